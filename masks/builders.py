"""How patterns become block masks: in proportion to their non-zero blocks, or, for a predicate of
one's own, strip by strip.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from masks._core import block_set, convert, slicing
from masks._core.bit_tiles import deduplicate, pack
from masks._core.grid import Grid
from masks._core.intervals import Runs, combine, empty, from_bool_matrix, from_points
from masks.block_mask import BlockMask

# Pairs whose int64 distances stay in the cache of a CPU: functions of tokens run several times
# faster on them than on a whole strip.
CACHED_PAIRS = 1 << 18


def from_intervals(grid: Grid, low: Tensor, high: Tensor) -> BlockMask:
    """Query q attends the keys low[q] <= k < high[q]; both int64 (q_len,), in tokens.

    The cost is O(q_len) and, in every block row, the blocks that some but not all of its queries
    attend.
    """
    low, high = low.clamp(0, grid.k_len), high.clamp(0, grid.k_len)
    none = high <= low
    low, high = torch.where(none, grid.k_len, low), torch.where(none, 0, high)
    inner = _block_runs(grid, low, high, by_all=True)
    outer = _block_runs(grid, low, high, by_all=False)
    candidates = combine(lambda some, all_: some & ~all_, outer, inner).expand()

    _, row, column = grid.locate(candidates)
    low, high = (_by_block(grid, t, 0)[row] - column[:, None] * grid.bk for t in (low, high))
    ends = torch.stack([low.clamp(0, grid.bk), high.clamp(0, grid.bk)], dim=2).int()
    distinct, tile = deduplicate(ends)
    key = torch.arange(grid.bk, device=grid.device)
    bit_tiles = torch.cat(
        [pack((key >= part[..., :1]) & (key < part[..., 1:])) for part in distinct.split(1024)]
        or [grid.inbounds_tiles[:0]]
    )
    return BlockMask(block_set.assemble(grid, (0,), inner, candidates, bit_tiles, tile))


def _block_runs(grid: Grid, low: Tensor, high: Tensor, by_all: bool) -> Runs:
    """Per block row the run of blocks that all, or some, of its queries attend."""
    if by_all:
        low = _by_block(grid, low, 0).amax(1)
        high = _by_block(grid, high, grid.k_len).amin(1)
        begin = -(-low // grid.bk)
        end = torch.where(high == grid.k_len, grid.nk, high // grid.bk)
    else:
        begin = _by_block(grid, low, grid.k_len).amin(1) // grid.bk
        end = -(-_by_block(grid, high, 0).amax(1) // grid.bk)
    return grid.runs(0, torch.arange(grid.nq, device=grid.device), begin, end)


def _by_block(grid: Grid, tokens: Tensor, padding: int) -> Tensor:
    """(q_len,) -> (nq, bq), padded at the end."""
    missing = -len(tokens) % grid.bq
    return torch.nn.functional.pad(tokens, (0, missing), value=padding).view(-1, grid.bq)


def from_offsets(
    grid: Grid, attends: Callable[[Tensor], Tensor], reach: int, shift: int
) -> BlockMask:
    """Query q attends key k where attends(k - q - shift) holds, which it may only for |k - q -
    shift| <= reach.
    """
    q = torch.arange(grid.q_len, device=grid.device) + shift
    band = from_intervals(grid, q - reach, q + reach + 1).block_set
    candidates = torch.cat([band.full.expand(), band.partial]).sort().values
    _, row, column = grid.locate(candidates)
    offset, tile = torch.unique(column * grid.bk - row * grid.bq - shift, return_inverse=True)
    keys = torch.arange(grid.bk, device=grid.device)
    inner = keys - torch.arange(grid.bq, device=grid.device)[:, None]
    bit_tiles = torch.stack([pack(attends(inner + start)) for start in offset.tolist()])
    nothing = empty(grid.device)
    return BlockMask(block_set.assemble(grid, (0,), nothing, candidates, bit_tiles, tile))


def from_runs(grid: Grid, runs: Runs) -> BlockMask:
    """Full blocks at the given flat indices."""
    return BlockMask(block_set.of_full(grid, runs))


def from_coordinates(grid: Grid, row: Tensor, column: Tensor) -> BlockMask:
    """Full blocks at the given block rows and columns; repeats are harmless."""
    return from_runs(grid, from_points(torch.unique(grid.flat_index(0, row, column))))


def on_square_blocks(grid: Grid, build: Callable[[Grid], BlockMask]) -> BlockMask:
    """A pattern of blocks drawn with square blocks of the grid's longer side, then cut into the
    grid's own.
    """
    side = max(grid.bq, grid.bk)
    mask = build(grid.with_blocks(side, side))
    return mask if grid.bq == grid.bk else mask.reblock(grid.block_size)


def place(grid: Grid, parts: Sequence[tuple[BlockMask, int, int]]) -> BlockMask:
    """The mask that holds every mask of `parts`, (mask, query, key), from that query and key on.

    Masks of one head, in blocks of the grid's size, that share no pair; nothing else attends.
    """
    return BlockMask(slicing.place(grid, [(mask.block_set, q, k) for mask, q, k in parts]))


def from_predicate(
    grid: Grid, name: str, attends: Callable[[Tensor, Tensor], Tensor]
) -> BlockMask:
    """attends(q, k) on int64 token indices that broadcast, (n, 1) and (1, k_len); read strip by
    strip.
    """
    k = torch.arange(grid.k_len, device=grid.device)[None]
    at_once = max(1, CACHED_PAIRS // grid.k_len) if grid.device.type == "cpu" else grid.q_len

    def strip(_: int, rows: slice) -> Tensor:
        q = torch.arange(rows.start, rows.stop, device=grid.device)[:, None]
        parts = [
            _checked(name, attends(part, k), (len(part), grid.k_len)) for part in q.split(at_once)
        ]
        return torch.cat(parts)

    return BlockMask(convert.from_strips(grid, strip))


def from_block_predicate(
    grid: Grid, name: str, attends: Callable[[Tensor, Tensor], Tensor]
) -> BlockMask:
    """attends(i, j) on int64 block indices that broadcast, (nq, 1) and (1, nk)."""
    i = torch.arange(grid.nq, device=grid.device)[:, None]
    j = torch.arange(grid.nk, device=grid.device)[None]
    blocks = _checked(name, attends(i, j), (grid.nq, grid.nk))
    return from_runs(grid, from_bool_matrix(blocks[None]))


def _checked(name: str, answer, shape: tuple[int, int]) -> Tensor:
    if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
        got = answer.dtype if isinstance(answer, Tensor) else type(answer).__name__
        raise TypeError(f"pattern {name} must return a bool tensor, got {got}")
    try:
        return answer.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"pattern {name} must return a tensor that broadcasts to {shape}, got "
            f"{tuple(answer.shape)}"
        ) from None
