"""Transposed masks: blocks renumbered in the transposed grid."""

from torch import Tensor

from masks._core.bit_tiles import pack, unpack
from masks._core.block_set import BlockSet, DirectionLists
from masks._core.grid import Grid
from masks._core.intervals import CHUNK, Runs, combine, concatenate, from_bool_matrix

# With more runs per block than this, a bool matrix of blocks is transposed instead of runs.
DENSE_SHARE = 1 / 128


def transpose(blocks: BlockSet) -> BlockSet:
    """The transposed mask, with keys as queries."""
    lists = transpose_lists(
        DirectionLists(blocks.full, blocks.partial, blocks.partial_bit_tile),
        blocks.grid,
        blocks.num_masks,
    )
    tiles = pack(unpack(blocks.bit_tiles, blocks.grid.bk).transpose(1, 2))
    return BlockSet(blocks.grid.T, blocks.head_to_mask, *lists, tiles)


def transpose_lists(lists: DirectionLists, grid: Grid, num_masks: int) -> DirectionLists:
    """The same blocks in the transposed grid, with the same tile codes."""
    mask, row, column = grid.locate(lists.partial)
    partial, order = grid.T.flat_index(mask, column, row).sort()
    return DirectionLists(_transpose_runs(lists.full, grid, num_masks), partial, lists.tile[order])


def _transpose_runs(full: Runs, grid: Grid, num_masks: int) -> Runs:
    """Runs along rows as runs along columns.

    A run down a column begins at a block in the set whose upper neighbour is not in the set. It
    ends before a block that is not in the set and whose upper neighbour is. Both are differences
    of the set and the set shifted by one row, so only these blocks are expanded. With very many
    runs a bool matrix of blocks is smaller and is transposed instead.
    """
    if len(full.begin) > DENSE_SHARE * num_masks * grid.nq * grid.nk:
        matrix = full.to_bool(num_masks * grid.mask_stride).view(num_masks, grid.nq, -1)
        transposed = matrix[..., :-1].mT.flatten(0, 1)
        step = len(transposed) if full.begin.is_cuda else max(1, CHUNK // grid.nq)
        parts = [from_bool_matrix(part[None]) for part in transposed.split(step)]
        moved = [p.shift(i * step * grid.T.row_stride) for i, p in enumerate(parts)]
        return concatenate(moved)
    # Each mask gets one more row, so that runs can end below its last row.
    taller = Runs(*(t + t // grid.mask_stride * grid.row_stride for t in full))
    above = taller.shift(grid.row_stride)

    def columns(points: Tensor) -> Tensor:
        stacked = grid.stacked_row(points)
        mask, row = stacked // (grid.nq + 1), stacked % (grid.nq + 1)
        return grid.T.flat_index(mask, points % grid.row_stride, row).sort().values

    begin = combine(lambda here, over: here & ~over, taller, above).expand()
    end = combine(lambda here, over: over & ~here, taller, above).expand()
    return Runs(columns(begin), columns(end))
