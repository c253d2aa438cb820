import json
import signal
import sys

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from experiments.lra import callbacks, curriculum
from experiments.lra.curriculum import Run, Stage
from experiments.lra.options import check_options

PRESET = ["--preset", "curriculum/pathfinder32"]
TINY = {
    "trainer.accelerator": "cpu",
    "trainer.precision": "32-true",
    "trainer.enable_model_summary": False,
    "trainer.val_check_interval": 2,
    "data.workers": 0,
    "data.batch_size": 2,
    "data.task.init_args.sizes": [9, 4, 4],
    "model.passes": "eager",
    "model.encoder.attention": "local(16)",
    "model.encoder.dim": 4,
    "model.encoder.heads": 1,
    "model.encoder.layers": 1,
    "model.encoder.feedforward": 4,
}
FIT = PRESET + [part for name, value in TINY.items() for part in (f"--{name}", str(value))]
STAGES = ["easy:1:0:4", "hard:0.5:2:4"]


def run(*arguments):
    app = Typer()
    app.command()(curriculum.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def stages(*texts):
    return [part for text in texts for part in ("--stage", text)]


def test_a_stage_is_read_from_text():
    assert Stage.parse("easy:1:0.9:20") == Stage("easy", 1.0, 0.9, 20)
    for text in ("easy", "easy:1:x:20", "easy:1:1:2.5"):
        with pytest.raises(ValueError, match="a stage must be difficulty:shorter:enough:steps"):
            Stage.parse(text)
    for text in ("trivial:1:1:20", "easy:2:1:20", "easy:1:1:0"):
        with pytest.raises(ValueError, match=r"a stage must have a difficulty of .*'easy'.*, got"):
            Stage.parse(text)


def test_a_stage_that_begins_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("experiments.lra.command.fit", lambda *arguments, **options: None)
    both = [Stage.parse(text) for text in STAGES]
    for number in (0, 1):
        Run(tmp_path, both, seed=0, number=number).train_stage([], 8, None, None)
    assert capsys.readouterr().out.splitlines() == [
        "stage 1 of 2: easy images, 100 % of those for training with shorter contours, up to 4 "
        "steps or a validation accuracy of 0",
        "stage 2 of 2: hard images, 50 % of those for training with shorter contours, up to 4 "
        "steps",
    ]


def test_a_folder_of_another_run_is_refused(tmp_path):
    one, other = (
        [Stage.parse(text) for text in texts] for texts in (STAGES, ["easy:1:0.5:4", *STAGES[1:]])
    )
    Run(tmp_path, one, seed=1).save(None)
    assert Run.of(tmp_path, one, seed=1).number == 0
    with pytest.raises(ValueError, match=r": --seed was 1 and is 2 now; .* another --output"):
        Run.of(tmp_path, one, seed=2)
    message = r": stage 1 was easy:1:0 and is easy:1:0\.5 now; .* another --output"
    with pytest.raises(ValueError, match=message):
        Run.of(tmp_path, other, seed=1)
    with pytest.raises(ValueError, match=r": stage 2 was hard:0\.5:2 and is not given now;"):
        Run.of(tmp_path, one[:1], seed=1)
    # Stages may become longer or shorter.
    longer = [one[0], Stage("hard", 0.5, 2, 400)]
    assert Run.of(tmp_path, longer, seed=1).stages == longer
    # What is over is over: the stages to come are those that must agree.
    Run(tmp_path, one, seed=1, number=1).save(None)
    assert Run.of(tmp_path, other, seed=1).number == 1
    (tmp_path / "progress.json").write_text("{")
    with pytest.raises(ValueError, match=r"progress\.json cannot be read"):
        Run.of(tmp_path, one, seed=1)


def test_errors_are_told_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("--output", "run", *stages("easy"), "--", *FIT)
    assert done.exit_code == 2
    assert "difficulty:shorter:enough:steps" in done.output
    done = run("--output", "run", "--import", "none", "--", *FIT)
    assert done.exit_code == 2
    assert "has no piece-" in done.output
    # A command that trained nothing does not bind the next one to its stages or options.
    done = run("--output", "run", *stages(*STAGES), "--", "--preset", "none")
    assert done.exit_code == 1
    assert not (tmp_path / "run" / "progress.json").exists()
    done = run("--output", "run", "--", "--preset", "unknown")
    assert done.exit_code == 1


def test_a_run_with_other_options_is_not_resumed(tmp_path):
    both = [Stage.parse(text) for text in STAGES]
    Run(tmp_path, both, seed=0, number=2).save(None)
    command = ["--output", tmp_path, *stages(*STAGES)]
    done = run(*command, "--", *FIT)
    assert done.exit_code == 2
    assert "has runs but no options.json" in " ".join(done.output.replace("│", " ").split())
    check_options(tmp_path, ["--patience=8", *FIT], started=False)
    assert run(*command, "--", *FIT, "--data.workers=3").exit_code == 0
    for given, message in (
        ([*command, "--", *FIT, "--model.passes", "compiled"], "--model.passes was eager and is"),
        ([*command, "--patience", 3, "--", *FIT], "--patience was 8 and is 3 now"),
    ):
        done = run(*given)
        assert done.exit_code == 2
        assert message in " ".join(done.output.replace("│", " ").split())


def test_a_command_says_how_far_the_run_is(tmp_path):
    both = [Stage.parse(text) for text in STAGES]
    place = tmp_path / "curriculum.json"
    going_on = Run(tmp_path, both, seed=0, number=1).in_words()
    assert going_on == f"stage 2 of 2 has not ended; the same command resumes: {place}"
    stuck = Run(tmp_path, both, seed=0, number=1, stuck=True).in_words()
    assert stuck == f"stage 2 of 2 was stuck at chance, which ends the run: {place}"
    Run(tmp_path, both, seed=0, number=2).save(None)
    check_options(tmp_path, ["--patience=8", *FIT], started=False)
    done = run("--output", tmp_path, *stages(*STAGES), "--", *FIT)
    assert done.exit_code == 0, done.output
    assert done.output.replace("\n", "") == f"all 2 stages have ended: {place}"


@pytest.mark.filterwarnings("ignore")  # of Lightning and of how it calls jsonargparse
def test_an_interrupted_stage_says_that_the_same_command_resumes(tmp_path, monkeypatch):
    """Lightning leaves interruptions ignored, so the test restores their handler."""
    said, before = [], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(callbacks, "rank_zero_info", said.append)
    monkeypatch.setattr(sys, "argv", ["curriculum"])
    monkeypatch.setattr(
        callbacks.Interruption,
        "on_train_batch_start",
        lambda *_: signal.raise_signal(signal.SIGINT),
    )
    done = run("--output", tmp_path, *stages(*STAGES), "--", *FIT)
    signal.signal(signal.SIGINT, before)
    assert done.exit_code == 1
    last = tmp_path / "0-easy-1" / "checkpoints" / "last.ckpt"
    assert said[-1] == f"Saved {last}. To resume: the same command"


def test_the_time_of_a_command_that_was_killed_counts(tmp_path):
    """It has written a checkpoint, but not how long the run took."""
    both = [Stage.parse(text) for text in STAGES]

    def trained(number, seconds):
        path = Run(tmp_path, both, 0).checkpoint(number, "last")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"callbacks": {"Curve": {"seconds": seconds}}}, path)

    def resumed(seconds):
        run = Run.of(tmp_path, both, 0)
        assert run.seconds == pytest.approx(seconds, abs=1)
        return run

    trained(0, 60.0)
    first = resumed(60)
    first.number, first.started = 1, first.started - 5
    first.save(None)
    resumed(65)
    trained(1, 20.0)
    resumed(85).save(None)
    resumed(85)
    progress = tmp_path / "progress.json"
    older = json.loads(progress.read_text())
    del older["of_stage"]
    progress.write_text(json.dumps(older))
    resumed(85)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning and of how it calls jsonargparse
def test_a_run_goes_through_its_stages_and_goes_on_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["curriculum"])
    monkeypatch.setattr(curriculum, "EVALUATION_SECONDS", 2000)  # of 1001: the time is up at once
    here, there, pieces = (tmp_path / name for name in ("here", "there", "pieces"))
    first = run(
        "--output", here, *stages(*STAGES), "--seconds", 1001, "--export", pieces, "--", *FIT
    )
    assert first.exit_code == 0, first.output
    # Any accuracy is enough for the first stage; the deadline comes before its first validation.
    result = json.loads((pieces / "curriculum.json").read_text())
    assert [stage["trained"] for stage in result["stages"]] == [2, 0][: len(result["stages"])]
    assert not result["ended"]
    rest = run(
        "--output", there, *stages(*STAGES), "--import", pieces, "--export", pieces, "--", *FIT
    )
    assert rest.exit_code == 0, rest.output
    result = json.loads((pieces / "curriculum.json").read_text())
    assert result["ended"]
    assert [stage["trained"] for stage in result["stages"]] == [2, 4]
    assert result["task"] == "pathfinder32-hard-unclipped"
    assert result["test/samples"] == 4
    (checkpoint,) = (there / "1-hard-0.5").rglob("best.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] in (2, 4)
