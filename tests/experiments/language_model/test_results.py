import json

import pytest

from experiments.files import write_json
from experiments.language_model.results import (
    bits_at,
    common_seconds,
    contexts_of,
    gather,
    seconds_of,
    table_of,
)


def write_run(folder, bits=2.0, speed=1e6, data="a", context=1024):
    run = {
        "model": {"context": context},
        "steps": 20,
        "trained": 20,
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
    write_json(folder / "result.json", run)
    return folder


def test_a_record_holds_its_runs_and_a_picture(tmp_path):
    runs = [write_run(tmp_path / "dense"), write_run(tmp_path / "sparse", 2.02, 3e6)]
    path, picture = gather("pays", runs, tmp_path / "results")
    assert path.name == "language-model-pays-nvidia-h200.json"
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(path.read_text())
    assert list(record["runs"]) == ["dense", "sparse"]
    table = table_of(record)
    assert list(table.columns[5].cells) == ["+0.00 %", "+1.00 %"]
    assert list(table.columns[7].cells) == ["1.00", "3.00"]


def test_a_run_says_which_contexts_its_steps_had():
    run = {"model": {"context": 16384}}
    assert contexts_of(run) == "16,384"
    run |= {"short_context": 1024, "short_steps": 1200}
    assert contexts_of(run) == "16,384 (first 1,200 steps: 1,024)"


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
