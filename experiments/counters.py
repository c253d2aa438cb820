"""What binds the kernels: how busy they keep the parts of a GPU, by its hardware counters.

    python -m experiments.counters

runs the forward and the backward pass of a few problems under Nsight Compute (`ncu`, part of
CUDA), prints a table and writes `experiments/results/counters-<gpu>.json`, after every problem
what is known so far. A share is that of the most that a part can do in the time of the kernel. The
clock is left as it is.
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
from rich.console import Console
from rich.progress import track
from rich.table import Table

from experiments.cli import RESULTS, slug
from experiments.environment import ROOT, environment
from experiments.families import CAUSAL, FULL, Single
from experiments.files import write_json
from experiments.overhead import bare_passes
from experiments.suites import BLOCK, TOKENS, Shape, at_random

NANOSECONDS = "gpu__time_duration.sum"
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
OURS = "regex:(forward|gradient|row_terms|finish|score_sums|decode|merge)_kernel$"
COUNTERS = (NANOSECONDS, *PARTS.values())
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
    "random 1/16 in blocks of 64": Watched(16, 16_384, 128, 64, random_blocks(16_384, 64)),
    "full, 64 dims": Watched(32, 8192, 64, BLOCK, FULL),
    "causal, 64 dims": Watched(32, 8192, 64, BLOCK, CAUSAL),
    "full, in any order": Watched(16, 8192, 128, BLOCK, FULL, deterministic=False),
    "full, 64 dims, in any order": Watched(32, 8192, 64, BLOCK, FULL, deterministic=False),
}


@dataclass(frozen=True)
class Row:
    """One kernel of a problem: its milliseconds, and the percentages by PARTS."""

    problem: str
    kernel: str
    milliseconds: float
    percent: dict[str, float]


def main(
    only: Annotated[str, typer.Option(help=f"One of: {', '.join(PROBLEMS)}.")] = "",
    backend: Annotated[str, typer.Option()] = "auto",
    output: Annotated[Path, typer.Option(file_okay=False)] = RESULTS,
) -> None:
    """Reads the hardware counters of the kernels."""
    if only and only not in PROBLEMS:
        raise typer.BadParameter(f"unknown --only {only!r}; known: {', '.join(PROBLEMS)}")
    if not torch.cuda.is_available() or shutil.which("ncu") is None:
        raise typer.BadParameter("needs a GPU, and ncu (Nsight Compute) on the PATH")
    chosen = [only] if only else list(PROBLEMS)
    path = output / f"counters-{slug('cuda')}.json"
    record = {"environment": environment(torch.device("cuda")), "backend": backend}
    rows: list[Row] = []
    for name in track(chosen, description="problems"):
        rows += profiled(name, backend)
        found = {"complete": name == chosen[-1], "rows": [asdict(row) for row in rows]}
        write_json(path, record | {"counters": PARTS} | found)
    Console().print(table_of(rows))
    Console().print(f"wrote {path}", highlight=False)


def run_passes(problem: str, backend: str) -> None:
    """One forward and one backward pass, which is what the profiler watches."""
    heads, seq_len, head_dim, side, family, deterministic = PROBLEMS[problem]
    shape = Shape(TOKENS // seq_len, heads, seq_len, head_dim)
    (member,), _ = family.choose(shape.size(side), ())
    sizes = (4, shape.batch, heads, seq_len, head_dim)
    query, key, value, grad_out = torch.randn(sizes, dtype=torch.bfloat16, device="cuda").unbind()
    options = (member.problem.mask, backend, deterministic)
    _, backward = bare_passes(query, key, value, grad_out, *options)
    backward()
    torch.cuda.synchronize()


def profiled(problem: str, backend: str) -> list[Row]:
    """The kernels of a problem; RuntimeError with what the profiler said if it counted none."""
    metrics = ",".join(COUNTERS)
    profiler = ["ncu", "--clock-control", "none", "--kernel-name", OURS]
    profiler += ["--metrics", metrics, "--page", "raw", "--csv", "--print-units", "base"]
    watched = [sys.executable, "-c", RUN_PASSES, problem, backend]
    done = subprocess.run([*profiler, *watched], cwd=ROOT, capture_output=True, text=True)
    rows = list(rows_of(problem, done.stdout))
    if done.returncode or not rows:
        raise RuntimeError(f"ncu counted no kernels:\n{done.stdout}{done.stderr}")
    return rows


def rows_of(problem: str, printed: str) -> Iterator[Row]:
    """The kernels in what the profiler printed: lines of CSV among others."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    for entry in csv.DictReader(lines):
        if entry["ID"]:  # which the line of units has not
            numbers = {name: float(entry[name].replace(",", "")) for name in COUNTERS}
            percent = {part: numbers[counter] for part, counter in PARTS.items()}
            kernel = entry["Kernel Name"].removesuffix("_kernel")
            yield Row(problem, kernel, numbers[NANOSECONDS] / 1e6, percent)


def table_of(rows: list[Row]) -> Table:
    table = Table(title="how busy the parts of the GPU are, in % of what they can do")
    for heading in ("problem", "kernel"):
        table.add_column(heading)
    for heading in ("ms", *PARTS):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = (f"{row.percent[part]:.0f}" for part in PARTS)
        table.add_row(row.problem, row.kernel, f"{row.milliseconds:.3f}", *shares)
    return table


if __name__ == "__main__":
    typer.run(main)
