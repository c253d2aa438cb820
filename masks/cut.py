"""Masks of some of the queries and keys of another mask."""

from dataclasses import replace

import torch
from torch import Tensor

from masks import tiles
from masks.arguments import whole
from masks.block_mask import BlockMask, assemble
from masks.elements import from_strips
from masks.intervals import Runs, concatenate


def crop(mask: BlockMask, q_len: int, k_len: int) -> BlockMask:
    """See BlockMask.crop."""
    g = mask.grid
    q_len, k_len = whole("q_len", q_len), whole("k_len", k_len)
    if not (1 <= q_len <= g.q_len and 1 <= k_len <= g.k_len):
        raise ValueError(f"crop must lie within seq_len {g.seq_len}, got ({q_len}, {k_len})")
    cropped = replace(g, q_len=q_len, k_len=k_len)
    row, begin = g.split(mask.full.begin)
    end = mask.full.end - row * g.line
    row = _renumber(row, g.nq, cropped.nq)
    runs = Runs(cropped.number(row, begin), cropped.number(row, end.clamp(max=cropped.nk)))
    runs = Runs(*(t[row >= 0] for t in runs)).nonempty()
    row, column = g.split(mask.partial)
    row = _renumber(row, g.nq, cropped.nq)
    keep = (row >= 0) & (column < cropped.nk)
    number = cropped.number(row[keep], column[keep])
    return assemble(
        cropped, mask.head_to_mask, runs, number, mask.bit_tiles, mask.partial_bit_tile[keep]
    )


def _renumber(row: Tensor, old: int, new: int) -> Tensor:
    """Rows counted over layers of `old` rows, recounted over layers of `new` rows; -1 for those
    cut off.
    """
    layer, inside = row // old, row % old
    return torch.where(inside < new, layer * new + inside, -1)


def slice_queries(mask: BlockMask, begin: int, end: int) -> BlockMask:
    """See BlockMask.slice_queries."""
    g = mask.grid
    begin, end = whole("begin", begin), whole("end", end)
    if not 0 <= begin < end <= g.q_len:
        raise ValueError(f"slice_queries must lie within {g.q_len} queries, got {begin} to {end}")
    if begin // g.bq == (end - 1) // g.bq:
        return _within_row(mask, begin, end)
    if begin % g.bq == 0:
        return _from_row(crop(mask, end, g.k_len), begin // g.bq)

    def strip(layer: int, queries: slice) -> Tensor:
        return _pairs(mask, layer, begin + queries.start, begin + queries.stop)

    return from_strips(replace(g, q_len=end - begin), strip, mask.head_to_mask)


def _within_row(mask: BlockMask, begin: int, end: int) -> BlockMask:
    """The mask of queries that lie in one row of blocks."""
    g = mask.grid
    rest = replace(g, q_len=end - begin)
    runs, points, which = [], [], []
    for layer in range(mask.num_masks):
        low = (layer * g.nq + begin // g.bq) * g.line
        distance = layer * rest.layer - low
        runs.append(mask.full.between(low, low + g.line).shift(distance))
        edges = torch.tensor([low, low + g.line], device=mask.device)
        first, last = torch.searchsorted(mask.partial, edges).tolist()
        points.append(mask.partial[first:last] + distance)
        which.append(mask.partial_bit_tile[first:last])
    met, tile = torch.unique(torch.cat(which), return_inverse=True)
    bit_tiles = mask.bit_tiles[met].roll(-(begin % g.bq), dims=1)
    return assemble(rest, mask.head_to_mask, concatenate(runs), torch.cat(points), bit_tiles, tile)


def _from_row(mask: BlockMask, first: int) -> BlockMask:
    """The mask from a block row on."""
    g = mask.grid
    rest = replace(g, q_len=g.q_len - first * g.bq)

    def renumbered(number: Tensor) -> tuple[Tensor, Tensor]:
        row, column = g.split(number)
        row = row // g.nq * rest.nq + row % g.nq - first
        return rest.number(row, column), number // g.line % g.nq >= first

    begin, keep = renumbered(mask.full.begin)
    length = (mask.full.end - mask.full.begin)[keep]
    full = Runs(begin[keep], begin[keep] + length)
    number, keep = renumbered(mask.partial)
    tile = mask.partial_bit_tile[keep]
    return assemble(rest, mask.head_to_mask, full, number[keep], mask.bit_tiles, tile)


def _pairs(mask: BlockMask, layer: int, begin: int, end: int) -> Tensor:
    """bool (end - begin, k_len): the pairs of these queries in one layer."""
    g = mask.grid
    first, last = begin // g.bq, -(-end // g.bq)
    low, high = ((layer * g.nq + row) * g.line for row in (first, last))
    view = torch.zeros(last - first, g.bq, g.nk, g.bk, dtype=torch.bool, device=mask.device)
    row, column = g.split(mask.full.between(low, high).expand() - low)
    view[row, :, column] = True
    near = (mask.partial >= low) & (mask.partial < high)
    row, column = g.split(mask.partial[near] - low)
    view[row, :, column] = tiles.unpack(mask.bit_tiles[mask.partial_bit_tile[near]], g.bk)
    dense = view.view(-1, g.nk * g.bk)
    return dense[begin - first * g.bq : end - first * g.bq, : g.k_len]
