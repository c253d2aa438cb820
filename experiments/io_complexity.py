"""The IO complexity of FlashAttention, predicted and measured: Figure 2 of the paper, and scaling.

    python -m experiments.io_complexity

predicts with `sparseflash.io_model` the FLOPs, the bytes of device memory and the time of both
passes of attention. The panels of the figure are

- left: standard attention and FlashAttention;
- middle: block-sparse attention of one density in blocks of 64 to 512 tokens;
- right: block-sparse attention at densities from 1 to 1/32;
- scaling: strided masks of density (N / B)^(-1/2) and butterfly masks of density
  log(N / B) / (N / B), in blocks of B tokens, from 1K to 256K tokens.

If there is a GPU, times and bytes are also measured. Results are checked first, times are taken as
in `experiments.bench`, and bytes are read from the hardware counters by Nsight Compute (`ncu`).
The command prints tables and writes io-complexity-<device>.json and pictures.
"""

import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track

from experiments.cli import RESULTS, Baseline, Clock, Load, Output, Overwrite
from experiments.record import OURS

if TYPE_CHECKING:
    from experiments.instruments import Log
    from masks import Pattern
    from sparseflash.io_model import Cost, Device

DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")  # hardware counters of device memory
MARKER = "spin_kernel"  # kernel of torch.cuda._sleep, which is launched before every counted pass
COUNT_PASSES = (
    "import sys; from experiments import io_complexity; io_complexity.run_passes(sys.argv[1])"
)
DIRECTIONS = ("forward", "backward")
BUDGET_MS = 60.0  # milliseconds of measurement for each pass
BLOCK = 128  # tokens
BLOCK_SIZES = (64, 128, 256, 512)  # tokens, of the middle panel
LARGEST_BLOCK = 256  # tokens; a larger block is composed of blocks of this size
DENSITIES = (1, 2, 4, 8, 16, 32)  # 1 / s, of the right panel
LENGTHS = tuple(1024 * 2**i for i in range(9))  # tokens, of the panel "scaling"
FITTED_FROM = 16_384  # tokens; shorter sequences have too few block rows to keep a device busy


class Panel(StrEnum):
    """Panels of the figure."""

    LEFT = "left"
    MIDDLE = "middle"
    RIGHT = "right"
    SCALING = "scaling"


@dataclass(frozen=True)
class Sizes:
    """Sizes that a case and its rows share; seq_len and block_size are in tokens."""

    panel: str
    implementation: str
    name: str
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    block_size: int


@dataclass(frozen=True)
class Case(Sizes):
    """A call of attention whose two passes are predicted and measured."""

    pattern: "Pattern"

    @property
    def mask_block(self) -> int:
        """The block size of the mask in tokens."""
        return min(self.block_size, LARGEST_BLOCK)


@dataclass(frozen=True)
class Row(Sizes):
    """One pass of a case.

    Attributes:
        direction: "forward" or "backward".
        density: Density s of the mask, in its own blocks.
        gflop: 10^9 FLOPs of the matrix products, with those that the backward pass recomputes.
        memory_gb: Predicted memory bytes, in 10^9.
        l2_gb: Predicted L2 bytes, in 10^9.
        predicted_ms: Predicted least time in milliseconds.
        bound_by: The part of the device that determines the predicted time.
        measured_gb: Measured memory bytes, in 10^9, or None.
        measured_ms: Measured time in milliseconds, or None.
    """

    direction: str
    density: float
    gflop: float
    memory_gb: float
    l2_gb: float
    predicted_ms: float
    bound_by: str
    measured_gb: float | None = None
    measured_ms: float | None = None

    @property
    def bytes_deviation(self) -> float | None:
        """measured_gb / memory_gb - 1"""
        return None if self.measured_gb is None else self.measured_gb / self.memory_gb - 1

    @property
    def time_deviation(self) -> float | None:
        """measured_ms / predicted_ms - 1"""
        return None if self.measured_ms is None else self.measured_ms / self.predicted_ms - 1


def main(
    only: Annotated[Panel | None, typer.Option(help="Only this panel of the figure.")] = None,
    model: Annotated[
        str,
        typer.Option(
            help="Device of the prediction: A100, H100 or H200. By default the GPU of this machine"
            " with rates that are measured first, or an H200 if there is none.",
            show_default=False,
        ),
    ] = "",
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Predict and measure the IO complexity of attention."""
    import torch

    from experiments.instruments import Log
    from experiments.io_plots import draw

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = model_device(model, kind)
    cases = list(chosen_cases(only))
    rows = [predict(case, direction, device) for case in cases for direction in DIRECTIONS]
    title = f"predicted for {device.name}"
    show(title, rows)
    log = Log("io-complexity", kind, output, overwrite, model=asdict(device))
    skipped = {}
    if kind == "cuda":
        for number, row in enumerate(with_times(cases, list(rows))):
            rows[number] = row
            save(log, rows, skipped, complete=False)
        rows, skipped = with_bytes(rows, only)
        show(f"{title}, and measured", rows)
    log.facts["exponents"] = exponents = [asdict(fit) for fit in fits(rows)]
    save(log, rows, skipped, complete=True)
    show_exponents(exponents)
    for reason in skipped.values():
        typer.echo(f"bytes are left out: {reason}")
    for path in (log.path, *draw(rows, log.facts["environment"], device.name, log.path)):
        typer.echo(f"wrote {path}")


def save(log: "Log", rows: Sequence[Row], skipped: dict[str, str], complete: bool) -> None:
    """Writes the rows, in place of those that were written before.

    Args:
        log: The log that writes them.
        rows: All rows, with what is measured so far.
        skipped: By figure, why it was not measured.
        complete: Whether the measurement has ended.
    """
    log.rows.clear()
    log.add("io-complexity", rows, skipped, complete)


def model_device(name: str, kind: str) -> "Device":
    """The device of the prediction.

    Args:
        name: Its name; empty for the GPU of this machine, or an H200 if there is none.
        kind: "cuda" or "cpu".

    Raises:
        typer.BadParameter: The device is not known.
    """
    import torch

    from experiments.roofline import measure_roofline
    from sparseflash.io_model import device_like, device_named

    if kind == "cuda" and not name:
        if device := device_like(torch.device("cuda", torch.cuda.current_device())):
            roofline = measure_roofline(torch.bfloat16)
            return replace(
                device,
                matrix_flops=roofline["matrix_product_tflops"] * 1e12,
                memory_bandwidth=roofline["copy_terabytes_per_second"] * 1e12,
            )
        name = torch.cuda.get_device_name()
    try:
        return device_named(name or "H200")
    except ValueError as error:
        raise typer.BadParameter(f"--model: {error}") from None


def chosen_cases(only: str | None) -> Iterator[Case]:
    """The cases of one panel, or of all panels if `only` is None."""
    yield from (case for case in all_cases() if only in (None, case.panel))


def all_cases() -> Iterator[Case]:
    """The cases of every panel. The left panel has the sizes of GPT-2 medium, as in the paper."""
    import masks

    gpt2 = {"batch": 64, "heads": 16, "seq_len": 1024, "head_dim": 64, "block_size": BLOCK}
    for implementation in (Baseline.STANDARD.value, OURS):
        yield Case(Panel.LEFT, implementation, "full", **gpt2, pattern=masks.full())
    size: dict[str, Any] = {"batch": 2, "heads": 16, "seq_len": 16_384, "head_dim": 128}
    for side in BLOCK_SIZES:
        name, pattern = "random 1/8", random_blocks(8, size["seq_len"], side)
        yield Case(Panel.MIDDLE, OURS, name, block_size=side, pattern=pattern, **size)
    for share in DENSITIES:
        pattern = masks.full() if share == 1 else random_blocks(share, size["seq_len"], BLOCK)
        name = "full" if share == 1 else f"random 1/{share}"
        yield Case(Panel.RIGHT, OURS, name, block_size=BLOCK, pattern=pattern, **size)
    for seq_len in LENGTHS:
        size = {"batch": 1, "heads": 16, "seq_len": seq_len, "head_dim": 128, "block_size": BLOCK}
        stride = round(math.sqrt(seq_len / BLOCK))
        yield Case(Panel.SCALING, OURS, "strided", pattern=masks.strided(stride), **size)
        yield Case(Panel.SCALING, OURS, "butterfly", pattern=masks.butterfly(), **size)


def random_blocks(share: int, seq_len: int, side: int) -> "Pattern":
    """A random pattern of density 1 / share in blocks of `side` by `side` tokens.

    If `side` exceeds LARGEST_BLOCK, each block is composed of blocks of that size.
    """
    import masks

    drawn = masks.random(1 / share, seed=0)
    if side <= LARGEST_BLOCK:
        return drawn
    blocks = drawn(seq_len // side * BLOCK, block_size=BLOCK).to_blocks()
    group = side // LARGEST_BLOCK
    return masks.block_pattern(
        lambda i, j: blocks[i.cpu() // group, j.cpu() // group].to(i.device)
    )


def predict(case: Case, direction: str, device: "Device") -> Row:
    """The prediction of a pass."""
    mask = case.pattern(case.seq_len, block_size=case.mask_block)
    cost = predicted_cost(case, mask, direction, device)
    return Row(
        **{field.name: getattr(case, field.name) for field in fields(Sizes)},
        direction=direction,
        density=mask.density,
        gflop=cost.flops / 1e9,
        memory_gb=cost.memory_bytes / 1e9,
        l2_gb=cost.l2_bytes / 1e9,
        predicted_ms=cost.seconds * 1e3,
        bound_by=cost.bound_by,
    )


def predicted_cost(case: Case, mask: Any, direction: str, device: "Device") -> "Cost":
    """The cost of a pass according to the IO model."""
    from sparseflash import io_model

    sizes: dict[str, Any] = {"batch": case.batch, "heads": case.heads}
    sizes |= {"direction": direction, "device": device}
    if case.implementation == OURS:
        return io_model.attention(mask, case.head_dim, **sizes)
    return io_model.standard_attention(case.seq_len, case.head_dim, **sizes)


def with_times(cases: Sequence[Case], rows: Sequence[Row]) -> Iterator[Row]:
    """The rows with measured times. Every result is checked before it is timed.

    Args:
        cases: The cases.
        rows: Two rows for each case, forward and backward.
    """
    from experiments.measure import measure
    from experiments.settings import Method

    method = Method("cuda", "bf16", DIRECTIONS, Clock.GRAPH, Load.RESTED, BUDGET_MS, seed=0)
    for number, case in enumerate(track(cases, description="times")):
        measured, _ = measure(measured_case(case), [case.implementation], method)
        times = {measurement.direction: measurement.median_ms for measurement in measured}
        # Standard attention may lack a pass, for which it needs too much memory.
        for row in rows[len(DIRECTIONS) * number :][: len(DIRECTIONS)]:
            yield replace(row, measured_ms=times.get(row.direction))


def measured_case(case: Case):
    """The case in the form that `experiments.measure` takes."""
    from experiments.pattern_families import Single
    from experiments.suites import Shape

    shape = Shape(case.batch, case.heads, case.seq_len, case.head_dim)
    family = Single(case.name, case.pattern, "full" if case.name == "full" else None)
    return shape.case(case.panel, family, case.mask_block, (case.implementation,))


def with_bytes(rows: Sequence[Row], only: str | None) -> tuple[list[Row], dict[str, str]]:
    """The rows with measured bytes of device memory.

    Args:
        rows: Two rows for each case, forward and backward.
        only: The panel of the rows, or None for all panels.

    Returns:
        The rows, and an empty dict. If bytes cannot be counted, the rows are unchanged and the
        dict has the reason under "bytes".
    """
    from experiments.instruments.counters import count

    if shutil.which("ncu") is None:
        return list(rows), {"bytes": "there is no ncu (Nsight Compute) on the PATH"}
    typer.echo("counting bytes: ncu runs every pass once more")
    try:
        entries = count([sys.executable, "-c", COUNT_PASSES, only or ""], DRAM)
    except RuntimeError as error:
        return list(rows), {"bytes": str(error).splitlines()[0]}
    found = list(bytes_of_passes(entries))
    if len(found) != len(rows):
        return list(rows), {"bytes": f"ncu counted {len(found)} passes of {len(rows)}"}
    return [
        replace(row, measured_gb=counted / 1e9) for row, counted in zip(rows, found, strict=True)
    ], {}


def bytes_of_passes(entries: Sequence[dict[str, str]]) -> Iterator[float]:
    """The bytes of device memory of each pass.

    Args:
        entries: The kernels in the order of their launches; the marker precedes those of a pass.
    """
    from experiments.instruments.counters import number

    totals: list[float] = []
    for entry in entries:
        if MARKER in entry["Kernel Name"]:
            totals.append(0.0)
        else:
            totals[-1] += sum(number(entry, counter) for counter in DRAM)
    yield from totals


def run_passes(only: str) -> None:
    """Runs both passes of every case under the profiler, each after a marker.

    Every case runs once before it is profiled, because a first call may compile kernels.

    Args:
        only: The panel of the cases; empty for all panels.
    """
    import torch

    from experiments.measure import make_attend, random_problem

    for case in chosen_cases(only or None):
        measured = measured_case(case)
        attend = make_attend(case.implementation, measured.problem)
        inputs, grad_out = random_problem(measured, torch.bfloat16, torch.device("cuda"), 0)
        for profiled in (False, True):
            torch.cuda.synchronize()
            if profiled:
                torch.cuda.profiler.start()
                torch.cuda._sleep(1)
            out = attend(*inputs)
            if profiled:
                torch.cuda._sleep(1)
            torch.autograd.grad(out, inputs, grad_out)
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()


@dataclass(frozen=True)
class Fit:
    """A power law y = c N^exponent, fitted to one pass of a pattern at lengths from FITTED_FROM.

    Attributes:
        name: The pattern.
        direction: "forward" or "backward".
        figure: The attribute of Row that y is.
        exponent: The fitted exponent.
        theory: The exponent that the same fit gives for the number of pairs: N sqrt(N) or
            N log N.
    """

    name: str
    direction: str
    figure: str
    exponent: float
    theory: float


THEORY = {"strided": lambda n: n * math.sqrt(n), "butterfly": lambda n: n * math.log2(n / BLOCK)}


def fits(rows: Sequence[Row]) -> Iterator[Fit]:
    """A fit for every pattern, pass and figure of the panel "scaling"."""
    scaling = [r for r in rows if r.panel == Panel.SCALING and r.seq_len >= FITTED_FROM]
    for name, theory in THEORY.items():
        for direction in DIRECTIONS:
            of_pass = [row for row in scaling if (row.name, row.direction) == (name, direction)]
            pairs = [(row.seq_len, theory(row.seq_len)) for row in of_pass]
            expected = exponent(pairs) if pairs else 0
            for figure in ("l2_gb", "predicted_ms", "measured_ms"):
                points = [(row.seq_len, getattr(row, figure)) for row in of_pass]
                if points and None not in points[0]:
                    yield Fit(name, direction, figure, exponent(points), expected)


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The exponent p of y = c x^p, fitted to (x, y) by least squares of logarithms."""
    import numpy as np

    x, y = np.log(np.array(points)).T
    return float(np.polyfit(x, y, 1)[0])


def show(title: str, rows: Sequence[Row]) -> None:
    """Prints a table of the rows."""
    from experiments.report import plain_table, wide_console

    columns: dict[str, Callable[[Row], str]] = {
        "N": lambda row: f"{row.seq_len:,}",
        "blocks": lambda row: f"{row.block_size}",
        "s": lambda row: f"{row.density:.3g}",
        "GFLOP": lambda row: f"{row.gflop:,.0f}",
        "L2 GB": lambda row: f"{row.l2_gb:.3f}",
        "GB": lambda row: f"{row.memory_gb:.3f}",
        "measured": lambda row: _with_deviation(row.measured_gb, row.bytes_deviation),
        "ms": lambda row: f"{row.predicted_ms:.3f}",
        "measured ": lambda row: _with_deviation(row.measured_ms, row.time_deviation),
    }
    if all(row.measured_ms is None for row in rows):
        columns = {name: text for name, text in columns.items() if name.strip() != "measured"}
    table = plain_table(title, ("panel", "implementation", "mask", "pass", "bound by"), columns)
    for row in rows:
        figures = (text(row) for text in columns.values())
        words = (row.panel, row.implementation, row.name, row.direction, row.bound_by)
        table.add_row(*words, *figures)
    wide_console().print(table)


def _with_deviation(value: float | None, deviation: float | None) -> str:
    return "" if value is None or deviation is None else f"{value:.3f} {deviation:+.0%}"


def show_exponents(exponents: Sequence[dict[str, Any]]) -> None:
    """Prints a line for every fit."""
    for fit in exponents:
        typer.echo(
            f"{fit['name']}, {fit['direction']}: {fit['figure']} grows as N^{fit['exponent']:.2f},"
            f" theory N^{fit['theory']:.2f} (from {FITTED_FROM:,} tokens on)"
        )


if __name__ == "__main__":
    typer.run(main)
