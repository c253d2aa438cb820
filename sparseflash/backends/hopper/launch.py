"""The host side of all kernels: descriptors of tensors, arguments, grids."""

from functools import lru_cache

import torch
from torch import Tensor

from masks.lookup_table import PREFETCH, BlockRows, LookupTable
from sparseflash.backends.hopper.device import LOG2E
from sparseflash.backends.hopper.gluon_shim import TensorDescriptor, gl
from sparseflash.spec import AttentionSpec

ALIGNMENT = 16  # bytes that the tensor memory accelerator wants addresses and strides to divide by
# How many times the mean the heaviest row of a mask holds: from the first on programs take tiles
# as they are done and not in turns, from the second on the heaviest rows of all heads come first.
UNEVEN, VERY_UNEVEN = 1.25, 3
GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def on_device(device: torch.device):
    """Context in which kernels run on `device`."""
    return torch.cuda.device(device)


def addressable(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if the tensor memory accelerator cannot address it."""
    aligned = tensor.data_ptr() % ALIGNMENT == 0
    strides = _strides(tensor.shape, tensor.stride(), tensor.element_size())
    return tensor if aligned and strides else tensor.contiguous()


@lru_cache(maxsize=4096)
def _strides(
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


def tiles_of(tensor: Tensor, rows: int) -> TensorDescriptor:
    """The (rows, width) tiles of an addressable tensor (batch, heads, tokens, dims)."""
    block = [1, 1, rows, width(tensor.shape[-1])]
    return _descriptor(tensor, block, _layout(tuple(block), tensor.dtype))


def terms_of(terms: Tensor, columns: int) -> TensorDescriptor:
    """The pieces of `columns` neighbouring entries of a row of row terms."""
    return _descriptor(terms, [1, columns], gl.NVMMASharedLayout(0, 32, 2))


def _descriptor(tensor: Tensor, block: list[int], layout) -> TensorDescriptor:
    strides = _strides(tensor.shape, tensor.stride(), tensor.element_size())
    return TensorDescriptor(tensor, list(tensor.shape), list(strides), block, layout)


@lru_cache(maxsize=64)
def _layout(block: tuple[int, ...], dtype: torch.dtype):
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[dtype])


def unpadded(tensor: Tensor, key_lengths: Tensor | None) -> Tensor:
    """Keys or values with zeros past the length of each batch element.

    Kernels give those keys no weight, but zero times NaN would be NaN.
    """
    if key_lengths is None:
        return tensor
    padding = torch.arange(tensor.shape[2], device=tensor.device) >= key_lengths[:, None]
    return tensor.masked_fill(padding[:, None, :, None], 0)


def table_arguments(rows: BlockRows, bank: Tensor, table: LookupTable) -> tuple[Tensor, ...]:
    """One direction of a lookup table, as device.Table."""
    lists = (rows.bounds, rows.full_index, rows.partial_index, rows.partial_tile, rows.order)
    return (*lists, bank, table.head_layer)


def schedule(
    spec: AttentionSpec, rows: BlockRows, heads: int
) -> tuple[tuple[Tensor | int | None, ...], tuple[int]]:
    """(counter, *device.Sizes), and the grid: at most a program for each multiprocessor.

    Heads follow one another, so that programs share keys and values in the cache. If some rows are
    very heavy, those of all heads come first: a program that took one of them last would keep all
    others waiting.
    """
    pairs = spec.batch * heads
    tiles = pairs * rows.rows
    heaviest = rows.max_count * rows.bounds.shape[0] * rows.rows / max(rows.total, 1)
    counter = None
    if heaviest > UNEVEN:
        counter = torch.zeros(1, dtype=torch.int32, device=spec.device)
    together = pairs if heaviest > VERY_UNEVEN else 1
    lengths = (spec.heads, spec.q_len, spec.k_len)
    sizes = (*lengths, spec.mask_heads, rows.rows, tiles, together)
    return (counter, *sizes), (min(tiles, multiprocessors(spec.device)),)


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def constants(spec: AttentionSpec, rows: BlockRows) -> dict:
    """Compile-time constants of a kernel, but for the sizes of its rings."""
    return {
        "GROUP": spec.heads // spec.kv_heads,
        "MASKED": spec.has_key_lengths or rows.partial_index.shape[0] > PREFETCH,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }


def scale2(spec: AttentionSpec) -> float:
    """scale * log2(e)."""
    return spec.scale * LOG2E.value
