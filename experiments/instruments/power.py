"""The power that implementations draw, and the clock at which the GPU then runs.

    python -m experiments.instruments.power

A GPU lowers its clock if it would exceed its power limit. Then a kernel gets faster by using less
energy, not by filling idle time. Each pass of each implementation is timed rested, in bursts after
a pause, and sustained, without a pause for some seconds. Meanwhile `nvidia-smi` (part of the
driver) reads the clock, the power and whether power limits the clock. The table is written to
power-<gpu>.json after every problem.
"""

import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track

from experiments.cli import (
    RESULTS,
    Baseline,
    Baselines,
    Clock,
    Output,
    Overwrite,
    Passes,
    needs,
    needs_cuda,
)
from experiments.instruments import Log, command
from experiments.record import ANY_ORDER, OURS, useful_flops
from experiments.settings import Method

if TYPE_CHECKING:
    from experiments.measure import Case

HEADS, HEAD_DIM = 16, 128
IMPLEMENTATION = f"{OURS}:auto{ANY_ORDER}"
BASELINES = (Baseline.CUDNN, Baseline.FLASH4)
# Rested runs come in bursts, each after a pause and so short that power has no time to bind.
BURSTS, BURST_MS, PAUSE_SECONDS = 10, 3.0, 0.1
ENQUEUED_MS = 20.0  # of sustained runs at a time
SAMPLE_MILLISECONDS = 50
WARM_UP = 1 / 3  # of the sustained runs, which is not counted: the clock settles
QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap"
LINE = re.compile(r"([\d.]+), ([\d.]+), (Active|Not Active)\n")


@dataclass(frozen=True)
class Row:
    """One pass of an implementation: milliseconds and useful TFLOP/s rested and sustained; medians
    of the clock (MHz) and the power (W) of the sustained runs; the share of their samples in which
    power held the clock down.
    """

    problem: str
    seq_len: int
    density: float
    direction: str
    implementation: str
    rested_ms: float
    rested_tflops: float
    sustained_ms: float
    sustained_tflops: float
    clock: float
    power: float
    capped: float


Sample = Callable[[int], list[float]]
# What nvidia-smi reads at a time: the clock, the power, whether power holds the clock down.
Reading = tuple[float, float, bool]


def main(
    baselines: Baselines = None,
    seconds: Annotated[
        float, typer.Option(min=0.5, help="Seconds of continuous load for each pass.")
    ] = 2.0,
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Measure rested and sustained rates, with the clock and the power under load."""
    needs_cuda()
    needs(shutil.which("nvidia-smi"), "nvidia-smi on the PATH")
    cases = list(problems((IMPLEMENTATION, *(BASELINES if baselines is None else baselines))))
    log = Log("power", "cuda", output, overwrite, limit_watts=limit_watts())
    for case in track(cases, description="problems"):
        rows, reasons = measure(case, seconds)
        log.add(str(case), rows, reasons, complete=case is cases[-1])
    log.show(
        "useful TFLOP/s rested and sustained; clock and power under load",
        ("problem", "seq_len", "direction", "implementation"),
        {
            "rested": lambda row: f"{row.rested_tflops:.0f}",
            "sustained": lambda row: f"{row.sustained_tflops:.0f}",
            "MHz": lambda row: f"{row.clock:.0f}",
            "W": lambda row: f"{row.power:.0f}",
            "capped": lambda row: f"{row.capped:.0%}",
        },
    )


def problems(implementations: tuple[str, ...]) -> "Iterator[Case]":
    """A dense baseline takes part in the full mask alone."""
    from experiments.pattern_families import FULL, Single
    from experiments.suites import BLOCK, TOKENS, Shape, at_random

    known = (IMPLEMENTATION, Baseline.FLASH4, Baseline.FLEX)
    sparse = tuple(name for name in implementations if name in known)
    yield Shape(TOKENS // 8192, HEADS, 8192, HEAD_DIM).case("power", FULL, BLOCK, implementations)
    for seq_len, share in ((16_384, 16), (32_768, 16), (32_768, 4)):
        family = Single(f"random 1/{share}", at_random(share, seq_len, BLOCK))
        shape = Shape(TOKENS // seq_len, HEADS, seq_len, HEAD_DIM)
        yield shape.case("power", family, BLOCK, sparse)


def measure(case: "Case", seconds: float) -> tuple[list[Row], dict[str, str]]:
    """The rows of all implementations, checked first, and why baselines cannot run."""
    import torch

    from experiments.measure import DTYPES, SkipReasons, checked, random_problem
    from experiments.timing import prepared

    directions = Passes.BOTH.directions
    method = Method("cuda", "bf16", directions, Clock.GRAPH, "sustained", 0.0, seed=0)
    problem = random_problem(case, DTYPES[method.dtype], torch.device("cuda"), method.seed)
    skips = SkipReasons()
    rows = []
    for name in case.implementations:
        with skips.catch(name):
            for direction, prepare in checked(name, case, method, *problem, skips).items():
                with prepared(prepare, Clock.GRAPH) as sample:
                    rows.append(row_of(case, name, direction, sample, seconds))
    return rows, skips.reasons


def row_of(case: "Case", name: str, direction: str, sample: Sample, seconds: float) -> Row:
    """Times a pass rested, then sustained with the GPU read."""
    rested_ms = rested(sample)
    with readings() as read:
        sustained_ms = sustained(sample, seconds)
    clocks, powers, capped = zip(*read[int(len(read) * WARM_UP) :], strict=True)
    lengths, density = (case.seq_len, case.seq_len), case.problem.density
    flops = useful_flops(case.batch * case.heads, lengths, case.head_dim, density, direction)
    return Row(
        *(case.family, case.seq_len, density, direction, name),
        *(rested_ms, flops / (rested_ms * 1e9), sustained_ms, flops / (sustained_ms * 1e9)),
        *(statistics.median(clocks), statistics.median(powers), statistics.mean(capped)),
    )


def rested(sample: Sample) -> float:
    """The median of runs in short bursts; the first of each wakes the GPU up."""
    (estimate,) = sample(1)
    milliseconds = []
    for _ in range(BURSTS):
        time.sleep(PAUSE_SECONDS)
        milliseconds += sample(max(2, round(BURST_MS / estimate)))[1:]
    return statistics.median(milliseconds)


def sustained(sample: Sample, seconds: float) -> float:
    """The median of runs that follow one another for so long, after the clock has settled."""
    (estimate,) = sample(1)
    milliseconds = []
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        times = sample(max(1, round(ENQUEUED_MS / estimate)))
        milliseconds += times if elapsed > WARM_UP * seconds else []
    return statistics.median(milliseconds)


@contextmanager
def readings() -> Iterator[list[Reading]]:
    """Reads the GPU while the block runs, after which the list is filled.

    Raises:
        OSError: with what nvidia-smi said if it read nothing; no reason to skip a baseline.
    """
    asked = [*asking(QUERY), f"--loop-ms={SAMPLE_MILLISECONDS}"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(asked, text=True, **pipes) as reader:
        found: list[Reading] = []
        try:
            yield found
        finally:
            reader.terminate()
            printed, _ = reader.communicate()
    found += samples_of(printed)
    if not found:
        raise OSError(f"nvidia-smi read nothing:\n{printed}")


def samples_of(printed: str) -> Iterator[Reading]:
    """The complete lines of what nvidia-smi printed."""
    for clock, power, capped in LINE.findall(printed):
        yield float(clock), float(power), capped == "Active"


def identity() -> str:
    """Of torch's current GPU, whichever of the machine's it is."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def asking(query: str) -> list[str]:
    """The command that asks for facts of that GPU."""
    form = "--format=csv,noheader,nounits"
    return ["nvidia-smi", f"--id={identity()}", f"--query-gpu={query}", form]


def limit_watts() -> float:
    """The power that the GPU may draw."""
    asked = asking("power.limit")
    return float(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    command(main)
