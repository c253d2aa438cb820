"""The Lightning module of training: losses, schedule, and metrics besides accuracy."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import cos, pi, sqrt
from operator import add
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from experiments.attention import attended
from experiments.lra.model import Classifier, EncoderConfig, Expressions, pooled_by
from experiments.lra.tasks import Batch, Task
from experiments.lra.tasks.hashing import stream_of
from experiments.module import TrainingModule

# Classes of contour labels: the number of discs on the contour of a token.
TRACES = 3
HEADS = ("restore.", "trace.")  # weights that only training uses
LABEL_HEAD = ("classifier.hidden.", "classifier.answer.")  # weights that only labels train
ATTENTION = "attention"  # a key of checkpoints
TRAINED = "trained"  # a key of checkpoints: what a run reports that starts from them
Growth = Literal["interpolated", "repeated"]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and the schedule of its learning rate: a linear warm-up, then a decay.

    Args:
        schedule: "onecycle" decays linearly and moves beta1 in the opposite direction, like
            OneCycleLR of torch. "cosine" decays to 0. "rsqrt" decays by 1 / sqrt(step). "constant"
            does not decay. "trapezoid" is constant and decays linearly to 0 over the last fifth of
            the steps, so a run can be resumed as a longer one.
    """

    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Literal["onecycle", "cosine", "rsqrt", "constant", "trapezoid"] = "onecycle"


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss: labels * cross-entropy of labels + pixels * cross-entropy of hidden tokens.

    Args:
        labels: Weight of the labels; 0 for pre-training without labels.
        pixels: Weight of hidden tokens.
        traces: Weight of the cross-entropy of contour labels, for a task with traced samples.
        hidden: Share of the tokens that are hidden.
        ink: Weight of tokens (and contour labels) other than 0, of which images of contours have
            few.
    """

    labels: float = 1.0
    pixels: float = 0.0
    traces: float = 0.0
    hidden: float = 0.5
    ink: float = 1.0


class Learner(TrainingModule):
    """The training of a classifier for a task.

    Args:
        init_from: A checkpoint with initial weights.
        positions_from: How learned positions of a smaller image or a shorter text are resized to
            a larger one; see `resized`.
        passes: "compiled" uses torch.compile for everything except our kernels. It compiles for
            each batch size, so make the sizes of splits multiples of it. "cuda_graph" replays the
            passes of the classifier as CUDA graphs, which is faster for small models.
        seed: Seed of the random numbers of a step, which depend only on seed, step and process.
    """

    def __init__(
        self,
        task: Task,
        encoder: EncoderConfig,
        optimizer: OptimizerConfig,
        objective: ObjectiveConfig,
        init_from: Path | None = None,
        positions_from: Growth = "interpolated",
        passes: Literal["eager", "compiled", "cuda_graph"] = "eager",
        seed: int = 0,
    ):
        super().__init__()
        if encoder.mask_black and objective.pixels:
            raise ValueError(
                "mask_black must be false with objective.pixels, which predicts black pixels too"
            )
        if not (objective.labels or objective.pixels):
            raise ValueError("objective must have a weight of labels or of pixels, got 0 for both")
        self.passes = passes
        self.task, self.optimizer, self.objective, self.seed = task, optimizer, objective, seed
        self.classifier = Classifier(encoder, task.shape)
        # Predicts hidden tokens.
        self.restore = nn.Linear(encoder.dim, task.shape.vocabulary) if objective.pixels else None
        # Predicts contour labels.
        self.trace = nn.Linear(encoder.dim, TRACES) if objective.traces else None
        classes = task.shape.classes
        # Validation of their arguments would wait for the device.
        self.accuracy = MulticlassAccuracy(classes, average="micro", validate_args=False)
        self.confusion = MulticlassConfusionMatrix(classes, validate_args=False)
        # What trained the initial weights, or None for random ones.
        self.start = None if init_from is None else start_from(self, init_from, positions_from)
        if passes == "compiled":
            # Contour labels and hidden tokens use the encoder, labels the whole classifier.
            whole = not (objective.traces or objective.pixels)
            (self.classifier if whole else self.classifier.encoder).compile(dynamic=False)

    def on_train_start(self) -> None:
        if self.passes == "cuda_graph":
            self._capture()

    def _capture(self) -> None:
        """Replaces the training passes of the classifier by CUDA graphs."""
        if self.device.type != "cuda" or self.trainer.world_size > 1:
            raise ValueError("passes 'cuda_graph' need one CUDA device")
        if self.classifier.encoder.config.attention_dropout:
            raise ValueError(
                "passes 'cuda_graph' need attention_dropout 0: a graph repeats its seed"
            )
        assert self.trainer.train_dataloader is not None
        batch = next(iter(self.trainer.train_dataloader))
        moved = self.trainer.strategy.batch_to_device(batch)
        # A graph must not read lengths in memory of the host, which the next step overwrites.
        inputs = tuple(part.to(self.device) for part in moved.inputs)
        with self.trainer.precision_plugin.forward_context():
            torch.cuda.make_graphed_callables(self.classifier, inputs)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        # Exact resumption needs no saved random state, on any number of processes.
        stream = stream_of(
            "step", self.seed, self.trainer.global_step, batch_idx, self.global_rank
        )
        self.seed_step(int(stream) >> 1)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        terms: list[Tensor] = []
        right = None
        if self.objective.labels:
            logits, traces = self.answers(batch)
            if traces is not None:
                terms.append(self.objective.traces * traces)
            terms.append(self.objective.labels * cross_entropy(logits, batch.labels))
            right = (logits.argmax(-1) == batch.labels).float().mean()
            self.measure(accuracy=right)
        if self.restore is not None:
            pixels = self.restoration_loss(batch)
            terms.append(self.objective.pixels * pixels)
            self.measure(pixels=pixels)
        loss = reduce(add, terms)
        self.measure(loss=loss)
        return {"loss": loss} if right is None else {"loss": loss, "accuracy": right}

    def answers(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The logits of the labels, and the loss of the contour labels if it is needed."""
        if self.trace is None:
            return self.classifier(*batch.inputs), None
        if batch.traces is None:
            raise ValueError("objective.traces needs a task with traced: true")
        encoder = self.classifier.encoder
        features, _ = encoder(batch.ids[:, 0], None)
        classes = batch.traces if encoder.order is None else batch.traces[:, encoder.order]
        weights = torch.ones(TRACES, device=self.device)
        weights[1:] = self.objective.ink
        logits = self.trace(features[:, features.shape[1] - classes.shape[1] :])
        traces = cross_entropy(logits.flatten(0, 1).float(), classes.flatten(), weights)
        self.measure(traces=traces)
        return self.classifier.classify(pooled_by(encoder.config.pool, features, None)), traces

    def restoration_loss(self, batch: Batch) -> Tensor:
        """Cross-entropy of hidden tokens over all ids, weighted by `ink`."""
        assert self.restore is not None
        encoder = self.classifier.encoder
        ids = batch.ids.flatten(0, 1)
        lengths = None if batch.lengths is None else batch.lengths.flatten()
        hidden = torch.rand(ids.shape, device=ids.device) < self.objective.hidden
        if lengths is not None:
            hidden &= attended(lengths, ids[..., None])
        features, _ = encoder(ids.masked_fill(hidden, encoder.extra_id), lengths)
        features = features[:, features.shape[1] - ids.shape[1] :]  # without a CLS token
        if encoder.order is not None:
            ids, hidden = ids[:, encoder.order], hidden[:, encoder.order]
        losses = cross_entropy(self.restore(features[hidden]), ids[hidden], reduction="none")
        weights = torch.where(ids[hidden] > 0, self.objective.ink, 1.0)
        return (losses * weights).sum() / weights.sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if self.restore is not None:
            # The same tokens are hidden in every validation.
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                torch.manual_seed(batch_idx)
                pixels = self.restoration_loss(batch)
            size = len(batch.labels)
            self.log("validation/pixels", pixels, sync_dist=True, batch_size=size)
        if not self.objective.labels:
            return
        logits = self.classifier(*batch.inputs)
        self.accuracy.update(logits, batch.labels)
        size = len(batch.labels)
        self.log("validation/accuracy", self.accuracy, prog_bar=True, batch_size=size)
        loss = cross_entropy(logits, batch.labels)
        self.log("validation/loss", loss, sync_dist=True, batch_size=size)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint[ATTENTION] = self.attention
        checkpoint[TRAINED] = {
            "task": self.task.name,
            "seed": self.seed,
            "labels": not self.pre_trains,
            "init_from": self.start,
        }

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        super().on_load_checkpoint(checkpoint)
        if TRAINED not in checkpoint:  # saved before checkpoints had it
            return
        before = checkpoint[TRAINED]["init_from"]
        if self.start is not None and self.start != before:
            raise ValueError(
                f"init_from must be that of the run which is resumed, {before}, got {self.start}"
            )
        self.start = before

    @property
    def attention(self) -> Expressions:
        """The attention of all layers, or of each; see EncoderConfig."""
        return self.classifier.encoder.config.attention

    @property
    def pre_trains(self) -> bool:
        """Whether labels are not used in training, so that accuracy has no meaning."""
        return not self.objective.labels

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.confusion.update(self.classifier(*batch.inputs), batch.labels)

    def on_test_epoch_end(self) -> None:
        for name, value in accuracy_of(self.confusion.compute()).items():
            self.log(f"test/{name}", value)

    def configure_optimizers(self):
        config, steps = self.optimizer, int(self.trainer.max_steps)
        optimizer = self.adamw(
            self.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        schedule = schedule_of(config, optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def accuracy_of(confusion: Tensor) -> dict[str, float]:
    """Accuracy, its standard error, and the accuracy of always the most frequent class."""
    total = float(confusion.sum())
    accuracy = float(confusion.diagonal().sum()) / total
    return {
        "accuracy": accuracy,
        "standard_error": sqrt(accuracy * (1 - accuracy) / total),
        "class_prior": float(confusion.sum(1).max()) / total,
        "samples": total,
    }


def schedule_of(config: OptimizerConfig, optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate over a run of so many steps; see OptimizerConfig.

    Raises:
        ValueError: The schedule is "onecycle", and the warm-up is longer than the run or the run
            has no end.
    """
    if config.schedule == "onecycle":
        check_warm_up(config, steps)
        return OneCycleLR(
            optimizer,
            config.learning_rate,
            total_steps=steps + 1,
            pct_start=config.warmup_steps / steps,
            anneal_strategy="linear",
        )
    warmup = max(config.warmup_steps, 1)
    fall: dict[str, Callable[[int], float]] = {
        "cosine": lambda step: (1 + cos(pi * (step - warmup) / max(steps - warmup, 1))) / 2,
        "rsqrt": lambda step: sqrt(warmup / step),
        "constant": lambda step: 1.0,
        "trapezoid": lambda step: min(1.0, 5 * max(steps - step, 0) / steps),
    }
    after = fall[config.schedule]
    return LambdaLR(optimizer, lambda step: (step + 1) / warmup if step < warmup else after(step))


def check_warm_up(config: OptimizerConfig, steps: int) -> None:
    """Raises ValueError if the warm-up is not 0 to the number of steps."""
    if config.schedule == "onecycle" and not 0 <= config.warmup_steps <= steps:
        raise ValueError(
            f"model.optimizer.warmup_steps must be 0 to the {steps} steps of trainer.max_steps "
            f"for schedule 'onecycle', got {config.warmup_steps}"
        )


def read_checkpoint(path: Path) -> dict:
    """Reads a checkpoint without running code in it. Raises ValueError with the file name."""
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # any kind of error, because any bytes may be in the file
        # The message of torch recommends loading it without protection.
        other = "it contains other objects than weights, or is damaged"
        reason = other if isinstance(error, UnpicklingError) else error
        raise ValueError(f"{path} cannot be read as a checkpoint: {reason}") from error


def start_from(learner: Learner, path: Path, how: Growth = "interpolated") -> dict:
    """Loads weights. Learned positions are resized, and heads for training may be missing.

    Pre-training without labels does not train the head of the classifier, so this head keeps its
    random weights. The pre-training may be of another task with the same tokens.

    Returns:
        What trained these weights; see `trained_by`.

    Raises:
        ValueError: The checkpoint is of another model.
    """
    checkpoint = read_checkpoint(path)
    if "state_dict" not in checkpoint:
        raise ValueError(f"{path} has no weights: 'state_dict' is missing")
    without = () if checkpoint.get(TRAINED, {}).get("labels", True) else LABEL_HEAD
    weights = {
        name: value
        for name, value in checkpoint["state_dict"].items()
        if not name.startswith(without)
    }
    own = learner.state_dict()
    name = "classifier.encoder.positions.learned.weight"
    if name in weights and name in own:
        special = int(learner.classifier.encoder.cls)
        image = learner.task.shape.side is not None
        tokens = own[name].shape[0] - special
        longer = resized(weights[name][special:], tokens, how, image)
        weights[name] = torch.cat([weights[name][:special], longer])
    try:
        missing, unexpected = learner.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{path} has another model: {error}") from error
    ours = (*HEADS, *without)
    if others := [key for key in (*missing, *unexpected) if not key.startswith(ours)]:
        raise ValueError(f"{path} has another model: only one of the two has {others}")
    return trained_by(checkpoint)


def trained_by(checkpoint: dict) -> dict:
    """What trained the weights of a checkpoint, as far as it says so: the task, the seed, whether
    labels were used, the number of steps, and from what that run started in turn.
    """
    return {"steps": checkpoint.get("global_step")} | checkpoint.get(TRAINED, {})


def resized(positions: Tensor, tokens: int, how: Growth, image: bool = True) -> Tensor:
    """Resizes learned positions of a square image, or of a text, to a larger one.

    Positions of an image with the same size, or of one that is not square, are not changed.

    Args:
        positions: (side^2, dim), in raster order; of a text (tokens, dim).
        tokens: Number of tokens of the larger image or text.
        how: "interpolated" is bilinear for an image, as in the FlashAttention paper for Path-X,
            and linear for a text. "repeated" repeats the smaller image, so the larger side must be
            a multiple of the smaller one, or the text, as in that paper for long documents.
        image: Whether they are positions of an image.

    Returns:
        (tokens, dim).
    """
    if positions.shape[0] == tokens:
        return positions
    if not image:
        if how == "repeated":
            return repeated(positions, tokens)
        return interpolate(positions.T[None], tokens, mode="linear")[0].T
    small, large = (round(sqrt(n)) for n in (positions.shape[0], tokens))
    if small**2 != positions.shape[0] or large**2 != tokens:
        return positions
    grid = positions.view(small, small, -1)
    if how == "interpolated":
        plane = grid.permute(2, 0, 1)[None]
        return interpolate(plane, (large, large), mode="bilinear")[0].flatten(1).T
    if large % small:
        return positions
    return grid.repeat(large // small, large // small, 1).flatten(0, 1)


def repeated(positions: Tensor, tokens: int) -> Tensor:
    """The positions (n, dim) of a text repeated to (tokens, dim): row i is row i mod n."""
    return positions.repeat(-(-tokens // len(positions)), 1)[:tokens]
