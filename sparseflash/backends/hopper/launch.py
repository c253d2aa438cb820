"""The host side of all kernels: descriptors of tensors, arguments, grids."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from masks.lookup_table import PREFETCH, BlockLists, LookupTable
from sparseflash import dropout
from sparseflash.backends.compiled import launch
from sparseflash.backends.hopper.device import LOG2E, PART
from sparseflash.backends.hopper.gluon_shim import TensorDescriptor, gl, gluon
from sparseflash.backends.relaunch import again, remember
from sparseflash.dispatch.spec import AttentionSpec

ALIGNMENT = 16  # bytes that the tensor memory accelerator wants addresses and strides to divide by
# How many times the mean the heaviest row of a mask holds: from the first on programs take tiles
# as they are done and not in turns, from the second on the heaviest rows of all heads come first.
UNEVEN, VERY_UNEVEN = 1.25, 3
GLUON_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


class Tiles(NamedTuple):
    """Tiles of `rows` tokens and all dims of addressable tensors (batch, heads, tokens, dims)."""

    rows: int

    def of(self, tensor: Tensor) -> TensorDescriptor:
        facts = (tensor.shape, tensor.stride(), tensor.dtype, self.rows)
        return _Descriptor(tensor, *_tiling(*facts))


class Pieces(NamedTuple):
    """(rows, columns) pieces of a matrix."""

    columns: int
    rows: int = 1

    def of(self, tensor: Tensor) -> TensorDescriptor:
        shape, strides = list(tensor.shape), list(tensor.stride())
        return _Descriptor(tensor, shape, strides, [self.rows, self.columns], FLAT_LAYOUT)


PART_TILES = Tiles(PART.value)  # what a group of warps owns of a tensor
Read = Tiles | Pieces | None  # how a kernel reads a tensor: by a descriptor, or by its address


class Room(NamedTuple):
    """What a program has of a multiprocessor.

    programs:  how many share it
    constants: of the kernel: the sizes of its rings
    """

    programs: int
    constants: dict[str, int]


def launch_pass(
    kernel: gluon.jit,
    tensors: tuple[Tensor | None, ...],
    read: tuple[Read, ...],
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
    room: Room,
    by_key: bool = False,
) -> None:
    """Launches a persistent kernel over the query rows of a table, or over its key rows.

    Its parameters are `tensors`, each as it is `read`; device.Table; key_lengths; the counter;
    device.Sizes; scale2; device.Dropout; GROUP, MASKED, BLOCK; the constants of `room`.
    """
    block = table.block_size[0]
    rows = table.by_key if by_key else table.by_query
    counter = counter_of(rows, spec.device)
    seeds = (None, None) if spec.dropout_p == 0 else _words(seed)
    kind = (kernel.__name__, spec, *[None if x is None else x.stride() for x in tensors])
    addresses = [None if x is None else x.data_ptr() for x in (*tensors, key_lengths, counter)]
    if again(table, kind, (*addresses, *seeds)):
        return
    heads = spec.kv_heads if by_key else spec.heads
    sizes, grid = schedule(spec, rows, heads, room.programs)
    arguments = (
        *(_as_read(x, how) for x, how in zip(tensors, read, strict=True)),
        *_table_arguments(rows, table.bit_tiles_by_key if by_key else table.bit_tiles, table),
        *(key_lengths, counter, *sizes, spec.scale * LOG2E.value),
        *(*seeds, *_dropout_arguments(spec.dropout_p)),
    )
    group = spec.heads // spec.kv_heads
    masked = spec.has_key_lengths or rows.partial_index.shape[0] > PREFETCH
    facts = (spec.device, spec.dtype, spec.head_dim, block, group, masked, spec.dropout_p > 0)
    variant = (*facts, *(x is None for x in (*tensors, key_lengths, counter)))
    constants = {"GROUP": group, "MASKED": masked, "BLOCK": block} | room.constants
    constants |= OPTIONS | registers(room.programs)
    launched = launch(kernel, grid, arguments, variant, constants)
    if launched is not None:
        names = kernel.arg_names[: len(tensors)]
        changing = (*names, "key_lengths", "counter", "seed_low", "seed_high")
        remember(table, kind, launched, changing)


def _as_read(tensor: Tensor | None, how: Read) -> Tensor | TensorDescriptor | None:
    return tensor if tensor is None or how is None else how.of(tensor)


OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
REGISTERS = 65536  # of a multiprocessor


def registers(programs: int) -> dict[str, int]:
    """What each of the 256 threads of a program starts with where several share a multiprocessor,
    before those that compute take more and the others keep fewer.
    """
    return {} if programs == 1 else {"maxnreg": REGISTERS // programs // 256 // 8 * 8}


def addressable(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if the tensor memory accelerator cannot address it."""
    aligned = tensor.data_ptr() % ALIGNMENT == 0
    if aligned and tensor.is_contiguous():  # all head dims are multiples of its unit
        return tensor
    strides = addressable_strides(tensor.shape, tensor.stride(), tensor.element_size())
    return tensor if aligned and strides else tensor.contiguous()


@lru_cache(maxsize=4096)
def addressable_strides(
    shape: torch.Size, strides: tuple[int, ...], element_size: int
) -> tuple[int, ...] | None:
    """Strides for the accelerator, or None; those of dimensions of one element do not matter."""
    unit = ALIGNMENT // element_size
    *outer, inner = (n if size > 1 else unit for n, size in zip(strides, shape, strict=True))
    inner = 1 if shape[-1] == 1 else inner
    if inner != 1 or any(n <= 0 or n % unit for n in outer):
        return None
    return (*outer, inner)


def width(head_dim: int) -> int:
    """Dims of a tile: a power of 2. What lies past head_dim is zero in shared memory alone."""
    return 1 << (head_dim - 1).bit_length()


# By the width of tiles: the most keys of one where rows are queries.
KEYS = {64: 128, 128: 128, 256: 64}


@lru_cache(maxsize=64)
def key_tiles(block: int, head_dim: int) -> Tiles:
    """The tiles of keys and values where rows are queries: a block, or half of one."""
    return Tiles(min(block, KEYS[width(head_dim)]))


FLAT_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)


class _Descriptor(TensorDescriptor):
    """One of an addressable tensor, so that it is not checked again."""

    def __post_init__(self):
        pass


@lru_cache(maxsize=4096)
def _tiling(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int) -> tuple:
    """(shape, strides, tile, layout)"""
    tile = [1, 1, rows, width(shape[-1])]
    layout = gl.NVMMASharedLayout.get_default_for(tile, GLUON_DTYPES[dtype])
    return list(shape), list(addressable_strides(shape, strides, dtype.itemsize)), tile, layout


def unpadded(tensor: Tensor, key_lengths: Tensor | None) -> Tensor:
    """Keys or values with zeros past the length of each batch element.

    Kernels give those keys no weight, but zero times NaN would be NaN.
    """
    if key_lengths is None:
        return tensor
    padding = torch.arange(tensor.shape[2], device=tensor.device) >= key_lengths[:, None]
    return tensor.masked_fill(padding[:, None, :, None], 0)


def _table_arguments(rows: BlockLists, bank: Tensor, table: LookupTable) -> tuple[Tensor, ...]:
    """One direction of a lookup table, as device.Table."""
    lists = (
        rows.row_ptr,
        rows.full_index,
        rows.partial_index,
        rows.partial_bit_tile,
        rows.schedule,
    )
    return (*lists, bank, table.head_to_mask)


def _dropout_arguments(dropout_p: float) -> tuple[int | float | None, ...]:
    """(threshold, keep_scale) of device.Dropout."""
    if dropout_p == 0:
        return None, None
    return dropout.threshold(dropout_p) - 2**31, 1 / (1 - dropout_p)


def _words(seed: int) -> tuple[int, int]:
    """(seed_low, seed_high) of device.Dropout."""
    return _signed(seed % 2**32), _signed((seed >> 32) % 2**32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def counter_of(rows: BlockLists, device: torch.device) -> Tensor | None:
    """What hands out the tiles of uneven rows."""
    if rows.imbalance <= UNEVEN:
        return None
    return torch.zeros(1, dtype=torch.int32, device=device)


def schedule(
    spec: AttentionSpec, rows: BlockLists, heads: int, programs: int
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """device.Sizes, and the grid: at most as many programs as run at a time, `programs` on each
    multiprocessor.

    Heads follow one another, so that programs share keys and values in the cache. If some rows are
    very heavy, those of all heads come first: a program that took one of them last would keep all
    others waiting.
    """
    pairs = spec.batch * heads
    tiles = pairs * rows.num_rows
    together = pairs if rows.imbalance > VERY_UNEVEN else 1
    lengths = (spec.heads, spec.q_len, spec.k_len)
    sizes = (*lengths, spec.mask_heads, rows.num_rows, tiles, together)
    return sizes, (min(tiles, programs * multiprocessors(spec.device)), 1, 1)


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
