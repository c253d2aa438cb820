"""What ends, saves and resumes a run."""

import json
import signal
import time
from contextlib import suppress

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from experiments.lra import callbacks
from experiments.lra.callbacks import (
    Averaged,
    Best,
    Curve,
    Deadline,
    Diverged,
    Enough,
    Interruption,
    StuckAtChance,
)
from experiments.lra.learner import Learner, ObjectiveConfig, read_checkpoint
from tests.helpers.lightning import TRAINS
from tests.helpers.lra_runs import Losses, Majority, fit

pytestmark = TRAINS


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


class Slow(Callback):
    def on_train_batch_end(self, trainer, *_):
        time.sleep(0.05)


def test_a_run_that_goes_on_counts_the_seconds_of_its_parts(tmp_path):
    first, rest = Curve(), Curve()
    fit(tmp_path, first, Slow(), Deadline(at=0, every=6))
    assert first.seconds is not None
    assert first.seconds > 0.3  # 6 of 12 steps
    last = tmp_path / "checkpoints" / "last.ckpt"
    fit(tmp_path, rest, Slow(), Deadline(), ckpt_path=last)
    assert rest.seconds is not None
    assert rest.seconds > first.seconds + 0.3
    rest.load_state_dict({"points": []})  # of a checkpoint that was saved before it had the time
    assert rest.seconds is None


class Destroying(Callback):
    """Makes weights that are not finite at a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, *_):
        if trainer.global_step == self.step:
            with torch.no_grad():
                next(pl_module.parameters()).fill_(torch.nan)


def test_a_run_whose_loss_is_not_finite_ends_at_its_next_validation(tmp_path):
    best, diverged = Best(), Diverged()
    trainer = fit(tmp_path, Curve(), best, diverged, Destroying(5), steps=20)[0]
    assert diverged.diverged
    assert trainer.global_step == 8  # validated at 4, 8, ...
    assert read_checkpoint(tmp_path / "checkpoints" / "best.ckpt")["global_step"] == 4
    curve = json.loads((tmp_path / "curve.json").read_text(), parse_constant=pytest.fail)
    assert [point[0] for point in curve] == [4, 8]
    assert curve[1][2] is None


def test_a_run_whose_loss_is_finite_does_not_diverge(tmp_path):
    diverged = Diverged()
    assert fit(tmp_path, diverged, steps=8)[0].global_step == 8
    assert not diverged.diverged


class Interrupting(Callback):
    """Interrupts a run so many times in the middle of a step."""

    def __init__(self, step, times=1):
        self.step, self.times = step, times

    def on_train_batch_start(self, trainer, *_):
        while trainer.global_step == self.step and self.times > 0:
            self.times -= 1
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible():
    """Lightning leaves interruptions ignored."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_goes_on_with_the_same_losses(tmp_path, monkeypatch):
    whole = fit(tmp_path / "whole")[3]
    losses, said = Losses(), []
    monkeypatch.setattr(callbacks, "rank_zero_info", said.append)
    with pytest.raises(SystemExit):
        fit(tmp_path / "cut", losses, Interruption(), Interrupting(4))
    assert list(losses.values) == [1, 2, 3, 4, 5]  # the step that was being made counts
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    assert said == [
        "Stops after this step; interrupt once more to stop at once.",
        f"Saved {last}. To resume: --ckpt_path {last}",
    ]
    rest = fit(tmp_path / "cut", Interruption(), ckpt_path=last)[3]
    assert {**losses.values, **rest} == whole


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("ends", [[Deadline(at=0, every=1)], [Interruption(), Interrupting(0)]])
def test_a_run_ends_with_the_last_batch_of_a_step(tmp_path, ends):
    """The gradients of the batches before it are in no checkpoint."""
    training = {"accumulate_grad_batches": 3}
    whole = fit(tmp_path / "whole", steps=4, training=training)[1].state_dict()
    with suppress(SystemExit):
        fit(tmp_path / "cut", *ends, steps=4, training=training)
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    assert read_checkpoint(last)["global_step"] == 1
    resumed = fit(tmp_path / "cut", steps=4, training=training, ckpt_path=last)[1].state_dict()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


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


def test_indices_are_not_averaged(tmp_path):
    _, learner, *_ = fit(tmp_path, Averaged(decay=0.9))
    assert learner.classifier.encoder.positions.place.tolist() == list(range(16))


@pytest.mark.gpu
def test_the_average_is_on_the_device_of_the_model(tmp_path):
    averaged = Averaged()
    fit(tmp_path, averaged, accelerator="gpu")
    assert averaged._average_model is not None
    assert {p.device.type for p in averaged._average_model.module.parameters()} == {"cuda"}


def test_a_run_that_guesses_is_stopped(tmp_path):
    stuck = StuckAtChance(steps=20)
    trainer, *_ = fit(tmp_path, stuck, steps=40, every=40, task=Majority(random=True))
    assert stuck.stuck
    assert trainer.global_step == 20
    learning = StuckAtChance(steps=100)
    fit(tmp_path, learning, steps=102, every=102)
    assert not learning.stuck
