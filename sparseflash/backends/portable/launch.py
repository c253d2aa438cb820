"""The host side of all kernels: their arguments, their constants and their grid of programs."""

import math
from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from masks.lookup_table import BlockRows, LookupTable
from sparseflash.backends.portable.configs import Config, plan
from sparseflash.backends.portable.tiles import LOG2E
from sparseflash.spec import AttentionSpec

VECTOR_BYTES = 16  # widest load of a thread, and the alignment of the tensor memory accelerator
WIDEST_TILE = 256
HEAVY_ROW = 3  # a mask is uneven when its heaviest row holds more than this many times the mean
GRID_LIMIT = 65535  # programs along the second and the third axis of a grid


def launch_pass(
    which: str,
    kernel: triton.JITFunction,
    tensors: tuple[Tensor, ...],
    streamed: tuple[Tensor, ...],
    others: tuple[Tensor | int | None, ...],
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
) -> None:
    """Launches the kernel of one pass: "forward", "dq" (rows of queries) or "dkdv" (rows of keys).

    Its parameters are `tensors`, each with its strides; descriptors of those that its loop reads
    (`streamed`); `others`; the table; key_lengths; run-time sizes; scalars; constants.
    """
    config, constants = configuration(which, streamed, spec)
    block_q, block_k = spec.block_size
    if which == "dkdv":
        rows, heads, parts, step = table.by_key, spec.kv_heads, block_k // config.bn, config.bm
    else:
        rows, heads, parts, step = table.by_query, spec.heads, block_q // config.bm, config.bn
    sizes, grid = _sizes_and_grid(spec, rows, heads, parts)
    strided, layout = strided_arguments(*tensors)
    arguments = (
        *strided,
        *_descriptors(config, streamed, step, constants["DIMS"]),
        *others,
        *_table_arguments(table, rows),
        key_lengths,
        *sizes,
        *_scalars(spec, seed),
    )
    launch(kernel, grid, *arguments, GROUP=spec.heads // spec.kv_heads, **layout, **constants)


def configuration(
    which: str, streamed: tuple[Tensor, ...], spec: AttentionSpec
) -> tuple[Config, dict]:
    """How one pass of a call runs; see configs.plan."""
    facts = (spec.device, spec.dtype, spec.head_dim, spec.block_size, spec.dropout_p > 0)
    return plan(which, *facts, spec.precision, all(map(_is_describable, streamed)))


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Launches a kernel unless its grid is empty."""
    if 0 not in grid:
        kernel[grid](*arguments, **constants)


def on_device(device: torch.device):
    """Context in which kernels run on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def strided_arguments(*tensors: Tensor) -> tuple[list, dict]:
    """Each tensor followed by its strides, and the constants that say how kernels read them."""
    strides, layout = _aligned_strides(tensors[0].element_size(), *(t.stride() for t in tensors))
    return [arg for t, s in zip(tensors, strides, strict=True) for arg in (t, *s)], layout


@lru_cache(maxsize=4096)
def _aligned_strides(
    element_size: int, *strides: tuple[int, ...]
) -> tuple[tuple[tuple[int, ...], ...], dict]:
    """Strides as kernels take them, and constants that say how to read them.

    Kernels are compiled for any strides (see tiles.unspecialized). What they know is ALIGN, the
    largest power of two, up to 16 bytes, that divides all but the last: those come divided by it.
    """
    contiguous = all(s[-1] == 1 for s in strides)
    align = (
        math.gcd(VECTOR_BYTES // element_size, *(n for s in strides for n in s[:-1]))
        if contiguous
        else 1
    )
    reach = WIDEST_TILE * max(token + dim for *_, token, dim in strides)
    scaled = tuple((*(n // align for n in s[:-1]), s[-1]) for s in strides)
    return scaled, {"ALIGN": align, "INDEX": tl.int64 if reach >= 2**31 else tl.int32}


def _is_describable(tensor: Tensor) -> bool:
    """Whether the tensor memory accelerator can read a tensor."""
    strides = _describable_strides(tensor.element_size(), tensor.stride())
    return strides and tensor.data_ptr() % VECTOR_BYTES == 0


@lru_cache(maxsize=4096)
def _describable_strides(element_size: int, strides: tuple[int, ...]) -> bool:
    *outer, inner = strides
    return inner == 1 and all(n > 0 and n * element_size % VECTOR_BYTES == 0 for n in outer)


def _descriptors(config: Config, streamed: tuple[Tensor, ...], rows: int, dims: int) -> list:
    """For each tensor the descriptor of its (rows, dims) tiles, or None if pointers are used."""
    if not config.tma:
        return [None] * len(streamed)
    return [TensorDescriptor(t, t.shape, t.stride(), [1, 1, rows, dims]) for t in streamed]


def _table_arguments(table: LookupTable, rows: BlockRows) -> tuple[Tensor, ...]:
    """One direction of a lookup table, as tiles.Table."""
    lists = (rows.bounds, rows.full_index, rows.partial_index, rows.partial_tile, rows.order)
    return (*lists, table.bank, table.head_layer)


def _sizes_and_grid(
    spec: AttentionSpec, rows: BlockRows, heads: int, parts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """tiles.Sizes, and the grid with `parts` programs for each block row of each head."""
    layers = rows.bounds.shape[0]
    tiles = rows.rows * parts
    slots = rows.max_count * layers * rows.rows
    ordered = slots != rows.total
    heavy_first = slots > HEAVY_ROW * rows.total and tiles <= GRID_LIMIT
    sizes = (spec.heads, spec.q_len, spec.k_len, layers, rows.rows, int(ordered), int(heavy_first))
    return sizes, (heads, spec.batch, tiles) if heavy_first else (tiles, heads, spec.batch)


def _scalars(spec: AttentionSpec, seed: int) -> tuple[float, int, int, float]:
    """scale * log2(e); dropout's seed, the least random word that keeps a pair, 1 / (1 - p)."""
    threshold = math.floor(spec.dropout_p * 2**32)
    return spec.scale * LOG2E.value, seed or 0, threshold, 1.0 / (1.0 - spec.dropout_p)
