"""Builds block masks of patterns, at a cost in proportion to their non-zero blocks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from masks._core import block_set, slicing
from masks._core.bit_tiles import deduplicate, pack, unique_codes, unpack
from masks._core.grid import Grid
from masks._core.intervals import (
    CHUNK,
    Runs,
    combine,
    concatenate,
    empty,
    from_bool_matrix,
    from_points,
    in_chunks,
    union,
)
from masks.arguments import check_memory
from masks.block_mask import BlockMask

BLOCKS_AT_ONCE = 1 << 22  # blocks of whole rows that are processed at a time
# With more blocks than this share of a row, marking them in a bool row is faster than sorting.
DENSE_SHARE = 1 / 32
BYTES_OF_PARTIAL = 40  # memory of a partial block while a mask is assembled


def from_intervals(grid: Grid, low: Tensor, high: Tensor) -> BlockMask:
    """Query q attends the keys low[q] <= k < high[q].

    The cost is O(q_len) plus the number of partial blocks.

    Args:
        grid: Lengths, block size and device.
        low, high: int64 (q_len,), in tokens.
    """
    low, high = low.clamp(0, grid.k_len), high.clamp(0, grid.k_len)
    none = high <= low
    low, high = torch.where(none, grid.k_len, low), torch.where(none, 0, high)
    of_all = _by_block(grid, low, 0).amax(1), _by_block(grid, high, grid.k_len).amin(1)
    of_any = _by_block(grid, low, grid.k_len).amin(1), _by_block(grid, high, 0).amax(1)
    inner, outer = _blocks_inside(grid, *of_all), _blocks_touched(grid, *of_any)
    candidates = combine(lambda some, all_: some & ~all_, outer, inner).expand()

    of_rows = [_by_block(grid, each, 0) for each in (low, high)]

    def ends_in(flat: Tensor) -> Tensor:
        """int32 (blocks, bq, 2): bounds of the keys of each query, counted from the block."""
        _, row, column = grid.locate(flat)
        first = column[:, None] * grid.bk
        bounds = [(each[row] - first).clamp_(0, grid.bk).int() for each in of_rows]
        return torch.stack(bounds, dim=2)

    at_once = len(candidates) if candidates.is_cuda else CHUNK // grid.bq
    ends = torch.cat([ends_in(part) for part in candidates.split(max(1, at_once))])
    distinct, tile = deduplicate(ends)
    key = torch.arange(grid.bk, device=grid.device)
    bit_tiles = torch.cat(
        [pack((key >= part[..., :1]) & (key < part[..., 1:])) for part in distinct.split(1024)]
        or [grid.inbounds_tiles[:0]]
    )
    return BlockMask(block_set.assemble(grid, (0,), inner, candidates, bit_tiles, tile))


def _blocks_inside(grid: Grid, low: Tensor, high: Tensor) -> Runs:
    """The blocks of each row whose keys are all in [low, high), with bounds (nq,) in tokens."""
    end = torch.where(high == grid.k_len, grid.nk, high // grid.bk)
    return grid.runs(0, torch.arange(grid.nq, device=grid.device), -(-low // grid.bk), end)


def _blocks_touched(grid: Grid, low: Tensor, high: Tensor) -> Runs:
    """The blocks of each row with any key in [low, high), with bounds (nq,) in tokens."""
    row = torch.arange(grid.nq, device=grid.device)
    return grid.runs(0, row, low // grid.bk, -(-high // grid.bk))


def _by_block(grid: Grid, tokens: Tensor, padding: int) -> Tensor:
    """Groups queries by block, (q_len,) -> (nq, bq), padded at the end."""
    missing = -len(tokens) % grid.bq
    return torch.nn.functional.pad(tokens, (0, missing), value=padding).view(-1, grid.bq)


def from_band(grid: Grid, low: int, high: int) -> BlockMask:
    """Query q attends the keys q + low <= k < q + high. The cost is O(non-full blocks).

    Args:
        grid: Lengths, block size and device.
        low, high: Bounds of k - q, in tokens, low < high.
    """
    inner, candidates = _blocks_of_band(grid, low, high)

    def attends(distance: Tensor) -> Tensor:
        return (distance >= low) & (distance < high)

    return _from_distances(grid, attends, inner, candidates.expand())


def _blocks_of_band(grid: Grid, low: int, high: int) -> tuple[Runs, Runs]:
    """(full blocks, other non-zero blocks) of the band q + low <= k < q + high."""
    first = torch.arange(grid.nq, device=grid.device) * grid.bq
    last = (first + grid.bq).clamp(max=grid.q_len) - 1

    def keys(lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
        return (lowest + low).clamp(min=0), (highest + high).clamp(max=grid.k_len)

    inner = _blocks_inside(grid, *keys(last, first))  # keys that all queries of a row attend
    outer = _blocks_touched(grid, *keys(first, last))  # keys that any of them attends
    return inner, combine(lambda some, all_: some & ~all_, outer, inner)


def from_offsets(
    grid: Grid, attends: Callable[[Tensor], Tensor], reach: int, step: int, shift: int
) -> BlockMask:
    """Query q attends key k if attends(k - q - shift) is true.

    Args:
        grid: Lengths, block size and device.
        attends: A function of distances, true only for multiples of `step` in [-reach, reach].
        reach: Largest distance, in tokens.
        step: Divisor of distances that attend, in tokens.
        shift: Tokens by which the diagonal is shifted.
    """
    reach = min(reach, grid.q_len + grid.k_len)
    if step <= grid.bq + grid.bk:  # every block of the band contains a multiple
        inner, others = _blocks_of_band(grid, shift - reach, shift + reach + 1)
        check_memory("dilated", BYTES_OF_PARTIAL * (inner.size() + others.size()))
        # Runs, of which a row has few, are joined in less time than blocks are sorted.
        candidates = union(inner, others).expand()
    else:
        distance = step * torch.arange(-(reach // step), reach // step + 1, device=grid.device)
        check_memory("dilated", BYTES_OF_PARTIAL * grid.nq * len(distance))
        candidates = _blocks_at(grid, distance + shift)
    return _from_distances(
        grid, lambda distance: attends(distance - shift), empty(grid.device), candidates
    )


def _from_distances(
    grid: Grid, attends: Callable[[Tensor], Tensor], full: Runs, candidates: Tensor
) -> BlockMask:
    """Query q attends key k if attends(k - q) is true.

    Blocks at equal distances from the diagonal share a bit tile.

    Args:
        grid: Lengths, block size and device.
        attends: A function of distances k - q, in tokens.
        full: Full blocks.
        candidates: Ascending flat indices of all other blocks that may be non-zero.
    """
    side, farthest = min(grid.block_size), grid.nq * grid.bq

    def code(flat: Tensor) -> Tensor:
        """The distance from query 0 to key 0 of a block, in multiples of the shorter side."""
        _, row, column = grid.locate(flat)
        return (column * grid.bk - row * grid.bq + farthest) // side

    used, tile = unique_codes(
        in_chunks(code, candidates), farthest // side + grid.nk * grid.bk // side
    )
    keys = torch.arange(grid.bk, device=grid.device)
    inner = keys - torch.arange(grid.bq, device=grid.device)[:, None]
    starts = (used * side - farthest).tolist()
    bit_tiles = (
        torch.stack([pack(attends(inner + start)) for start in starts])
        if starts
        else grid.inbounds_tiles[:0]
    )
    return BlockMask(block_set.assemble(grid, (0,), full, candidates, bit_tiles, tile))


def _blocks_at(grid: Grid, distance: Tensor) -> Tensor:
    """Ascending flat indices of the blocks with a pair whose k - q is in `distance`.

    Distances ascend by more than bq + bk, so no block contains two of them.
    """

    def blocks(row: Tensor) -> Tensor:
        first = (row * grid.bq + distance) // grid.bk
        last = (row * grid.bq + grid.bq - 1 + distance) // grid.bk + 1
        edges = (row.expand_as(first), first.clamp(0, grid.nk), last.clamp(0, grid.nk))
        return grid.runs(0, *(t.flatten() for t in edges)).expand()

    rows = torch.arange(grid.nq, device=grid.device)[:, None]
    return torch.cat([blocks(part) for part in rows.split(max(1, CHUNK // len(distance)))])


def from_cross(grid: Grid, queries: Tensor, keys: Tensor) -> BlockMask:
    """Query q attends key k if queries[q] or keys[k]. The cost is O(non-zero blocks).

    Args:
        grid: Lengths, block size and device.
        queries: bool (q_len,).
        keys: bool (k_len,).
    """
    row_bits, row_kind, row_all = _block_bits(queries, grid.bq)
    column_bits, column_kind, column_all = _block_bits(keys, grid.bk)
    row_any, column_any = row_bits.any(1)[row_kind], column_bits.any(1)[column_kind]
    nbytes = 4 * row_bits.numel() * len(column_bits) * grid.bk // 32
    blocks = int(row_any.sum()) * grid.nk + grid.nq * int(column_any.sum())
    check_memory("global_tokens", nbytes + BYTES_OF_PARTIAL * blocks)

    # A block row with a chosen query lists every column, another row the columns with a chosen
    # key. Lists are written row by row, because sorting all blocks would take most of the time.
    every, some = (~column_all).nonzero().flatten(), (column_any & ~column_all).nonzero().flatten()

    def candidates(row: Tensor) -> tuple[Tensor, Tensor]:
        """(flat index, tile) of the blocks of ascending rows that are not full."""
        lists_all = row_any[row]
        count = torch.where(lists_all, len(every), len(some))
        begin = count.cumsum(0) - count
        flat = torch.empty(int(count.sum()), dtype=torch.int64, device=grid.device)
        tile = torch.empty_like(flat)
        for column, inside in ((every, lists_all), (some, ~lists_all)):
            slot = begin[inside, None] + torch.arange(len(column), device=grid.device)
            own = row[inside, None]
            flat[slot] = own * grid.row_stride + column
            tile[slot] = row_kind[own] * len(column_bits) + column_kind[column]
        return flat, tile

    rows = (~row_all).nonzero().flatten()
    count = torch.where(row_any[rows], len(every), len(some))
    part = (count.cumsum(0) - count) // CHUNK
    parts = rows.split(part.unique_consecutive(return_counts=True)[1].tolist()) or (rows,)
    flat, tile = (torch.cat(t) for t in zip(*map(candidates, parts), strict=True))
    full_rows = grid.all_blocks().select(row_all)
    columns = from_points(column_all.nonzero().flatten())
    start = torch.arange(grid.nq, device=grid.device)[~row_all] * grid.row_stride
    repeated = Runs(*((start[:, None] + edge).flatten() for edge in columns))
    words = torch.where(
        row_bits[:, None, :, None],
        pack(torch.ones_like(column_bits[:1])),
        pack(column_bits)[:, None],
    )
    full = union(full_rows, repeated)
    return BlockMask(block_set.assemble(grid, (0,), full, flat, words.flatten(0, 1), tile))


def _block_bits(tokens: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """(distinct blocks of tokens, bool (kinds, side); kind of each block; whether all are set)."""
    missing = -len(tokens) % side
    bits = torch.nn.functional.pad(tokens, (0, missing)).view(-1, side)
    inside = torch.nn.functional.pad(torch.ones_like(tokens), (0, missing)).view(-1, side)
    kinds, kind = deduplicate(pack(bits))
    return unpack(kinds, side), kind, (bits == inside).all(1)


def from_runs(grid: Grid, runs: Runs) -> BlockMask:
    """The mask whose full blocks are `runs` of flat indices."""
    return BlockMask(block_set.from_full_runs(grid, runs))


def from_spans(grid: Grid, row: Tensor, first: Tensor, last: Tensor) -> BlockMask:
    """The mask whose full blocks are the columns [first, last) of `row`. Spans may overlap."""
    first, last = first.clamp(0, grid.nk), last.clamp(0, grid.nk)
    row, first, last = (t.flatten() for t in torch.broadcast_tensors(row, first, last))
    return from_runs(grid, union(grid.runs(0, row, first, last)))


def from_columns(name: str, grid: Grid, columns: Callable[[Tensor], Tensor]) -> BlockMask:
    """The mask with full blocks at columns(row) of each block row.

    Args:
        name: Name of the pattern, for errors.
        grid: Lengths, block size and device.
        columns: A function from block rows, int64 (n,), to block columns, int64 (n, m). Columns
            may be unordered, repeated or outside the grid.

    Raises:
        ValueError: The mask would need more memory than the machine has.
    """
    width = columns(torch.zeros(1, dtype=torch.int64, device=grid.device)).shape[1]
    check_memory(name, 16 * grid.nq * min(width, grid.nk))
    rows = torch.arange(grid.nq, device=grid.device)
    parts = [
        _runs_at(grid, part, columns(part))
        for part in rows.split(max(1, BLOCKS_AT_ONCE // max(width, grid.nk)))
    ]
    return from_runs(grid, concatenate(parts))


def _runs_at(grid: Grid, row: Tensor, column: Tensor) -> Runs:
    """Runs of the blocks at columns (n, m) of ascending rows (n,)."""
    column = torch.where((column >= 0) & (column < grid.nk), column, grid.nk)
    if DENSE_SHARE * grid.nk < column.shape[1]:  # a matrix of the rows is smaller than a sort
        blocks = torch.zeros(len(row), grid.nk + 1, dtype=torch.bool, device=grid.device)
        return from_bool_matrix(blocks.scatter_(1, column, True)[None, :, :-1]).shift(
            int(row[0]) * grid.row_stride
        )
    flat = torch.unique(grid.flat_index(0, row[:, None], column))
    return from_points(flat[flat % grid.row_stride < grid.nk])


def on_square_blocks(grid: Grid, build: Callable[[Grid], BlockMask]) -> BlockMask:
    """Builds a pattern of blocks with square blocks of the longer side, then re-blocks it."""
    side = max(grid.bq, grid.bk)
    mask = build(grid.with_blocks(side, side))
    return mask if grid.bq == grid.bk else mask.reblock(grid.block_size)


def paste(grid: Grid, parts: Sequence[tuple[BlockMask, int, int]]) -> BlockMask:
    """A mask that contains each part at an offset; no other pair attends.

    Args:
        grid: Grid of the result.
        parts: (mask, first query, first key) of each part, in tokens. Parts have one head and the
            block size of the grid, and have no pair in common.
    """
    return BlockMask(slicing.paste(grid, [(mask.block_set, q, k) for mask, q, k in parts]))
