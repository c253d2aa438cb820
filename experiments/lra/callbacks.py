"""What happens around training steps: a bar with an end, a curve, runs that are given up."""

from math import sqrt

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar

from experiments.lra.learner import Learner
from experiments.lra.tasks import Batch

# A run is stuck when its accuracy is not so many standard errors above guessing.
CLEARLY = 4


class StepBar(TQDMProgressBar):
    """Counts to max_steps: the training data has no end."""

    @property
    def total_train_batches(self) -> int:
        return int(self.trainer.max_steps) * self.trainer.accumulate_grad_batches


class StuckAtChance(Callback):
    """Stops a run whose accuracy is still that of guessing after `steps` steps.

    It is the training accuracy over the last tenth of these steps. `python -m
    experiments.lra.seeds` starts such a run again with another seed, and counts it.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self.stuck = False
        self._accuracies: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Learner, outputs: dict, batch: Batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.steps - self.steps // 10 <= step <= self.steps and "accuracy" in outputs:
            self._accuracies.append(float(outputs["accuracy"]))
            if step == self.steps:
                samples = len(self._accuracies) * len(batch.labels) * trainer.world_size
                self.stuck = trainer.should_stop = self._guesses(trainer, pl_module, samples)

    def _guesses(self, trainer: L.Trainer, learner: Learner, samples: int) -> bool:
        mine = torch.tensor(self._accuracies, device=learner.device).mean()
        accuracy = float(trainer.strategy.reduce(mine, reduce_op="mean"))
        chance = 1 / learner.task.shape.classes
        return accuracy < chance + CLEARLY * sqrt(chance * (1 - chance) / samples)

    def state_dict(self) -> dict:
        return {"stuck": self.stuck, "accuracies": self._accuracies}

    def load_state_dict(self, state_dict: dict) -> None:
        self.stuck, self._accuracies = state_dict["stuck"], state_dict["accuracies"]


class Curve(Callback):
    """Keeps [step, accuracy, loss] of every validation."""

    def __init__(self):
        self.points: list[list[float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: Learner) -> None:
        if not trainer.sanity_checking:
            measured = trainer.callback_metrics
            names = ("validation/accuracy", "validation/loss")
            self.points.append([trainer.global_step, *(float(measured[name]) for name in names)])

    def state_dict(self) -> dict:
        return {"points": self.points}

    def load_state_dict(self, state_dict: dict) -> None:
        self.points = state_dict["points"]
