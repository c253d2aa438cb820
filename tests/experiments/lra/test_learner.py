"""Learning: schedules, objectives, passes, the weights that a run starts from."""

import csv
import math
import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.lra import page
from experiments.lra.callbacks import Averaged, StepBar, StuckAtChance
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
from experiments.lra.tasks import Sample, Shape
from tests.helpers.baselines import need_package
from tests.helpers.lightning import TRAINS
from tests.helpers.lra_runs import ENCODER, Losses, Majority, fit

pytestmark = TRAINS


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


class Observed(TorchDispatchMode):
    """Counts what takes the host long in steps 2 to 10.

    `reads` are values that the host reads, for each of which it waits for the device, and
    `tracebacks` those that torch stores.
    """

    reads = tracebacks = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Observer(Callback):
    def __init__(self):
        self.observed, self.patch = Observed(), pytest.MonkeyPatch()

    def count(self, *_):
        self.observed.tracebacks += 1
        return []

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 1:
            self.patch.setattr("traceback.format_stack", self.count)
            self.observed.__enter__()
        if trainer.global_step == 10:
            self.observed.__exit__(None, None, None)
            self.patch.undo()


def test_a_step_neither_waits_for_the_device_nor_stores_tracebacks(tmp_path):
    bar, stuck, observer = StepBar(refresh_rate=20), StuckAtChance(steps=11), Observer()
    training = {"enable_progress_bar": True, "log_every_n_steps": 20}
    fit(tmp_path, bar, stuck, observer, every=20, training=training)
    assert len(stuck.state_dict()["accuracies"]) == 2
    assert observer.observed.reads == 9  # by the helper, which keeps losses
    assert observer.observed.tracebacks == 0


def test_losses_are_shown_and_logged_at_their_steps(tmp_path):
    logger = CSVLogger(tmp_path, name="", version="")
    bar = StepBar(refresh_rate=4)
    shown = {}

    class Shown(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            shown[trainer.global_step] = bar.get_metrics(trainer, pl_module)["train/loss"]

    training = {"logger": logger, "enable_progress_bar": True, "log_every_n_steps": 4}
    trainer, *_, losses = fit(tmp_path, bar, Shown(), steps=14, every=20, training=training)
    assert shown == losses
    with (tmp_path / "metrics.csv").open() as file:
        logged = {int(row["step"]) + 1: float(row["train/loss"]) for row in csv.DictReader(file)}
    assert logged == {step: pytest.approx(losses[step]) for step in (4, 8, 12)}
    assert float(trainer.callback_metrics["train/loss"]) == losses[14]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_run_of_an_optimizer_that_is_not_fused_goes_on(tmp_path, clip):
    training = {"precision": "bf16-mixed", "gradient_clip_val": clip}
    whole = fit(tmp_path / "whole", training=training)[3]
    with pytest.raises(SystemExit):
        fit(tmp_path / "cut", Losses(killed_at=7), training=training)
    path = tmp_path / "cut" / "last.ckpt"
    checkpoint = read_checkpoint(path)
    (group,) = checkpoint["optimizer_states"][0]["param_groups"]
    assert group["fused"]
    group["fused"] = None
    torch.save(checkpoint, path)
    trainer, *_, rest = fit(tmp_path / "cut", ckpt_path=path, training=training)
    assert trainer.optimizers[0].param_groups[0]["fused"]
    assert rest.items() <= whole.items()


def test_an_objective_without_a_loss_is_refused():
    objective = ObjectiveConfig(labels=0.0, traces=1.0)
    with pytest.raises(ValueError, match="weight of labels or of pixels, got 0"):
        Learner(Majority(), ENCODER, OptimizerConfig(), objective)


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


@pytest.mark.parametrize("label", [row.label for row in page.ROWS if row.label])
def test_every_attention_of_the_comparison_trains(label, tmp_path):
    attention = label.partition(" of ")[0]
    need_package(attention)
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
    with pytest.raises(ValueError, match=r"objective\.traces needs a task with traced: true"):
        fit(tmp_path, objective=ObjectiveConfig(traces=1), steps=3)


def test_black_pixels_cannot_be_both_masked_and_guessed():
    with pytest.raises(ValueError, match=r"mask_black must be false with objective\.pixels"):
        Learner(
            Majority(),
            EncoderConfig(mask_black=True),
            OptimizerConfig(),
            ObjectiveConfig(pixels=1),
        )


def test_training_starts_from_pre_trained_weights(tmp_path):
    fit(tmp_path / "before", steps=2, objective=ObjectiveConfig(pixels=1))
    start = tmp_path / "before" / "last.ckpt"
    weights = torch.load(start, weights_only=True)["state_dict"]
    learner = Learner(Majority(), ENCODER, OptimizerConfig(), ObjectiveConfig(), init_from=start)
    name = "classifier.encoder.embedding.weight"
    assert torch.equal(learner.state_dict()[name], weights[name])
    with pytest.raises(ValueError, match=r"last\.ckpt has another model"):
        Learner(
            Majority(),
            EncoderConfig(dim=32),
            OptimizerConfig(),
            ObjectiveConfig(),
            init_from=start,
        )
    # What trained the weights goes with them, and a run that is resumed keeps its start.
    before = {
        "task": "majority",
        "seed": 0,
        "labels": True,
        "steps": 2,
        "init_from": None,
    }
    assert learner.start == before
    fit(tmp_path / "after", steps=4, init_from=start)
    last = tmp_path / "after" / "last.ckpt"
    resumed = fit(tmp_path / "after", steps=4, ckpt_path=last)[1]
    assert resumed.start == before
    assert start_from(resumed, last) == before | {"steps": 4, "init_from": before}
    with pytest.raises(ValueError, match="init_from must be that of the run which is resumed"):
        fit(tmp_path / "after", steps=4, ckpt_path=last, init_from=last)
    torch.save({"weights": {}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt has no weights"):
        start_from(learner, tmp_path / "other.pt")


class MajorityOfTwo(Majority):
    """Two documents of a sample, for which a classifier has another head than for one."""

    name = "majority-of-two"

    def __init__(self):
        self.shape = Shape(seq_len=16, vocabulary=3, classes=2, documents=2)

    def samples(self, stream):
        single = Majority().samples(stream)
        pairs = pairwise(single)
        return [Sample([*a.documents, *b.documents], a.label ^ b.label) for a, b in pairs]


def test_pre_training_without_labels_gives_its_weights_to_a_task_with_another_head(tmp_path):
    fit(tmp_path / "before", steps=2, objective=ObjectiveConfig(labels=0, pixels=1))
    fit(tmp_path / "labels", steps=2)
    start = tmp_path / "before" / "last.ckpt"
    weights = torch.load(start, weights_only=True)["state_dict"]
    task = MajorityOfTwo()
    learner = Learner(task, ENCODER, OptimizerConfig(), ObjectiveConfig(), init_from=start)
    own = learner.state_dict()
    for name in own.keys() & weights.keys():
        trained = not name.startswith(("classifier.hidden.", "classifier.answer."))
        assert torch.equal(own[name], weights[name]) == trained, name
    fit(tmp_path / "after", steps=2, task=task, init_from=start)
    # Labels have trained the head, which must not be lost without a word.
    with pytest.raises(ValueError, match=r"last\.ckpt has another model"):
        fit(tmp_path / "after", task=task, init_from=tmp_path / "labels" / "last.ckpt")


@pytest.mark.parametrize(
    "content", [None, b"", b"no checkpoint", b"broken\n", pickle.dumps(pytest.fail, protocol=2)]
)
def test_a_broken_checkpoint_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read as a checkpoint") as raised:
        read_checkpoint(tmp_path / "last.ckpt")
    assert "weights_only" not in str(raised.value)


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


def test_positions_of_a_text_are_repeated_or_interpolated():
    positions = torch.arange(4.0)[:, None]  # 4 tokens would be an image of 2 x 2
    assert resized(positions, 9, "repeated", image=False)[:, 0].tolist() == [*range(4)] * 2 + [0]
    found = resized(positions, 8, "interpolated", image=False)[:, 0].tolist()
    assert found == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]
    assert resized(positions, 4, "interpolated", image=False) is positions


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_a_longer_text_starts_with_repeated_positions(tmp_path, pool):
    encoder = replace(ENCODER, attention="flash", positions="learned", pool=pool)
    before = fit(tmp_path, steps=2, encoder=encoder)[1].classifier.encoder.positions.learned
    longer = Majority()
    longer.shape = replace(longer.shape, seq_len=40)
    given = (longer, encoder, OptimizerConfig(), ObjectiveConfig(), tmp_path / "last.ckpt")
    learned = Learner(*given, positions_from="repeated").classifier.encoder.positions.learned
    special, rows = int(pool == "cls"), before.weight[int(pool == "cls") :]
    assert torch.equal(learned.weight[:special], before.weight[:special])
    assert torch.equal(learned.weight[special:], torch.cat([rows, rows, rows[:8]]))


def test_a_warm_up_is_not_longer_than_its_run():
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    with pytest.raises(ValueError, match=r"warmup_steps must be 0 to the 60 steps.*, got 1000"):
        schedule_of(OptimizerConfig(warmup_steps=1000), optimizer, 60)


def test_accuracy_comes_with_error_and_prior():
    result = accuracy_of(torch.tensor([[50, 10], [10, 30]]))
    assert result == pytest.approx(
        {"accuracy": 0.8, "standard_error": 0.04, "class_prior": 0.6, "samples": 100}
    )
