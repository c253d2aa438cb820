"""Compositions that people ask for by name."""

import torch

from masks._core.grid import Grid
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.builders import from_coordinates, on_square_blocks
from masks.pattern import Pattern, builtin
from masks.patterns.global_tokens import global_tokens
from masks.patterns.local import local
from masks.patterns.random import random_blocks


@builtin()
def longformer(window: int, num_global: int) -> Pattern:
    """local(window) | global_tokens(num_global): |q - k| <= window, or q or k among the first
    tokens; in tokens.

    Raises TypeError or ValueError for a window below 0 or a num_global below 1, or no integers.
    Source: Beltagy et al. 2020, Longformer.
    """
    num_global = check_integer("num_global", num_global, least=1)
    both = local(window) | global_tokens(num_global)
    return Pattern(f"longformer({window}, {num_global})", both.build)


@builtin()
def bigbird(window: int = 3, num_global: int = 2, num_random: int = 3, seed: int = 0) -> Pattern:
    """Full blocks: a window of `window` blocks around the diagonal, `num_global` first rows and
    columns of blocks, and `num_random` blocks drawn in every row (they may fall on the others).

    All counts in blocks. Raises TypeError or ValueError for an even or negative window, a negative
    count, or no integers.
    Source: Zaheer et al. 2020, BigBird.
    """
    window = check_integer("window", window, least=1)
    if window % 2 == 0:
        raise ValueError(f"window must be odd, got {window}")
    num_global = check_integer("num_global", num_global, least=0)
    num_random = check_integer("num_random", num_random, least=0)
    seed = check_integer("seed", seed)

    def blocks(grid: Grid) -> BlockMask:
        i, j = (torch.arange(n, device=grid.device) for n in (grid.nq, grid.nk))
        first_q, first_k = i[:num_global], j[:num_global]
        near = (
            (i * grid.nk // grid.nq)[:, None]
            + torch.arange(window, device=grid.device)
            - window // 2
        )
        near = near.clamp(0, grid.nk - 1)
        row = torch.cat(
            [
                i.repeat_interleave(window),
                *torch.cartesian_prod(first_q, j).T[:1],
                *torch.cartesian_prod(i, first_k).T[:1],
            ]
        )
        column = torch.cat(
            [
                near.flatten(),
                *torch.cartesian_prod(first_q, j).T[1:],
                *torch.cartesian_prod(i, first_k).T[1:],
            ]
        )
        mask = from_coordinates(grid, row, column)
        return mask | random_blocks(grid, num_random, seed) if num_random else mask

    name = f"bigbird({window}, {num_global}, {num_random}, {seed})"
    return Pattern(name, lambda grid: on_square_blocks(grid, blocks))
