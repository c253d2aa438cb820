"""The power that implementations draw, and the clock at which the GPU then runs.

    python -m experiments.instruments.power

A GPU lowers its clock if it would otherwise exceed its power limit. Then only a kernel that takes
less energy is faster. Each pass of each implementation is timed rested, in short turns with
pauses between them, and sustained, for some seconds without a pause. During the sustained runs
`nvidia-smi` (part of the driver) reads the clock, the power, and whether power limits the clock.
The rows are written to power-<gpu>.json after every problem.
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
# Rested runs: turns after pauses, too short for the power limit to lower the clock.
TURNS, TURN_MS, PAUSE_SECONDS = 10, 3.0, 0.1
ENQUEUED_MS = 20.0  # sustained runs that are enqueued at a time
SAMPLE_MILLISECONDS = 50  # between readings of nvidia-smi
WARM_UP = 1 / 3  # first share of the sustained runs, in which the clock settles; not counted
QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap"
LINE = re.compile(r"([\d.]+), ([\d.]+), (Active|Not Active)\n")


@dataclass(frozen=True)
class Row:
    """One pass of an implementation.

    Attributes:
        problem, seq_len, density: The mask: its name, its length in tokens and its density s.
        direction: "forward" or "backward".
        implementation: sparseflash with its backend, or a baseline.
        rested_ms, rested_tflops: Time, and useful TFLOP/s, rested.
        sustained_ms, sustained_tflops: The same, sustained.
        clock: Median clock of the sustained runs in MHz.
        power: Median power of the sustained runs in W.
        capped: Share of the readings in which power limited the clock.
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


# Runs a pass so many times, and returns the milliseconds of each run.
Sample = Callable[[int], list[float]]
# Clock in MHz, power in W, whether power limits the clock.
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
    """The problems. Implementations that take no sparse mask compute only the full mask."""
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
    """Measures all implementations of a problem, after a check of their results.

    Returns:
        The rows, and by implementation why it was not measured.
    """
    import torch

    from experiments.check import SampledRows
    from experiments.measure import DTYPES, SkipReasons, checked, random_problem
    from experiments.timing import prepared

    directions = Passes.BOTH.directions
    method = Method("cuda", "bf16", directions, Clock.GRAPH, "sustained", 0.0, seed=0)
    device = torch.device("cuda")
    inputs, grad_out = random_problem(case, DTYPES[method.dtype], device, method.seed)
    sampled_rows = SampledRows.of(case.problem.mask, device)
    skips = SkipReasons()
    rows = []
    for name in case.implementations:
        with skips.catch(name):
            passes = checked(name, case, method, inputs, grad_out, sampled_rows, skips)
            for direction, prepare in passes.items():
                with prepared(prepare, Clock.GRAPH) as sample:
                    rows.append(row_of(case, name, direction, sample, seconds))
    return rows, skips.reasons


def row_of(case: "Case", name: str, direction: str, sample: Sample, seconds: float) -> Row:
    """The row of a pass, which is timed rested and then sustained."""
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
    """The median of runs in short turns. The first run of a turn, which ends the pause of the GPU,
    is not counted.
    """
    (estimate,) = sample(1)
    milliseconds = []
    for _ in range(TURNS):
        time.sleep(PAUSE_SECONDS)
        milliseconds += sample(max(2, round(TURN_MS / estimate)))[1:]
    return statistics.median(milliseconds)


def sustained(sample: Sample, seconds: float) -> float:
    """The median of runs without a pause, after the clock has settled."""
    (estimate,) = sample(1)
    milliseconds = []
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < seconds:
        times = sample(max(1, round(ENQUEUED_MS / estimate)))
        milliseconds += times if elapsed > WARM_UP * seconds else []
    return statistics.median(milliseconds)


@contextmanager
def readings() -> Iterator[list[Reading]]:
    """A context in which nvidia-smi reads the GPU; its list has the readings after the end.

    Raises:
        OSError: nvidia-smi read nothing; the message has its output. An OSError ends the command,
            whereas other errors skip an implementation.
    """
    command = [*smi_command(QUERY), f"--loop-ms={SAMPLE_MILLISECONDS}"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as reader:
        found: list[Reading] = []
        try:
            yield found
        finally:
            reader.terminate()
            printed, _ = reader.communicate()
    found += parse_readings(printed)
    if not found:
        raise OSError(f"nvidia-smi read nothing:\n{printed}")


def parse_readings(printed: str) -> Iterator[Reading]:
    """The readings of the complete lines in the output of nvidia-smi."""
    for clock, power, capped in LINE.findall(printed):
        yield float(clock), float(power), capped == "Active"


def gpu_uuid() -> str:
    """The UUID of torch's current GPU, whose index for nvidia-smi may be another one."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def smi_command(query: str) -> list[str]:
    """The command that queries properties of this GPU."""
    output_format = "--format=csv,noheader,nounits"
    return ["nvidia-smi", f"--id={gpu_uuid()}", f"--query-gpu={query}", output_format]


def limit_watts() -> float:
    """The power limit of the GPU in W."""
    command = smi_command("power.limit")
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    command(main)
