"""The command line, from options to the result of a run."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments.lra import __main__ as entry
from experiments.lra import command, presets
from experiments.lra.learner import Learner, ObjectiveConfig, OptimizerConfig
from experiments.lra.parser import HELP
from experiments.lra.tasks import Pathfinder
from tests.helpers.lightning import TRAINS
from tests.helpers.lra_runs import ENCODER

pytestmark = TRAINS
ROOT = Path(__file__).parents[3]
SMALL_RUN = """fit --preset nystromformer/image --data.task Synthetic --data.task.like ImageTask
    --data.task.size 8 --data.batch_size 4 --trainer.max_steps 3 --trainer.val_check_interval 3
    --trainer.precision 32-true --trainer.accelerator cpu --model.optimizer.warmup_steps 1
    --model.encoder.dropout 0 --model.encoder.attention_dropout 0"""
PRE_TRAINING = """ --model.objective.labels 0 --model.objective.pixels 1
    --model.encoder.mask_black false"""


def test_what_was_tested_outlives_a_kill_during_moved_discs(tmp_path, monkeypatch):
    def killed(*arguments):
        raise SystemExit

    monkeypatch.setattr(command, "moved_discs", killed)
    task = Pathfinder()
    cli = command.ArenaCLI.__new__(command.ArenaCLI)
    vars(cli).update(
        model=Learner(task, ENCODER, OptimizerConfig(), ObjectiveConfig()),
        datamodule=SimpleNamespace(task=task, batch_size=8),
        trainer=SimpleNamespace(
            accumulate_grad_batches=1,
            is_global_zero=True,
            log_dir=tmp_path,
            callback_metrics={"test/accuracy": 0.75},
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
            precision_plugin=SimpleNamespace(forward_context=nullcontext),
        ),
    )
    with pytest.raises(SystemExit):
        cli._report({"stuck": False})
    assert json.loads((tmp_path / "result.json").read_text())["test/accuracy"] == 0.75


@pytest.mark.slow(60)
def test_a_run_that_is_killed_goes_on_where_it_saved(tmp_path):
    """Kills the process by a signal that no program can catch."""

    options = SMALL_RUN.replace("max_steps 3", "max_steps 520")
    options = options.replace("val_check_interval 3", "val_check_interval 260")
    options += " --model.encoder.layers 1 --model.encoder.dim 16 --data.workers 0"
    given = [*options.split()[1:], "--trainer.enable_progress_bar", "false"]

    def start(folder):
        command = [sys.executable, "-m", "experiments.lra.seeds", "--seeds", "1"]
        command += ["--output", str(folder), "--", *given]
        return subprocess.Popen(command, start_new_session=True)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait() == 0
    process = start(killed)
    last = killed / "seed0" / "checkpoints" / "last.ckpt"
    while process.poll() is None and not last.exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert start(killed).wait() == 0
    results = [
        json.loads((path / "seed0" / "result.json").read_text()) for path in (whole, killed)
    ]
    for name in ("curve", "steps", "test/accuracy", "ended"):
        assert results[0][name] == results[1][name]


def test_a_run_is_resumed_on_its_own_task_only(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({"trained": {"task": "pathfinder32-hard"}}, path)
    command.check_resumed(path, Pathfinder(resampling="clipped"), "flash")
    with pytest.raises(ValueError, match=r"of a run on pathfinder32-hard, not on .*-unclipped:"):
        command.check_resumed(path, Pathfinder(), "flash")
    torch.save({"global_step": 3}, path)  # saved before checkpoints said their task
    command.check_resumed(path, Pathfinder(), "flash")


def test_a_run_is_resumed_with_its_own_attention_only(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({"attention": ["flash", "butterfly()"]}, path)
    command.check_resumed(path, Pathfinder(), ["flash", "butterfly()"])
    with pytest.raises(ValueError, match=r"the attention .*'butterfly\(\)'\], not 'flash'"):
        command.check_resumed(path, Pathfinder(), "flash")


def test_unknown_tasks_list_the_known_ones():
    command.check_task(["fit", "--data.task", "ListOps"])
    with pytest.raises(ValueError, match="unknown task 'Foo'; known: FilmPairs, ImageTask, "):
        command.check_task(["fit", "--data.task", "Foo"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how Lightning calls jsonargparse
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.encoder.attention", "foo()"], "error: .*unknown pattern 'foo'; known: "),
        (["--model.optimizer.warmup_steps", "9"], r"error: .*warmup_steps must be 0 to the 3"),
        (["--data.task", "ImageTask"], r"error: .*data_batch_1 is missing"),
        (["--ckpt_path", "none.ckpt"], r"error: none\.ckpt cannot be read as a checkpoint"),
        (["--trainer.logger", "false"], r"error: Cannot use `LearningRateMonitor`"),
    ],
)
def test_what_cannot_be_is_told_without_a_traceback(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lra", *SMALL_RUN.split(), *arguments])
    with pytest.raises(SystemExit, match=message):
        command.main()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how Lightning calls jsonargparse
def test_a_run_without_a_bar_shows_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [*SMALL_RUN.split(), "--trainer.enable_progress_bar", "false"]
    monkeypatch.setattr(sys, "argv", ["lra", *arguments])
    command.main()
    assert len(list(tmp_path.rglob("result.json"))) == 1
    assert "it/s" not in "".join(capsys.readouterr())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how Lightning calls jsonargparse
@pytest.mark.parametrize(
    ("at", "objective", "tested_step"), [(4, "", 3), (1, "", None), (1, PRE_TRAINING, None)]
)
def test_weights_of_a_run_that_diverged_are_not_tested(
    at, objective, tested_step, tmp_path, monkeypatch, capsys
):
    def destroy(self, batch, batch_idx):
        if self.trainer.global_step == at:
            with torch.no_grad():
                next(self.parameters()).fill_(torch.nan)

    monkeypatch.setattr(Learner, "on_train_batch_start", destroy)
    monkeypatch.chdir(tmp_path)
    arguments = SMALL_RUN.replace("max_steps 3", "max_steps 12") + objective
    monkeypatch.setattr(sys, "argv", ["lra", *arguments.split()])
    command.main()
    (path,) = tmp_path.rglob("result.json")
    result = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (result["diverged"], result["ended"]) == (True, True)
    assert result["steps"] == (6 if tested_step else 3)
    assert result.get("tested_step") == tested_step
    assert ("test/accuracy" in result) == (tested_step is not None)
    if not objective:
        told = f"synthetic image: diverged before step {result['steps']}"
        assert told in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how Lightning calls jsonargparse
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_hostile_checkpoint_runs_no_file(is_whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hostile.py").write_text("open('ran', 'w').close()\nfound = None\n")
    options = {"encoder": {"attention": "hostile.py:found"}}
    path = tmp_path / "last.ckpt"
    torch.save({"hyper_parameters": options, "state_dict": {}}, path)
    if not is_whole:
        path.write_bytes(path.read_bytes()[:300])
    monkeypatch.setattr(sys, "argv", ["lra", *SMALL_RUN.split(), "--ckpt_path", "last.ckpt"])
    message = "is not a checkpoint of a run" if is_whole else "cannot be read as a checkpoint"
    with pytest.raises(SystemExit, match=rf"^error: last\.ckpt {message}"):
        command.main()
    assert not (tmp_path / "ran").exists()


def test_help_comes_at_once_and_lists_presets(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lra", "fit", "--help"])
    monkeypatch.setattr(command, "main", lambda: pytest.fail("imported more than help takes"))
    entry.main()
    printed = capsys.readouterr().out
    assert "--model.encoder.attention" in printed
    assert "nystromformer/listops" in printed.replace("\n", "")
    program = (
        "import sys, experiments.lra.__main__ as e; e.print_help(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split()[-1] == "False"


def test_all_options_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lra", "--help-all"])
    monkeypatch.setattr(command, "main", lambda: None)
    entry.main()
    assert sys.argv[1:] == ["fit", "--help"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--nosuch", "unknown option --nosuch"),
        (
            "--model.encoder.atention=flash",
            "unknown option --model.encoder.atention; similar: --model.encoder.attention",
        ),
        ("--worker", "unknown option --worker; similar: --data.workers"),
        ("--prest=nystromformer/image", "unknown option --prest; similar: --preset"),
        ("--data.task.sise=8", "'sise' is not accepted; known: like, size"),
        ("--model.encoder.layers=x", "key \"model.encoder.layers\":\n  Expected a <class 'int'>"),
    ],
)
def test_a_wrong_option_is_answered_in_a_few_lines(option, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["__main__.py", *SMALL_RUN.split(), option])
    with pytest.raises(SystemExit, match="2"):
        entry.main()
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed
    assert printed.endswith(f"\n{HELP}\n")
    assert len(printed.splitlines()) <= 4


def test_an_accuracy_without_an_error_has_no_distance_in_errors(capsys):
    result = {"task": "t", "stuck": False, "floors": {}, "moved discs": {}}
    tested = {"test/accuracy": 0.0, "test/standard_error": 0.0, "test/class_prior": 0.25}
    command.show(result | tested)
    assert "000" not in capsys.readouterr().out


def test_a_preset_is_given_as_any_other_option():
    parted, whole = ["--preset", "tay/text"], ["--preset=tay/text"]
    expected = [part for path in presets.files_of("tay/text") for part in ("--config", str(path))]
    assert command.with_presets(parted) == command.with_presets(whole) == expected


def test_a_preset_is_read_after_the_common_files_of_all_its_folders():
    files = presets.files_of("text/film-pairs-joined/labels")
    assert [str(path.relative_to(presets.FOLDER)) for path in files] == [
        "common.yaml",
        "text/common.yaml",
        "text/film-pairs-joined/common.yaml",
        "text/film-pairs-joined/labels.yaml",
    ]
    assert presets.files_of("tay/text") == [
        presets.FOLDER / name for name in ("common.yaml", "tay/common.yaml", "tay/text.yaml")
    ]


def test_unknown_presets_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown preset 'x'; known: .*nystromformer/listops"):
        presets.files_of("x")


@pytest.fixture(scope="module")
def one_parser():
    """What sets up the parser of a command: made once, as that takes longer than to read."""
    setup, made = command.ArenaCLI.setup_parser, {}

    def set_up(cli, *arguments):
        if not made:
            before = {*vars(cli)}
            setup(cli, *arguments)
            made.update({name: x for name, x in vars(cli).items() if name not in before})
        vars(cli).update(made)

    return set_up


@pytest.mark.parametrize("preset", presets.names())
def test_presets_are_read(preset, one_parser, monkeypatch, capsys):
    monkeypatch.setattr(command.ArenaCLI, "setup_parser", one_parser)
    monkeypatch.setattr(sys, "argv", ["lra", "fit", "--preset", preset, "--print_config"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 0
    assert "class_path: experiments.lra.tasks" in capsys.readouterr().out


@pytest.mark.slow(20)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how Lightning calls jsonargparse
def test_two_processes_train_as_one(tmp_path, monkeypatch):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    monkeypatch.setattr(sys, "argv", ["lra", *SMALL_RUN.split()])
    command.main()
    run = [sys.executable, "-m", "experiments.lra", *SMALL_RUN.split()]
    run += ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    run += ["--trainer.default_root_dir", folder, "--data.data_root", folder]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (one, weights_of_one), (two, weights_of_two) = map(made_by, folders)
    assert one["test/samples"] == two["test/samples"] == 8
    assert one["steps"] == one["tested_step"] == 3
    assert one["curve"] == [pytest.approx(two["curve"][0])]
    for name, weight in weights_of_one.items():
        torch.testing.assert_close(weight, weights_of_two[name])


def made_by(folder):
    """Result and weights of the run of a folder."""
    (result,) = folder.rglob("result.json")
    (checkpoint,) = folder.rglob("best.ckpt")
    return json.loads(result.read_text()), torch.load(checkpoint)["state_dict"]
