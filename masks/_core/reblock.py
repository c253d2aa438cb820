"""Re-blocking: the same pairs in blocks of another size, first finer, then coarser."""

from math import gcd

import torch
from torch import Tensor

from masks._core.bit_tiles import pack, unpack
from masks._core.block_set import BlockSet, assemble
from masks._core.grid import Grid
from masks._core.intervals import Runs, combine, from_points, union


def reblock(blocks: BlockSet, block_size: tuple[int, int]) -> BlockSet:
    """The mask in blocks of `block_size` tokens."""
    target = blocks.grid.with_blocks(*block_size)
    return _merge(_refine(blocks, target), target)


def coverage(blocks: BlockSet, block_size: tuple[int, int]) -> float:
    """See BlockMask.coverage."""
    target = blocks.grid.with_blocks(*block_size)
    parts = _refine(blocks, target)
    touched = union(_touched_runs(parts, target), from_points(_touched_points(parts, target)))
    covered = (parts.full.size() + len(parts.partial)) * parts.grid.bq * parts.grid.bk
    return covered / (touched.size() * target.bq * target.bk) if covered else 1.0


def _refine(blocks: BlockSet, target: Grid) -> BlockSet:
    """The mask in blocks that divide both its own blocks and those of the target."""
    g = blocks.grid
    return _split(blocks, g.with_blocks(gcd(g.bq, target.bq), gcd(g.bk, target.bk)))


def _split(blocks: BlockSet, fine: Grid) -> BlockSet:
    """The mask in a finer grid: every block is split."""
    g = blocks.grid
    rq, rk = g.bq // fine.bq, g.bk // fine.bk
    if rq == rk == 1:
        return blocks
    mask, row, begin, end = (t[:, None] for t in g.locate_runs(blocks.full))
    row = row * rq + _arange(rq, g)
    runs = (mask, row, begin * rk, (end * rk).clamp(max=fine.nk))
    inside = row < fine.nq
    full = fine.runs(*(t.expand_as(row)[inside] for t in runs))
    order = full.begin.argsort()

    tiles = unpack(blocks.bit_tiles, g.bk).view(-1, rq, fine.bq, rk, fine.bk).transpose(2, 3)
    mask, row, column = (t[:, None, None] for t in g.locate(blocks.partial))
    down, right = _arange(rq, g)[:, None], _arange(rk, g)
    row, column = row * rq + down, column * rk + right
    inside = (row < fine.nq) & (column < fine.nk)
    tile = (blocks.partial_bit_tile[:, None, None] * rq + down) * rk + right
    flat, by_flat = fine.flat_index(mask, row, column)[inside].sort()
    return assemble(
        fine,
        blocks.head_to_mask,
        Runs(full.begin[order], full.end[order]),
        flat,
        pack(tiles).flatten(0, 2),
        tile[inside][by_flat],
    )


def _arange(count: int, grid: Grid) -> Tensor:
    return torch.arange(count, device=grid.device)


def _merge(blocks: BlockSet, coarse: Grid) -> BlockSet:
    """The mask in a coarser grid: a block is full if all of its parts are."""
    g = blocks.grid
    rq, rk = coarse.bq // g.bq, coarse.bk // g.bk
    if rq == rk == 1:
        return blocks
    mask, row, begin, end = g.locate_runs(blocks.full)
    # The last coarse column may have fewer than rk parts. A run that reaches the end fills it.
    inner_end = torch.where(end == g.nk, coarse.nk, end // rk)
    inner_begin = -(-begin // rk)
    full_or_missing = []
    for part in range(rq):
        own = row % rq == part
        filled = coarse.runs(mask[own], row[own] // rq, inner_begin[own], inner_end[own])
        # The last coarse row may have fewer than rq parts, too.
        all_blocks = coarse.all_blocks(blocks.num_masks)
        is_missing = coarse.locate(all_blocks.begin)[1] * rq + part >= g.nq
        full_or_missing += [filled, all_blocks.select(is_missing)]
    full = combine(
        lambda *sets: torch.stack([a | b for a, b in zip(sets[::2], sets[1::2], strict=True)]).all(
            0
        ),
        *full_or_missing,
    )
    touched, points = _touched_runs(blocks, coarse), from_points(_touched_points(blocks, coarse))
    candidates = combine(lambda t, p, f: (t | p) & ~f, touched, points, full).expand()
    mask, row, column = (t[:, None, None] for t in coarse.locate(candidates))
    row, column = row * rq + _arange(rq, g)[:, None], column * rk + _arange(rk, g)
    outside = (row >= g.nq) | (column >= g.nk)
    pairs, tile = blocks.gather(torch.where(outside, -1, g.flat_index(mask, row, column)))
    return assemble(coarse, blocks.head_to_mask, full, candidates, pack(pairs), tile)


def _touched_runs(blocks: BlockSet, coarse: Grid) -> Runs:
    """The coarse blocks that contain a full block."""
    rq, rk = coarse.bq // blocks.grid.bq, coarse.bk // blocks.grid.bk
    mask, row, begin, end = blocks.grid.locate_runs(blocks.full)
    return union(coarse.runs(mask, row // rq, begin // rk, -(-end // rk)))


def _touched_points(blocks: BlockSet, coarse: Grid) -> Tensor:
    """The coarse blocks that contain a partial block, ascending."""
    rq, rk = coarse.bq // blocks.grid.bq, coarse.bk // blocks.grid.bk
    mask, row, column = blocks.grid.locate(blocks.partial)
    return torch.unique(coarse.flat_index(mask, row // rq, column // rk))
