"""The host time of one `sparseflash.attention` call beyond its kernel launches.

    python -m experiments.overhead

Calls with a compiled mask, on tensors so small that the device waits for the host, are timed back
to back: that is the host time of a call. Of it, as many bare launches as the call makes are no
overhead; a bare launch is that of an empty kernel, which torch launches without dispatch. On a CPU
the host runs the kernels itself: there the time of the backend's forward alone is subtracted.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

import masks
import sparseflash
from sparseflash.backends import select
from sparseflash.spec import AttentionSpec

LIMIT_US = 60
REPEATS = 50
CALLS = 100


def main(
    heads: Annotated[int, typer.Option(min=1)] = 4,
    seq_len: Annotated[int, typer.Option(min=1)] = 256,
    head_dim: Annotated[int, typer.Option(min=8, max=256)] = 64,
) -> None:
    """Measures the host microseconds of an attention call, forward."""
    console = Console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, heads, seq_len, head_dim)
    query, key, value = (torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    mask = masks.local(64)(seq_len, block_size=64, device=device)

    def call():
        return sparseflash.attention(query, key, value, mask)

    total = host_microseconds(call, device)
    if device.type == "cuda":
        launches, launch = count_launches(call), host_microseconds(empty_kernel, device)
        console.print(
            f"host time of a call: {total:.1f} us, with {launches} launches of {launch:.1f} us"
        )
        overhead = total - launches * launch
    else:
        bare = host_microseconds(bare_forward(query, key, value, mask), device)
        console.print(
            f"host time of a call: {total:.1f} us; of its arithmetic alone: {bare:.1f} us"
        )
        overhead = total - bare
    console.print(f"overhead: {overhead:.1f} us (limit {LIMIT_US} us)")


def host_microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Median over REPEATS of the mean host time of CALLS calls, none waited for."""
    return statistics.median(_mean_microseconds(call, device) for _ in range(REPEATS))


def _mean_microseconds(call: Callable[[], object], device: torch.device) -> float:
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


def count_launches(call: Callable[[], object]) -> int:
    """Kernels that one call puts on the GPU."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in record.events() or ())


def bare_forward(query, key, value, mask: masks.BlockMask) -> Callable[[], object]:
    """The backend's forward with everything that a call prepares prepared."""
    batch, heads, seq_len, head_dim = query.shape
    spec = AttentionSpec(
        batch=batch,
        heads=heads,
        kv_heads=heads,
        q_len=seq_len,
        k_len=seq_len,
        head_dim=head_dim,
        dtype=query.dtype,
        device=query.device,
        block_size=mask.block_size,
        mask_heads=1,
        scale=head_dim**-0.5,
        dropout_p=0.0,
        has_key_lengths=False,
    )
    backend, table = select("auto", spec), mask.table(query.device)
    return lambda: backend.forward(query, key, value, table, None, 0, spec)


if __name__ == "__main__":
    typer.run(main)
