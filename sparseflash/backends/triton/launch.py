"""The host side of all kernels: their arguments, their constants and their grid of programs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from masks.lookup_table import BlockLists, LookupTable
from sparseflash import dropout
from sparseflash.backends.compiled import launch
from sparseflash.backends.relaunch import again, remember
from sparseflash.backends.triton.configs import (
    FORCED,
    Config,
    KernelVariant,
    kernel_variant,
    resident_programs,
)
from sparseflash.backends.triton.tiles import LOG2E
from sparseflash.dispatch.spec import AttentionSpec

VECTOR_BYTES = 16  # widest load of a thread, and the alignment of the tensor memory accelerator
MAX_TILE = 256
# From this ratio on of the longest row to the mean, the longest rows of all heads start first.
LONGEST_FIRST_IMBALANCE = 3
MAX_GRID_YZ = 65535  # programs along the second and the third axis of a grid
RANK = 4  # of query, key and value: each comes with so many strides


def launch_pass(
    pass_name: str,
    kernel: triton.JITFunction,
    tensors: tuple[Tensor, ...],
    streamed: tuple[int, ...],
    others: tuple[Tensor | int | None, ...],
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
    bias: Tensor | None = None,
) -> None:
    """Launches the kernel of one pass: "forward", "dq" (rows of queries) or "dkdv" (rows of keys).

    Its parameters are `tensors`, each with its strides; descriptors of those that its loop reads,
    `streamed` by their places; `others`; the table; key_lengths; bias; run-time sizes;
    scalars; constants.
    """
    prepared = prepare(pass_name, spec, tensors, streamed)
    launch_prepared(prepared, kernel, tensors, others, table, key_lengths, seed, spec, bias)


def launch_prepared(
    prepared: "PreparedPass",
    kernel: triton.JITFunction,
    tensors: tuple[Tensor, ...],
    others: tuple[Tensor | int | None, ...],
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
    bias: Tensor | None = None,
    grid: tuple[int, int, int] | None = None,
) -> None:
    """Launches the kernel of a pass that was prepared, by default with a program for each tile of
    rows; see launch_pass.
    """
    addresses = [x.data_ptr() for x in tensors]
    moved = [x.data_ptr() if isinstance(x, Tensor) else None for x in (*others, key_lengths, bias)]
    streamed = [addresses[place] for place in prepared.streamed]
    facts = [Tensor if isinstance(x, Tensor) else x for x in others]
    bias_stride = 0 if bias is None or len(bias) == 1 else bias.stride(0)
    kind = (kernel.__name__, prepared, grid, bias_stride, *facts)
    if again(table, kind, (*addresses, *streamed, *moved, seed)):
        return
    rows = table.by_key if prepared.pass_name == "dkdv" else table.by_query
    sizes, every_tile = _sizes_and_grid(spec, rows, prepared.heads, prepared.parts)
    scale2, cap, threshold, keep_scale = prepared.scalars
    arguments = (
        *_interleaved(tensors, prepared.strides),
        *_descriptors(prepared.tile, [tensors[place] for place in prepared.streamed]),
        *others,
        *_table_arguments(table, rows),
        *(key_lengths, bias, bias_stride),
        *sizes,
        *(scale2, cap, seed, threshold, keep_scale),
    )
    missing = tuple([x is None for x in (*others, key_lengths)])
    variant = (prepared.variant, missing)
    launched = launch(kernel, grid or every_tile, arguments, variant, prepared.constants)
    if launched is not None:
        strided = len(tensors) * (1 + RANK)
        names = kernel.arg_names[: strided + len(streamed) + len(others)]
        first = (*names[: strided : 1 + RANK], *names[strided:])
        remember(table, kind, launched, (*first, "key_lengths", "bias", "seed"))


def launch_with_layout(
    kernel: triton.JITFunction,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    others: tuple[Tensor | int | None, ...],
    constants: dict,
) -> None:
    """Launches a kernel whose parameters are `tensors`, each with its strides; `others`; and
    constants."""
    strides, aligned = _strides_and_alignment(tensors)
    first = tensors[0]
    scaled, layout = _layout(first.element_size(), strides, aligned)
    missing = tuple([x is None for x in others])
    variant = (first.device, first.dtype, layout, missing, *constants.items())
    arguments = (*_interleaved(tensors, scaled), *others)
    launch(kernel, grid, arguments, variant, constants | layout.constants)


@dataclass(frozen=True, eq=False)
class PreparedPass:
    """What is the same in all launches of a pass with the same facts.

    streamed:     the tensors that its loop reads, by their places
    variant, constants: see compiled.launch
    strides:      those of the tensors, as kernels take them
    tile:         shape of the tiles that descriptors describe, None where pointers are used
    heads, parts: programs along the heads, and for each block row
    slots:        programs that run at a time, about
    scalars:      scale * log2(e), the soft cap, the least random word that keeps a pair,
        1 / (1 - dropout_p)
    """

    pass_name: str
    config: Config
    streamed: tuple[int, ...]
    variant: tuple
    constants: dict
    strides: tuple[tuple[int, ...], ...]
    tile: list[int] | None
    heads: int
    parts: int
    slots: int
    scalars: tuple[float, float, int, float]


def prepare(
    pass_name: str,
    spec: AttentionSpec,
    tensors: tuple[Tensor, ...],
    streamed: tuple[int, ...],
    packed: int | None = None,
) -> PreparedPass:
    """What a pass over these tensors launches with; packed: heads in a tile of "decode"."""
    return _prepare_pass(pass_name, spec, streamed, packed, *_strides_and_alignment(tensors))


@lru_cache(maxsize=4096)
def _prepare_pass(
    pass_name: str,
    spec: AttentionSpec,
    streamed: tuple[int, ...],
    packed: int | None,
    strides: tuple[tuple[int, ...], ...],
    aligned: tuple[bool, ...],
) -> PreparedPass:
    size = spec.dtype.itemsize
    describable = all(aligned[i] and _is_describable(size, strides[i]) for i in streamed)
    packed_rows = spec.q_len * packed if packed else 0
    chosen = _variant_of(pass_name, spec, describable, packed_rows)
    config, group = chosen.config, spec.heads // spec.kv_heads
    block_q, block_k = spec.block_size
    constants = {"GROUP": group}
    if pass_name == "dkdv":
        heads, parts, step = spec.kv_heads, block_k // config.bn, config.bm
    elif packed:
        heads, parts, step = spec.heads // packed, -(-packed_rows // config.bm), config.bn
        constants["PACKED"] = packed
    else:
        heads, parts, step = spec.heads, block_q // config.bm, config.bn
    scaled, layout = _layout(size, strides, aligned)
    return PreparedPass(
        pass_name=pass_name,
        config=config,
        streamed=streamed,
        variant=(chosen, layout, *constants.values()),
        constants=constants | layout.constants | chosen.constants,
        strides=scaled,
        tile=[1, 1, step, chosen.constants["DIMS"]] if config.tma else None,
        heads=heads,
        parts=parts,
        slots=resident_programs(spec.device, config, pass_name, spec.dtype, spec.head_dim),
        scalars=_scalars(spec),
    )


def _variant_of(
    pass_name: str, spec: AttentionSpec, describable: bool, packed_rows: int
) -> KernelVariant:
    facts = (spec.device, spec.dtype, spec.head_dim, spec.block_size)
    scores = (spec.softcap is not None, spec.score, spec.bias, spec.precision)
    dropout = spec.dropout_p > 0
    return kernel_variant(pass_name, *facts, dropout, *scores, describable, packed_rows)


@contextmanager
def forced(config: Config, *passes: str) -> Iterator[None]:
    """Makes some passes run with `config`, whatever it needs, so that it can be measured."""
    FORCED.update(dict.fromkeys(passes, config))
    _forget_plans()
    try:
        yield
    finally:
        FORCED.clear()
        _forget_plans()


def _forget_plans() -> None:
    kernel_variant.cache_clear()
    _prepare_pass.cache_clear()


class Layout(NamedTuple):
    """What a kernel is compiled to know of its strided tensors.

    Kernels serve any strides (see tiles.unspecialized). ALIGN is the largest power of two, up to
    16 bytes, that divides all strides but the last: those come divided by it.

    unit:    for each tensor, whether its last stride is 1
    wide:    the strides that take 64 bits, by tensor and axis
    aligned: for each tensor, whether it begins at a multiple of 16 bytes
    """

    align: int
    index: tl.dtype
    unit: tuple[bool, ...]
    wide: tuple[tuple[int, int], ...]
    aligned: tuple[bool, ...]

    @property
    def constants(self) -> dict:
        return {"ALIGN": self.align, "INDEX": self.index}


@lru_cache(maxsize=4096)
def _layout(
    element_size: int, strides: tuple[tuple[int, ...], ...], aligned: tuple[bool, ...]
) -> tuple[tuple[tuple[int, ...], ...], Layout]:
    """Strides as kernels take them, and the layout of their tensors."""
    unit = tuple(s[-1] == 1 for s in strides)
    align = (
        math.gcd(VECTOR_BYTES // element_size, *(n for s in strides for n in s[:-1]))
        if all(unit)
        else 1
    )
    reach = MAX_TILE * max(token + dim for *_, token, dim in strides)
    index = tl.int64 if reach >= 2**31 else tl.int32
    scaled = tuple((*(n // align for n in s[:-1]), s[-1]) for s in strides)
    wide = tuple((i, j) for i, s in enumerate(scaled) for j, n in enumerate(s) if n >= 2**31)
    return scaled, Layout(align, index, unit, wide, aligned)


def _strides_and_alignment(
    tensors: tuple[Tensor, ...],
) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    strides = tuple([t.stride() for t in tensors])
    return strides, tuple([t.data_ptr() % VECTOR_BYTES == 0 for t in tensors])


def _interleaved(tensors: tuple[Tensor, ...], strides: tuple[tuple[int, ...], ...]) -> list:
    """Each tensor followed by its strides."""
    return [argument for t, s in zip(tensors, strides, strict=True) for argument in (t, *s)]


def _is_describable(element_size: int, strides: tuple[int, ...]) -> bool:
    """Whether the tensor memory accelerator can read an aligned tensor of these strides."""
    *outer, inner = strides
    return inner == 1 and all(n > 0 and n * element_size % VECTOR_BYTES == 0 for n in outer)


class _Descriptor(TensorDescriptor):
    """One whose tensor and tile are known to be right, so that they are not checked again."""

    def __post_init__(self):
        pass


def _descriptors(tile: list[int] | None, streamed: list[Tensor]) -> list[_Descriptor | None]:
    if tile is None:
        return [None] * len(streamed)
    return [_Descriptor(t, t.shape, t.stride(), tile) for t in streamed]


def _table_arguments(table: LookupTable, rows: BlockLists) -> tuple[Tensor, ...]:
    """One direction of a lookup table, as tiles.Table."""
    lists = (
        rows.row_ptr,
        rows.full_index,
        rows.partial_index,
        rows.partial_bit_tile,
        rows.schedule,
    )
    return (*lists, table.bit_tiles, table.head_to_mask)


def _sizes_and_grid(
    spec: AttentionSpec, rows: BlockLists, heads: int, parts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """tiles.Sizes, and the grid with `parts` programs for each block row of each head."""
    num_masks = rows.row_ptr.shape[0]
    tiles = rows.num_rows * parts
    use_schedule = rows.imbalance != 1
    longest_first = rows.imbalance > LONGEST_FIRST_IMBALANCE and tiles <= MAX_GRID_YZ
    schedule = (num_masks, rows.num_rows, int(use_schedule), int(longest_first))
    masks = (spec.mask_heads if spec.mask_batch > 1 else 0, int(spec.mask_heads > 1))
    sizes = (spec.heads, spec.q_len, spec.k_len, *schedule, *masks)
    return sizes, (heads, spec.batch, tiles) if longest_first else (tiles, heads, spec.batch)


def _scalars(spec: AttentionSpec) -> tuple[float, float, int, float]:
    least = dropout.threshold(spec.dropout_p)
    return spec.scale * LOG2E.value, spec.softcap or 0.0, least, 1.0 / (1.0 - spec.dropout_p)
