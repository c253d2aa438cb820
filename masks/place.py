"""Masks set into a longer one, at any tokens, in O(runs + blocks that are cut or partial)."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from masks import tiles
from masks.block_mask import BlockMask, assemble
from masks.compile import without_cut_blocks
from masks.grid import Grid
from masks.intervals import Runs, combine, from_points, union
from masks.mosaic import pairs_of


class _Moved(NamedTuple):
    """One mask in blocks of the longer one: the surely full, the other candidates, their tiles."""

    full: Runs
    number: Tensor
    tile: Tensor
    bit_tiles: Tensor


def place(grid: Grid, parts: Sequence[tuple[BlockMask, int, int]]) -> BlockMask:
    """The mask that holds every mask of `parts`, (mask, query, key), from that query and key on.

    Masks of one head, in blocks of the grid's size, that share no pair; nothing else attends.
    """
    moved = [_move(grid, *part) for part in parts]
    begin, order = torch.cat([part.full.begin for part in moved]).sort()
    end = torch.cat([part.full.end for part in moved])[order]
    return assemble(grid, (0,), Runs(begin, end), *_joined(moved))


def _move(grid: Grid, mask: BlockMask, query: int, key: int) -> _Moved:
    """A block of the longer mask meets up to 2 x 2 blocks of `mask`, 0 and 1 along either side.

    With query = down * bq + dq, its row r is row bq + r - dq of those two; likewise for columns.
    """
    (down, dq), (right, dk) = divmod(query, grid.bq), divmod(key, grid.bk)
    lists, bit_tiles = without_cut_blocks(mask)
    uncut = BlockMask(mask.grid, (0,), lists.full, lists.partial, lists.tile, bit_tiles)
    row, begin = mask.grid.split(lists.full.begin)
    length = lists.full.end - lists.full.begin
    start = grid.number(row, begin)
    runs, points = Runs(start, start + length), grid.number(*mask.grid.split(lists.partial))

    # Along a side where blocks stay in line only block 1 is met.
    shifts = [
        (down + 1 - i) * grid.line + right + 1 - j
        for i in range(dq == 0, 2)
        for j in range(dk == 0, 2)
    ]
    shifted = [runs.shift(distance) for distance in shifts]
    full = combine(lambda *inside: torch.stack(inside).all(0), *shifted)
    touched = union(*shifted)
    met = from_points(torch.unique(torch.cat([points + distance for distance in shifts])))
    number = combine(lambda t, m, f: (t | m) & ~f, touched, met, full).expand()
    row, column = grid.split(number)
    number = number[(row < grid.nq) & (column < grid.nk)]

    pairs, tile = pairs_of(uncut, _sources(grid, mask.grid, number, down, right))
    rows = slice(grid.bq - dq, 2 * grid.bq - dq)
    columns = slice(grid.bk - dk, 2 * grid.bk - dk)
    return _Moved(full, number, tile, tiles.pack(pairs[:, rows, columns]))


def _sources(grid: Grid, source: Grid, number: Tensor, down: int, right: int) -> Tensor:
    """int64 (n, 2, 2): the blocks of the shorter mask that each block meets, -1 outside it."""
    row, column = grid.split(number)
    two = torch.arange(2, device=grid.device)
    row = (row - down - 1)[:, None, None] + two[:, None]
    column = (column - right - 1)[:, None, None] + two
    inside = (row >= 0) & (row < source.nq) & (column >= 0) & (column < source.nk)
    return torch.where(inside, source.number(row, column), -1)


def _joined(moved: list[_Moved]) -> tuple[Tensor, Tensor, Tensor]:
    """(number, bit_tiles, tile) of all candidates, those of several masks at one place made one.

    No two masks have a pair in common, so the words of their tiles add up to those of the union.
    """
    first = accumulate((len(part.bit_tiles) for part in moved), initial=0)
    bit_tiles = torch.cat([part.bit_tiles for part in moved])
    tile = torch.cat([part.tile + start for part, start in zip(moved, first, strict=False)])
    number, order = torch.cat([part.number for part in moved]).sort()
    tile = tile[order]
    number, place, count = torch.unique_consecutive(
        number, return_inverse=True, return_counts=True
    )
    shared = count > 1
    several = shared[place]
    slot = torch.cumsum(shared, 0) - 1
    sums = bit_tiles.new_zeros(int(shared.sum()), *bit_tiles.shape[1:])
    sums.index_add_(0, slot[place[several]], bit_tiles[tile[several]])
    joined = tile[torch.cumsum(count, 0) - count]
    joined[shared] = len(bit_tiles) + slot[shared]
    return number, torch.cat([bit_tiles, sums]), joined
