"""Masks as blocks of FlashInfer."""

from typing import NamedTuple

import torch
from torch import Tensor

from masks._core.bit_tiles import pack
from masks._core.block_set import assemble, from_full_runs
from masks._core.grid import Grid
from masks._core.intervals import from_points
from masks.arguments import check_dtype
from masks.block_mask import BlockMask
from masks.interop.lists import check_integers, check_lists, sorted_blocks
from masks.mask_batch import check_block_mask


class FlashInferBlocks(NamedTuple):
    """Blocks in CSR form, with the names of arguments of FlashInfer's block-sparse plan.

    Attributes:
        indptr: Row pointers, int32 (rows + 1,).
        indices: Columns, int32 (n,), ascending in each row.
        M, N: Number of queries and of keys.
        R, C: Number of queries and of keys in a block.
        mask: The pairs of each block that attend, bool (n, R, C); None if all blocks are full.
    """

    indptr: Tensor
    indices: Tensor
    M: int
    N: int
    R: int
    C: int
    mask: Tensor | None = None


def to_flashinfer(mask: BlockMask) -> FlashInferBlocks:
    """Converts a mask to arguments of FlashInfer's BlockSparseAttentionWrapper.plan.

    Args:
        mask: A mask of one head, whose lengths are multiples of its block size.

    Returns:
        The arguments.

    Raises:
        TypeError: `mask` is not a BlockMask.
        ValueError: The mask has several heads, or lengths that are not whole blocks.
    """
    check_block_mask(mask)
    g = mask.grid
    if g.q_len % g.bq or g.k_len % g.bk:
        raise ValueError(
            f"mask must have lengths of whole blocks of {g.block_size}, got {g.seq_len}"
        )
    rows = mask.to_scipy()
    indptr, indices = (torch.from_numpy(part).int() for part in (rows.indptr, rows.indices))
    pairs = torch.from_numpy(rows.data).to(mask.device) if mask.partial_blocks else None
    lists = (indptr.to(mask.device), indices.to(mask.device))
    return FlashInferBlocks(*lists, *g.seq_len, *g.block_size, pairs)


def from_flashinfer(blocks: FlashInferBlocks) -> BlockMask:
    """Converts blocks in the form of FlashInfer.

    Args:
        blocks: The blocks.

    Returns:
        A mask on the device of `blocks`.

    Raises:
        TypeError: `blocks` is not a FlashInferBlocks of tensors of integers, or its mask is not
            bool.
        ValueError: A mask cannot have blocks of this size; indptr does not ascend from 0 to the
            number of blocks; a column is outside of the grid or listed twice in a row; or `mask`
            has another shape.
    """
    check_lists("blocks", blocks, FlashInferBlocks)
    for name in ("indptr", "indices"):
        check_integers(name, getattr(blocks, name), ("entries",))
    indptr, indices, *sizes, pairs = blocks
    if pairs is not None:
        check_dtype("mask", pairs, torch.bool)
    grid = Grid.of((sizes[0], sizes[1]), (sizes[2], sizes[3]), indices.device)
    if len(indptr) != grid.nq + 1 or int(indptr[-1]) != len(indices):
        raise ValueError(
            f"indptr must have {grid.nq + 1} entries and end in {len(indices)}, got "
            f"{len(indptr)} that end in {int(indptr[-1])}"
        )
    if int(indptr[0]) or bool((indptr.diff() < 0).any()):
        raise ValueError(f"indptr must ascend from 0, got {indptr}")
    if pairs is not None and pairs.shape != (len(indices), *grid.block_size):
        expected = (len(indices), *grid.block_size)
        raise ValueError(f"mask must be {expected}, got {tuple(pairs.shape)}")
    row = torch.arange(grid.nq, device=grid.device).repeat_interleave(indptr.diff())
    flat, order = sorted_blocks(grid, row, indices)
    if pairs is None:
        return BlockMask(from_full_runs(grid, from_points(flat)))
    tiles = pack(pairs)[order]
    which = torch.arange(len(flat), device=grid.device)
    return BlockMask(assemble(grid, (0,), from_points(flat[:0]), flat, tiles, which))
