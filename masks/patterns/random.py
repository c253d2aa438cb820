from numbers import Real

import torch
from torch import Tensor

from masks._core.grid import Grid
from masks.arguments import check_integer
from masks.block_mask import BlockMask, of_full
from masks.builders import from_coordinates, on_square_blocks
from masks.pattern import Pattern, builtin


@builtin()
def random(density: float, seed: int = 0) -> Pattern:
    """Every block row holds exactly max(1, round(density * nk)) full blocks, uniformly without
    replacement.

    The same seed gives the same mask on every device. Give heads masks of their own with stack and
    several seeds.
    Raises TypeError or ValueError for a density outside (0, 1] or a seed that is no integer.
    """
    if not isinstance(density, Real) or not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density!r}")
    seed = check_integer("seed", seed)

    def blocks(grid: Grid) -> BlockMask:
        return random_blocks(grid, max(1, round(density * grid.nk)), seed)

    return Pattern(f"random({density:g}, {seed})", lambda grid: on_square_blocks(grid, blocks))


def random_blocks(grid: Grid, count: int, seed: int) -> BlockMask:
    """`count` full blocks in every row (all of them when there are fewer)."""
    generator = torch.Generator("cpu").manual_seed(seed)
    if 2 * count > grid.nk:
        if count >= grid.nk:
            return of_full(grid)
        return ~_chosen(grid, grid.nk - count, generator)
    return _chosen(grid, count, generator)


def _chosen(grid: Grid, count: int, generator: torch.Generator) -> BlockMask:
    """Draws with replacement until each row has `count` distinct blocks, keeping the first `count`
    of them.
    """
    draws = torch.empty(grid.nq, 0, dtype=torch.int64, device="cpu")
    while True:
        more = torch.randint(grid.nk, (grid.nq, count + 8), generator=generator, device="cpu")
        draws = torch.cat([draws, more], dim=1)
        new = _first_time(draws)
        if int(new.sum(1).min()) >= count:
            break
    row, place = (new & (new.cumsum(1) <= count)).nonzero(as_tuple=True)
    column = draws[row, place]
    return from_coordinates(grid, row.to(grid.device), column.to(grid.device))


def _first_time(draws: Tensor) -> Tensor:
    """Which draws of each row had not come before."""
    value, order = draws.sort(dim=1, stable=True)
    new = torch.ones_like(draws, dtype=torch.bool)
    new[:, 1:] = value[:, 1:] != value[:, :-1]
    return torch.empty_like(new).scatter_(1, order, new)
