"""Parts of a mask (crops, slices of queries), and masks as parts of a longer mask (documents).

A mask that moves by whole blocks is renumbered. If it moves by (dq, dk) tokens that are not whole
blocks, a block of the result takes its pairs from up to 2 x 2 blocks of the mask.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from masks._core.bit_tiles import pack, renumbered
from masks._core.block_set import BlockSet, assemble, list_clipped_as_partial
from masks._core.grid import Grid
from masks._core.intervals import Runs, combine, from_points, union
from masks.arguments import check_integer


def crop(blocks: BlockSet, q_len: int, k_len: int) -> BlockSet:
    """See BlockMask.crop."""
    g = blocks.grid
    q_len = check_integer("q_len", q_len, least=1, most=g.q_len)
    k_len = check_integer("k_len", k_len, least=1, most=g.k_len)
    return _assemble_rows(blocks, replace(g, q_len=q_len, k_len=k_len), 0)


def slice_queries(blocks: BlockSet, begin: int, end: int) -> BlockSet:
    """See BlockMask.slice_queries."""
    g = blocks.grid
    begin = check_integer("begin", begin, least=0, most=g.q_len - 1)
    end = check_integer("end", end, least=begin + 1, most=g.q_len)
    first, skipped = divmod(begin, g.bq)
    target = replace(g, q_len=end - begin)
    if skipped == 0:
        return _assemble_rows(blocks, target, first)
    if skipped + target.q_len <= g.bq:
        full, partial, tile = _cut_rows(blocks, target, first)
        used, tile = torch.unique(tile, return_inverse=True)
        bit_tiles = blocks.bit_tiles[used].roll(-skipped, dims=1)
        return assemble(target, blocks.head_to_mask, full, partial, bit_tiles, tile)
    rows = _assemble_rows(blocks, replace(g, q_len=skipped + target.q_len), first)
    moved = _move(rows, g.bq - skipped, 0)
    return _assemble_pasted(target, rows.head_to_mask, [_paste(moved, target, [(-1, 0)])])


def take_blocks(blocks: BlockSet, rows: Tensor, columns: Tensor) -> BlockSet:
    """See BlockMask.take_blocks."""
    g = blocks.grid
    rows, columns = _check("rows", rows, g.nq, g), _check("columns", columns, g.nk, g)
    target = replace(
        g, q_len=_tokens(rows, g.nq, g.bq, g.q_len), k_len=_tokens(columns, g.nk, g.bk, g.k_len)
    )
    new_row, new_column = _index_in(rows, g.nq), _index_in(columns, g.nk)
    mask, row, begin, end = g.locate_runs(blocks.full)
    begin, end = torch.searchsorted(columns, begin), torch.searchsorted(columns, end)
    taken = new_row[row] >= 0
    # Runs may touch after columns between them are removed. `union` joins them.
    full = target.runs(*(t[taken] for t in (mask, new_row[row], begin, end)))
    mask, row, column = g.locate(blocks.partial)
    taken = (new_row[row] >= 0) & (new_column[column] >= 0)
    partial = target.flat_index(mask, new_row[row], new_column[column])[taken]
    tile = blocks.partial_bit_tile[taken]
    return assemble(target, blocks.head_to_mask, union(full), partial, blocks.bit_tiles, tile)


def keep_rows(blocks: BlockSet, rows: Tensor) -> BlockSet:
    """See BlockMask.keep_rows."""
    g = blocks.grid
    is_selected = _index_in(_check("rows", rows, g.nq, g), g.nq) >= 0
    full = blocks.full.select(is_selected[g.stacked_row(blocks.full.begin) % g.nq])
    chosen = is_selected[g.stacked_row(blocks.partial) % g.nq]
    partial, tile = blocks.partial[chosen], blocks.partial_bit_tile[chosen]
    return assemble(g, blocks.head_to_mask, full, partial, blocks.bit_tiles, tile)


def _check(name: str, numbers: Tensor, limit: int, grid: Grid) -> Tensor:
    """Checks indices of block rows or columns: distinct and ascending."""
    if not isinstance(numbers, Tensor) or numbers.dtype != torch.int64 or numbers.dim() != 1:
        raise TypeError(f"{name} must be a one-dimensional int64 tensor, got {numbers!r}")
    if numbers.device != grid.device:
        raise ValueError(f"{name} must be on {grid.device} like the mask, got {numbers.device}")
    inside = len(numbers) > 0 and int(numbers[0]) >= 0 and int(numbers[-1]) < limit
    if not inside or not bool((numbers.diff() > 0).all()):
        raise ValueError(
            f"{name} must be ascending from 0 to {limit - 1}, at least one, got {numbers}"
        )
    return numbers


def _tokens(numbers: Tensor, count: int, side: int, length: int) -> int:
    """The number of tokens of some blocks. The last block of the sequence may be clipped."""
    missing = count * side - length if int(numbers[-1]) == count - 1 else 0
    return len(numbers) * side - missing


def _index_in(numbers: Tensor, count: int) -> Tensor:
    """For each of `count` blocks its index in `numbers`, or -1."""
    index = numbers.new_full((count,), -1)
    index[numbers] = torch.arange(len(numbers), device=numbers.device)
    return index


def paste(grid: Grid, parts: Sequence[tuple[BlockSet, int, int]]) -> BlockSet:
    """A mask that contains each part at an offset.

    Parts that are the same object, with equal offsets modulo the block size, are computed once.

    Args:
        grid: Grid of the result.
        parts: (mask, first query, first key) of each part, in tokens. Parts have one head and the
            block size of the grid, and have no pair in common.
    """
    by_offset: dict[tuple[int, int, int], tuple[BlockSet, list[tuple[int, int]]]] = {}
    for blocks, query, key in parts:
        (down, dq), (right, dk) = divmod(query, grid.bq), divmod(key, grid.bk)
        by_offset.setdefault((id(blocks), dq, dk), (blocks, []))[1].append((down, right))
    pasted = [
        _paste(_move(blocks, dq, dk), grid, corners)
        for (_, dq, dk), (blocks, corners) in by_offset.items()
    ]
    return _assemble_pasted(grid, (0,), pasted)


def _assemble_rows(blocks: BlockSet, target: Grid, first: int) -> BlockSet:
    full, partial, tile = _cut_rows(blocks, target, first)
    return assemble(target, blocks.head_to_mask, full, partial, blocks.bit_tiles, tile)


def _cut_rows(blocks: BlockSet, target: Grid, first: int) -> tuple[Runs, Tensor, Tensor]:
    """(full, partial, tile) of the block rows from `first` on, cut to the size of the target."""
    g = blocks.grid
    mask, row, begin, end = g.locate_runs(blocks.full)
    inside = (row >= first) & (row < first + target.nq) & (begin < target.nk)
    runs = [t[inside] for t in (mask, row - first, begin, end.clamp(max=target.nk))]
    mask, row, column = g.locate(blocks.partial)
    inside = (row >= first) & (row < first + target.nq) & (column < target.nk)
    partial = target.flat_index(mask, row - first, column)[inside]
    return target.runs(*runs), partial, blocks.partial_bit_tile[inside]


class _MovedBlocks(NamedTuple):
    """Full blocks, and candidates (see assemble) with flat indices and bit tiles."""

    grid: Grid
    num_masks: int
    full: Runs
    flat: Tensor
    tile: Tensor
    bit_tiles: Tensor


def _move(blocks: BlockSet, dq: int, dk: int) -> _MovedBlocks:
    """The mask moved down by dq < bq and right by dk < bk tokens, in a larger grid.

    Block (row, column) of the result overlaps the 2 x 2 blocks (row - 1, column - 1) to (row,
    column) of the mask. Its pairs begin bq - dq rows and bk - dk columns after their first pair.
    """
    g = blocks.grid
    larger = replace(g, q_len=(g.nq + 1) * g.bq, k_len=(g.nk + 1) * g.bk)
    # A clipped full block is partial in a longer sequence.
    unclipped, partial, _ = list_clipped_as_partial(blocks, keys=True, queries=True)
    mask, row, begin, end = g.locate_runs(unclipped)
    runs, points = larger.runs(mask, row, begin, end), g.renumber(partial, larger)
    # If dq or dk is 0, a block overlaps only one block along that side.
    shifts = [i * larger.row_stride + j for i in range(1 + (dq > 0)) for j in range(1 + (dk > 0))]
    moved = [runs.shift(distance) for distance in shifts]
    full = combine(lambda *inside: torch.stack(inside).all(0), *moved)
    overlapped = from_points(torch.unique(torch.cat([points + distance for distance in shifts])))
    parts = union(*moved), overlapped, full
    candidates = combine(lambda runs, points, f: (runs | points) & ~f, *parts).expand()

    mask, row, column = (t[:, None, None] for t in larger.locate(candidates))
    both = torch.arange(-1, 1, device=g.device)
    row, column = row + both[:, None], column + both
    outside = (row < 0) | (row >= g.nq) | (column < 0) | (column >= g.nk)
    pairs, tile = blocks.gather(torch.where(outside, -1, g.flat_index(mask, row, column)))
    pairs = pairs[:, g.bq - dq : 2 * g.bq - dq, g.bk - dk : 2 * g.bk - dk]
    return _MovedBlocks(larger, blocks.num_masks, full, candidates, tile, pack(pairs))


def _paste(
    moved: _MovedBlocks, grid: Grid, corners: Sequence[tuple[int, int]]
) -> tuple[Runs, Tensor, Tensor, Tensor]:
    """(full, candidates, tile, bit tiles), unsorted, with block (0, 0) at each of `corners`."""
    down, right = torch.tensor(corners, device=grid.device).T[:, :, None]
    mask, row, begin, end = moved.grid.locate_runs(moved.full)
    row, begin, end = row + down, begin + right, end + right
    inside = (row >= 0) & (row < grid.nq) & (begin < grid.nk)
    runs = (mask.expand_as(row), row, begin.clamp(min=0), end.clamp(max=grid.nk))
    full = grid.runs(*(t[inside] for t in runs))
    mask, row, column = moved.grid.locate(moved.flat)
    row, column = row + down, column + right
    inside = (row >= 0) & (row < grid.nq) & (column >= 0) & (column < grid.nk)
    flat = grid.flat_index(mask, row, column)[inside]
    return full, flat, moved.tile.expand_as(row)[inside], moved.bit_tiles


def _assemble_pasted(
    grid: Grid, head_to_mask: tuple[int, ...], pasted: list[tuple[Runs, Tensor, Tensor, Tensor]]
) -> BlockSet:
    """The canonical set of pasted parts. Candidates of several parts in one block are united.

    Parts have no pair in common, so the sum of the words of their tiles is the union of the tiles.
    """
    fulls, flats, tiles, parts = zip(*pasted, strict=True)
    bit_tiles, tile = torch.cat(parts), renumbered(tiles, parts)
    flat, order = torch.cat(flats).sort()
    tile = tile[order]
    flat, group, count = torch.unique_consecutive(flat, return_inverse=True, return_counts=True)
    shared = count > 1
    is_shared = shared[group]
    slot = torch.cumsum(shared, 0) - 1
    sums = bit_tiles.new_zeros(int(shared.sum()), *bit_tiles.shape[1:])
    sums.index_add_(0, slot[group[is_shared]], bit_tiles[tile[is_shared]])
    joined = tile[torch.cumsum(count, 0) - count]
    joined[shared] = len(bit_tiles) + slot[shared]
    return assemble(grid, head_to_mask, union(*fulls), flat, torch.cat([bit_tiles, sums]), joined)
