"""What binds the kernels: how busy they keep the parts of a GPU, by its hardware counters.

    python -m experiments.counters --baselines cudnn,flash4

runs the forward and the backward pass of a few problems under Nsight Compute (`ncu`, part of
CUDA), prints a table and writes `experiments/results/counters-<gpu>.json`, after every problem
what is known so far. A share is that of the most that a part can do in the time of the kernel. The
clock is left as it is: cycles are what implementations can be compared by, whatever it was.
"""

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.progress import track
from rich.table import Table

from experiments.baselines import ANY_ORDER, Baseline
from experiments.cli import RESULTS, parse_baselines, slug
from experiments.environment import ROOT, environment
from experiments.files import write_json
from experiments.measure import SkipReasons, make_attend
from experiments.pattern_families import CAUSAL, FULL, Single
from experiments.record import OURS, is_ours
from experiments.report import wide_console
from experiments.suites import BLOCK, TOKENS, Shape, at_random

NANOSECONDS, CYCLES = "gpu__time_duration.sum", "sm__cycles_elapsed.max"
# The name of a part, and the counter that says how busy it was.
PARTS = {
    "matrix units": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exponentials": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "instructions": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
# The kernels of all backends.
OUR_KERNELS = "regex:(forward|dq|dkdv|fused|gradient|lse_delta|ds_sums|decode|merge)_kernel$"
COUNTERS = (NANOSECONDS, CYCLES, *PARTS.values())
NAME_WIDTH = 80  # of kernels of baselines, whose names tell the types of all their arguments
RUN_PASSES = "import sys; from experiments import counters; counters.run_passes(*sys.argv[1:])"


def random_blocks(seq_len: int, side: int) -> Single:
    return Single("random 1/16", at_random(16, seq_len, side))


class Watched(NamedTuple):
    """A problem. side: of its blocks; deterministic: whether gradients have a fixed order"""

    heads: int
    seq_len: int
    head_dim: int
    side: int
    family: Single
    deterministic: bool = True


PROBLEMS = {
    "full": Watched(16, 8192, 128, BLOCK, FULL),
    "causal": Watched(16, 8192, 128, BLOCK, CAUSAL),
    "random 1/16": Watched(16, 16_384, 128, BLOCK, random_blocks(16_384, BLOCK)),
    "random 1/16 of 32,768": Watched(16, 32_768, 128, BLOCK, random_blocks(32_768, BLOCK)),
    "random 1/16 in blocks of 64": Watched(16, 16_384, 128, 64, random_blocks(16_384, 64)),
    "full, 64 dims": Watched(32, 8192, 64, BLOCK, FULL),
    "causal, 64 dims": Watched(32, 8192, 64, BLOCK, CAUSAL),
    "full, in any order": Watched(16, 8192, 128, BLOCK, FULL, deterministic=False),
    "full, 64 dims, in any order": Watched(32, 8192, 64, BLOCK, FULL, deterministic=False),
}


@dataclass(frozen=True)
class Row:
    """One kernel of an implementation: milliseconds, cycles, and the percentages by PARTS."""

    problem: str
    implementation: str
    kernel: str
    milliseconds: float
    cycles: float
    percent: dict[str, float]


def main(
    only: Annotated[str, typer.Option(help=f"One of: {', '.join(PROBLEMS)}.")] = "",
    backend: Annotated[str, typer.Option()] = "auto",
    baselines: Annotated[
        tuple | None,
        typer.Option(
            "--baselines",
            "--peers",
            parser=parse_baselines,
            metavar="NAME,NAME",
            help="Beside our kernels.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(file_okay=False)] = RESULTS,
) -> None:
    """Reads the hardware counters of the kernels."""
    if only and only not in PROBLEMS:
        raise typer.BadParameter(f"unknown --only {only!r}; known: {', '.join(PROBLEMS)}")
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        raise typer.BadParameter("needs a GPU, and ncu (Nsight Compute) on the PATH")
    chosen = [only] if only else list(PROBLEMS)
    path = output / f"counters-{slug('cuda')}.json"
    record = {"environment": environment(torch.device("cuda")), "counters": PARTS}
    rows: list[Row] = []
    skipped: dict[str, dict[str, str]] = {}
    for name in track(chosen, description="problems"):
        skips = SkipReasons()
        for implementation in implementations(PROBLEMS[name], backend, baselines or ()):
            with skips.catch(implementation):
                rows += profiled(name, implementation)
        if skips.reasons:
            skipped[name] = skips.reasons
        found = {"complete": name == chosen[-1], "skipped": skipped}
        write_json(path, record | found | {"rows": [asdict(row) for row in rows]})
    console = wide_console()
    console.print(table_of(rows))
    for name, reasons in skipped.items():
        for implementation, reason in reasons.items():
            console.print(f"[yellow]{implementation} on {name}: {reason}[/]")
    console.print(f"wrote {path}", highlight=False)


def implementations(problem: Watched, backend: str, baselines: tuple[str, ...]) -> Iterator[str]:
    """Baselines know one order of gradients, and dense ones no sparse masks."""
    yield f"{OURS}:{backend}{'' if problem.deterministic else ANY_ORDER}"
    for baseline in baselines if problem.deterministic else ():
        if problem.family.dense or baseline in (Baseline.FLASH4, Baseline.FLEX):
            yield baseline


def run_passes(name: str, implementation: str) -> None:
    """One forward and one backward pass, which the profiler watches, after one that it does not:
    a first call may compile or try kernels.
    """
    heads, seq_len, head_dim, side, family, _ = PROBLEMS[name]
    shape = Shape(TOKENS // seq_len, heads, seq_len, head_dim)
    (problem,), _ = family.choose(shape.size(side), ())
    attend = make_attend(implementation, problem, "auto")
    sizes = (4, shape.batch, heads, seq_len, head_dim)
    *leaves, grad_out = torch.randn(sizes, dtype=torch.bfloat16, device="cuda").unbind()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    for watched in (False, True):
        torch.cuda.synchronize()
        if watched:
            torch.cuda.profiler.start()
        torch.autograd.grad(attend(*leaves), leaves, grad_out)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profiled(problem: str, implementation: str) -> list[Row]:
    """The kernels of an implementation. Raises RuntimeError if the profiler counted none."""
    metrics = ",".join(COUNTERS)
    profiler = ["ncu", "--clock-control", "none", "--profile-from-start", "off"]
    profiler += ["--kernel-name", OUR_KERNELS] if is_ours(implementation) else []
    profiler += ["--metrics", metrics, "--page", "raw", "--csv", "--print-units", "base"]
    watched = [sys.executable, "-c", RUN_PASSES, problem, implementation]
    done = subprocess.run([*profiler, *watched], cwd=ROOT, capture_output=True, text=True)
    rows = list(rows_of(problem, implementation, done.stdout))
    if done.returncode or not rows:
        lines = f"{done.stdout}{done.stderr}".strip().splitlines() or ["it printed nothing"]
        raise RuntimeError("\n".join((f"ncu counted no kernels: {lines[-1]}", *lines)))
    return rows


def rows_of(problem: str, implementation: str, printed: str) -> Iterator[Row]:
    """The kernels in what the profiler printed: lines of CSV among others."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    for entry in csv.DictReader(lines):
        if entry["ID"]:  # which the line of units has not
            numbers = {name: float(entry[name].replace(",", "")) for name in COUNTERS}
            percent = {part: numbers[counter] for part, counter in PARTS.items()}
            kernel = entry["Kernel Name"].removesuffix("_kernel")[:NAME_WIDTH]
            milliseconds = numbers[NANOSECONDS] / 1e6
            yield Row(problem, implementation, kernel, milliseconds, numbers[CYCLES], percent)


def table_of(rows: list[Row]) -> Table:
    table = Table(title="how busy the parts of the GPU are, in % of what they can do")
    for heading in ("problem", "implementation"):
        table.add_column(heading)
    table.add_column("kernel", max_width=24, no_wrap=True)
    for heading in ("ms", "1000 cycles", *PARTS):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = (f"{row.percent[part]:.0f}" for part in PARTS)
        spent = (f"{row.milliseconds:.3f}", f"{row.cycles / 1000:,.0f}")
        table.add_row(row.problem, row.implementation, row.kernel, *spent, *shares)
    return table


if __name__ == "__main__":
    typer.run(main)
