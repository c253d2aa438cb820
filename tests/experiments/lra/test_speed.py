import json

import pytest
import typer

from experiments.lra import speed
from experiments.lra.speed import Step


def step(task, attention, clock, median_ms):
    return Step(task, attention, 128, 1024, 4, 9, clock, median_ms, median_ms, median_ms, 1)


def read(folder, name):
    (path,) = folder.glob(name)
    return json.loads(path.read_text())


def test_means_are_geometric_and_over_all_tasks():
    steps = [
        *(step("a", name, "cpu", ms) for name, ms in (("standard", 8.0), ("flash", 4.0))),
        *(step("b", name, "cpu", ms) for name, ms in (("standard", 8.0), ("flash", 1.0))),
        step("a", "linear", "cpu", 1.0),
    ]
    assert speed.means(steps)["cpu"] == pytest.approx({"standard": 1.0, "flash": 4.0})


def test_table_is_measured_and_kept(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    speed.main(
        tasks="image",
        only=["standard", "butterfly()", "linear"],
        scale=256,
        compiled=False,
        name="small",
        output=folder,
    )
    record = read(folder, "lra-small-*.json")
    assert {s["attention"] for s in record["steps"]} == {"standard", "butterfly()", "linear"}
    assert all(s["median_ms"] > 0 and s["batch"] == 1 for s in record["steps"])
    # Attentions without parameters of their own are compared in the same model.
    assert len({s["parameters"] for s in record["steps"]}) == 1
    assert all(means["standard"] == 1 for means in record["geometric_mean_speedup"].values())
    assert "butterfly() of 64" in capsys.readouterr().out


def test_a_step_that_no_graph_holds_is_told_and_the_others_are_kept(tmp_path, monkeypatch, capsys):
    def measured(task, case, contender, compiled, device):
        yield step(task, contender.attention, "events", 2.0)
        speed.timed(waits, speed.Clock.GRAPH)

    def waits():
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(speed, "measure", measured)
    monkeypatch.setattr(speed, "time_call", lambda prepare, clock, budget: prepare()())
    speed.main(tasks="image", only=["reformer"], name="small", output=tmp_path)
    record = read(tmp_path, "lra-small-*.json")
    assert len(record["steps"]) == 1
    assert record["failed"] == [
        ["image", "reformer", "no CUDA graph: operation not permitted when stream is capturing"]
    ]
    assert "image: reformer: no CUDA graph" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="not permitted"):
        speed.timed(waits, speed.Clock.EVENTS)


def test_a_folder_that_cannot_be_is_told_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "measure", lambda *arguments: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        speed.main(tasks="image", output=tmp_path / "file" / "folder")


def test_unknown_tasks_list_the_known_ones():
    with pytest.raises(typer.BadParameter, match=r"unknown task 'x'; known: listops, .*path-256"):
        speed.main(tasks="x")


def test_cases_are_those_of_the_presets():
    case = speed.case_of("path-x")
    assert (case.shape.seq_len, case.model.layers, case.model.order) == (128 * 128, 6, "tiles")
    own = case.contenders[-1]
    assert (own.attention.split(" | ")[0], own.block_size) == ("neighborhood2d(16, 3)", 64)
    assert speed.case_of("image").batch == 256


def test_what_cannot_run_is_recorded(tmp_path, monkeypatch):
    def measure(*arguments):
        raise ImportError("no package")

    monkeypatch.setattr(speed, "measure", measure)
    speed.main(tasks="image", only=["linear"], scale=256, name="none", output=tmp_path)
    record = read(tmp_path, "lra-none-*.json")
    assert record["failed"] == [["image", "linear", "no package"]]
