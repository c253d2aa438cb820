"""Hardware counters: how busy the kernels keep the units of a GPU.

    python -m experiments.instruments.counters --baselines cudnn,flash4

runs the forward and the backward pass of a few problems under Nsight Compute (`ncu`, part of
CUDA), prints a table and writes counters-<gpu>.json after every problem. The utilisation of a unit
is its work over the most that it can do in the time of the kernel. The clock is not locked. So
implementations are compared by cycles, which do not depend on the clock.
"""

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.progress import track

from experiments.cli import (
    RESULTS,
    ROOT,
    Baseline,
    Baselines,
    Output,
    Overwrite,
    check_backend,
    needs,
    needs_cuda,
)
from experiments.instruments import Log, command
from experiments.record import ANY_ORDER, OURS, is_ours

if TYPE_CHECKING:
    from experiments.pattern_families import Problem as MaskProblem
    from experiments.pattern_families import Size

NANOSECONDS, CYCLES = "gpu__time_duration.sum", "sm__cycles_elapsed.max"
# Units of the GPU, and the counter of the utilisation of each.
PARTS = {
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exponentials": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "instructions": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
# The kernels of all backends, as `ncu --kernel-name` takes them.
OUR_KERNELS = (
    "regex:(forward|gradient|dq|dkdv|fused|clipped_block|lse_delta|convert_dq|ds_sums|decode|merge"
    "|rows|rows_of_both)_kernel$"
)
COUNTERS = (NANOSECONDS, CYCLES, *PARTS.values())
NAME_WIDTH = 80  # characters; names of kernels of baselines have the types of all arguments
RUN_PASSES = (
    "import sys; from experiments.instruments import counters; counters.run_passes(*sys.argv[1:])"
)


class Problem(NamedTuple):
    """A call that is profiled.

    Attributes:
        heads, seq_len, head_dim: Sizes of its tensors; seq_len is in tokens.
        side: Side of a block in tokens.
        pattern: "full", "causal" or "random".
        deterministic: Whether its gradients have the same bits in every run.
    """

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
    """The counters of one kernel.

    Attributes:
        problem: A key of PROBLEMS.
        implementation: sparseflash with its backend, or a baseline.
        kernel: Name of the kernel.
        milliseconds, cycles: Time of the kernel.
        percent: Utilisation of each of PARTS.
    """

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
    check_backend(backend)
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
    title = "utilisation of the units of the GPU in %"
    log.show(title, ("problem", "implementation", "kernel"), figures | shares)


def implementations(problem: Problem, backend: str, baselines: tuple[str, ...]) -> Iterator[str]:
    """The implementations that compute a problem.

    Baselines have no choice of deterministic gradients, and only some of them take sparse masks.
    """
    yield f"{OURS}:{backend}{'' if problem.deterministic else ANY_ORDER}"
    for baseline in baselines if problem.deterministic else ():
        if problem.pattern != "random" or baseline in (Baseline.FLASH4, Baseline.FLEX):
            yield baseline


def run_passes(name: str, implementation: str) -> None:
    """Runs both passes of a problem under the profiler.

    They run once before they are profiled, because a first call may compile or tune kernels.

    Args:
        name: A key of PROBLEMS.
        implementation: sparseflash with its backend, or a baseline.
    """
    import torch

    from experiments.measure import make_attend
    from experiments.suites import TOKENS, Shape

    chosen = PROBLEMS[name]
    shape = Shape(TOKENS // chosen.seq_len, chosen.heads, chosen.seq_len, chosen.head_dim)
    problem = with_mask(chosen, shape.size(chosen.side))
    attend = make_attend(implementation, problem)
    sizes = (4, shape.batch, shape.heads, shape.seq_len, shape.head_dim)
    *leaves, grad_out = torch.randn(sizes, dtype=torch.bfloat16, device="cuda").unbind()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    for profiled in (False, True):
        torch.cuda.synchronize()
        if profiled:
            torch.cuda.profiler.start()
        torch.autograd.grad(attend(*leaves), leaves, grad_out)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def with_mask(problem: Problem, size: "Size") -> "MaskProblem":
    """The mask of a problem, with what baselines need of it."""
    from experiments.pattern_families import KNOWN, Single
    from experiments.suites import at_random

    if problem.pattern == "random":
        family = Single("random 1/16", at_random(16, problem.seq_len, problem.side))
    else:
        family = KNOWN[problem.pattern]
    (found,), _ = family.choose(size, ())
    return found


def profiled(problem: str, implementation: str) -> list[Row]:
    """The rows of a problem and an implementation.

    Raises:
        RuntimeError: The profiler counted no kernels.
    """
    kernels = OUR_KERNELS if is_ours(implementation) else ""
    program = [sys.executable, "-c", RUN_PASSES, problem, implementation]
    entries = count(program, COUNTERS, kernels)
    return [row_of(problem, implementation, entry) for entry in entries]


def count(program: list[str], counters: Sequence[str], kernels: str = "") -> list[dict[str, str]]:
    """Reads hardware counters of the kernels that a program launches.

    Args:
        program: A command, which starts and stops the profiler.
        counters: Names of the hardware counters.
        kernels: The kernels, as `ncu --kernel-name` takes them; by default all.

    Returns:
        For each kernel a dict of text: its name under "Kernel Name", and the value of each
        counter under the name of the counter.

    Raises:
        RuntimeError: The profiler counted no kernels.
    """
    profiler = ["ncu", "--clock-control", "none", "--profile-from-start", "off"]
    profiler += ["--kernel-name", kernels] if kernels else []
    profiler += ["--metrics", ",".join(counters)]
    profiler += ["--page", "raw", "--csv", "--print-units", "base"]
    done = subprocess.run([*profiler, *program], cwd=ROOT, capture_output=True, text=True)
    entries = list(parse_kernels(done.stdout))
    if done.returncode or not entries:
        lines = f"{done.stdout}{done.stderr}".strip().splitlines() or ["it printed nothing"]
        raise RuntimeError("\n".join((f"ncu counted no kernels: {lines[-1]}", *lines)))
    return entries


def parse_kernels(printed: str) -> Iterator[dict[str, str]]:
    """The kernels in the output of the profiler, in which lines of CSV are among others."""
    lines = [line for line in printed.splitlines() if line.startswith('"')]
    return (entry for entry in csv.DictReader(lines) if entry["ID"])  # the line of units has no ID


def number(entry: dict[str, str], counter: str) -> float:
    """The value of a counter of a kernel."""
    return float(entry[counter].replace(",", ""))


def row_of(problem: str, implementation: str, entry: dict[str, str]) -> Row:
    """The row of a kernel; entry: see count."""
    percent = {part: number(entry, counter) for part, counter in PARTS.items()}
    kernel = entry["Kernel Name"].removesuffix("_kernel")[:NAME_WIDTH]
    milliseconds, cycles = number(entry, NANOSECONDS) / 1e6, number(entry, CYCLES)
    return Row(problem, implementation, kernel, milliseconds, cycles, percent)


if __name__ == "__main__":
    command(main)
