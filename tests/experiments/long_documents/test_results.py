import json

import pytest

from experiments.files import write_json
from experiments.long_documents.results import (
    by_device,
    continues,
    gather,
    samples_read,
    table_of,
)

START = {"task": "authors-512-words", "labels": True, "steps": 10, "init_from": None}


def write_runs(root, data="a", device="NVIDIA X", start=None):
    """Runs of two lengths; the longer one starts from `start`."""
    for length, accuracy in ((512, 0.4), (65_536, 0.8)):
        write_json(root / f"{length}" / "data.json", {"train": data})
        for seed in (0, 1):
            run = {"task": f"authors-{length}", "seed": seed, "stuck": False}
            run |= {"test/accuracy": accuracy + 0.1 * seed, "environment": {"device": device}}
            run |= {"steps": 10 + seed, "batch_size": 4, "curve": [[5, 0.7, 1.0], [10, 0.9, 1.0]]}
            run |= {"init_from": start if length > 512 else None}
            write_json(root / f"{length}" / f"seed{seed}" / "result.json", run)


def write_floors(path, data="a"):
    words = {"words": {"accuracy": 0.3}, "bytes": {"accuracy": 0.1}}
    write_json(path, {"data": {"train": data}, "floors": {"512": words}})


def test_a_record_holds_lengths_seeds_floors_and_a_picture(tmp_path):
    write_runs(tmp_path / "runs")
    write_floors(tmp_path / "floors.json")
    facts, (path, picture) = gather(
        "authors", tmp_path / "runs", tmp_path / "floors.json", tmp_path
    )
    assert facts == json.loads(path.read_text())
    assert (path.name, list(facts["lengths"])) == (
        "long-documents-authors-nvidia-x.json",
        ["512", "65536"],
    )
    assert facts["lengths"]["512"]["accuracy"] == pytest.approx(0.45)
    assert picture.read_bytes().startswith(b"\x89PNG")
    columns = [list(map(str, column.cells)) for column in table_of(facts).columns]
    assert columns[0] == ["512", "65,536"]
    assert columns[1] == ["random weights", "random weights"]
    assert columns[2][1].startswith("85.00 ± 7.07 %, 2 runs")
    assert columns[3:] == [["30.0 %", ""], ["10.0 %", ""]]


def test_lengths_may_be_of_several_devices_and_the_record_says_of_which(tmp_path):
    write_floors(tmp_path / "floors.json")
    write_runs(tmp_path / "runs")
    write_runs(tmp_path / "more", device="NVIDIA Y")
    for length, other in ((1024, 512), (131_072, 65_536)):
        (tmp_path / f"more/{other}").rename(tmp_path / f"runs/{length}")
    given = ("authors", tmp_path / "runs", tmp_path / "floors.json", tmp_path)
    facts, (path, _) = gather(*given)
    assert facts["device"] == "NVIDIA X, NVIDIA Y"
    assert path.name == "long-documents-authors-nvidia-x-nvidia-y.json"
    devices = [("NVIDIA X", ["512"]), ("NVIDIA Y", ["1024"]), ("NVIDIA X", ["65536"])]
    found = by_device(facts["lengths"])
    assert found == [*devices, ("NVIDIA Y", ["131072"])]
    # A mean of runs on two devices would be of neither.
    moved = tmp_path / "runs/512/seed0/result.json"
    write_json(moved, json.loads(moved.read_text()) | {"environment": {"device": "NVIDIA Y"}})
    with pytest.raises(ValueError, match=r"must have one device in .*512, got \['NVIDIA X', 'NV"):
        gather(*given)


def test_runs_and_floors_of_other_books_do_not_compare(tmp_path):
    write_runs(tmp_path / "runs")
    write_floors(tmp_path / "floors.json", data="b")
    with pytest.raises(ValueError, match="was trained on other books"):
        gather("authors", tmp_path / "runs", tmp_path / "floors.json", tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="must have a folder for each length"):
        gather("authors", tmp_path / "none", tmp_path / "floors.json", tmp_path)


def test_files_of_other_commands_are_named(tmp_path):
    write_runs(tmp_path / "runs")
    write_json(tmp_path / "lra-floors.json", {"floors": {}})
    with pytest.raises(ValueError, match=r"floors\.json must be a record of .* has no 'data'"):
        gather("authors", tmp_path / "runs", tmp_path / "lra-floors.json", tmp_path)
    write_floors(tmp_path / "floors.json")
    (tmp_path / "runs/512/data.json").unlink()
    with pytest.raises(ValueError, match=r"data\.json must be written by .* got no file"):
        gather("authors", tmp_path / "runs", tmp_path / "floors.json", tmp_path)


def test_a_record_says_from_what_the_encoders_of_a_length_started(tmp_path):
    write_floors(tmp_path / "floors.json")
    write_runs(tmp_path / "runs", start=START)
    given = ("authors-chain", tmp_path / "runs", tmp_path / "floors.json", tmp_path)
    facts, _ = gather(*given)
    assert list(table_of(facts).columns[1].cells) == ["random weights", "512 bytes"]
    # Seeds are different starts of one kind.
    one = tmp_path / "runs/65536/seed0/result.json"
    run = json.loads(one.read_text())
    write_json(one, run | {"init_from": START | {"seed": 3}})
    gather(*given)
    for start, message in (
        (
            START | {"labels": False},
            r"one start in .*got \['512 bytes', '512 bytes, without labels'",
        ),
        (None, r"one start in .*got \['512 bytes', 'random weights'\]"),
        (
            START | {"task": "listops"},
            r"must be of `train`, got \{'task': 'listops'",
        ),
        ({"steps": 10}, r"init_from of a run must be of `train`, got \{'steps'"),
    ):
        write_json(one, run | {"init_from": start})
        with pytest.raises(ValueError, match=message):
            gather(*given)


def test_lengths_that_all_start_from_another_one_continue_it():
    random, chained = {"runs": [{"init_from": None}]}, {"runs": [{"init_from": START}]}
    assert not continues({"512": random})
    assert continues({"512": random, "2048": chained})
    assert continues({"2048": chained})


def test_accumulated_batches_are_counted():
    run = {"steps": 10, "batch_size": 4}
    assert samples_read(run) == 40
    assert samples_read(run | {"accumulate_grad_batches": 8}) == 320
