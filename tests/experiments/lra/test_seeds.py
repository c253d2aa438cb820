import json
import time

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from experiments.lra import exported, options, seeds

WEIGHTS = {"state_dict": {"w": torch.ones(2)}, "callbacks": {}, "optimizer_states": [1]}


def options_of(command):
    """The options of a run: seed, folder, the checkpoint that it resumes, and all others."""
    given = dict(part.removeprefix("--").split("=") for part in command if "=" in part)
    return given | {"before": given.get("model.init_from")}


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Runs whose seed is below 1000 and not 1 are stuck; `fit` holds the options of each."""
    fitted = []

    def run(command, check):
        assert check
        assert command[:4] == [*seeds.FIT]
        given = options_of(command)
        fitted.append(given)
        seed = int(given["seed_everything"])
        folder = tmp_path / f"seed{seed}"
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        for name in ("best", "last"):
            torch.save(WEIGHTS, folder / "checkpoints" / f"{name}.ckpt")
        stuck = "never" not in command and seed < 1000 and seed != 1
        ended = "ckpt_path" in given or "deadline.at" not in given
        result = {"stuck": stuck, "ended": ended, "seed": seed, "test/accuracy": 0.5 + seed / 1e4}
        (folder / "result.json").write_text(json.dumps(result))

    monkeypatch.setattr(seeds.subprocess, "run", run)
    return fitted


def command(*arguments):
    app = Typer()
    app.command()(seeds.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_stuck_runs_start_again_and_are_counted(runs, tmp_path):
    seeds.main(["--preset", "x"], seeds=2, restarts=3, output=tmp_path)
    summary = json.loads((tmp_path / "runs.json").read_text())
    assert [run["seed"] for run in summary["runs"]] == [0, 1000, 1]
    assert (summary["finished"], summary["stuck"]) == (2, 1)
    assert summary["accuracy"] == pytest.approx((0.6 + 0.5001) / 2)
    assert summary["deviation"] == pytest.approx((0.6 - 0.5001) / 2**0.5)
    assert [given["trainer.logger.version"] for given in runs] == ["seed0", "seed1000", "seed1"]


@pytest.mark.usefixtures("runs")
def test_restarts_end(tmp_path):
    results = seeds.Runs(tmp_path, ["--preset", "x"]).until_unstuck(0, 0)
    assert [result["stuck"] for result in results] == [True]
    assert seeds.summary_of(results)["accuracy"] is None


def test_runs_that_ended_are_not_made_again(runs, tmp_path):
    for _ in range(2):
        seeds.main(["never"], seeds=2, first=3, output=tmp_path, at_once=2)
    assert sorted(given["seed_everything"] for given in runs) == ["3", "4"]


def test_each_seed_has_a_number_in_its_arguments(runs, tmp_path):
    seeds.main(["--model.init_from=before/seed{seed}"], seeds=2, output=tmp_path)
    # A restart begins with the weights of the seed that it takes the place of.
    assert [given["before"] for given in runs] == ["before/seed0"] * 2 + ["before/seed1"]


def test_a_run_goes_on_elsewhere(runs, tmp_path):
    pieces, there = tmp_path / "pieces", tmp_path / "there"
    arguments = ("--seeds", 1, "--export", pieces, "--seconds", 100)
    cut = command(*arguments, "--output", tmp_path, "--", "never")
    assert cut.exit_code == 1, cut.output
    assert "the time is over; the same command resumes" in cut.output
    assert float(runs[0]["deadline.at"]) < time.time() + 100 - exported.EVALUATION_SECONDS + 1
    # Files that nothing reads are not exported; those that a resumed run needs are.
    arguments += ("--import", pieces)
    command(*arguments, "--output", there, "--", "never")
    best, last = (
        torch.load(there / "seed0" / "checkpoints" / f"{name}.ckpt") for name in ("best", "last")
    )
    assert last.keys() - best.keys() == {"optimizer_states"}
    assert runs[1]["ckpt_path"] == str(there / "seed0" / "checkpoints" / "last.ckpt")


@pytest.mark.usefixtures("runs")
def test_what_has_ended_leaves_no_checkpoint_to_go_on_from(tmp_path):
    command("--seeds", 1, "--output", tmp_path, "--export", tmp_path / "p", "--", "never")
    found = seeds.Runs(tmp_path, []).files()
    assert found.keys() == {"options.json", "seed0/result.json", "seed0/checkpoints/best.ckpt"}


def test_runs_with_other_options_need_another_folder(runs, tmp_path):
    given = ["--preset", "x", "--model.encoder.attention", "flash", "--data.workers=2"]
    pieces = tmp_path / "pieces"
    arguments = ["--seeds", 1, "--first", 1, "--export", pieces]
    assert command(*arguments, "--output", tmp_path, "--", *given).exit_code == 0
    # Those of the machine may change.
    same = ["--preset=x", "--model.encoder.attention=flash", "--data.workers", 3]
    assert command(*arguments, "--output", tmp_path, "--", *same).exit_code == 0
    other = [*given, "--model.encoder.dim", 32]
    for folder in (tmp_path, tmp_path / "there"):
        done = command(*arguments, "--output", folder, "--import", pieces, "--", *other)
        assert done.exit_code == 2
        message = " ".join(done.output.replace("│", " ").split())
        assert "other options: --model.encoder.dim was not given and is 32 now; give" in message
    assert len(runs) == 1


def test_runs_of_unknown_options_are_not_resumed(runs, tmp_path):
    arguments = ["--seeds", 1, "--first", 1, "--output", tmp_path, "--", "--preset=x"]
    assert command(*arguments).exit_code == 0
    path = tmp_path / options.OPTIONS
    recorded = path.read_text()
    for text, message in (
        (None, "has runs but no options.json, so that their options are not known"),
        ('{"preset": "x"}', "must be a list of options, got {'preset': 'x'}"),
    ):
        path.unlink() if text is None else path.write_text(text)
        done = command(*arguments)
        assert done.exit_code == 2
        assert message in " ".join(done.output.replace("│", " ").split())
    path.write_text(recorded)
    assert command(*arguments).exit_code == 0
    assert len(runs) == 1


def test_options_with_which_nothing_was_trained_may_change(runs, tmp_path, monkeypatch):
    def failed(command, check):
        raise seeds.subprocess.CalledProcessError(1, command)

    with monkeypatch.context() as during:
        during.setattr(seeds.subprocess, "run", failed)
        assert command("--output", tmp_path, "--", "--preset", "wrong").exit_code == 2
    seeds.main(["--preset", "x"], seeds=1, first=1, output=tmp_path)
    assert len(runs) == 1


def test_pieces_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("--output", "runs", "--import", "none", "--", "never")
    assert done.exit_code == 2
    assert "has no piece-" in done.output


def test_a_run_that_fails_is_named(tmp_path, monkeypatch):
    def failed(command, check):
        raise seeds.subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(seeds.subprocess, "run", failed)
    done = command("--output", tmp_path, "--", "--preset", "x")
    assert done.exit_code == 2
    assert "a run failed" in done.output
    assert "--preset x --seed_everything=0" in " ".join(done.output.split())


def test_pre_training_has_no_accuracy():
    results = [{"stuck": False, "validation/pixels": 2.0}]
    assert seeds.summary_of(results)["accuracy"] is None
