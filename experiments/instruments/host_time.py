"""The host time of `sparseflash.attention`, forward and backward.

    python -m experiments.instruments.host_time

times calls with a compiled mask and with tensors so small that the device waits for the host. The
calls follow one another in short runs. The fastest run gives the host time of a call, because
other work of the host can only add to it. The median run is recorded too. From the host time two
parts are subtracted, and the remainder is the time of sparseflash itself:

- launches: the time of as many launches of an empty kernel as the call makes. On a CPU, where the
  host computes, it is the time of the backend.
- autograd of torch: the time of the same pass through a `torch.autograd.Function` that computes
  nothing, with as many inputs, outputs, saved tensors and gradients. On a GPU, torch runs every
  backward pass in another thread.

The table is written to host-time-<device>.json.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli import RESULTS, Device, Output, Overwrite, check_backend, resolve
from experiments.instruments import Log, command

if TYPE_CHECKING:
    import torch

RUNS = 500  # most runs of a call
CALLS = 10  # calls of a run
SECONDS = 3.0  # after which no run begins
NEEDS = (True, True, True, False, False, False)  # gradients of query, key and value

Call = Callable[[], object]
# A call; its computation by the backend alone; the same call of a function that computes nothing,
# or None without autograd.
Parts = tuple[Call, Call, Call | None]


@dataclass(frozen=True)
class Row:
    """Microseconds of one call.

    Attributes:
        call: Name of the call.
        total_us: Host time, of the fastest run.
        median_us: Host time of the median run.
        launches: Number of kernels that the call launches; 0 on a CPU.
        kernels_us: Time of these launches.
        engine_us: Time of torch's autograd engine.
        overhead_us: Remainder of total_us.
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
    seq_len: Annotated[int, typer.Option(min=1, help="Length in tokens.")] = 256,
    head_dim: Annotated[int, typer.Option(min=8, max=256)] = 64,
    block_size: Annotated[
        int, typer.Option(min=16, max=256, help="Side of a block in tokens.")
    ] = 64,
    backend: Annotated[str, typer.Option()] = "auto",
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Measure the host time of a call and of its backward pass, in microseconds."""
    check_backend(backend)
    kind = resolve(Device.AUTO)
    shape = {"batch": 1, "heads": heads, "seq_len": seq_len, "head_dim": head_dim}
    shape |= {"block_size": block_size, "backend": backend}
    log = Log("host-time", kind, output, overwrite, shape=shape)
    calls = build_calls(heads, seq_len, head_dim, block_size, backend, kind)
    rows = [measure(name, parts, kind) for name, parts in calls.items()]
    log.add("calls", rows, {}, complete=True)
    figures: dict[str, Callable[[Row], str]] = {"kernels": lambda row: f"{row.launches}"}
    for heading, name in (
        *(("total", "total_us"), ("median", "median_us"), ("launches", "kernels_us")),
        *(("autograd of torch", "engine_us"), ("sparseflash", "overhead_us")),
    ):
        figures[heading] = lambda row, name=name: f"{getattr(row, name):.1f}"
    title = "host time of a call in microseconds"
    log.show(title, ("call",), figures)


def build_calls(
    heads: int, seq_len: int, head_dim: int, block_size: int, backend: str, device: str
) -> dict[str, Parts]:
    """The calls that are measured, by name, with random tensors of these sizes."""
    import torch

    import masks
    import sparseflash
    from sparseflash.dispatch import call
    from sparseflash.dispatch.plan import find_plan
    from sparseflash.dispatch.spec import CallFacts

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = torch.randn(4, 1, heads, seq_len, head_dim, dtype=dtype, device=device).unbind()
    query, key, value, grad_out = (x.clone() for x in inputs)
    leaves = q, k, v = tuple(x.clone().requires_grad_() for x in (query, key, value))
    mask = masks.local(block_size)(seq_len, block_size=block_size, device=device)
    options, facts = {"backend": backend}, CallFacts()
    bare = call.Call(find_plan(query, key, value, mask, options, facts))
    saved = (query, key, value, *bare.forward(query, key, value))
    last, last_row = query[:, :, -1:].clone(), mask.slice_queries(seq_len - 1, seq_len)
    step = call.Call(find_plan(last, key, value, last_row, options, facts))
    attention = partial(sparseflash.attention, backend=backend)
    nothing = partial(null_function(*bare.forward(query, key, value)), *leaves, None, None)

    def backward_of(out: torch.Tensor) -> Call:
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    forward = partial(bare.forward, query, key, value)
    backward = partial(bare.backward, grad_out, None, saved, NEEDS)
    return {
        "forward": (partial(attention, query, key, value, mask), forward, None),
        "forward, gradients wanted": (partial(attention, q, k, v, mask), forward, nothing),
        "backward": (backward_of(attention(q, k, v, mask)), backward, backward_of(nothing()[0])),
        "one query": (
            partial(attention, last, key, value, last_row),
            partial(step.forward, last, key, value),
            None,
        ),
    }


def null_function(out: "torch.Tensor", lse: "torch.Tensor") -> Callable:
    """A differentiable function with the signature of attention that computes nothing.

    Args:
        out, lse: The function returns views of these tensors.

    Returns:
        The function. Its gradients are query, key and value themselves.
    """
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value, bias, block_scores):  # pyright: ignore[reportIncompatibleMethodOverride]
            results = out.view_as(out), lse.view_as(lse)
            ctx.save_for_backward(query, key, value, *results)
            ctx.set_materialize_grads(False)
            return results

        @staticmethod
        def backward(ctx, grad_out, grad_lse):  # pyright: ignore[reportIncompatibleMethodOverride]
            return *ctx.saved_tensors[:3], None, None

    return Nothing.apply


def measure(name: str, parts: Parts, device: str) -> Row:
    """Times a call and the parts that are subtracted."""
    import torch

    call, kernels, engine = parts
    on_gpu = device == "cuda"
    launches = count_launches(kernels) if on_gpu else 0
    launch = partial(torch.cuda._sleep, 1) if on_gpu else kernels
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    totals, bare, *engines = run_times([call, launch, *([engine] if engine else [])], wait)
    kernels_us = min(bare) * (launches if on_gpu else 1)
    engine_us = min(engines[0]) if engines else 0.0
    total, median = min(totals), statistics.median(totals)
    return Row(
        name, total, median, launches, kernels_us, engine_us, total - kernels_us - engine_us
    )


def run_times(calls: list[Call], wait: Call) -> list[list[float]]:
    """Times calls in runs of CALLS, alternately, without a wait inside a run.

    Args:
        calls: The calls.
        wait: Waits for the device.

    Returns:
        For each call, the mean microseconds of a call in each run.
    """
    end = time.perf_counter() + SECONDS
    runs: list[list[float]] = [[] for _ in calls]
    while not runs[0] or (len(runs[0]) < RUNS and time.perf_counter() < end):
        for times, call in zip(runs, calls, strict=True):
            wait()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times.append((time.perf_counter() - begin) * 1e6 / CALLS)
            wait()
    return runs


def count_launches(call: Call) -> int:
    """The number of kernels that a call launches."""
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
