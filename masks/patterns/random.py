from itertools import accumulate, takewhile
from numbers import Real

import torch
from torch import Tensor

from masks._core.grid import Grid
from masks._core.intervals import Runs, combine, concatenate, from_bool_matrix, from_points
from masks._pattern import Pattern, builtin
from masks.arguments import check_integer, check_memory
from masks.block_mask import BlockMask, from_full_runs
from masks.builders import BLOCKS_AT_ONCE, DENSE_SHARE, from_runs, on_square_blocks


@builtin()
def random(density: float, seed: int = 0) -> Pattern:
    """Each block row has max(1, round(density * nk)) full blocks, drawn without replacement.

    Equal seeds give equal masks on every device. To give heads different masks, use stack with
    different seeds.

    Args:
        density: Share of blocks that are full, in (0, 1].
        seed: Seed of the random numbers.

    Raises:
        TypeError: `seed` is not an integer.
        ValueError: `density` is outside (0, 1].

    Reference:
        Zaheer et al. 2020, BigBird (random blocks).
    """
    if not isinstance(density, Real) or not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density!r}")
    seed = check_integer("seed", seed)

    def blocks(grid: Grid) -> BlockMask:
        return random_blocks(grid, max(1, round(density * grid.nk)), seed)

    return Pattern(f"random({density:g}, {seed})", lambda grid: on_square_blocks(grid, blocks))


def random_blocks(grid: Grid, count: int, seed: int) -> BlockMask:
    """A mask with `count` full blocks in every row, or all if there are fewer."""
    if count >= grid.nk:
        return from_full_runs(grid)
    check_memory("random", 16 * grid.nq * count)
    generator = torch.Generator("cpu").manual_seed(seed)
    few = min(count, grid.nk - count)  # of a row that is mostly chosen the others are drawn
    rows = torch.empty(grid.nq, 0, dtype=torch.int32, device="cpu")
    draws = list(rows.split(max(1, BLOCKS_AT_ONCE // max(grid.nk, few + 8))))
    complete: list[Runs] = []
    while len(complete) < len(draws):
        for i, part in enumerate(draws):
            more = part.new_empty(len(part), few + 8).random_(grid.nk, generator=generator)
            draws[i] = torch.cat([part, more], dim=1)
        tried = (_first_distinct(part, few, grid.nk, few < count) for part in draws)
        complete = [runs for runs in takewhile(lambda runs: runs is not None, tried) if runs]
    starts = accumulate((len(part) for part in draws), initial=0)
    runs = [runs.shift(row * grid.row_stride) for runs, row in zip(complete, starts, strict=False)]
    full = concatenate(runs)
    return from_runs(grid, Runs(*(edge.to(grid.device) for edge in full)))


def _first_distinct(draws: Tensor, count: int, nk: int, complement: bool) -> Runs | None:
    """The blocks of the first `count` distinct draws of every row, or all others.

    None if a row has fewer distinct draws.
    """
    if DENSE_SHARE * nk < count:  # marking all blocks of a row takes less than a sort of the draws
        block, number = draws.long(), torch.arange(draws.shape[1], dtype=torch.int32, device="cpu")
        first = torch.full((len(draws), nk), draws.shape[1], dtype=torch.int32, device="cpu")
        first.scatter_reduce_(1, block, number.expand_as(block), "amin")
        distinct = (first.gather(1, block) == number).cumsum(1, dtype=torch.int32)
        if int(distinct[:, -1].min()) < count:
            return None
        target = distinct.new_full((len(draws), 1), count)
        last = torch.searchsorted(distinct, target, out_int32=True)
        return from_bool_matrix(((first <= last) ^ complement)[None])
    value, order = draws.sort(dim=1, stable=True)
    new = torch.ones_like(draws, dtype=torch.bool)
    new[:, 1:] = value[:, 1:] != value[:, :-1]
    new = torch.empty_like(new).scatter_(1, order, new)
    rank = new.cumsum(1)
    if int(rank[:, -1].min()) < count:
        return None
    row, at = (new & (rank <= count)).nonzero(as_tuple=True)
    chosen = from_points((row * (nk + 1) + draws[row, at]).sort().values)
    if not complement:
        return chosen
    every = torch.arange(len(draws), device="cpu") * (nk + 1)
    return combine(lambda a, b: a & ~b, Runs(every, every + nk), chosen)
