import json

import pytest

from experiments.files import write_json
from experiments.language_model.results import (
    bits_at,
    bits_of,
    common_seconds,
    contexts_of,
    gather,
    record_of,
    repeated,
    seconds_of,
    table_of,
)

SIZES = {"layers": 2, "heads": 8, "block_size": 128}


def write_run(folder, bits=2.0, speed=1e6, data="a", context=1024, attention="flash", **facts):
    run = {
        "model": SIZES | {"context": context, "attention": [attention]},
        "seed": 0,
        "steps": 20,
        "trained": 20,
        "ended": True,
        "step_tokens": 4096,
        "step_bytes": 4096,
        "parameters": 1000,
        "data": {"train": data},
        "bits_per_byte": bits,
        "bytes_per_second": speed,
        "positions": [0, 1, 32, context],
        "curve": [
            {"step": 10, "bits_per_byte": 3.0, "by_position": [5.0, 3.0, 2.9]},
            {"step": 20, "bits_per_byte": bits, "by_position": [5.0, 2.5, bits]},
        ],
        "environment": {"device": "NVIDIA H200"},
    }
    write_json(folder / "result.json", run | facts)
    return folder


def test_a_record_holds_its_runs_and_a_picture(tmp_path):
    runs = [
        write_run(tmp_path / "dense"),
        write_run(tmp_path / "sparse", 2.02, 3e6, attention="local(8)"),
    ]
    path, picture = gather("pays", runs, tmp_path / "results")
    assert path.name == "language-model-pays-nvidia-h200.json"
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(path.read_text())
    assert list(record["runs"]) == ["dense", "sparse"]
    table = table_of(record)
    assert list(table.columns[6].cells) == ["+0.00 %", "+1.00 %"]
    assert list(table.columns[8].cells) == ["1.00", "3.00"]


def test_runs_are_added_to_a_record(tmp_path):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", seed=1)
    path, _ = gather("pays", [one], tmp_path / "results")
    added = record_of("pays", [path, two])
    assert list(added["runs"]) == ["one", "two"]
    assert added == record_of("pays", [one, two])
    with pytest.raises(ValueError, match="distinct names, got \\['one', 'one'\\]"):
        record_of("pays", [path, one])
    with pytest.raises(ValueError, match=r"must be a record of `experiments\.language_model rec"):
        record_of("pays", [one / "result.json"])


def test_seeds_are_one_row_with_their_mean_and_spread(tmp_path):
    folders = [
        write_run(tmp_path / "dense", 2.0, 1e6),
        write_run(tmp_path / "mid", 2.02, 2e6, attention="local(8)"),
        write_run(tmp_path / "mid-seed-1", 2.06, 4e6, attention="local(8)", seed=1),
        write_run(tmp_path / "longer", 2.0, attention="local(8)", steps=40, trained=40),
        write_run(tmp_path / "cut", 3.0, attention="local(8)", seed=2, trained=10, ended=False),
    ]
    record = record_of("pays", folders)
    groups = repeated(record["runs"])
    assert {name: [run["seed"] for run in group] for name, group in groups.items()} == {
        "dense": [0],
        "mid": [0, 1],
        "longer": [0],
        "cut": [2],  # has not ended
    }
    assert bits_of(groups["mid"]) == "2.0400 (2.0200 to 2.0600)"
    assert bits_of(groups["dense"]) == "2.0000"
    table = table_of(record)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["dense", "mid", "longer", "cut"]
    assert cells[1] == ["1", "2", "1", "1"]
    assert cells[4] == ["20 of 20", "20 of 20", "40 of 40", "10 of 20"]
    assert cells[6] == ["+0.00 %", "+2.00 %", "+0.00 %", ""]
    assert cells[8][:2] == ["1.00", "3.00"]
    assert all(path.exists() for path in gather("pays", folders, tmp_path / "results"))


def test_a_run_says_which_contexts_its_steps_had():
    run = {"model": {"context": 16384}, "step_tokens": 100, "step_bytes": 100.0}
    assert contexts_of(run) == "16,384 bytes"
    assert contexts_of(run | {"step_bytes": 400.0}) == "16,384 tokens, some 66 KB"
    run |= {"short_context": 1024, "short_steps": 1200}
    assert contexts_of(run) == "16,384 bytes (first 1,200 steps: 1,024)"


def test_seconds_are_those_of_both_contexts():
    run = {"step_bytes": 100, "bytes_per_second": 50}
    assert seconds_of(run, 3) == 6
    run |= {"short_steps": 2, "short_bytes_per_second": 100}
    assert [seconds_of(run, step) for step in (1, 2, 3)] == [1, 2, 4]


def test_bits_per_byte_at_a_time_are_interpolated_between_validations():
    run = {"step_bytes": 100, "bytes_per_second": 50, "short_steps": 2}
    run |= {"short_bytes_per_second": 100}  # seconds of steps 1, 2, 3, 4: 1, 2, 4, 6
    run["curve"] = [{"step": step, "bits_per_byte": bits} for step, bits in ((1, 3.0), (4, 2.0))]
    assert [bits_at(run, seconds) for seconds in (1, 3.5, 6)] == [3.0, 2.5, 2.0]
    assert [bits_at(run, seconds) for seconds in (0.9, 6.1)] == [None, None]
    faster = run | {"bytes_per_second": 100}
    assert common_seconds([run, faster]) == 4
    assert common_seconds([run, run | {"bytes_per_second": 0.0}]) is None
    assert common_seconds([run, run | {"short_bytes_per_second": 0.0}]) is None


def test_runs_that_do_not_compare(tmp_path):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", data="b")
    with pytest.raises(ValueError, match="must have one data"):
        gather("x", [one, other], tmp_path)
    with pytest.raises(ValueError, match="distinct names, got \\['one', 'one'\\]"):
        gather("x", [one, one], tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no result\.json"):
        gather("x", [tmp_path / "empty"], tmp_path)


def test_a_run_of_another_command_is_named(tmp_path):
    write_json(tmp_path / "arena/result.json", {"test/accuracy": 0.5, "environment": {}})
    with pytest.raises(
        ValueError, match=r"must be a result of `experiments\.language_model train`"
    ):
        gather("pays", [tmp_path / "arena"], tmp_path)
