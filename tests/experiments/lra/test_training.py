import json
import math
import pickle
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from experiments.lra import __main__ as entry
from experiments.lra import command, page, presets
from experiments.lra.batches import ArenaData, StepBatches
from experiments.lra.callbacks import (
    Averaged,
    Best,
    Curve,
    Deadline,
    Enough,
    Interruption,
    Last,
    StuckAtChance,
)
from experiments.lra.learner import (
    Learner,
    ObjectiveConfig,
    OptimizerConfig,
    accuracy_of,
    read_checkpoint,
    resized,
    schedule_of,
    start_from,
)
from experiments.lra.model import EncoderConfig
from experiments.lra.tasks import SPLITS, Pathfinder, Sample, Shape, Task

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec.*is deprecated"),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Steps this small spend their time waiting for one another's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Majority(Task):
    """Which symbol is more frequent? Learned in a few steps; `random` labels never."""

    name = "majority"

    def __init__(self, random: bool = False):
        self.shape = Shape(seq_len=16, vocabulary=3, classes=2)
        self.random = random

    def splits(self, data_root):
        return {split: self.samples(n) for n, split in enumerate(SPLITS)}

    def samples(self, stream):
        random = np.random.default_rng(stream)
        ids = random.integers(1, 3, (96, 15))
        labels = random.integers(2, size=96) if self.random else (ids == 2).sum(1) > 7
        return [Sample([row], int(label)) for row, label in zip(ids, labels, strict=True)]


ENCODER = EncoderConfig(dim=16, feedforward=32, block_size=16, attention="local(4)")


class Losses(Callback):
    def __init__(self, killed_at: int | None = None):
        self.values, self.killed_at = {}, killed_at

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values[trainer.global_step] = float(outputs["loss"])
        if trainer.global_step == self.killed_at:
            raise SystemExit


def fit(
    folder,
    *callbacks,
    steps=12,
    task=None,
    objective=None,
    ckpt_path=None,
    seed=0,
    every=2,
    accelerator="cpu",
    **options,
):
    task = task or Majority()
    torch.manual_seed(seed)
    learner = Learner(
        task,
        options.pop("encoder", ENCODER),
        OptimizerConfig(learning_rate=3e-3, warmup_steps=2),
        objective or ObjectiveConfig(),
        seed=seed,
        **options,
    )
    losses = next((c for c in callbacks if isinstance(c, Losses)), Losses())
    last = Last(every)
    last.dirpath = str(folder)
    trainer = L.Trainer(
        accelerator=accelerator,
        max_steps=steps,
        val_check_interval=2 * every,
        check_val_every_n_epoch=None,
        callbacks=[*{id(c): c for c in (*callbacks, losses, last)}.values()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
    )
    data = ArenaData(task, folder, batch_size=8, seed=seed)
    trainer.fit(learner, data, ckpt_path=ckpt_path, weights_only=True)
    return trainer, learner, data, losses.values


class TestStepBatches:
    def test_every_sample_once_each_time_through(self):
        batches = iter(StepBatches(10, 5, seed=0, start=0, rank=0, world_size=1))
        first, second = (sorted(next(batches) + next(batches)) for _ in range(2))
        assert first == second == list(range(10))

    def test_starts_anywhere(self):
        whole = iter(StepBatches(10, 4, seed=0, start=0, rank=0, world_size=1))
        skipped = [next(whole) for _ in range(6)]
        assert next(iter(StepBatches(10, 4, 0, start=5, rank=0, world_size=1))) == skipped[5]

    def test_processes_share_a_batch(self):
        whole = next(iter(StepBatches(10, 4, 0, 3, 0, 1)))
        parts = [next(iter(StepBatches(10, 4, 0, 3, rank, 2))) for rank in range(2)]
        assert sorted(parts[0] + parts[1]) == sorted(whole)
        with pytest.raises(ValueError, match="batch_size must be a multiple of the 3 processes"):
            StepBatches(10, 4, 0, 0, 0, 3)


def test_a_small_task_is_learned(tmp_path):
    trainer, learner, data, _ = fit(tmp_path, steps=150, every=150)
    (metrics,) = trainer.test(learner, data, verbose=False)
    assert metrics["test/accuracy"] > 0.8
    assert metrics["test/samples"] == 96


@pytest.mark.parametrize("ema", [False, True])
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, ema):
    def averages():
        return [Averaged(decay=0.9)] if ema else []

    whole = fit(tmp_path / "whole", *averages())[3]
    killed = Losses(killed_at=7)
    with pytest.raises(SystemExit):
        fit(tmp_path / "killed", killed, *averages())
    last = tmp_path / "killed" / "last.ckpt"
    resumed = fit(tmp_path / "killed", *averages(), ckpt_path=last)[3]
    assert list(resumed) == list(range(7, 13))
    assert {**killed.values, **resumed} == whole


def test_a_run_that_goes_on_keeps_its_best_checkpoint_wherever_it_is_moved(tmp_path, monkeypatch):
    losses = {0: 1.0, 4: 0.5, 5: 0.7, 8: 0.9}

    def validation_step(self, batch, batch_idx):
        self.log("validation/loss", losses[self.trainer.global_step], batch_size=1)

    monkeypatch.setattr(Learner, "validation_step", validation_step)
    first, second = (Best("validation/loss", "min") for _ in range(2))
    fit(tmp_path / "here", first, Deadline(at=0, every=5), steps=8)
    assert float(first.best_model_score) == 0.5
    (tmp_path / "here").rename(tmp_path / "there")
    last = tmp_path / "there" / "checkpoints" / "last.ckpt"
    fit(tmp_path / "there", second, steps=8, ckpt_path=last)
    assert float(second.best_model_score) == 0.5
    best = tmp_path / "there" / "checkpoints" / "best.ckpt"
    assert second.best_model_path == str(best)
    assert read_checkpoint(best)["global_step"] == 4
    assert list(best.parent.glob("best*")) == [best]


def test_a_short_run_leaves_its_last_checkpoint(tmp_path):
    fit(tmp_path, Interruption(), steps=3, every=10)
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 3


def test_pre_training_is_monitored_by_its_own_loss(tmp_path):
    best, curve = Best(), Curve()
    objective = ObjectiveConfig(labels=0, pixels=1, hidden=0.3)
    trainer, learner, *_ = fit(tmp_path, best, curve, steps=8, objective=objective)
    assert "validation/accuracy" not in trainer.callback_metrics
    assert [len(point) for point in curve.points] == [2, 2]
    assert float(best.best_model_score) == min(loss for _, loss in curve.points)
    assert learner.pre_trains


@pytest.mark.parametrize(
    ("options", "steps"), [({"accuracy": 0.0}, 4), ({"patience": 2}, None), ({}, 40)]
)
def test_a_run_ends_when_its_validation_says_so(tmp_path, options, steps):
    enough = Enough(**options)
    trainer, *_ = fit(tmp_path, enough, steps=40, task=Majority(random=True))
    assert trainer.global_step == steps if steps else trainer.global_step < 40
    assert enough.reached == bool(options)


def test_a_deadline_stops_a_run_that_can_go_on(tmp_path):
    whole = fit(tmp_path / "whole", Averaged(decay=0.9))[3]
    curve = Curve()
    trainer, *_, first = fit(tmp_path / "cut", Averaged(decay=0.9), curve, Deadline(at=0, every=3))
    assert trainer.global_step == 3
    # It is validated where it stops.
    assert [point[0] for point in curve.points] == [3]
    assert json.loads((tmp_path / "cut" / "curve.json").read_text()) == curve.points
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    rest = fit(tmp_path / "cut", Averaged(decay=0.9), Curve(), Deadline(), ckpt_path=last)[3]
    assert {**first, **rest} == whole


class Interrupting(Callback):
    """Interrupts a run so many times in the middle of a step."""

    def __init__(self, step, times=1):
        self.step, self.times = step, times

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible():
    """Lightning leaves interruptions ignored."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_goes_on_with_the_same_losses(tmp_path):
    whole = fit(tmp_path / "whole")[3]
    losses = Losses()
    with pytest.raises(SystemExit):
        fit(tmp_path / "cut", losses, Interruption(), Interrupting(4))
    assert list(losses.values) == [1, 2, 3, 4, 5]  # the step that was being made counts
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    rest = fit(tmp_path / "cut", Interruption(), ckpt_path=last)[3]
    assert {**losses.values, **rest} == whole


@pytest.mark.usefixtures("interruptible")
def test_a_second_interruption_stops_a_run_at_once(tmp_path):
    losses = Losses()
    with pytest.raises(SystemExit):
        fit(tmp_path, losses, Interruption(), Interrupting(4, times=2))
    assert list(losses.values) == [1, 2, 3, 4]
    assert not (tmp_path / "checkpoints" / "last.ckpt").exists()


@pytest.mark.usefixtures("interruptible")
def test_interruptions_are_answered_during_a_run_only(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    fit(tmp_path, Interruption())
    assert signal.getsignal(signal.SIGINT) is before


def test_what_is_tested_is_the_average(tmp_path):
    trainer, learner, data, _ = fit(tmp_path, Averaged(decay=0.5), steps=6)
    saved = read_checkpoint(tmp_path / "last.ckpt")
    trainer.test(learner, data, ckpt_path=tmp_path / "last.ckpt", weights_only=True, verbose=False)
    name = "classifier.answer.weight"
    assert torch.equal(learner.state_dict()[name], saved["state_dict"][name])
    assert not torch.equal(learner.state_dict()[name], saved["current_model_state"][name])


def after_peak(step):
    """torch's onecycle of 101 steps, a tenth of them to warm up: its peak is at 9.1."""
    return 1 - (1 - 4e-6) * (step - 9.1) / 90.9


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("trapezoid", [0.1, 1, 1, 1, 0.5, 0]),
        ("constant", [0.1, 1, 1, 1, 1, 1]),
        ("rsqrt", [0.1, 1, 1, 8**-0.5, 9**-0.5, 10**-0.5]),
        ("cosine", [0.1, 1, 1, *((1 + math.cos(math.pi * t / 90)) / 2 for t in (70, 80, 90))]),
        ("onecycle", [0.04, 0.04 + 0.96 * 9 / 9.1, *map(after_peak, (10, 80, 90, 100))]),
    ],
)
def test_schedules_rise_over_the_warm_up_and_fall_as_they_are_called(kind, expected):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, schedule=kind)
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    schedule = schedule_of(config, optimizer, 100)
    rates = []
    for _ in range(101):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert [rates[step] for step in (0, 9, 10, 80, 90, 100)] == pytest.approx(expected, abs=1e-9)


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore:TensorFloat32 tensor cores",  # of torch.compile
    "ignore:The AccumulateGrad node's stream",  # of torch.cuda.make_graphed_callables
)
@pytest.mark.parametrize("passes", ["compiled", "cuda_graph"])
def test_other_passes_have_the_losses_of_eager_ones(tmp_path, passes):
    encoder = replace(ENCODER, dropout=0.0, attention_dropout=0.0)
    eager, other = (
        fit(tmp_path / kind, accelerator="gpu", encoder=encoder, passes=kind)[3]
        for kind in ("eager", passes)
    )
    assert other == pytest.approx(eager, rel=1e-3)


class Longer(Majority):
    """The same over 64 tokens, which every attention of the comparison takes."""

    def __init__(self):
        super().__init__()
        self.shape = Shape(seq_len=64, vocabulary=3, classes=2)


PACKAGES = {
    "nystromformer": "nystrom_attention",
    "performer": "performer_pytorch",
    "linformer": "linformer",
    "reformer": "transformers",
}


@pytest.mark.filterwarnings("ignore:distutils Version classes are deprecated")
@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp")
@pytest.mark.parametrize("label", [row.label for row in page.ROWS if row.label])
def test_every_attention_of_the_comparison_trains(label, tmp_path):
    attention = label.partition(" of ")[0]
    pytest.importorskip(PACKAGES.get(attention, "torch"), reason="an optional extra, lra-peers")
    encoder = replace(ENCODER, attention=attention)
    torch.manual_seed(0)  # as `fit` begins
    begin = Learner(Longer(), encoder, OptimizerConfig(), ObjectiveConfig())
    begin = dict(begin.classifier.named_parameters())
    trainer, learner, data, losses = fit(tmp_path, task=Longer(), encoder=encoder, steps=4)
    assert all(math.isfinite(loss) for loss in losses.values())
    for name, parameter in learner.classifier.named_parameters():
        assert not torch.equal(parameter, begin[name]), name
    trainer.test(learner, data, verbose=False)
    assert 0 <= trainer.callback_metrics["test/accuracy"] <= 1


def test_graphs_are_refused_where_they_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="passes 'cuda_graph' need one CUDA device"):
        fit(tmp_path, passes="cuda_graph")


def test_a_run_that_guesses_is_stopped(tmp_path):
    stuck = StuckAtChance(steps=20)
    trainer, *_ = fit(tmp_path, stuck, steps=40, every=40, task=Majority(random=True))
    assert stuck.stuck
    assert trainer.global_step == 20
    learning = StuckAtChance(steps=100)
    fit(tmp_path, learning, steps=102, every=102)
    assert not learning.stuck


def test_hidden_tokens_are_guessed_without_labels(tmp_path):
    objective = ObjectiveConfig(labels=0, pixels=1, hidden=0.3)
    losses = fit(tmp_path, steps=40, every=40, objective=objective)[3]
    assert losses[40] < losses[1]


class Grey(Majority):
    """Images of three greys, whose pixels' classes are these."""

    def __init__(self):
        self.shape = Shape(seq_len=16, vocabulary=3, classes=2, side=4)

    def samples(self, stream):
        images = np.random.default_rng(stream).integers(0, 3, (96, 16))
        return [Sample([image], 0, image) for image in images]


def test_classes_of_tokens_are_learned_in_the_order_of_tokens(tmp_path):
    tiles = replace(ENCODER, order="tiles", tile=(2, 2), positions="axial", dropout=0.0)
    trainer, *_ = fit(
        tmp_path,
        task=Grey(),
        encoder=tiles,
        objective=ObjectiveConfig(traces=1, ink=2),
        steps=80,
        every=80,
    )
    assert float(trainer.callback_metrics["train/traces"]) < 0.3
    with pytest.raises(ValueError, match=r"objective\.traces needs a task that is traced"):
        fit(tmp_path, objective=ObjectiveConfig(traces=1), steps=3)


def test_black_pixels_cannot_be_both_masked_and_guessed():
    with pytest.raises(ValueError, match=r"mask_black does not go with objective\.pixels"):
        Learner(
            Majority(),
            EncoderConfig(mask_black=True),
            OptimizerConfig(),
            ObjectiveConfig(pixels=1),
        )


def test_training_starts_from_pre_trained_weights(tmp_path):
    fit(tmp_path / "before", steps=2, objective=ObjectiveConfig(pixels=1))
    start = tmp_path / "before" / "last.ckpt"
    before = torch.load(start, weights_only=True)["state_dict"]
    learner = Learner(Majority(), ENCODER, OptimizerConfig(), ObjectiveConfig(), init_from=start)
    name = "classifier.encoder.embedding.weight"
    assert torch.equal(learner.state_dict()[name], before[name])
    with pytest.raises(ValueError, match=r"last\.ckpt holds another model"):
        Learner(
            Majority(),
            EncoderConfig(dim=32),
            OptimizerConfig(),
            ObjectiveConfig(),
            init_from=start,
        )
    torch.save({"weights": {}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt holds no weights"):
        start_from(learner, tmp_path / "other.pt")


@pytest.mark.parametrize(
    "content", [None, b"", b"no checkpoint", b"broken\n", pickle.dumps(pytest.fail, protocol=2)]
)
def test_a_broken_checkpoint_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read as a checkpoint") as raised:
        read_checkpoint(tmp_path / "last.ckpt")
    assert "weights_only" not in str(raised.value)


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


def test_unknown_tasks_list_the_known_ones():
    command.check_task(["fit", "--data.task", "ListOps"])
    with pytest.raises(ValueError, match="unknown task 'Foo'; known: FilmPairs, ImageTask, "):
        command.check_task(["fit", "--data.task", "Foo"])


def test_positions_of_a_small_image_are_repeated_or_interpolated():
    positions = torch.arange(4.0)[:, None]
    assert resized(positions, 16, "repeated").view(4, 4).tolist() == [
        [0, 1, 0, 1],
        [2, 3, 2, 3],
        [0, 1, 0, 1],
        [2, 3, 2, 3],
    ]
    # Pixels of the small image are centred on two by two of the large one.
    assert resized(positions, 16, "interpolated").view(4, 4).tolist() == [
        [0, 0.25, 0.75, 1],
        [0.5, 0.75, 1.25, 1.5],
        [1.5, 1.75, 2.25, 2.5],
        [2, 2.25, 2.75, 3],
    ]
    for how in ("repeated", "interpolated"):
        assert resized(positions, 4, how) is positions
        assert resized(torch.ones(3, 1), 16, how).shape == (3, 1)
    assert resized(positions, 9, "repeated") is positions
    assert resized(positions, 9, "interpolated").shape == (9, 1)


def test_a_warm_up_is_not_longer_than_its_run():
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    with pytest.raises(ValueError, match=r"warmup_steps must be 0 to the 60 steps.*, got 1000"):
        schedule_of(OptimizerConfig(warmup_steps=1000), optimizer, 60)


def test_accuracy_comes_with_error_and_prior():
    result = accuracy_of(torch.tensor([[50, 10], [10, 30]]))
    assert result == pytest.approx(
        {"accuracy": 0.8, "standard_error": 0.04, "class_prior": 0.6, "samples": 100}
    )


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
    message = "is no checkpoint of a run" if is_whole else "cannot be read as a checkpoint"
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


def test_an_accuracy_without_an_error_has_no_distance_in_errors(capsys):
    result = {"task": "t", "stuck": False, "floors": {}, "moved discs": {}}
    tested = {"test/accuracy": 0.0, "test/standard_error": 0.0, "test/class_prior": 0.25}
    command.show(result | tested)
    assert "000" not in capsys.readouterr().out


def test_unknown_presets_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown preset 'x'; known: .*nystromformer/listops"):
        presets.files_of("x")


@pytest.mark.parametrize("preset", presets.names())
def test_presets_are_read(preset, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lra", "fit", "--preset", preset, "--print_config"])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 0
    assert "class_path: experiments.lra.tasks" in capsys.readouterr().out


SMALL_RUN = """fit --preset nystromformer/image --data.task Synthetic --data.task.like ImageTask
    --data.task.size 8 --data.batch_size 4 --trainer.max_steps 3 --trainer.val_check_interval 3
    --trainer.precision 32-true --trainer.accelerator cpu --model.optimizer.warmup_steps 1
    --model.encoder.dropout 0 --model.encoder.attention_dropout 0"""


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    results = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        more = ["--trainer.devices", str(processes), "--trainer.strategy", "ddp"]
        run = [sys.executable, "-m", "experiments.lra", *SMALL_RUN.split(), *more]
        run += ["--trainer.default_root_dir", folder, "--data.data_root", folder]
        done = subprocess.run(run, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        (result,) = folder.rglob("result.json")
        (checkpoint,) = folder.rglob("best.ckpt")
        results.append((json.loads(result.read_text()), torch.load(checkpoint)["state_dict"]))
    (one, weights_of_one), (two, weights_of_two) = results
    assert one["test/samples"] == two["test/samples"] == 8
    assert one["steps"] == one["tested_step"] == 3
    assert one["curve"] == [pytest.approx(two["curve"][0])]
    for name, weight in weights_of_one.items():
        torch.testing.assert_close(weight, weights_of_two[name])
