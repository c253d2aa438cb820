"""Re-blocking: the same elements in blocks of another size, finer first and then coarser."""

import torch
from torch import Tensor

from masks import tiles
from masks.block_mask import BlockMask, assemble
from masks.grid import Grid
from masks.intervals import Runs, combine, from_points, union
from masks.mosaic import pairs_of


def reblock(mask: BlockMask, block_size) -> BlockMask:
    """The mask with blocks of `block_size` (tokens)."""
    target = Grid.of(mask.seq_len, block_size, mask.device)
    return _merge(_cut_for(mask, target), target)


def coverage(mask: BlockMask, block_size) -> float:
    """The share of the blocks of `block_size` (tokens) with pairs that finer ones of `mask` cover.

    1 for a mask without pairs.
    """
    target = Grid.of(mask.seq_len, block_size, mask.device)
    parts = _cut_for(mask, target)
    touched = union(_coarse_runs(parts, target), from_points(_coarse_points(parts, target)))
    covered = (parts.full.size() + len(parts.partial)) * parts.grid.bq * parts.grid.bk
    return covered / (touched.size() * target.bq * target.bk) if covered else 1.0


def _cut_for(mask: BlockMask, target: Grid) -> BlockMask:
    """The mask in blocks of which those of the target are made."""
    g = mask.grid
    return _split(mask, g.with_blocks(min(g.bq, target.bq), min(g.bk, target.bk)))


def _split(mask: BlockMask, fine: Grid) -> BlockMask:
    """Every block cut into the blocks of a finer grid."""
    g = mask.grid
    rq, rk = g.bq // fine.bq, g.bk // fine.bk
    if rq == rk == 1:
        return mask
    row, begin = g.split(mask.full.begin)
    end = (mask.full.end - row * g.line) * rk
    child = _children(row, g.nq, rq)
    inside = (child % (g.nq * rq)) < fine.nq
    child_row = (child // (g.nq * rq)) * fine.nq + child % (g.nq * rq)
    first = fine.number(child_row, (begin * rk)[:, None])
    last = fine.number(child_row, end.clamp(max=fine.nk)[:, None])
    order = first[inside].argsort()
    full = Runs(first[inside][order], last[inside][order])

    pairs = tiles.unpack(mask.bit_tiles, g.bk).view(-1, rq, fine.bq, rk, fine.bk).transpose(2, 3)
    bit_tiles = tiles.pack(pairs).flatten(0, 2)
    row, column = g.split(mask.partial)
    child = _children(row, g.nq, rq)[:, :, None]
    part_row = (child // (g.nq * rq)) * fine.nq + child % (g.nq * rq)
    part_column = (column[:, None] * rk + _count(rk, g))[:, None, :]
    tile = (
        mask.partial_bit_tile[:, None, None] * (rq * rk)
        + _count(rq, g)[:, None] * rk
        + _count(rk, g)
    )
    keep = (child % (g.nq * rq) < fine.nq) & (part_column < fine.nk)
    number, order = fine.number(part_row, part_column)[keep].sort()
    return assemble(fine, mask.head_to_mask, full, number, bit_tiles, tile[keep][order])


def _children(row: Tensor, rows: int, ratio: int) -> Tensor:
    """int64 (n, ratio): the rows that each row is cut into, counted over layers of rows * ratio
    rows.
    """
    layer, inside = row // rows, row % rows
    first = layer * rows * ratio + inside * ratio
    return first[:, None] + torch.arange(ratio, device=row.device)


def _count(ratio: int, g: Grid) -> Tensor:
    return torch.arange(ratio, device=g.device)


def _merge(mask: BlockMask, coarse: Grid) -> BlockMask:
    """Blocks of a coarser grid: full where all of their parts are, else with the bits of their
    parts.
    """
    g = mask.grid
    rq, rk = coarse.bq // g.bq, coarse.bk // g.bk
    if rq == rk == 1:
        return mask
    row, begin = g.split(mask.full.begin)
    end = mask.full.end - row * g.line
    up = _coarse_row(row, g, coarse)
    # The last coarse column may hold fewer than rk parts: a run that reaches the end fills it.
    inner_end = torch.where(end == g.nk, coarse.nk, end // rk)
    in_row = [
        Runs(coarse.number(up, -(-begin // rk))[own], coarse.number(up, inner_end)[own]).nonempty()
        for own in ((row % g.nq) % rq == part for part in range(rq))
    ]
    missing = _rows_without_part(coarse, g, mask.num_masks, rq)
    full = combine(
        lambda *inside: torch.stack(
            [a | b for a, b in zip(inside[:rq], inside[rq:], strict=True)]
        ).all(0),
        *in_row,
        *missing,
    )
    touched, points = _coarse_runs(mask, coarse), from_points(_coarse_points(mask, coarse))
    candidates = combine(lambda t, p, f: (t | p) & ~f, touched, points, full).expand()
    bit_tiles, tile = _gather(mask, coarse, candidates, rq, rk)
    return assemble(coarse, mask.head_to_mask, full, candidates, bit_tiles, tile)


def _coarse_runs(mask: BlockMask, coarse: Grid) -> Runs:
    """The coarse blocks that full blocks touch."""
    g, rk = mask.grid, coarse.bk // mask.grid.bk
    row, begin = g.split(mask.full.begin)
    end = mask.full.end - row * g.line
    up = _coarse_row(row, g, coarse)
    return union(Runs(coarse.number(up, begin // rk), coarse.number(up, -(-end // rk))))


def _coarse_points(mask: BlockMask, coarse: Grid) -> Tensor:
    """The coarse blocks that partial blocks touch, ascending."""
    row, column = mask.grid.split(mask.partial)
    up = _coarse_row(row, mask.grid, coarse)
    return torch.unique(coarse.number(up, column // (coarse.bk // mask.grid.bk)))


def _coarse_row(row: Tensor, g: Grid, coarse: Grid) -> Tensor:
    """The rows, counted over layers, that hold rows of a finer grid."""
    return row // g.nq * coarse.nq + row % g.nq // (coarse.bq // g.bq)


def _rows_without_part(coarse: Grid, g: Grid, layers: int, rq: int) -> list[Runs]:
    """For each part of a coarse row, the coarse rows that have no such part (the sequence ends
    before it).
    """
    every = coarse.every_row(layers)
    row = torch.arange(layers * coarse.nq, device=g.device) % coarse.nq
    return [Runs(*(t[row * rq + part >= g.nq] for t in every)) for part in range(rq)]


def _gather(
    mask: BlockMask, coarse: Grid, candidates: Tensor, rq: int, rk: int
) -> tuple[Tensor, Tensor]:
    """The bit tiles of coarse blocks, put together from their parts."""
    g = mask.grid
    row, column = coarse.split(candidates)
    layer, inside = row // coarse.nq, row % coarse.nq
    part_row = (inside[:, None] * rq + _count(rq, g))[:, :, None]
    part_column = (column[:, None] * rk + _count(rk, g))[:, None, :]
    outside = (part_row >= g.nq) | (part_column >= g.nk)
    number = g.number(layer[:, None, None] * g.nq + part_row, part_column)
    number = torch.where(outside, -1, number)
    pairs, tile = pairs_of(mask, number)
    return tiles.pack(pairs), tile
