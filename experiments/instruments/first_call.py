"""The time of first calls, which compile kernels.

    python -m experiments.instruments.first_call

runs each implementation in processes of its own. A process that is not recorded comes first, so
that no row includes the time to read compilers and libraries from the disk. In the next process
the caches of compiled kernels on disk are empty, and in the last they are those that this one
left. In each process these calls follow one another:

- first mask: causal, with partial blocks.
- second mask: a quarter of the blocks at random, all full, which may need other kernels.
- again: the second mask, when everything is compiled.

Each call is followed by a loss and its backward pass.

`warmup` is sparseflash with `sparseflash.warmup` for both masks before the first call; its time is
a row. Times are those from the call until the device has finished. They include the table of the
mask, but not the import of torch or the creation of the tensors. The table is written to
first-call-<device>.json.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli import RESULTS, Device, Output, Overwrite, check_known, resolve
from experiments.instruments import Log, command

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Leaves = tuple["Tensor", "Tensor", "Tensor"]  # query, key and value
IMPLEMENTATIONS = ("sparseflash", "warmup", "flex")
# Folders of compiled kernels: of Triton, of torch's compiler, and of CUDA's.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
PATTERNS = {"first mask": "causal()", "second mask": "random(0.25)", "again": "random(0.25)"}


@dataclass(frozen=True)
class Row:
    """One call of both passes.

    Attributes:
        implementation: One of IMPLEMENTATIONS.
        cache: "empty" or "filled": the caches on disk when the process began.
        call: A key of PATTERNS, or "warmup".
        seconds: Its time.
    """

    implementation: str
    cache: str
    call: str
    seconds: float


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors, and the device."""

    heads: int
    seq_len: int
    head_dim: int
    device: str


def main(
    heads: Annotated[int, typer.Option(min=1)] = 16,
    seq_len: Annotated[int, typer.Option(min=1, help="Length in tokens.")] = 4096,
    head_dim: Annotated[int, typer.Option(min=8, max=256)] = 128,
    only: Annotated[
        list[str] | None, typer.Option(help="One of sparseflash, warmup, flex; repeatable.")
    ] = None,
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Measure the first calls of a process with empty and with filled caches, in seconds."""
    chosen = only or list(IMPLEMENTATIONS)
    check_known("implementation", chosen, IMPLEMENTATIONS)
    sizes = Sizes(heads, seq_len, head_dim, resolve(Device.AUTO))
    shape = {"batch": 1, "heads": heads, "seq_len": seq_len, "head_dim": head_dim}
    log = Log("first-call", sizes.device, output, overwrite, shape=shape)
    for name in chosen:
        with TemporaryDirectory() as folder:
            in_new_process(name, "empty", folder, sizes)
        with TemporaryDirectory() as folder:
            for cache in ("empty", "filled"):
                last = (name, cache) == (chosen[-1], "filled")
                log.add(name, in_new_process(name, cache, folder, sizes), {}, complete=last)
    figures = {"seconds": lambda row: f"{row.seconds:.2f}"}
    log.show("first calls, both passes", ("implementation", "cache", "call"), figures)


def in_new_process(name: str, cache: str, folder: str, sizes: Sizes) -> list[Row]:
    """The rows of an implementation in a process whose caches on disk are in `folder`."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, name, cache, folder, sizes).result()


def measure(name: str, cache: str, folder: str, sizes: Sizes) -> list[Row]:
    """Times the calls in this process, which must not have imported torch."""
    for variable in CACHES:
        os.environ[variable] = str(Path(folder, variable))
    import torch

    shape = 1, sizes.heads, sizes.seq_len, sizes.head_dim
    dtype = torch.bfloat16 if sizes.device == "cuda" else torch.float32
    inputs = torch.randn(4, *shape, dtype=dtype, device=sizes.device).unbind()
    query, key, value = (x.clone().requires_grad_() for x in inputs[:3])
    leaves = query, key, value
    rows = []

    def timed(call: str, run: Callable[[], object]) -> None:
        begin = time.perf_counter()
        run()
        if sizes.device == "cuda":
            torch.cuda.synchronize()
        rows.append(Row(name, cache, call, time.perf_counter() - begin))

    # The first product of matrices loads the library of torch, which is no part of a call.
    (inputs[0] @ inputs[1].mT).sum().item()
    if name == "warmup":
        timed("warmup", partial(warm_up, sizes, dtype))
    attend = attend_flex if name == "flex" else attend_sparseflash

    def both_passes(pattern: str) -> None:
        # A loss, as in training. If a gradient is given, torch imports sympy to check its shape.
        loss = (attend(leaves, pattern) * inputs[3]).sum()
        torch.autograd.grad(loss, leaves)

    for call, pattern in PATTERNS.items():
        timed(call, partial(both_passes, pattern))
    return rows


def warm_up(sizes: Sizes, dtype: "torch.dtype") -> None:
    """Compiles the kernels of both masks of sparseflash."""
    import masks
    import sparseflash

    patterns = map(masks.parse, dict.fromkeys(PATTERNS.values()))
    sparseflash.warmup(
        *patterns,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        seq_len=sizes.seq_len,
        dtype=dtype,
        device=sizes.device,
    )


def attend_sparseflash(leaves: Leaves, pattern: str) -> "Tensor":
    """The output of sparseflash, from a pattern."""
    import masks
    import sparseflash

    return sparseflash.attention(*leaves, masks.parse(pattern))


def attend_flex(leaves: Leaves, pattern: str) -> "Tensor":
    """The output of compiled FlexAttention; a causal mask is a function, as its users write it."""
    from torch.nn.attention.flex_attention import create_block_mask

    import masks
    from experiments import baselines
    from masks.interop import to_flex

    seq_len, device = leaves[0].shape[2], leaves[0].device
    if pattern == "causal()":
        mask = create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, seq_len, seq_len, device
        )
    else:
        mask = to_flex(masks.parse(pattern)(seq_len, block_size=128, device=device))
    return baselines.attend_flex(mask)(*leaves)


if __name__ == "__main__":
    command(main)
