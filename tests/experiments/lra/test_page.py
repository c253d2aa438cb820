"""The tables of the page of Long Range Arena."""

import json

import pytest
import typer

from experiments.lra import page


@pytest.fixture
def records(tmp_path, monkeypatch):
    """An empty folder of records."""
    monkeypatch.setattr(page, "SHIPPED", tmp_path)
    page.record.cache_clear()
    yield tmp_path
    page.record.cache_clear()


def leave(folder, accuracies, **fields):
    runs = [
        {"attention": "local(1) | full()", "moved discs": {"both right": 0.5}} for _ in accuracies
    ]
    mean = sum(accuracies) / len(accuracies) if accuracies else None
    group = {"accuracy": mean, "deviation": None, "runs": runs or [{"attention": "flash"}]}
    record = {"floors": {page.DISCS: 0.6}, "groups": {"path-x-curriculum": group | fields}}
    (folder / "lra-path-x-labels-nvidia-h200.json").write_text(json.dumps(record))


def row(table, name):
    (found,) = (line for line in table.splitlines() if line.startswith(f"| {name}"))
    return [cell.strip() for cell in found.replace("\\|", "or").split("|")[2:-1]]


def test_what_has_no_record_was_not_run(records):
    assert row(page.trained_table(), "**Path-X, labels")[3] == "not run"
    assert row(page.comparison(), "block-sparse, butterfly()")[5] == "– (56.0)"
    assert page.pictures() == ""


def test_a_record_fills_its_rows(records):
    leave(records, [0.7, 0.8])
    shown = row(page.trained_table(), "**Path-X, labels")
    assert shown[1:4] == ["2", "local(1) or full()", "75.00"]
    assert shown[4:] == ["coordinates of the discs, 60.0", "15.0", "50.0"]
    assert row(page.comparison(), "**block-sparse")[5] == "75.00"


def test_deviations_and_stuck_groups(records):
    leave(records, [0.7, 0.8], deviation=0.05)
    assert row(page.trained_table(), "**Path-X, labels")[3] == "75.00 ± 5.00"
    page.record.cache_clear()
    leave(records, [])
    assert row(page.trained_table(), "**Path-X, labels")[3:6:2] == ["stuck at chance", ""]


def test_every_run_has_a_row_and_sentences_their_figures(records):
    assert page.on_path_x() == page.on_text() == page.pre_trained() == "not run"
    leave(records, [0.7, 0.8])
    path = records / "lra-path-x-labels-nvidia-h200.json"
    record = json.loads(path.read_text())
    for seed, run in enumerate(record["groups"]["path-x-curriculum"]["runs"]):
        run |= {"seed": seed, "steps": 30, "batch_size": 100, "tested_step": 20, "seconds": 61}
        run |= {"stuck": bool(seed), "test/accuracy": 0.7, "test/standard_error": 0.01}
        run |= {"test/samples": 1000.0, "environment": {"device": "NVIDIA H100 80GB HBM3"}}
    path.write_text(json.dumps(record))
    page.record.cache_clear()
    lines = page.runs_table().splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    tested = ["70.00 ± 1.00", "1,000", "50.0"]
    assert cells[0] == ["`path-x-curriculum`", "0", "H100", "30", "20", "3,000", "61", *tested]
    assert cells[1][7:] == ["stuck at chance", "", ""]
    assert page.on_path_x().startswith("75.0 % with block-sparse attention, 2 seeds, in 2 minutes")


def test_records_of_other_gpus_are_shown_and_the_h200_is_preferred(records):
    leave(records, [0.7])
    other = records / "lra-path-x-labels-nvidia-h100-80gb-hbm3.json"
    (records / "lra-path-x-labels-nvidia-h200.json").rename(other)
    other.with_name(f"{other.stem}-curves.png").touch()
    assert row(page.comparison(), "**block-sparse")[5] == "70.00"
    assert page.pictures().endswith("lra-path-x-labels-nvidia-h100-80gb-hbm3-curves.png)")
    page.record.cache_clear()
    leave(records, [0.8])
    assert row(page.comparison(), "**block-sparse")[5] == "80.00"


def test_attentions_with_a_record_of_their_own_have_a_speed_up(records):
    for name, label, ratio in (("arena", "flash", 4.0), ("smyrf", "smyrf", 2.5)):
        found = {"geometric_mean_speedup": {"graph": {"standard": 1.0, label: ratio}}}
        (records / f"lra-{name}-nvidia-h200.json").write_text(json.dumps(found))
    assert row(page.comparison(), "dense flash |")[-2] == "4.00 (2.4)"
    assert row(page.comparison(), "SMYRF")[-2] == "2.50 (1.7)"
    assert row(page.comparison(), "Reformer")[-2] == "– (1.3)"


def test_published_figures_are_complete():
    for found in page.ROWS:
        assert len(found.published) == len(page.COLUMNS), found.name
        assert found.trained.keys() <= set(page.COLUMNS), found.name


def test_an_installed_package_has_no_page_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "README", tmp_path / "README.md")
    with pytest.raises(typer.BadParameter, match="needs a checkout"):
        page.main()


def test_a_page_is_checked_and_written(tmp_path, monkeypatch):
    marked = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in page.TABLES)
    path, front = tmp_path / "README.md", tmp_path / "front.md"
    path.write_text(f"Title\n{marked}End\n")
    marks = [f"<!-- {name} -->old<!-- /{name} -->" for name in page.SENTENCES]
    front.write_text(f"On {'; '.join(marks)}.\n")
    monkeypatch.setattr(page, "README", path)
    monkeypatch.setattr(page, "FRONT", front)
    with pytest.raises(typer.Exit) as ended:
        page.main(check=True)
    assert ended.value.exit_code
    assert "old" in path.read_text()
    page.main()
    text = path.read_text()
    assert "old" not in text
    assert "old" not in front.read_text()
    assert text.startswith("Title\n<!-- comparison -->\n| ")
    assert text.endswith("<!-- /pictures -->\nEnd\n")
    with pytest.raises(typer.Exit) as ended:
        page.main(check=True)
    assert not ended.value.exit_code
    with pytest.raises(ValueError, match="the page needs <!-- comparison -->"):
        page.written("no marks", page.TABLES)
