"""Blocks that are put together from blocks of a mask: what re-blocking and moving share."""

import torch
from torch import Tensor

from masks import tiles
from masks.block_mask import BlockMask


def pairs_of(mask: BlockMask, number: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs of rectangles of rows x columns blocks, each distinct rectangle once.

    number: int64 (n, rows, columns), the block of `mask` at every place; one that the mask does
        not hold, like -1, is empty
    Returns bool (distinct, rows * bq, columns * bk), and for each of the n which of them it is.
    """
    code = torch.full_like(number, len(mask.bit_tiles) + 1)  # empty
    code[mask.full.contains(number)] = len(mask.bit_tiles)
    if len(mask.partial):
        at = torch.searchsorted(mask.partial, number).clamp(max=len(mask.partial) - 1)
        hit = mask.partial[at] == number
        code[hit] = mask.partial_bit_tile[at[hit]]
    met, which = tiles.distinct(code.flatten(1).int())
    blocks = tiles.unpack(mask.extended_bit_tiles(), mask.grid.bk)[met.long()]
    pairs = blocks.unflatten(1, number.shape[1:]).transpose(2, 3)
    return pairs.flatten(3, 4).flatten(1, 2), which
