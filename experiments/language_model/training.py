"""Training that can be interrupted, resumed exactly, and moved to another machine."""

import time
from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from math import log
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader, IterableDataset

from experiments.environment import device_name, environment
from experiments.files import RESULT, write_json
from experiments.language_model.books import BOUNDARY, Books
from experiments.language_model.model import LanguageModel
from experiments.language_model.settings import EVERY, ModelConfig, Settings
from experiments.lra.callbacks import Deadline, Interruption, StepBar, save_last
from experiments.lra.exported import EVALUATION_SECONDS
from experiments.lra.learner import OptimizerConfig, read_checkpoint, schedule_of
from experiments.module import TrainingModule
from experiments.pieces import export, restore
from experiments.pinning import pinned
from masks._parse import names_file

STRETCH = 65_536  # consecutive tokens that validation reads, in sequences of the context
STRETCHES = 64
UNTIMED = 5  # first steps of a command, in which kernels are compiled
CHECKPOINT = Path("checkpoints/last.ckpt")


class Learner(TrainingModule):
    """A language model in training; validation counts bits per byte, also by position.

    Args:
        settings: Settings of the run.
        token_bytes: Number of bytes of each token.
    """

    token_bytes: Tensor

    def __init__(self, settings: Settings, token_bytes: Sequence[int]):
        super().__init__()
        self.settings = settings
        self.model = LanguageModel(settings.model)
        self.register_buffer("token_bytes", torch.tensor(token_bytes), persistent=False)
        self.by_position: list[float] = []
        if settings.compiled:
            self.model.compile(dynamic=False)

    @property
    def context(self) -> int:
        """Length of the sequences of the last step and of validation, in tokens."""
        return self.settings.context_of(max(self.trainer.global_step - 1, 0))

    def losses(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of each token in nats, (batch, context), given the tokens before it."""
        tokens = tokens.long()
        logits = self.model(pad(tokens[:, :-1], (1, 0), value=BOUNDARY))
        flat = logits.flatten(0, 1).float()
        return cross_entropy(flat, tokens.flatten(), reduction="none").view_as(tokens)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        # Exact resumption needs no saved random state.
        self.seed_step(1_000_003 * self.settings.seed + self.trainer.global_step)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = self.losses(batch)
        size = self.token_bytes[batch.long()].sum()
        self.measure(bits_per_byte=losses.detach().sum() / (log(2) * size))
        return losses.mean()

    def on_validation_epoch_start(self) -> None:
        self.nats, self.bytes = torch.zeros(2, self.context, device=self.device)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        sequences = batch.view(-1, self.context)
        self.nats += self.losses(sequences).sum(0)
        self.bytes += self.token_bytes[sequences.long()].sum(0)

    def on_validation_epoch_end(self) -> None:
        nats, size = self.nats.double().cpu(), self.bytes.double().cpu()
        parts = [(nats[a:b].sum(), size[a:b].sum()) for a, b in pairwise(octaves(self.context))]
        self.by_position = [float(n / (log(2) * s)) for n, s in parts]
        bits = float(nats.sum() / (log(2) * size.sum()))
        self.log("validation/bits_per_byte", bits, prog_bar=True)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self.log("test/bits_per_byte", float((self.nats.sum() / self.bytes.sum()).cpu()) / log(2))

    def configure_optimizers(self):
        settings = self.settings
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
        rate = settings.learning_rate
        optimizer = self.adamw(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        config = OptimizerConfig(
            learning_rate=rate, warmup_steps=settings.warmup_steps, schedule="cosine"
        )
        schedule = schedule_of(config, optimizer, settings.steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["settings"] = self.settings.facts()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        mine, its = self.settings.facts(), checkpoint["settings"]
        if others := [name for name in mine if mine[name] != its.get(name)]:
            differences = ", ".join(
                f"{name} {its.get(name)!r}, not {mine[name]!r}" for name in others
            )
            raise ValueError(f"the run to resume has other settings: {differences}")
        super().on_load_checkpoint(checkpoint)


def octaves(context: int) -> list[int]:
    """Bounds of ranges of positions: 0, 1, 2, 4, ..., context."""
    return [0, *(2**n for n in range((context - 1).bit_length())), context]


class Sequences(IterableDataset):
    """Batches of sequences at random positions, which depend only on seed and step."""

    def __init__(self, content: np.ndarray, settings: Settings, start: int):
        self.content, self.settings, self.start = content, settings, start

    def __iter__(self) -> Iterator[Tensor]:
        for step in count(self.start):
            context = self.settings.context_of(step)
            batch = self.settings.step_tokens // context
            random = np.random.default_rng([self.settings.seed, step])
            starts = random.integers(len(self.content) - context + 1, size=batch)
            yield torch.from_numpy(np.stack([self.content[s : s + context] for s in starts]))


class BookData(L.LightningDataModule):
    """Sequences of a split.

    Those of validation and test are parts of STRETCH tokens, the same for every context.

    Raises:
        ValueError: A split is shorter than a sequence.
    """

    def __init__(self, books: Books, settings: Settings):
        super().__init__()
        self.settings, self.splits = settings, books.splits
        context = settings.model.context
        for split, content in books.splits.items():
            if len(content) < context:
                raise ValueError(f"{split} must have {context} tokens or more, got {len(content)}")

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        sequences = Sequences(self.splits["train"], self.settings, self.trainer.global_step)
        # A copy from memory that is not pinned would wait for the device.
        pin = pinned if torch.cuda.is_available() else None
        return DataLoader(sequences, batch_size=None, collate_fn=pin)  # pyright: ignore[reportArgumentType]

    def val_dataloader(self) -> DataLoader:
        return self._stretches("validation")

    def test_dataloader(self) -> DataLoader:
        return self._stretches("test")

    def _stretches(self, split: str) -> DataLoader:
        context, content = self.settings.model.context, self.splits[split]
        stretch = min(STRETCH, len(content)) // context * context
        number = min(STRETCHES, len(content) // stretch)
        starts = np.linspace(0, len(content) - stretch, number).astype(int)
        parts = np.concatenate([content[start : start + stretch] for start in starts])
        sequences = torch.from_numpy(parts.reshape(-1, context))
        return DataLoader(sequences, batch_size=self.settings.step_tokens // context)  # pyright: ignore[reportArgumentType]


class Curve(Callback):
    """Keeps a point of every validation, each in a checkpoint, and the time of training.

    Args:
        device: Full name of the device. Times of another one, from which a run was resumed, are
            not kept.

    Attributes:
        points: Of each validation.
        timed: By the context of steps, how many were timed and the seconds that they took, without
            those of validations and checkpoints.
    """

    def __init__(self, device: str):
        self.device = device
        self.points: list[dict] = []
        self.timed: dict[int, tuple[int, float]] = {}
        self._since: tuple[float, int] | None = None
        self._step = self._first = self._context = 0

    def speed(self, context: int) -> float:
        """Steps a second at a context; 0 where none was timed."""
        steps, seconds = self.timed.get(context, (0, 0.0))
        return steps / seconds if steps else 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._since, self._step, self._context = None, trainer.global_step, 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Tensor, batch_idx: int
    ) -> None:
        if batch.shape[1] != self._context:  # a new one is compiled first
            self._stop()
            self._context, self._first = batch.shape[1], trainer.global_step + UNTIMED
        # Not where a validation or a checkpoint ends, because the file is still to be written.
        if self._since is None and self._step >= self._first:
            self._since = (now(), self._step)

    def on_train_batch_end(self, trainer: L.Trainer, *_) -> None:
        self._step = trainer.global_step

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Learner)
        bits = float(trainer.callback_metrics["validation/bits_per_byte"])
        step = trainer.global_step
        point = {"step": step, "context": pl_module.context, "bits_per_byte": bits}
        self.points.append(point | {"by_position": pl_module.by_position})
        if trainer.state.fn == TrainerFn.FITTING:
            save_last(trainer)  # with this point, so that a resumed run validates at the next one

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._since is not None:
            begin, first = self._since
            steps, seconds = self.timed.get(self._context, (0, 0.0))
            self.timed[self._context] = (steps + self._step - first, seconds + now() - begin)
            self._since = None

    def state_dict(self) -> dict:
        self._stop()
        state = {"points": list(self.points), "timed": dict(self.timed)}
        return state | {"device": self.device}

    def load_state_dict(self, state_dict: dict) -> None:
        self.points = list(state_dict["points"])
        # Older checkpoints do not say their device.
        if state_dict.get("device", self.device) == self.device:
            self.timed = dict(state_dict["timed"])


def now() -> float:
    """Seconds on a clock, after the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train(
    settings: Settings,
    books: Books,
    output: Path,
    seconds: float | None = None,
    every: int = EVERY,
    export_to: Path | None = None,
    resume: Path | None = None,
    progress: bool = True,
) -> dict:
    """Trains to the end of the run or to the time limit. Resumes the run in the folder, if any.

    Args:
        settings: Settings of the run, equal to those of a resumed run.
        books: The data.
        output: Folder of the run, to which result.json and checkpoints/last.ckpt are written.
        seconds: Time limit of the command, with its validation.
        every: Number of steps between validations, each with a checkpoint.
        export_to: Folder to which the run is exported in pieces.
        resume: Folder of an exported run, which is read if `output` has no run.
        progress: Whether to show a progress bar.

    Returns:
        The contents of result.json.

    Raises:
        ValueError: The run to resume has other settings, or cannot be read.
    """
    end = None if seconds is None else time.time() + seconds - EVALUATION_SECONDS
    last = output / CHECKPOINT
    if resume is not None and not last.exists():
        restore(resume, output)
    L.seed_everything(settings.seed, verbose=False)
    learner = Learner(settings, books.token_bytes)
    data = BookData(books, settings)
    curve = Curve(device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    if last.exists():
        learner.on_load_checkpoint(read_checkpoint(last))
    bar = [StepBar(refresh_rate=20)] if progress else []
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision=settings.precision,  # pyright: ignore[reportArgumentType]
        max_steps=settings.steps,
        gradient_clip_val=1.0,
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        inference_mode=False,  # or compiled passes would be compiled once more for it
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=progress,
        enable_model_summary=False,
        default_root_dir=output,
        callbacks=[*bar, curve, Deadline(end), Interruption(resumes="the same command")],
    )
    try:
        resumed = str(last) if last.exists() else None
        trainer.fit(learner, datamodule=data, ckpt_path=resumed, weights_only=True)
    finally:
        if export_to is not None and last.exists():
            export({str(CHECKPOINT): last.read_bytes()}, export_to)
    if not curve.points or curve.points[-1]["step"] != trainer.global_step:
        trainer.validate(learner, datamodule=data, verbose=False)
    ended = trainer.global_step >= settings.steps
    if ended:
        trainer.test(learner, datamodule=data, verbose=False)
        tested = float(trainer.callback_metrics["test/bits_per_byte"])
    step_bytes = settings.step_tokens * books.bytes_per_token
    result = settings.facts() | {
        "parameters": sum(p.numel() for p in learner.parameters()),
        "trained": trainer.global_step,
        "ended": ended,
        "bits_per_byte": curve.points[-1]["bits_per_byte"],
        "test_bits_per_byte": tested if ended else None,
        "step_bytes": step_bytes,
        "bytes_per_second": step_bytes * curve.speed(settings.model.context),
        "short_bytes_per_second": step_bytes * curve.speed(settings.short_context or 0),
        "positions": octaves(curve.points[-1]["context"]),
        "curve": curve.points,
        "environment": environment(trainer.strategy.root_device),
    }
    write_json(output / RESULT, result)
    return result


def load(path: Path, attention: Sequence[str] = ()) -> LanguageModel:
    """The model of a checkpoint, in evaluation mode.

    Args:
        path: Path of the checkpoint.
        attention: Replaces the attention of the checkpoint; see ModelConfig.

    Raises:
        ValueError: The file is not a checkpoint of a language model, or names a Python file.
    """
    checkpoint = read_checkpoint(path)
    try:
        facts = checkpoint["settings"]["model"]
        weights = {name.removeprefix("model."): w for name, w in checkpoint["state_dict"].items()}
    except KeyError as error:
        raise ValueError(f"{path} is not a checkpoint of a language model: no {error}") from error
    if not attention and names_file(str(facts["attention"])):
        raise ValueError(
            f"{path} has the attention {facts['attention']}: a checkpoint must not run a file; "
            "give the attention again if you trust it"
        )
    chosen = {"attention": tuple(attention or facts["attention"])}
    model = LanguageModel(ModelConfig(**facts | chosen))
    model.load_state_dict(weights)
    return model.eval()
