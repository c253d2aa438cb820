"""How patterns become block masks: builders in O(non-zero blocks), and the strip-wise reading of a
predicate.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from masks import tiles
from masks.block_mask import BlockMask, assemble
from masks.elements import from_strips
from masks.grid import Grid
from masks.intervals import Runs, combine, from_points

# Pairs whose int64 distances stay in the cache of a CPU: functions of tokens run several times
# faster on them than on a whole strip.
CACHED = 1 << 18


def from_intervals(grid: Grid, low: Tensor, high: Tensor) -> BlockMask:
    """Query q attends the keys low[q] <= k < high[q]; both int64 (q_len,), in tokens.

    The cost is O(q_len) and, in every block row, the blocks that some but not all of its queries
    attend.
    """
    low, high = low.clamp(0, grid.k_len), high.clamp(0, grid.k_len)
    nobody = high <= low
    low, high = torch.where(nobody, grid.k_len, low), torch.where(nobody, 0, high)
    inner = _block_runs(grid, low, high, everybody=True)
    outer = _block_runs(grid, low, high, everybody=False)
    candidates = combine(lambda some, all_: some & ~all_, outer, inner).expand()

    row, column = grid.split(candidates)
    low, high = (_by_block(grid, t, 0)[row] - column[:, None] * grid.bk for t in (low, high))
    ends = torch.stack([low.clamp(0, grid.bk), high.clamp(0, grid.bk)], dim=2).int()
    met, tile = tiles.distinct(ends)
    key = torch.arange(grid.bk, device=grid.device)
    bit_tiles = torch.cat(
        [tiles.pack((key >= part[..., :1]) & (key < part[..., 1:])) for part in met.split(1024)]
        or [grid.whole[:0]]
    )
    return assemble(grid, (0,), inner, candidates, bit_tiles, tile)


def _block_runs(grid: Grid, low: Tensor, high: Tensor, everybody: bool) -> Runs:
    """Per block row the run of blocks that all, or some, of its queries attend."""
    if everybody:
        low = _by_block(grid, low, 0).amax(1)
        high = _by_block(grid, high, grid.k_len).amin(1)
        begin = -(-low // grid.bk)
        end = torch.where(high == grid.k_len, grid.nk, high // grid.bk)
    else:
        begin = _by_block(grid, low, grid.k_len).amin(1) // grid.bk
        end = -(-_by_block(grid, high, 0).amax(1) // grid.bk)
    start = torch.arange(grid.nq, device=grid.device) * grid.line
    return Runs(start + begin, start + end).nonempty()


def _by_block(grid: Grid, tokens: Tensor, fill: int) -> Tensor:
    """(q_len,) -> (nq, bq), the end filled up."""
    return torch.nn.functional.pad(tokens, (0, -len(tokens) % grid.bq), value=fill).view(
        -1, grid.bq
    )


def from_offsets(
    grid: Grid, attends: Callable[[Tensor], Tensor], reach: int, shift: int
) -> BlockMask:
    """Query q attends key k where attends(k - q - shift) holds, which it may only for |k - q -
    shift| <= reach.
    """
    q = torch.arange(grid.q_len, device=grid.device) + shift
    band = from_intervals(grid, q - reach, q + reach + 1)
    number = torch.cat([band.full.expand(), band.partial]).sort().values
    row, column = grid.split(number)
    offset, tile = torch.unique(column * grid.bk - row * grid.bq - shift, return_inverse=True)
    inner = (
        torch.arange(grid.bk, device=grid.device)
        - torch.arange(grid.bq, device=grid.device)[:, None]
    )
    bit_tiles = torch.stack([tiles.pack(attends(inner + start)) for start in offset.tolist()])
    nothing = Runs(number[:0], number[:0])
    return assemble(grid, (0,), nothing, number, bit_tiles, tile)


def from_coordinates(grid: Grid, row: Tensor, column: Tensor) -> BlockMask:
    """Full blocks at the given block rows and columns; repeats are harmless."""
    return BlockMask.of_full(grid, from_points(torch.unique(grid.number(row, column))))


def on_square_blocks(grid: Grid, build: Callable[[Grid], BlockMask]) -> BlockMask:
    """A pattern of blocks drawn with square blocks of the grid's longer side, then cut into the
    grid's own.
    """
    side = max(grid.bq, grid.bk)
    mask = build(grid.with_blocks(side, side))
    return mask if grid.bq == grid.bk else mask.reblock(grid.block_size)


def from_predicate(
    grid: Grid, name: str, attends: Callable[[Tensor, Tensor], Tensor]
) -> BlockMask:
    """attends(q, k) on int64 token indices that broadcast, (n, 1) and (1, k_len); read strip by
    strip.
    """
    k = torch.arange(grid.k_len, device=grid.device)[None]
    at_once = max(1, CACHED // grid.k_len) if grid.device.type == "cpu" else grid.q_len

    def strip(_: int, rows: slice) -> Tensor:
        q = torch.arange(rows.start, rows.stop, device=grid.device)[:, None]
        parts = [
            _checked(name, attends(part, k), (len(part), grid.k_len)) for part in q.split(at_once)
        ]
        return torch.cat(parts)

    return from_strips(grid, strip)


def from_block_predicate(
    grid: Grid, name: str, attends: Callable[[Tensor, Tensor], Tensor]
) -> BlockMask:
    """attends(i, j) on int64 block indices that broadcast, (nq, 1) and (1, nk)."""
    i = torch.arange(grid.nq, device=grid.device)[:, None]
    j = torch.arange(grid.nk, device=grid.device)[None]
    blocks = _checked(name, attends(i, j), (grid.nq, grid.nk))
    return BlockMask.of_full(grid, from_points(grid.number(*blocks.nonzero(as_tuple=True))))


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
