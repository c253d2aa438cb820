"""Combinations of patterns that are known by a name of their own."""

from dataclasses import replace

import torch

from masks._core.grid import Grid
from masks._pattern import Pattern, builtin
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.builders import from_spans, on_square_blocks
from masks.patterns.global_tokens import global_tokens
from masks.patterns.local import local
from masks.patterns.random import random_blocks


@builtin()
def longformer(window: int, num_global: int) -> Pattern:
    """local(window) | global_tokens(num_global): |q - k| <= window, or q or k among the first.

    Args:
        window: Number of tokens to each side, at least 0.
        num_global: Number of global tokens, at least 1.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: An argument is too small.

    Reference:
        Beltagy et al. 2020, Longformer.
    """
    num_global = check_integer("num_global", num_global, least=1)
    both = local(window) | global_tokens(num_global)
    return replace(both, name=f"longformer({window}, {num_global})")


@builtin()
def bigbird(window: int = 3, num_global: int = 2, num_random: int = 3, seed: int = 0) -> Pattern:
    """Full blocks: a window around the diagonal, the first rows and columns, and random ones.

    Block (i, j) is full if |floor(i * nk / nq) - j| <= (window - 1) / 2, i < num_global or
    j < num_global, or if j is one of the random blocks of row i. If blocks are not square, the
    pattern is made in square blocks of the longer side.

    Args:
        window: Number of blocks in each row around the diagonal, odd.
        num_global: Number of first block rows and block columns that are full.
        num_random: Number of random blocks in each row, which may coincide with the others.
        seed: Seed of the random blocks.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: `window` is even, or a number is negative.

    Reference:
        Zaheer et al. 2020, BigBird.
    """
    window = check_integer("window", window, least=1)
    if window % 2 == 0:
        raise ValueError(f"window must be odd, got {window}")
    num_global = check_integer("num_global", num_global, least=0)
    num_random = check_integer("num_random", num_random, least=0)
    seed = check_integer("seed", seed)

    def blocks(grid: Grid) -> BlockMask:
        row = torch.arange(grid.nq, device=grid.device)
        near = row * grid.nk // grid.nq - min(window, 2 * grid.nk + 1) // 2
        first_columns = torch.full_like(row, min(num_global, grid.nk))
        first = torch.stack([near, torch.zeros_like(row)])
        last = torch.stack([near + min(window, 2 * grid.nk + 1), first_columns])
        last[1, :num_global] = grid.nk
        mask = from_spans(grid, row, first, last)
        return mask | random_blocks(grid, num_random, seed) if num_random else mask

    name = f"bigbird({window}, {num_global}, {num_random}, {seed})"
    return Pattern(name, lambda grid: on_square_blocks(grid, blocks))
