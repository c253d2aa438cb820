"""The host time of `sparseflash.attention`, forward and backward, and what of it is ours.

    python -m experiments.instruments.host_time

Calls with a compiled mask, on tensors so small that the device waits for the host, are timed back
to back in short runs: the fastest run is the host time of a call, since whatever else the host
does can only add to it; the median, which shows how much it did, is recorded beside it. What is
left of that time is ours after two parts are taken off:

- launches: as many bare launches as the call makes; a bare launch is that of an empty kernel,
  which torch launches without dispatch. On a CPU the host runs the kernels itself: there it is the
  time of the backend alone.
- torch: the same pass through a `torch.autograd.Function` of as many tensors that does nothing.
  On a GPU torch runs every backward pass in a thread of its own.

The table goes to host-time-<device>.json.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli import RESULTS, Device, Output, Overwrite, resolve
from experiments.instruments import Log, command

if TYPE_CHECKING:
    import torch

RUNS = 500
CALLS = 10
SECONDS = 3.0  # no more runs of a call after so long
NEEDS = (True, True, True, False, False)  # gradients of query, key and value

Call = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """A call, the backend's part of it alone, and what torch does around it."""

    name: str
    call: Call
    kernels: Call
    engine: Call | None = None


@dataclass(frozen=True)
class Row:
    """Microseconds of one call.

    Attributes:
        call: what was called.
        total_us, median_us: of the fastest run, and of a run in the middle.
        launches: kernels that it starts, none on a CPU.
        kernels_us: of these launches.
        engine_us: of torch's autograd engine.
        overhead_us: what remains of total_us.
    """

    call: str
    total_us: float
    median_us: float
    launches: int
    kernels_us: float
    engine_us: float
    overhead_us: float


def main(
    heads: Annotated[int, typer.Option(min=1)] = 4,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens.")] = 256,
    head_dim: Annotated[int, typer.Option(min=8, max=256)] = 64,
    block_size: Annotated[int, typer.Option(min=16, max=256, help="Tokens.")] = 64,
    backend: Annotated[str, typer.Option()] = "auto",
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Measures the host microseconds of an attention call and of its backward pass."""
    import torch

    device = torch.device(resolve(Device.AUTO))
    shape = {"batch": 1, "heads": heads, "seq_len": seq_len, "head_dim": head_dim}
    shape |= {"block_size": block_size, "backend": backend}
    log = Log("host-time", device.type, output, overwrite, shape=shape)
    calls = measured_calls(heads, seq_len, head_dim, block_size, backend, device)
    log.add("calls", [measure(found, device) for found in calls], {}, complete=True)
    headings = ("fastest", "median", "launches", "torch", "ours")
    fields = ("total_us", "median_us", "kernels_us", "engine_us", "overhead_us")
    figures: dict[str, Callable[[Row], str]] = {"kernels": lambda row: f"{row.launches}"}
    for heading, name in zip(headings, fields, strict=True):
        figures[heading] = lambda row, name=name: f"{getattr(row, name):.1f}"
    title = "host microseconds of a call: all of it, bare launches, torch's engine, and ours"
    log.show(title, ("call",), figures)


def measured_calls(
    heads: int,
    seq_len: int,
    head_dim: int,
    block_size: int,
    backend: str,
    device: "torch.device",
) -> list[Measured]:
    """What is measured, on random tensors of one small problem."""
    import torch

    import masks
    import sparseflash
    from sparseflash.dispatch.plan import plan_call

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = torch.randn(4, 1, heads, seq_len, head_dim, dtype=dtype, device=device).unbind()
    query, key, value, grad_out = (x.clone() for x in inputs)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    mask = masks.local(block_size)(seq_len, block_size=block_size, device=device)
    bare = plan_call(query, key, value, mask, backend=backend)
    saved = (query, key, value, *bare.forward(query, key, value))
    last, last_row = query[:, :, -1:].clone(), mask.slice_queries(seq_len - 1, seq_len)
    step = plan_call(last, key, value, last_row, backend=backend)
    nothing = do_nothing()

    def attention(*tensors, mask=mask):
        return sparseflash.attention(*tensors, mask=mask, backend=backend)

    def backward_of(out):
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    forward = lambda: bare.forward(query, key, value)  # noqa: E731
    return [
        Measured("forward", lambda: attention(query, key, value), forward),
        Measured(
            "forward, gradients wanted",
            lambda: attention(*leaves),
            forward,
            lambda: nothing(*leaves),
        ),
        Measured(
            "backward",
            backward_of(attention(*leaves)),
            lambda: bare.backward(grad_out, None, saved, NEEDS),
            backward_of(nothing(*leaves)),
        ),
        Measured(
            "one query",
            lambda: attention(last, key, value, mask=last_row),
            lambda: step.forward(last, key, value),
        ),
    ]


def do_nothing() -> Callable:
    """A differentiable function of three tensors that computes nothing, forward and backward."""
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):  # pyright: ignore[reportIncompatibleMethodOverride]
            ctx.save_for_backward(query, key, value)
            return torch.empty_like(query)

        @staticmethod
        def backward(ctx, grad_out):  # pyright: ignore[reportIncompatibleMethodOverride]
            return ctx.saved_tensors

    return Nothing.apply


def measure(measured: Measured, device: "torch.device") -> Row:
    """Times a call beside what is taken off its time."""
    on_cpu = device.type == "cpu"
    launches = 0 if on_cpu else count_launches(measured.kernels)
    kernel = measured.kernels if on_cpu else empty_kernel
    calls = [measured.call, kernel, *([measured.engine] if measured.engine else [])]
    totals, kernels, *engines = run_times(calls, device)
    kernels_us = min(kernels) * (1 if on_cpu else launches)
    engine_us = min(engines[0]) if engines else 0.0
    overhead_us = min(totals) - kernels_us - engine_us
    median_us = statistics.median(totals)
    return Row(measured.name, min(totals), median_us, launches, kernels_us, engine_us, overhead_us)


def run_times(calls: list[Call], device: "torch.device") -> list[list[float]]:
    """For each call the mean host microseconds of runs of CALLS, in turns, none waited for."""
    end = time.perf_counter() + SECONDS
    runs: list[list[float]] = [[] for _ in calls]
    while not runs[0] or (len(runs[0]) < RUNS and time.perf_counter() < end):
        for times, call in zip(runs, calls, strict=True):
            times.append(_mean_microseconds(call, device))
    return runs


def _mean_microseconds(call: Call, device: "torch.device") -> float:
    _wait(device)
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - begin
    _wait(device)
    return elapsed * 1e6 / CALLS


def _wait(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_kernel() -> None:
    """Launches a kernel that does nothing."""
    import torch

    torch.cuda._sleep(1)


def count_launches(call: Call) -> int:
    """Kernels that one call puts on the GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as record:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in record.events() or ())


if __name__ == "__main__":
    command(main)
