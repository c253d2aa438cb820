"""Hardware counters: which units of a GPU the kernels keep busy.

    python -m experiments.instruments.counters --baselines cudnn,flash4

runs the forward and the backward pass of a few problems under Nsight Compute (`ncu`, part of
CUDA), prints a table and writes counters-<gpu>.json after every problem. A share is the work of a
unit over the most that it can do in the time of the kernel. The clock is not changed:
implementations are compared by cycles, which do not depend on it.
"""

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import typer
from rich.progress import track

from experiments.cli import (
    RESULTS,
    ROOT,
    Baseline,
    Baselines,
    Output,
    Overwrite,
    needs,
    needs_cuda,
)
from experiments.instruments import Log, command
from experiments.record import ANY_ORDER, OURS, is_ours

NANOSECONDS, CYCLES = "gpu__time_duration.sum", "sm__cycles_elapsed.max"
# The name of a part, and the counter that says how busy it was.
PARTS = {
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exponentials": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "instructions": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
# The kernels of all backends.
OUR_KERNELS = (
    "regex:(forward|gradient|dq|dkdv|fused|lse_delta|convert_dq|ds_sums|decode|merge)_kernel$"
)
COUNTERS = (NANOSECONDS, CYCLES, *PARTS.values())
NAME_WIDTH = 80  # of kernels of baselines, whose names hold the types of all their arguments
RUN_PASSES = (
    "import sys; from experiments.instruments import counters; counters.run_passes(*sys.argv[1:])"
)


class Problem(NamedTuple):
    """What is profiled: `pattern` is "full", "causal" or "random", blocks `side` tokens wide."""

    heads: int
    seq_len: int
    head_dim: int
    side: int
    pattern: str
    deterministic: bool = True


PROBLEMS = {
    "full": Problem(16, 8192, 128, 128, "full"),
    "causal": Problem(16, 8192, 128, 128, "causal"),
    "random 1/16": Problem(16, 16_384, 128, 128, "random"),
    "random 1/16 of 32,768": Problem(16, 32_768, 128, 128, "random"),
    "random 1/16 in blocks of 64": Problem(16, 16_384, 128, 64, "random"),
    "full, 64 dims": Problem(32, 8192, 64, 128, "full"),
    "causal, 64 dims": Problem(32, 8192, 64, 128, "causal"),
    "full, in any order": Problem(16, 8192, 128, 128, "full", deterministic=False),
    "full, 64 dims, in any order": Problem(32, 8192, 64, 128, "full", deterministic=False),
}


@dataclass(frozen=True)
class Row:
    """One kernel of an implementation: milliseconds, cycles, and percentages by PARTS."""

    problem: str
    implementation: str
    kernel: str
    milliseconds: float
    cycles: float
    percent: dict[str, float]


def main(
    only: Annotated[
        str, typer.Option(help=f"Profile only this problem: {'; '.join(PROBLEMS)}.")
    ] = "",
    backend: Annotated[str, typer.Option(help="Backend of sparseflash.")] = "auto",
    baselines: Baselines = None,
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Read hardware counters of the kernels under Nsight Compute (ncu)."""
    if only and only not in PROBLEMS:
        raise typer.BadParameter(f"--only must be one of {'; '.join(PROBLEMS)}, got {only!r}")
    needs_cuda()
    needs(shutil.which("ncu"), "ncu (Nsight Compute) on the PATH")
    from experiments.measure import SkipReasons

    chosen = [only] if only else list(PROBLEMS)
    log = Log("counters", "cuda", output, overwrite, counters=PARTS)
    for name in track(chosen, description="problems"):
        skips = SkipReasons()
        rows: list[Row] = []
        for implementation in implementations(PROBLEMS[name], backend, baselines or ()):
            with skips.catch(implementation):
                rows += profiled(name, implementation)
        log.add(name, rows, skips.reasons, complete=name == chosen[-1])
    shares = {part: lambda row, part=part: f"{row.percent[part]:.0f}" for part in PARTS}
    figures = {
        "ms": lambda row: f"{row.milliseconds:.3f}",
        "1000 cycles": lambda row: f"{row.cycles / 1000:,.0f}",
    }
    title = "utilisation of the units of the GPU, in % of their peak"
    log.show(title, ("problem", "implementation", "kernel"), figures | shares)


def implementations(problem: Problem, backend: str, baselines: tuple[str, ...]) -> Iterator[str]:
    """Baselines know one order of gradients, and dense ones no sparse masks."""
    yield f"{OURS}:{backend}{'' if problem.deterministic else ANY_ORDER}"
    for baseline in baselines if problem.deterministic else ():
        if problem.pattern != "random" or baseline in (Baseline.FLASH4, Baseline.FLEX):
            yield baseline


def run_passes(name: str, implementation: str) -> None:
    """One forward and one backward pass, which the profiler watches, after one that it does not:
    a first call may compile or try kernels.
    """
    import torch

    from experiments.measure import make_attend
    from experiments.pattern_families import KNOWN, Single
    from experiments.suites import TOKENS, Shape, at_random

    heads, seq_len, head_dim, side, pattern, _ = PROBLEMS[name]
    shape = Shape(TOKENS // seq_len, heads, seq_len, head_dim)
    family = KNOWN.get(pattern) or Single("random 1/16", at_random(16, seq_len, side))
    (problem,), _ = family.choose(shape.size(side), ())
    attend = make_attend(implementation, problem)
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
    kernels = OUR_KERNELS if is_ours(implementation) else ""
    called = [sys.executable, "-c", RUN_PASSES, problem, implementation]
    entries = count(called, COUNTERS, kernels)
    return [row_of(problem, implementation, entry) for entry in entries]


def count(called: list[str], counters: Sequence[str], kernels: str = "") -> list[dict[str, str]]:
    """What the profiler counted in the kernels of a command, each kernel a dictionary: "Kernel
    Name", and numbers as text by the names of `counters`.

    Args:
        called: The command, which starts and stops the profiler.
        counters: Names of hardware counters.
        kernels: Those to count, as `ncu --kernel-name` takes them; all by default.

    Raises:
        RuntimeError: It counted none.
    """
    profiler = ["ncu", "--clock-control", "none", "--profile-from-start", "off"]
    profiler += ["--kernel-name", kernels] if kernels else []
    profiler += ["--metrics", ",".join(counters)]
    profiler += ["--page", "raw", "--csv", "--print-units", "base"]
    done = subprocess.run([*profiler, *called], cwd=ROOT, capture_output=True, text=True)
    entries = list(entries_of(done.stdout))
    if done.returncode or not entries:
        lines = f"{done.stdout}{done.stderr}".strip().splitlines() or ["it printed nothing"]
        raise RuntimeError("\n".join((f"ncu counted no kernels: {lines[-1]}", *lines)))
    return entries


def entries_of(printed: str) -> Iterator[dict[str, str]]:
    """The kernels in what the profiler printed: lines of CSV among others."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    return (entry for entry in csv.DictReader(lines) if entry["ID"])  # the line of units has none


def number(entry: dict[str, str], counter: str) -> float:
    """What a counter says of a kernel."""
    return float(entry[counter].replace(",", ""))


def row_of(problem: str, implementation: str, entry: dict[str, str]) -> Row:
    """A kernel that the profiler counted."""
    percent = {part: number(entry, counter) for part, counter in PARTS.items()}
    kernel = entry["Kernel Name"].removesuffix("_kernel")[:NAME_WIDTH]
    milliseconds, cycles = number(entry, NANOSECONDS) / 1e6, number(entry, CYCLES)
    return Row(problem, implementation, kernel, milliseconds, cycles, percent)


if __name__ == "__main__":
    command(main)
