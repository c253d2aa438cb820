"""Records of trained runs."""

import json
import os

import pytest

from experiments.lra import results


def run(seed, accuracy, stuck=False, task="listops"):
    tested = {} if stuck else {"test/accuracy": accuracy, "test/class_prior": 0.17}
    return {
        "task": task,
        "seed": seed,
        "stuck": stuck,
        "curve": [[500, accuracy - 0.1, 1.9], [1000, accuracy, 1.8]],
        "floors": {"root operator only": 0.357, "root and 4 levels": 0.888},
        "environment": {"device": "A GPU", "command": f"--seed {seed}", "git": {"commit": "c"}},
        **tested,
    }


def leave(folder, result, at=0):
    """A result as a run leaves it."""
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))
    os.utime(folder / "result.json", (at, at))


@pytest.fixture
def groups(tmp_path):
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    for seed, accuracy in enumerate((0.36, 0.37, 0.38)):
        leave(dense / f"seed{seed}" / "version_0", run(seed, accuracy))
    leave(sparse / "seed0" / "version_0", run(0, 0.17, stuck=True))
    leave(sparse / "seed1000" / "version_1", run(1000, 0.4), at=2)
    leave(sparse / "seed1000" / "version_0", run(1000, 0.3), at=1)
    return [dense, sparse]


def test_a_record_holds_runs_means_floors_and_stuck_runs(groups, tmp_path, capsys):
    results.main("x", groups, tmp_path)
    record = json.loads((tmp_path / "lra-x-a-gpu.json").read_text())
    dense, sparse = record["groups"]["dense"], record["groups"]["sparse"]
    assert dense["accuracy"] == pytest.approx(0.37)
    assert dense["deviation"] == pytest.approx(0.01)
    assert [run["environment"]["command"] for run in dense["runs"]] == [
        f"--seed {seed}" for seed in range(3)
    ]
    assert (sparse["accuracy"], sparse["finished"], sparse["stuck"]) == (0.4, 1, 1)
    assert record["floors"]["class prior"] == 0.17
    assert "+1.3" in capsys.readouterr().out
    assert results.in_words(dense) == "37.00 ± 1.00 %, 3 runs"
    assert results.in_words(sparse) == "40.00 %, 1 run, 1 stuck"
    assert (tmp_path / "lra-x-a-gpu-curves.png").stat().st_size > 10_000


def test_a_curriculum_is_one_run_with_stages(tmp_path):
    folder = tmp_path / "labels" / "seed0"
    leave(folder / "1-hard" / "version_0", run(0, 0.5))
    stage = {"difficulty": "easy", "shorter": 1.0, "trained": 1000}
    stages = [stage | {"curve": run(0, accuracy)["curve"]} for accuracy in (0.6, 0.9)]
    whole = run(0, 0.9) | {"stages": stages, "tested_step": 500}
    (folder / "curriculum.json").write_text(json.dumps(whole))
    (ended,) = results.ended(tmp_path / "labels")
    assert (ended["steps"], ended["tested_step"]) == (2000, 1500)
    assert [point[0] for point in ended["curve"]] == [500, 1000, 1500, 2000]
    assert ended["stages"] == [stage, stage]
    results.main("x", [tmp_path / "labels"], tmp_path)
    assert (tmp_path / "lra-x-a-gpu-curves.png").stat().st_size > 10_000
    del whole["test/accuracy"]
    (folder / "curriculum.json").write_text(json.dumps(whole))
    assert results.ended(tmp_path / "labels")[0]["curve"] == run(0, 0.5)["curve"]


def test_a_seed_that_was_not_tested_is_named(groups, capsys):
    """It diverged before its first checkpoint, or was stopped before its test."""
    dense = groups[0]
    untested = run(3, 0.3)
    del untested["test/accuracy"]
    leave(dense / "seed3" / "version_0", untested)
    leave(dense / "seed2" / "version_1", untested | {"seed": 2}, at=2)  # which version_0 tested
    assert [run["seed"] for run in results.ended(dense)] == [0, 1, 2]
    path = dense / "seed3" / "version_0" / "result.json"
    assert capsys.readouterr().out == f"{path} is left out: its run was not tested\n"


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no result\.json: none of its runs has finished"):
        results.ended(tmp_path)


def test_one_record_is_of_one_task():
    groups = {"a": [run(0, 0.4)], "b": [run(0, 0.7, task="pathfinder32-hard")]}
    with pytest.raises(ValueError, match=r"must have one task, got \['listops', 'pathfinder32"):
        results.record_of("x", groups)
    other = run(1, 0.4)
    other["environment"] = {"device": "Another"}
    with pytest.raises(ValueError, match=r"must have one device, got \['A GPU', 'Another'\]"):
        results.record_of("x", {"a": [run(0, 0.4), other]})


def test_a_group_that_is_stuck_throughout():
    record = results.record_of("x", {"a": [run(0, 0.17, stuck=True)]})
    assert "class prior" not in record["floors"]
    assert list(next(iter(results.table_of(record).columns[1:])).cells) == ["1 stuck"]


def test_a_folder_of_another_command_is_named(tmp_path):
    leave(tmp_path / "dense-1k", {"bits_per_byte": 1.5, "seed": 0})
    with pytest.raises(
        ValueError, match=r"must be a result of `experiments\.lra`, but has no 'stuck'"
    ):
        results.ended(tmp_path)
