"""Callbacks of the trainer: progress bar, learning curve, checkpoints, early ends of runs."""

import time
from math import isfinite, sqrt
from pathlib import Path
from typing import Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    ModelCheckpoint,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from experiments.files import write_json
from experiments.interruption import Interrupt
from experiments.lra.learner import Learner, read_checkpoint
from experiments.lra.tasks import Batch
from experiments.module import TrainingModule

# A run is stuck if its accuracy is less than so many standard errors above that of guessing.
CLEARLY = 4


class StepBar(TQDMProgressBar):
    """A progress bar up to max_steps, because the training data has no end."""

    @property
    def total_train_batches(self) -> int:
        return int(self.trainer.max_steps) * self.trainer.accumulate_grad_batches

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict:
        assert isinstance(pl_module, TrainingModule)
        # This waits for the device, when the bar is drawn only. Lightning reads metrics of
        # `log(prog_bar=True)` in every step.
        measured = {name: float(value) for name, value in pl_module.measured.items()}
        return super().get_metrics(trainer, pl_module) | measured


class Averaged(WeightAveraging):
    """Validates, saves and tests an exponential average of the weights.

    EMAWeightAveraging of Lightning would test the weights of the last step, keep the average on
    the host, and average buffers too, which rounds down those of integers.

    Args:
        decay: Weight of the average in each update; that of the new weights is 1 - decay.
        update_every_n_steps: Number of steps between updates.
    """

    def __init__(self, decay: float = 0.999, update_every_n_steps: int = 1):
        super().__init__(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.update_every_n_steps = update_every_n_steps

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % self.update_every_n_steps == 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            trainer.strategy.model_to_device()  # where the average is then, too
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            # The number of updates stays on the CPU, because each update reads it as a number.
            self._average_model.n_averaged = self._average_model.n_averaged.cpu()

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)


class Best(ModelCheckpoint):
    """Saves the best checkpoint of a run as `checkpoints/best.ckpt` in its folder.

    A resumed run finds it even if the folder was moved; the callback of Lightning does not.
    Pre-training without labels is monitored by its loss.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if getattr(pl_module, "pre_trains", False):
            self.monitor, self.mode = "validation/pixels", "min"
            self.kth_value = torch.tensor(torch.inf)
        super().setup(trainer, pl_module, stage)

    def __init__(self, monitor: str = "validation/accuracy", mode: Literal["min", "max"] = "max"):
        super().__init__(filename="best", monitor=monitor, mode=mode, enable_version_counter=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Logits that are not numbers give the same class for each sample, which can be better
        # than the accuracy of the first steps.
        if isfinite(validation_loss(trainer)):
            super().on_validation_end(trainer, pl_module)

    def load_state_dict(self, state_dict: dict) -> None:
        path = Path(self.dirpath or "") / f"best{self.FILE_EXTENSION}"
        if not path.exists():
            return
        score = read_checkpoint(path)["callbacks"][self.state_key]["current_score"]
        super().load_state_dict(
            state_dict
            | {
                "dirpath": self.dirpath,
                "best_model_path": str(path),
                "best_model_score": score,
                "best_k_models": {str(path): score},
                "kth_best_model_path": str(path),
                "kth_value": score,
            }
        )


class Last(ModelCheckpoint):
    """Saves `checkpoints/last.ckpt`, from which a run is resumed, at regular steps."""

    def __init__(self, every: int = 500):
        super().__init__(filename="last", every_n_train_steps=every, enable_version_counter=False)

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads nothing: the state of an earlier folder is not needed."""


class Enough(Callback):
    """Ends a run by its validation accuracy.

    Args:
        accuracy: The run ends when validation accuracy is at least this; None for never.
        patience: The run ends after so many validations without a better one; None for never.
    """

    def __init__(self, accuracy: float | None = None, patience: int | None = None):
        self.accuracy, self.patience = accuracy, patience
        self.best, self.since_best = 0.0, 0
        self.reached = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: Learner) -> None:
        if trainer.sanity_checking or "validation/accuracy" not in trainer.callback_metrics:
            return
        accuracy = float(trainer.callback_metrics["validation/accuracy"])
        self.since_best = 0 if accuracy > self.best else self.since_best + 1
        self.best = max(accuracy, self.best)
        enough = self.accuracy is not None and accuracy >= self.accuracy
        if enough or (self.patience is not None and self.since_best >= self.patience):
            self.reached = trainer.should_stop = True

    def state_dict(self) -> dict:
        return {"best": self.best, "since_best": self.since_best}

    def load_state_dict(self, state_dict: dict) -> None:
        self.best, self.since_best = state_dict["best"], state_dict["since_best"]


class StuckAtChance(Callback):
    """Stops a run whose accuracy is still that of guessing after `steps` steps.

    The accuracy is that of training over the last tenth of these steps. `python -m
    experiments.lra.seeds` restarts such a run with another seed, and counts it.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self.stuck = False
        self._accuracies: list[float | Tensor] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Learner, outputs: dict, batch: Batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.steps - self.steps // 10 <= step <= self.steps and "accuracy" in outputs:
            self._accuracies.append(outputs["accuracy"])  # to read it would wait for the device
            if step == self.steps:
                samples = len(self._accuracies) * len(batch.labels) * trainer.world_size
                self.stuck = trainer.should_stop = self._guesses(trainer, pl_module, samples)

    def _guesses(self, trainer: L.Trainer, learner: Learner, samples: int) -> bool:
        mine = torch.tensor(self._read(), device=learner.device).mean()
        accuracy = float(trainer.strategy.reduce(mine, reduce_op="mean"))
        chance = 1 / learner.task.shape.classes
        return accuracy < chance + CLEARLY * sqrt(chance * (1 - chance) / samples)

    def _read(self) -> list[float]:
        return [float(accuracy) for accuracy in self._accuracies]

    def state_dict(self) -> dict:
        return {"stuck": self.stuck, "accuracies": self._read()}

    def load_state_dict(self, state_dict: dict) -> None:
        self.stuck, self._accuracies = state_dict["stuck"], state_dict["accuracies"]


class Diverged(Callback):
    """Ends a run whose validation loss is not a finite number.

    Its weights are not finite then, or its activations overflow in half precision. The best
    checkpoint is tested, as at the normal end; nothing is if there is none.
    """

    def __init__(self):
        self.diverged = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: Learner) -> None:
        if trainer.sanity_checking:
            return
        if not isfinite(validation_loss(trainer)):
            self.diverged = trainer.should_stop = True
            rank_zero_info(
                f"The validation loss of step {trainer.global_step} is not finite: the run ends."
            )


class Deadline(Checkpoint):
    """Stops a run at a given time, and saves a checkpoint from which it can be resumed.

    The run is then validated and tested as at its normal end. It is a Checkpoint, because
    Lightning calls checkpoints after all other callbacks of a step.

    Args:
        at: The time, in seconds since 1970.
        every: Number of steps between checks of the time. In a check several processes agree, for
            which each waits for its device.
    """

    def __init__(self, at: float | None = None, every: int = 10):
        self.at, self.every = at, every

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Learner, outputs: dict, batch: Batch, batch_idx: int
    ) -> None:
        if self.at is None or trainer.should_stop or not ends_step(trainer, batch_idx):
            return
        if trainer.global_step % self.every:
            return
        # All processes stop at the same step.
        if trainer.strategy.reduce_boolean_decision(time.time() >= self.at, all=False):
            trainer.should_stop = True
            save_last(trainer)


class Interruption(Checkpoint):
    """Saves a checkpoint from which a run can be resumed, on Ctrl-C and at the end of a run.

    After Ctrl-C the current step is finished first. A second Ctrl-C stops the run immediately.

    Args:
        every: Number of steps between agreements of several processes; see Deadline.
        resumes: What resumes the run, for the message; `{path}` is its checkpoint.
    """

    def __init__(self, every: int = 10, resumes: str = "--ckpt_path {path}"):
        self.every, self.resumes = every, resumes
        self._interrupt = Interrupt(rank_zero_info)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            self._interrupt.begin()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._interrupt.end()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._interrupt.end()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Learner, outputs: dict, batch: Batch, batch_idx: int
    ) -> None:
        if not ends_step(trainer, batch_idx):
            return
        stops = self._interrupt.asked
        if trainer.world_size > 1:
            looks = trainer.global_step % self.every == 0
            stops = looks and trainer.strategy.reduce_boolean_decision(stops, all=False)
        if stops:
            path = save_last(trainer)
            rank_zero_info(f"Saved {path}. To resume: {self.resumes.format(path=path)}")
            raise KeyboardInterrupt
        if trainer.global_step == trainer.max_steps:
            save_last(trainer)


def validation_loss(trainer: L.Trainer) -> float:
    """The loss of the last validation: of hidden tokens if there is none of labels."""
    measured = trainer.callback_metrics
    names = ("validation/loss", "validation/pixels")
    return float(next(measured[name] for name in names if name in measured))


def finite_or_none(value: float) -> float | None:
    """The value; None if it is not finite, because JSON has no such number."""
    return value if isfinite(value) else None


def ends_step(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether a batch is the last one of a step; a checkpoint has no gradients."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def save_last(trainer: L.Trainer) -> Path:
    """Saves the checkpoint from which a run is resumed; returns its path."""
    path = folder_of(trainer) / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(path, weights_only=False)
    return path


def folder_of(trainer: L.Trainer) -> Path:
    """The folder of a run; all processes must call this to agree on it."""
    return Path(trainer.log_dir or trainer.default_root_dir)


class Curve(Callback):
    """Writes [step, accuracy, loss] of every validation to curve.json, also if a run is killed.

    In pre-training it writes [step, loss of hidden tokens]. A value that is not finite is None.
    It also measures how long a run takes.
    """

    def __init__(self):
        self.points: list[list[float | None]] = []
        self._before: float | None = 0.0
        self._started: float | None = None

    @property
    def seconds(self) -> float | None:
        """Time of training and validation so far, in all parts of a run that was resumed.

        It is None if the run was resumed from a checkpoint without its time.
        """
        if self._started is None or self._before is None:
            return self._before
        return self._before + time.monotonic() - self._started

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.monotonic()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before, self._started = self.seconds, None

    def on_validation_end(self, trainer: L.Trainer, pl_module: Learner) -> None:
        if not trainer.sanity_checking:
            measured = trainer.callback_metrics
            names = ("validation/accuracy", "validation/loss")
            names = ("validation/pixels",) if pl_module.pre_trains else names
            values = [finite_or_none(float(measured[name])) for name in names]
            self.points.append([trainer.global_step, *values])
            folder = folder_of(trainer)
            if trainer.is_global_zero:
                write_json(folder / "curve.json", self.points)

    def state_dict(self) -> dict:
        return {"points": self.points, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict) -> None:
        self.points, self._before = state_dict["points"], state_dict.get("seconds")
