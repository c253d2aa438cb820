"""Masks as block lists of FlashAttention-4."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from masks._core.bit_tiles import deduplicate, pack
from masks._core.block_set import assemble
from masks._core.convert import STRIP
from masks._core.grid import Grid
from masks._core.intervals import from_points
from masks._pattern import Pattern
from masks.block_mask import BlockMask, stack
from masks.interop.lists import check_counts_and_columns, check_lists, padded_lists, sorted_blocks
from masks.mask_batch import check_block_mask


class BlockSparseTensors(NamedTuple):
    """Block lists of FlashAttention-4, with the fields of its BlockSparseTensorsTorch.

    Attributes:
        mask_block_cnt: Number of partial blocks in each block row, int32 (1, heads, rows).
        mask_block_idx: Their columns, int32 (1, heads, rows, columns), ascending, undefined past
            the count.
        full_block_cnt, full_block_idx: The same for full blocks.
        block_size: (bq, bk) in tokens, also if the rows are block rows of keys.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def to_block_lists(mask: BlockMask, *, by_key: bool = False) -> BlockSparseTensors:
    """Converts a mask to block lists of FlashAttention-4.

    The lists do not contain the element masks of partial blocks. The kernel needs a mask_mod for
    these.

    Args:
        mask: The mask.
        by_key: Whether rows are block rows of keys, as in the backward pass, not of queries.

    Returns:
        The lists.

    Raises:
        TypeError: `mask` is not a BlockMask.
    """
    check_block_mask(mask)
    blocks = (mask.T if by_key else mask).block_set
    return BlockSparseTensors(
        *padded_lists(blocks, blocks.partial),
        *padded_lists(blocks, blocks.full.expand()),
        block_size=mask.block_size,
    )


def from_block_lists(
    lists: BlockSparseTensors, seq_len: int | tuple[int, int], pattern: Pattern | None = None
) -> BlockMask:
    """Converts block lists of FlashAttention-4.

    Args:
        lists: The lists of the forward pass.
        seq_len: Length in tokens, one number or (q_len, k_len).
        pattern: Which pairs of the partial blocks attend.

    Returns:
        The mask.

    Raises:
        TypeError: `lists` is not a BlockSparseTensors of tensors of integers, or `pattern` is not
            a Pattern.
        ValueError: The lists have several batch elements or another length; they have partial
            blocks, but there is no pattern; a count exceeds its list; or a column is outside of
            the grid or listed twice in a row.
    """
    check_lists("lists", lists, BlockSparseTensors)
    for kind in ("mask", "full"):
        count, index = (f"{kind}_block_{part}" for part in ("cnt", "idx"))
        check_counts_and_columns(lists, count, index)
    if not isinstance(pattern, Pattern | None):
        raise TypeError(f"pattern must be a Pattern or None, got {type(pattern).__name__}")
    if lists.full_block_cnt.shape[0] != 1:
        raise ValueError(f"lists must have one batch element, got {lists.full_block_cnt.shape[0]}")
    if pattern is None:
        if lists.mask_block_cnt.any():
            raise ValueError("pattern must say which pairs of partial blocks attend, got None")
        return from_lists(lists, seq_len, None)
    full = from_lists(lists._replace(mask_block_cnt=torch.zeros_like(lists[0])), seq_len, None)
    candidates = from_lists(lists, seq_len, None) - full
    return full | (candidates & pattern(seq_len, lists.block_size, full.device))


def from_lists(
    lists: BlockSparseTensors,
    seq_len: int | tuple[int, int],
    attends: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
) -> BlockMask:
    """The mask of the lists of one batch element.

    attends(head, q, k) is true for pairs of partial blocks that attend; None if all do.
    """
    grid = Grid.of(seq_len, lists.block_size, lists.full_block_cnt.device)
    if lists.full_block_cnt.shape[-1] != grid.nq:
        raise ValueError(
            f"lists must have {grid.nq} block rows for seq_len {grid.seq_len} in blocks of "
            f"{grid.block_size}, got {lists.full_block_cnt.shape[-1]}"
        )
    heads = []
    for head in range(lists.full_block_cnt.shape[1]):
        full = _flat(grid, lists.full_block_cnt[0, head], lists.full_block_idx[0, head])
        partial = _flat(grid, lists.mask_block_cnt[0, head], lists.mask_block_idx[0, head])
        if attends is None:
            bit_tiles, tile = grid.inbounds_tiles[:1], torch.zeros_like(partial)
        else:
            bit_tiles, tile = _evaluated(grid, partial, head, attends)
        blocks = assemble(grid, (0,), from_points(full), partial, bit_tiles, tile)
        heads.append(BlockMask(blocks))
    return stack(heads)


def _flat(grid: Grid, count: Tensor, index: Tensor) -> Tensor:
    """The ascending flat indices of the listed blocks.

    Raises:
        ValueError: A count exceeds the list, or a column is outside of the grid or listed twice.
    """
    most = index.shape[1]
    if bool(((count < 0) | (count > most)).any()):
        raise ValueError(f"counts must be 0 to {most}, the length of the lists, got {count}")
    listed = torch.arange(most, device=index.device) < count[:, None]
    row, slot = listed.nonzero(as_tuple=True)
    return sorted_blocks(grid, row, index[row, slot])[0]


def _evaluated(
    grid: Grid, flat: Tensor, head: int, attends: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(bit_tiles, tile) of the pairs of these blocks for which attends(head, q, k) is true."""
    by_key = torch.vmap(attends, in_dims=(None, None, 0))
    by_query = torch.vmap(by_key, in_dims=(None, 0, None))
    by_block = torch.vmap(by_query, in_dims=(None, 0, 0))
    _, row, column = grid.locate(flat)
    queries = row[:, None] * grid.bq + torch.arange(grid.bq, device=grid.device)
    keys = column[:, None] * grid.bk + torch.arange(grid.bk, device=grid.device)
    # A function may index tensors of the sequence's length, and bits outside it are cleared.
    queries, keys = queries.clamp(max=grid.q_len - 1), keys.clamp(max=grid.k_len - 1)
    which = torch.tensor(head, device=grid.device)
    step = max(1, STRIP // (grid.bq * grid.bk))
    words = [
        pack(by_block(which, q, k).expand(-1, grid.bq, grid.bk))
        for q, k in zip(queries.split(step), keys.split(step), strict=True)
        if len(q)
    ]
    return deduplicate(torch.cat([grid.inbounds_tiles[:0], *words]))
