import json

import pytest

from experiments.lra import seeds


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Every seed below 1000 is stuck, but for seed 1."""

    def run(command, check):
        assert check
        assert command[3:6] == ["fit", "--preset", "x"]
        seed = int(command[command.index("--seed_everything") + 1])
        folder = tmp_path / f"seed{seed}" / "version_0"
        folder.mkdir(parents=True)
        stuck = seed < 1000 and seed != 1
        result = {"stuck": stuck, "seed": seed, "test/accuracy": 0.5 + seed / 1e4}
        (folder / "result.json").write_text(json.dumps(result))

    monkeypatch.setattr(seeds.subprocess, "run", run)
    return tmp_path


def test_stuck_runs_start_again_and_are_counted(runs):
    seeds.main(["--preset", "x"], seeds=2, restarts=3, output=runs)
    summary = json.loads((runs / "runs.json").read_text())
    assert [run["seed"] for run in summary["runs"]] == [0, 1000, 1]
    assert (summary["finished"], summary["stuck"]) == (2, 1)
    assert summary["accuracy"] == pytest.approx((0.6 + 0.5001) / 2)
    assert summary["deviation"] == pytest.approx((0.6 - 0.5001) / 2**0.5)


def test_restarts_end(runs):
    results = seeds.until_unstuck(0, 0, runs, ["--preset", "x"])
    assert [result["stuck"] for result in results] == [True]
    assert seeds.summary_of(results)["accuracy"] is None
