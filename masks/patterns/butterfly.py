import torch
from torch import Tensor

from masks._core.grid import Grid
from masks._pattern import Pattern, builtin
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.builders import from_columns, on_square_blocks


@builtin()
def butterfly(max_stride: int | None = None) -> Pattern:
    """Flat block butterfly: block i attends i and i xor m for m = 1, 2, 4, ..., max_stride / 2.

    This is the sum of the butterfly factors of stride 2, 4, ..., max_stride. The number of blocks
    need not be a power of two: blocks past the end are left out. If q_len and k_len differ, query
    block i has the position of key block floor(i * nk / nq). If blocks are not square, the pattern
    is made in square blocks of the longer side.

    Args:
        max_stride: Largest stride in blocks, a power of two. 1 gives the block diagonal; None
            gives all factors.

    Raises:
        TypeError: max_stride is not an integer.
        ValueError: max_stride is not a power of two.

    Reference:
        Dao et al. 2022, Pixelated Butterfly, section 3.
    """
    if max_stride is not None:
        max_stride = check_integer("max_stride", max_stride, least=1)
        if max_stride & (max_stride - 1):
            raise ValueError(f"max_stride must be a power of two (blocks), got {max_stride}")

    def blocks(grid: Grid) -> BlockMask:
        factors = (grid.nk - 1).bit_length()
        if max_stride is not None:
            factors = min(factors, max_stride.bit_length() - 1)
        masks = torch.tensor([0, *(1 << f for f in range(factors))], device=grid.device)

        def columns(row: Tensor) -> Tensor:
            return (row * grid.nk // grid.nq)[:, None] ^ masks

        return from_columns("butterfly", grid, columns)

    shown = "" if max_stride is None else max_stride
    return Pattern(f"butterfly({shown})", lambda grid: on_square_blocks(grid, blocks))
