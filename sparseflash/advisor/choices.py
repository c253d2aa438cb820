"""Ranks patterns and block sizes by predicted time and receptive field."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from masks import BlockMask, Pattern
from masks._core.grid import BLOCK_SIDES
from masks._parse import as_pattern
from masks.analysis import receptive_field
from masks.analysis.counts import attended_pairs, computed_pairs
from masks.arguments import (
    check_floating_dtype,
    check_integer,
    check_integers,
    check_sizes,
    checked_device,
)
from masks.plot import check_picture
from masks.progress import Progress
from sparseflash import io_model
from sparseflash._attention import attention
from sparseflash.timing import median_ms

EXACT_CLASSES = 1 << 12  # with more classes of tokens, keys are sampled
SAMPLES = 512
SECONDS = 0.2  # of measurement for each choice
ROUNDING = 1e-12  # of shares
# Minimum, median and maximum of measured time over predicted time (io_model) on an H200: rested
# calls of one pass, 16,384 tokens, 128 dims.
OVER_LEAST = (1.2, 1.4, 2.0)


@dataclass(frozen=True)
class Workload:
    """The calls of attention whose time is predicted.

    Args:
        seq_len: Length of the sequence, in tokens, at least 1.
        head_dim: Head dim.
        batch, heads: Number of batch elements; number of query heads.
        causal: Whether every pattern is intersected with causal().
        backward: Whether times include the backward pass.
        device: A name in io_model.DEVICES, or a Device.
        dtype: Dtype of query, key and value.

    Raises:
        TypeError, ValueError: A size is not an integer of at least 1, the device is unknown, or
            the dtype is not floating-point.
    """

    seq_len: int
    head_dim: int = 128
    batch: int = 1
    heads: int = 16
    causal: bool = False
    backward: bool = True
    device: str | io_model.Device = "H200"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        sizes = {"seq_len": self.seq_len, "batch": self.batch}
        check_sizes(**sizes, heads=self.heads, head_dim=self.head_dim)
        check_floating_dtype("dtype", self.dtype)
        io_model.device_named(self.device)

    def __str__(self) -> str:
        passes = "forward and backward" if self.backward else "forward"
        sizes = (
            f"{self.seq_len:,} tokens, batch {self.batch}, {self.heads} heads, "
            f"head dim {self.head_dim}" + ", causal" * self.causal
        )
        device = io_model.device_named(self.device).name
        return f"{device}, {passes}, {str(self.dtype).removeprefix('torch.')}: {sizes}"

    def mask(self, pattern: Pattern | str, block_size: int) -> BlockMask:
        """The mask of a pattern in square blocks, at the length of the workload.

        Args:
            pattern: A Pattern, or its text.
            block_size: Side of a block, in tokens.
        """
        mask = as_pattern(pattern)(self.seq_len, block_size)
        return mask & as_pattern("causal()")(self.seq_len, block_size) if self.causal else mask

    def predicted_ms(self, mask: BlockMask) -> float:
        """The least time that the device allows (its roofline), in milliseconds.

        Args:
            mask: A mask of the workload.
        """
        directions = ("forward", "backward") if self.backward else ("forward",)
        sizes = {"batch": self.batch, "heads": self.heads, "dtype": self.dtype}
        costs = (
            io_model.attention(
                mask, self.head_dim, direction=direction, device=self.device, **sizes
            )
            for direction in directions
        )
        return sum(cost.seconds for cost in costs) * 1e3


@dataclass(frozen=True)
class Choice:
    """A pattern in blocks of one size.

    Attributes:
        pattern: The pattern as it was given.
        block_size: Side of a block, in tokens.
        density: Non-zero blocks over all blocks.
        pairs: Attended pairs.
        useful: Attended pairs over computed pairs; 1 / useful is the overhead of blocks.
        predicted_ms: Least time that the device allows, in milliseconds.
        measured_ms: Measured time, in milliseconds; None before `measure`.
        connected: Share of pairs that are connected after the given number of layers; None if not
            computed.
        connected_interval: Its 95 % confidence interval (low, high); both equal if it is exact.
    """

    pattern: str
    block_size: int
    density: float
    pairs: int
    useful: float
    predicted_ms: float
    measured_ms: float | None = None
    connected: float | None = None
    connected_interval: tuple[float, float] | None = None


def block_sizes(
    pattern: Pattern | str, workload: Workload, sides: Sequence[int] = BLOCK_SIDES
) -> list[Choice]:
    """Compares a pattern in blocks of several sizes.

    Small blocks compute fewer pairs that do not attend. Large blocks read less memory and use the
    tensor cores better. A pattern of blocks, such as butterfly(), attends other pairs in others.

    Args:
        pattern: A Pattern, or its text.
        workload: Lengths, heads and device of the calls.
        sides: Sides of blocks in tokens, some of 16, 32, 64, 128, 256 and 512.

    Returns:
        A choice for each side, least predicted time first; equal times in the order of `sides`.

    Raises:
        TypeError, ValueError: As Pattern and io_model.attention do.
    """
    _check_workload(workload)
    sides = check_integers("sides", sides)
    choices = (_choice(pattern, workload.mask(pattern, side), workload) for side in sides)
    return sorted(choices, key=lambda choice: choice.predicted_ms)


def search(
    workload: Workload,
    *,
    layers: int,
    connected: float = 1.0,
    budget_ms: float | None = None,
    patterns: Sequence[str] | None = None,
    block_size: int = 128,
    most: int = 8,
    failing: bool = False,
    progress: Progress | None = None,
) -> list[Choice]:
    """The fastest patterns, by predicted time, whose receptive field is large enough.

    Receptive fields are computed in the order of predicted time, until `most` patterns are found.

    Args:
        workload: Lengths, heads, dtype and device of the calls.
        layers: Number of layers of the model that attend by the pattern.
        connected: Least share of pairs that are connected after these layers, in (0, 1]. If the
            workload is causal, the share of causal pairs.
        budget_ms: Most predicted time of one layer, in milliseconds; None for no bound.
        patterns: Candidates as texts. By default several families of patterns, with parameters
            that grow by powers of two.
        block_size: Side of a block, in tokens.
        most: Most patterns to find.
        failing: Whether to return also the patterns whose receptive field was computed and is too
            small, for `plot`.
        progress: Called with (candidates done, all candidates).

    Returns:
        The choices, least predicted time first; equal times in the order of candidates. Empty if
        no candidate satisfies the conditions.

    Raises:
        TypeError: `workload` is not a Workload, `patterns` is not a list, or a number is not one
            or not an integer.
        ValueError: `connected` is outside (0, 1], `layers` or `most` is below 1, or a pattern
            cannot be parsed.
    """
    _check_workload(workload)
    if isinstance(patterns, str) or not isinstance(patterns, Sequence | None):
        raise TypeError(f"patterns must be a list of patterns, got {patterns!r}")
    if not isinstance(budget_ms, Real | None):
        raise TypeError(f"budget_ms must be a number or None, got {budget_ms!r}")
    if not isinstance(connected, Real) or not 0 < connected <= 1:
        raise ValueError(f"connected must be above 0 and at most 1, got {connected!r}")
    layers, most = check_integer("layers", layers, 1), check_integer("most", most, 1)
    texts = families(workload.seq_len, block_size) if patterns is None else patterns
    compiled = [(text, workload.mask(text, block_size)) for text in texts]
    ranked = sorted(
        ((_choice(text, mask, workload), mask) for text, mask in compiled),
        key=lambda pair: pair[0].predicted_ms,
    )
    evaluated: list[Choice] = []
    sufficient: list[Choice] = []
    for number, (choice, mask) in enumerate(ranked, 1):
        if len(sufficient) == most or (budget_ms is not None and choice.predicted_ms > budget_ms):
            break
        field = receptive_field(mask, layers, samples=_samples(mask))
        share, interval = field.share[-1], field.interval[-1]
        evaluated.append(replace(choice, connected=share, connected_interval=interval))
        if share >= connected - ROUNDING:
            sufficient.append(evaluated[-1])
        if progress is not None:
            progress(number, len(ranked))
    if progress is not None:
        progress(len(ranked), len(ranked))
    return evaluated if failing else sufficient


def families(seq_len: int, block_size: int) -> list[str]:
    """The default candidates of `search`: families with parameters that grow by powers of two."""
    blocks = -(-seq_len // block_size)
    steps = [1 << i for i in range(max(blocks - 1, 1).bit_length())]
    windows = [block_size * step for step in steps[:-1]]
    return [
        "full()",
        *(f"butterfly({2 * step})" for step in steps),
        *(f"local({window})" for window in windows),
        *(f"strided({step}, window=1)" for step in steps[1:]),
        *(f"longformer({w}, {g})" for w in windows[:4] for g in (16, block_size)),
        *(f"bigbird({2 * w + 1}, {g}, {r})" for w in (1, 2, 4) for g in (0, 1) for r in (1, 3)),
        *(f"local({w}) | butterfly()" for w in windows[:4]),
        *(f"random({max(step / blocks, 1e-6):.6g})" for step in steps[1:6] if step < blocks),
    ]


def measure(
    choices: Sequence[Choice],
    workload: Workload,
    device: torch.device | str = "cuda",
    progress: Progress | None = None,
) -> list[Choice]:
    """Measures choices on this machine, in rested time (see sparseflash.timing).

    Args:
        choices: Results of block_sizes or search.
        workload: Lengths, heads and dtype of the calls.
        device: Device on which the calls run.
        progress: Called with (measured choices, all choices).

    Returns:
        The choices with measured_ms, least time first.

    Raises:
        TypeError: `workload` is not a Workload.
        ValueError: The device does not exist.
    """
    _check_workload(workload)
    device = checked_device(device)
    shape = (workload.batch, workload.heads, workload.seq_len, workload.head_dim)
    inputs = [torch.randn(shape, device=device, dtype=workload.dtype) for _ in range(3)]
    grad = torch.randn_like(inputs[0])
    measured = []
    for number, choice in enumerate(choices, 1):
        mask = workload.mask(choice.pattern, choice.block_size).to(device)
        measured.append(replace(choice, measured_ms=_median_ms(inputs, grad, mask, workload)))
        if progress is not None:
            progress(number, len(choices))
    return sorted(measured, key=lambda choice: choice.measured_ms or 0.0)


def ordered_share(times: Sequence[tuple[float, float]], differ: float = 0.1) -> float:
    """The share of pairs of times in which prediction and measurement have the same order.

    Args:
        times: (predicted, measured) times.
        differ: Pairs count if their measured times differ by more than this share.

    Returns:
        The share, from 0 to 1; 1 if no pair counts.
    """
    pairs = [
        (a[0] < b[0]) == (a[1] < b[1])
        for a, b in itertools.combinations(times, 2)
        if max(a[1], b[1]) > (1 + differ) * min(a[1], b[1])
    ]
    return sum(pairs) / len(pairs) if pairs else 1.0


def plot(
    choices: Sequence[Choice], path: str | Path, *, title: str = "", connected: float | None = None
) -> None:
    """Writes a picture (PNG, SVG or PDF): connected pairs, or useful pairs, against time.

    Choices on the Pareto front are numbered and named at the side. If all choices have the same
    pattern, each is numbered, by block size.

    Args:
        choices: Results of search or block_sizes, at least 1.
        path: The file; its suffix selects the format.
        title: Title, such as str(workload).
        connected: Share of pairs at which a line is drawn.

    Raises:
        ValueError: There is no choice, the suffix of `path` is another one, or its folder does not
            exist.
        OSError: The file cannot be written.
    """
    if not choices:
        raise ValueError("choices must have at least 1 entry, got none")
    check_picture("path", Path(path))
    from matplotlib.figure import Figure  # it takes long to import

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    shows_reach = all(choice.connected is not None for choice in choices)
    values = [(c.connected if shows_reach else c.useful) or 0.0 for c in choices]
    times = [choice.predicted_ms for choice in choices]
    single = len({choice.pattern for choice in choices}) == 1
    axes.plot(times, values, "o", color="#0072b2", label="least time")
    front = _pareto_front(times, values)
    axes.plot(*zip(*front, strict=True), color="#0072b2", linewidth=0.8, label="Pareto front")
    measured = [(c.measured_ms, v) for c, v in zip(choices, values, strict=True) if c.measured_ms]
    if measured:
        axes.plot(*zip(*measured, strict=True), "s", color="#d55e00", label="measured")
    if connected is not None:
        axes.axhline(connected, color="#7f7f7f", linestyle=":", label="must be connected")
    names: dict[tuple[float, float], list[str]] = {}
    for choice, time, value in zip(choices, times, values, strict=True):
        name = f"blocks of {choice.block_size}" if single else choice.pattern
        names.setdefault((time, value), []).append(name)
    lines = []
    for number, point in enumerate(names if single else front, 1):
        text = f"{number}  {', '.join(names[point])}"
        lines += wrap(text, 32, subsequent_indent="    ", max_lines=2)
        axes.annotate(str(number), point, (-10, 2), textcoords="offset points", fontsize=7)
    axes.text(1.02, 1, "\n".join(lines), transform=axes.transAxes, va="top", fontsize=7)
    label = "share of pairs connected" if shows_reach else "attended pairs over computed ones"
    axes.set(xlabel="time (ms)", ylabel=label)
    # Axes start at 0, so that small differences look small.
    axes.set_xlim(0, 1.1 * max(times + [ms for ms, _ in measured]))
    axes.set_ylim(0, 1.1 * max(values) or 1.0)
    axes.set_title(
        "\n".join(filter(None, [choices[0].pattern if single else "", title])),
        size=8,
        parse_math=False,
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _check_workload(workload: Any) -> None:
    if not isinstance(workload, Workload):
        raise TypeError(f"workload must be a Workload, got {type(workload).__name__}")


def _pareto_front(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """The points (time, value) for which no faster one has at least the value, by time."""
    front: list[tuple[float, float]] = []
    for time, value in sorted(zip(times, values, strict=True), key=lambda p: (p[0], -p[1])):
        if not front or value > front[-1][1]:
            front.append((time, value))
    return front


def _choice(pattern: Pattern | str, mask: BlockMask, workload: Workload) -> Choice:
    text = pattern if isinstance(pattern, str) else pattern.name
    attended, computed = attended_pairs(mask), computed_pairs(mask)
    return Choice(
        pattern=text,
        block_size=mask.block_size[0],
        density=mask.density,
        pairs=attended,
        useful=attended / computed if computed else 1.0,
        predicted_ms=workload.predicted_ms(mask),
    )


def _samples(mask: BlockMask) -> int | None:
    """The number of keys to sample; None for all keys, if there are few classes of tokens."""
    tokens = mask.seq_len[0]
    return SAMPLES if mask.partial_blocks and tokens > EXACT_CLASSES else None


def _median_ms(
    inputs: Sequence[torch.Tensor], grad: torch.Tensor, mask: BlockMask, workload: Workload
) -> float:
    query, key, value = (x.detach().requires_grad_(workload.backward) for x in inputs)

    def run() -> None:
        out = attention(query, key, value, mask)
        if workload.backward:
            torch.autograd.grad(out, (query, key, value), grad)

    return median_ms({"run": run}, query.device, SECONDS)["run"]
