"""The host time of `sparseflash.attention` beyond its kernel launches.

    python -m experiments.overhead

Calls with a compiled mask, on tensors so small that the device waits for the host, are timed back
to back in short runs: the fastest run is the host time of a call, since whatever else the host
does can only add to it; the median, which shows how much it did, is recorded beside it. Of that
time, as many bare launches as the call makes are no overhead; a bare launch is that of an empty
kernel, which torch launches without dispatch. On a CPU the host runs the kernels itself: there the
time of the backend alone is subtracted. The table goes to
`experiments/results/overhead-<device>.json`.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import masks
import sparseflash
from experiments.cli import RESULTS, slug
from experiments.environment import environment
from experiments.files import write_json
from masks import BlockMask
from sparseflash.dispatch.plan import plan_call

LIMIT_US = 60
RUNS = 500
CALLS = 10
SECONDS = 3.0  # no more runs of a call after so long
NEEDS = (True, True, True, False, False)  # gradients of query, key and value

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Microseconds of one call, median_us that of a run that is neither fast nor slow.

    launches: kernels that it starts, none on a CPU
    """

    call: str
    total_us: float
    median_us: float
    launches: int
    kernels_us: float

    @property
    def overhead_us(self) -> float:
        return self.total_us - self.kernels_us


def main(
    heads: Annotated[int, typer.Option(min=1)] = 4,
    seq_len: Annotated[int, typer.Option(min=1)] = 256,
    head_dim: Annotated[int, typer.Option(min=8, max=256)] = 64,
    block_size: Annotated[int, typer.Option(min=16, max=256)] = 64,
    backend: Annotated[str, typer.Option()] = "auto",
    output: Annotated[Path, typer.Option(file_okay=False)] = RESULTS,
) -> None:
    """Measures the host microseconds of an attention call and of its backward pass."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [
        measure(name, call, kernels, device)
        for name, call, kernels in calls(heads, seq_len, head_dim, block_size, backend, device)
    ]
    shape = {"batch": 1, "heads": heads, "seq_len": seq_len, "head_dim": head_dim}
    shape |= {"block_size": block_size, "backend": backend}
    found = [asdict(row) | {"overhead_us": row.overhead_us} for row in rows]
    path = output / f"overhead-{slug(device.type)}.json"
    record = {"environment": environment(device), "shape": shape, "rows": found}
    write_json(path, record)
    Console().print(table_of(rows))
    Console().print(f"wrote {path}", highlight=False)


def calls(
    heads: int, seq_len: int, head_dim: int, block_size: int, backend: str, device: torch.device
) -> list[tuple[str, Call, Call]]:
    """(name, call, the backend's part of it alone) of what is measured."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = torch.randn(4, 1, heads, seq_len, head_dim, dtype=dtype, device=device).unbind()
    query, key, value, grad_out = (x.clone() for x in inputs)
    q, k, v = leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    mask = masks.local(block_size)(seq_len, block_size=block_size, device=device)
    forward, backward = bare_passes(query, key, value, grad_out, mask, backend)
    attention = partial(sparseflash.attention, mask=mask, backend=backend)
    out = attention(q, k, v)
    last, last_row = query[:, :, -1:].clone(), mask.slice_queries(seq_len - 1, seq_len)
    step = plan_call(last, key, value, last_row, backend=backend)
    return [
        ("forward", lambda: attention(query, key, value), forward),
        ("forward, gradients wanted", lambda: attention(q, k, v), forward),
        (
            "backward",
            lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True),
            backward,
        ),
        (
            "one query",
            lambda: attention(last, key, value, mask=last_row),
            lambda: step.forward(last, key, value),
        ),
    ]


def bare_passes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    mask: BlockMask,
    backend: str,
) -> tuple[Call, Call]:
    """The backend's forward and backward with all that a call prepares prepared."""
    call = plan_call(query, key, value, mask, backend=backend)
    saved = (query, key, value, *call.forward(query, key, value))
    return (
        lambda: call.forward(query, key, value),
        lambda: call.backward(grad_out, None, saved, NEEDS),
    )


def measure(name: str, call: Call, kernels: Call, device: torch.device) -> Row:
    on_cpu = device.type == "cpu"
    launches = 0 if on_cpu else count_launches(kernels)
    totals, bare = in_turns(call, kernels if on_cpu else empty_kernel, device)
    kernels_us = min(bare) * (1 if on_cpu else launches)
    return Row(name, min(totals), statistics.median(totals), launches, kernels_us)


def in_turns(call: Call, other: Call, device: torch.device) -> tuple[list[float], list[float]]:
    """The mean host times, in microseconds, of runs of CALLS calls, none waited for."""
    end = time.perf_counter() + SECONDS
    runs: tuple[list[float], list[float]] = ([], [])
    while not runs[0] or (len(runs[0]) < RUNS and time.perf_counter() < end):
        for times, timed in zip(runs, (call, other), strict=True):
            times.append(_mean_microseconds(timed, device))
    return runs


def _mean_microseconds(call: Call, device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - begin
    _wait(device)
    return elapsed * 1e6 / CALLS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_kernel() -> None:
    torch.cuda._sleep(1)


def count_launches(call: Call) -> int:
    """Kernels that one call puts on the GPU."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in record.events() or ())


def table_of(rows: list[Row]) -> Table:
    table = Table(title=f"host microseconds of a call; at most {LIMIT_US} beyond its launches")
    for heading in ("call", "median", "fastest", "launches", "kernels", "overhead"):
        table.add_column(heading, justify="left" if heading == "call" else "right")
    for row in rows:
        figures = (row.median_us, row.total_us, row.kernels_us, row.overhead_us)
        median, fastest, kernels, overhead = (f"{figure:.1f}" for figure in figures)
        table.add_row(row.call, median, fastest, str(row.launches), kernels, overhead)
    return table


if __name__ == "__main__":
    typer.run(main)
