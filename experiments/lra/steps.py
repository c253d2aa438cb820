"""Measures training steps of models that differ only in their attention: see `speed`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, log
from pathlib import Path
from statistics import fmean

import torch
from rich.table import Table
from torch.nn.functional import cross_entropy

from experiments.attention import NAMED
from experiments.lra import TASKS, presets
from experiments.lra.batches import StepBatches
from experiments.lra.model import Classifier, EncoderConfig
from experiments.lra.tasks import Batch, Shape, Task, collate
from experiments.memory import peak_bytes
from experiments.packaged import PACKAGED
from experiments.report import plain_table
from experiments.timing import Clock, Timing, time_call

BUDGET_MS = 200
DENSE = ("standard", "sdpa", "flash")


@dataclass(frozen=True)
class Implementation:
    """An attention, and the block size that its pattern is compiled with."""

    attention: str
    block_size: int = 128

    @property
    def label(self) -> str:
        known = self.attention in NAMED or self.attention in PACKAGED
        return self.attention if known else f"{self.attention} of {self.block_size}"


IMPLEMENTATIONS = (
    *(Implementation(name) for name in DENSE),
    *(Implementation("butterfly()", size) for size in (64, 128)),
    Implementation("butterfly(2)", 128),
    *(Implementation("local(64)", size) for size in (64, 128)),
    Implementation("longformer(64, 64)", 64),
    Implementation("bigbird(3, 1, 1)", 64),
    Implementation("linear"),
    *(Implementation(name) for name in PACKAGED),
)


ARENA = {task: f"nystromformer/{task}" for task in TASKS}
# A substitute for Retrieval, whose papers are no longer available.
STAND_IN = {"film-pairs": "nystromformer/film-pairs"}
PATH = {task: f"curriculum/{task}" for task in ("path-x", "path-256")}
KNOWN = ARENA | STAND_IN | PATH
BATCHES = 4  # real ones, which differ in length


@dataclass(frozen=True)
class Case:
    """The model of a preset, its samples, and the attentions that are measured with it.

    real: Batches of the task; None for a random batch.
    """

    shape: Shape
    batch: int
    model: EncoderConfig
    implementations: tuple[Implementation, ...]
    real: tuple[Batch, ...] = ()


def case_of(task: str, data_root: Path | None = None, scale: int = 1) -> Case:
    """The case of a task, with real batches if a folder of data is given.

    Raises:
        MissingData: A file that must be downloaded is missing.
    """
    values = presets.read(KNOWN[task])
    encoder = values["model"]["encoder"]
    if data_root is None:
        # Random ids have no black pixels, so every token is a key.
        encoder |= {"attention_dropout": 0.0, "mask_black": False}
    implementations = IMPLEMENTATIONS
    if task in PATH:
        # Standard attention would need more memory than any GPU has.
        own = Implementation(
            encoder["attention"], encoder.get("block_size", EncoderConfig.block_size)
        )
        implementations = (Implementation("sdpa"), Implementation("flash"), own)
    known, batch = presets.task_of(values), max(1, values["data"]["batch_size"] // scale)
    real = () if data_root is None else real_batches(known, batch, data_root)
    return Case(known.shape, batch, EncoderConfig(**encoder), implementations, real)


def real_batches(task: Task, size: int, data_root: Path) -> tuple[Batch, ...]:
    """The first batches of a training run with seed 0."""
    samples = task.splits(data_root)["train"]
    batches = islice(StepBatches(len(samples), size, 0, 0, 0, 1), BATCHES)
    return tuple(collate(task.shape, [samples[i] for i in batch]) for batch in batches)


@dataclass(frozen=True)
class Step:
    """One measurement: a training step of a task with an attention. clock: see timing.Clock."""

    task: str
    attention: str
    block_size: int
    seq_len: int
    batch: int
    parameters: int
    clock: str
    median_ms: float
    low_ms: float
    high_ms: float
    peak_bytes: int

    @property
    def label(self) -> str:
        return Implementation(self.attention, self.block_size).label


class NotCaptured(Exception):
    """A step that waits for the device, and so cannot be part of a CUDA graph."""


def measure(
    task: str, case: Case, implementation: Implementation, compiled: bool, device: torch.device
) -> Iterator[Step]:
    """The step timed by every clock of the device."""
    clocks = (Clock.EVENTS, Clock.GRAPH) if device.type == "cuda" else (Clock.CPU,)
    torch.manual_seed(0)
    config = replace(
        case.model, attention=implementation.attention, block_size=implementation.block_size
    )
    model = Classifier(config, case.shape).to(device)
    if compiled:
        model.compile(dynamic=False)
    step = training_step(model, case, device)
    step()
    # A step frees these gradients and makes new ones, which are memory of the step.
    model.zero_grad(set_to_none=True)
    peak = peak_bytes(step, device)
    for clock in clocks:
        timing, passes = timed(step, clock), max(len(case.real), 1)
        yield Step(
            task=task,
            attention=implementation.attention,
            block_size=implementation.block_size,
            seq_len=case.shape.seq_len,
            batch=case.batch,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            clock=clock.value,
            median_ms=timing.median_ms / passes,
            low_ms=timing.low_ms / passes,
            high_ms=timing.high_ms / passes,
            peak_bytes=peak,
        )


def timed(step: Callable[[], None], clock: Clock) -> Timing:
    try:
        return time_call(lambda: step, clock, BUDGET_MS)
    except RuntimeError as error:
        if clock is not Clock.GRAPH or isinstance(error, torch.OutOfMemoryError):
            raise
        raise NotCaptured(f"no CUDA graph: {error}") from error


def training_step(model: Classifier, case: Case, device: torch.device) -> Callable[[], None]:
    """Forward, backward and optimizer on each real batch, or on a random one of full length."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, capturable=device.type == "cuda")
    batches = [
        (tuple(part.to(device) for part in batch.inputs), batch.labels.to(device))
        for batch in case.real or (random_batch(case),)
    ]

    def step() -> None:
        for inputs, labels in batches:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                loss = cross_entropy(model(*inputs), labels)
            loss.backward()
            optimizer.step()

    return step


def random_batch(case: Case) -> Batch:
    """Random ids of full length, none of them 0."""
    shape = case.shape
    ids = torch.randint(1, shape.vocabulary, (case.batch, shape.documents, shape.seq_len))
    return Batch(ids, None, torch.randint(shape.classes, (case.batch,)))


def speedups(steps: list[Step]) -> dict[tuple[str, str], dict[str, float]]:
    """By clock and label: for each task, how many times faster than standard attention."""
    standard = {(s.task, s.clock): s.median_ms for s in steps if s.attention == "standard"}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for step in steps:
        if (step.task, step.clock) in standard:
            ratio = standard[step.task, step.clock] / step.median_ms
            found.setdefault((step.clock, step.label), {})[step.task] = ratio
    return found


def means(steps: list[Step]) -> dict[str, dict[str, float]]:
    """By clock: the geometric mean over tasks of each attention that ran on all of them."""
    tasks = {step.task for step in steps}
    found: dict[str, dict[str, float]] = {}
    for (clock, label), ratios in speedups(steps).items():
        if ratios.keys() == tasks:
            found.setdefault(clock, {})[label] = exp(fmean(map(log, ratios.values())))
    return found


def table_of(task: str, case: Case, steps: list[Step]) -> Table:
    ratios = speedups(steps)
    title = f"{task}: batch {case.batch}, N = {case.shape.seq_len}"
    figures = ("ms", "samples/s", "speed-up", "peak MiB")
    table = plain_table(title, ("attention", "clock"), figures)
    for step in steps:
        ratio = ratios.get((step.clock, step.label), {}).get(task)
        table.add_row(
            step.label,
            step.clock,
            f"{step.median_ms:.2f}",
            f"{1e3 * step.batch / step.median_ms:.0f}",
            "" if ratio is None else f"{ratio:.2f}",
            f"{step.peak_bytes / 2**20:.0f}",
        )
    return table


def table_of_means(geometric_means: dict[str, dict[str, float]]) -> Table:
    title = "geometric mean of speed-ups over tasks"
    table = plain_table(title, ["attention"], geometric_means)
    for label in next(iter(geometric_means.values()), {}):
        ratios = (by_label.get(label) for by_label in geometric_means.values())
        cells = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        table.add_row(label, *cells)
    return table
