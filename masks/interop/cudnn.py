"""Masks as block lists and as intervals of cuDNN."""

from typing import NamedTuple, overload

import torch
from torch import Tensor

from masks._core.convert import STRIP
from masks._core.grid import Grid
from masks.arguments import check_dtype, check_integer
from masks.block_mask import BlockMask, stack
from masks.builders import from_intervals
from masks.interop.flash_attention import BlockSparseTensors, from_block_lists
from masks.interop.lists import INTEGERS, check_counts_and_columns, check_lists, padded_lists
from masks.mask_batch import MaskBatch, check_block_mask


class CudnnBlocks(NamedTuple):
    """Block lists of cuDNN's block-sparse attention, with the names of its arguments.

    Attributes:
        q2k_block_index: Columns, int32 (batch, heads, nq, most), ascending, 0 past the count.
        q2k_block_nums: Number of blocks in each block row, int32 (batch, heads, nq).
        block_sizes: Number of keys in each block, int32 (nk,); None if no block is clipped.
        sparse_block_size: Side of a block, in tokens.
    """

    q2k_block_index: Tensor
    q2k_block_nums: Tensor
    block_sizes: Tensor | None
    sparse_block_size: int


def to_cudnn_blocks(mask: BlockMask, batch: int = 1, heads: int | None = None) -> CudnnBlocks:
    """Converts a mask to block lists of cuDNN's block-sparse attention.

    Args:
        mask: A mask with square blocks and without partial blocks. The kernels of cuDNN take sides
            of 64 and 128.
        batch: Number of batch elements. All get the same lists.
        heads: Number of query heads, by default that of the mask.

    Returns:
        The arguments of cudnn.block_sparse_attention.

    Raises:
        TypeError: `mask` is not a BlockMask, or a number is not an integer.
        ValueError: The mask has partial blocks, blocks that are not square, or another number of
            heads.
    """
    check_block_mask(mask)
    g, batch = mask.grid, check_integer("batch", batch, least=1)
    heads = mask.num_heads if heads is None else check_integer("heads", heads, least=1)
    if mask.partial_blocks:
        raise ValueError(f"mask must have no partial blocks, got {mask.partial_blocks}")
    if g.bq != g.bk:
        raise ValueError(f"mask must have square blocks, got {g.block_size}")
    if mask.num_heads not in (1, heads):
        raise ValueError(f"mask must have 1 or {heads} heads, got {mask.num_heads}")
    count, index = padded_lists(mask.block_set, mask.block_set.full.expand())
    index = index[..., : max(1, int(count.max()))].expand(batch, heads, -1, -1).contiguous()
    sizes = _keys_of_blocks(g).to(g.device) if g.k_len % g.bk else None
    return CudnnBlocks(index, count.expand(batch, heads, -1).contiguous(), sizes, g.bk)


def from_cudnn_blocks(blocks: CudnnBlocks, seq_len: int | tuple[int, int]) -> BlockMask:
    """Converts block lists of cuDNN.

    Args:
        blocks: The lists of one batch element.
        seq_len: Length in tokens, one number or (q_len, k_len).

    Returns:
        The mask.

    Raises:
        TypeError: `blocks` is not a CudnnBlocks of tensors of integers.
        ValueError: The lists have several batch elements or another length; a count exceeds its
            list; a column is outside of the grid or listed twice in a row; or block_sizes do not
            agree with seq_len.
    """
    check_lists("blocks", blocks, CudnnBlocks)
    check_counts_and_columns(blocks, "q2k_block_nums", "q2k_block_index")
    index, count, sizes, side = blocks
    expected = _keys_of_blocks(Grid.of(seq_len, side))
    if sizes is not None:
        check_dtype("block_sizes", sizes, *INTEGERS)
    if sizes is not None and sizes.tolist() != expected.tolist():
        raise ValueError(f"block_sizes must be {expected.tolist()}, got {sizes.tolist()}")
    none = torch.zeros_like(count)
    return from_block_lists(BlockSparseTensors(none, index, count, index, (side, side)), seq_len)


def to_cudnn_intervals(mask: BlockMask | MaskBatch, batch: int = 1) -> Tensor:
    """Converts a mask to the argument `mask_func` of cudnn.flex_attention.create_mask_plan.

    It has the keys of each query as intervals [0, F0), [F1, F2), ..., which may be empty.

    Args:
        mask: The mask of all batch elements, or a batch with a mask for each.
        batch: Number of batch elements that get the same intervals; 1 for a MaskBatch.

    Returns:
        int32 (heads, endpoints, batch * q_len), on the device of the mask. The number of endpoints
        is odd. If a query needs fewer than others, its last endpoint is repeated.

    Raises:
        TypeError: `mask` is not a BlockMask or a MaskBatch, or `batch` is not an integer.
        ValueError: `batch` is below 1, or above 1 for a MaskBatch.
    """
    batch = check_integer("batch", batch, least=1)
    if isinstance(mask, MaskBatch):
        each = [mask[b] for b in range(len(mask))]
        if batch > 1:
            raise ValueError(f"batch must be 1 for a MaskBatch, got {batch}")
    else:
        check_block_mask(mask, "a BlockMask or a MaskBatch")
        each = [mask]
    q_len, k_len = mask.seq_len
    rows = max(1, STRIP // k_len)
    strips = [
        _endpoints(own.slice_queries(begin, min(begin + rows, q_len)).to_dense())
        for own in each
        for begin in range(0, q_len, rows)
    ]
    most = max(strip.shape[1] for strip in strips)
    padded = [torch.cat([s, s[:, -1:].expand(-1, most - s.shape[1], -1)], dim=1) for s in strips]
    return torch.cat(padded, dim=2).repeat(1, 1, batch)


@overload
def from_cudnn_intervals(
    intervals: Tensor, k_len: int, block_size: int | tuple[int, int] = 128, batch: None = None
) -> BlockMask: ...
@overload
def from_cudnn_intervals(
    intervals: Tensor, k_len: int, block_size: int | tuple[int, int] = 128, *, batch: int
) -> MaskBatch: ...
def from_cudnn_intervals(
    intervals: Tensor,
    k_len: int,
    block_size: int | tuple[int, int] = 128,
    batch: int | None = None,
) -> BlockMask | MaskBatch:
    """Converts intervals of keys; see to_cudnn_intervals.

    Args:
        intervals: Integers (heads, endpoints, queries) from 0 to k_len, with an odd number of
            endpoints, which do not descend.
        k_len: Number of keys, in tokens.
        block_size: Block size in tokens, one number or (bq, bk).
        batch: Number of batch elements, whose queries follow one another; None for the mask of
            one batch element.

    Returns:
        The mask; with `batch` a MaskBatch.

    Raises:
        TypeError: `intervals` is not a tensor of integers, or `batch` is not an integer.
        ValueError: `intervals` has another shape, an endpoint is past the keys or below the one
            before it, or `batch` does not divide the number of queries.
    """
    check_dtype("intervals", intervals, *INTEGERS)
    if intervals.dim() != 3 or intervals.shape[1] % 2 == 0 or 0 in intervals.shape:
        raise ValueError(
            "intervals must be (at least 1 head, an odd number of endpoints, queries), got "
            f"{tuple(intervals.shape)}"
        )
    if batch is not None:
        batch = check_integer("batch", batch, least=1)
        if intervals.shape[2] % batch:
            raise ValueError(f"batch must divide the {intervals.shape[2]} queries, got {batch}")
        each = intervals.chunk(batch, dim=2)
        return MaskBatch.from_masks([from_cudnn_intervals(x, k_len, block_size) for x in each])
    grid = Grid.of(
        (intervals.shape[2], check_integer("k_len", k_len)), block_size, intervals.device
    )
    beyond = (intervals < 0) | (intervals > k_len)
    if bool(beyond.any()):
        raise ValueError(f"intervals must be 0 to k_len {k_len}, got {int(intervals[beyond][0])}")
    if bool((intervals.diff(dim=1) < 0).any()):
        head, _, query = (intervals.diff(dim=1) < 0).nonzero()[0].tolist()
        raise ValueError(
            f"intervals must not descend, got the endpoints {intervals[head, :, query].tolist()} "
            f"of query {query} in head {head}"
        )
    heads = []
    for endpoints in intervals.long():
        mask = from_intervals(grid, torch.zeros_like(endpoints[0]), endpoints[0])
        for low, high in zip(endpoints[1::2], endpoints[2::2], strict=True):
            mask = mask | from_intervals(grid, low, high)
        heads.append(mask)
    return stack(heads)


def _keys_of_blocks(grid: Grid) -> Tensor:
    """int32 (nk,): the number of keys in each block column, on the CPU."""
    first = torch.arange(grid.nk, dtype=torch.int32, device="cpu") * grid.bk
    return (grid.k_len - first).clamp(max=grid.bk)


def _endpoints(dense: Tensor) -> Tensor:
    """int32 (heads, odd number, rows): beginnings and ends of the runs of keys of bool rows."""
    dense = dense.view(-1, *dense.shape[-2:])
    padded = torch.nn.functional.pad(dense, (1, 1))
    changes = padded[..., 1:] != padded[..., :-1]
    # The first interval begins at 0, which is not stored. If no run begins at 0, it is empty.
    changes[..., 0] ^= True
    head, row, position = changes.nonzero(as_tuple=True)
    count = changes.sum(-1)
    slot = changes.cumsum(-1)[head, row, position] - 1
    last = (changes * torch.arange(changes.shape[-1], device=dense.device)).amax(-1)
    found = last.unsqueeze(1).repeat(1, int(count.max()), 1)
    found[head, slot, row] = position
    return found.int()
