import torch

from masks._core.grid import Grid
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.builders import from_coordinates, on_square_blocks
from masks.pattern import Pattern, builtin


@builtin()
def butterfly(max_stride: int | None = None) -> Pattern:
    """Fixed flat block butterfly: block i attends itself and the blocks i xor m for m = 1, 2, 4,
    ..., max_stride / 2.

    The sum of the butterfly factors of stride 2, 4, ..., max_stride (in blocks, a power of two; 1
    leaves the block diagonal; None takes all factors). Any number of blocks: partners past the end
    are left out. When q_len and k_len differ, query block i stands at key block floor(i * nk /
    nq). Blocks that are not square are cut out of square ones of the longer side. Raises
    TypeError or ValueError when max_stride is not a power of two.
    Source: Dao et al. 2022, Pixelated Butterfly, section 3.
    """
    if max_stride is not None:
        max_stride = check_integer("max_stride", max_stride, least=1)
        if max_stride & (max_stride - 1):
            raise ValueError(f"max_stride must be a power of two of blocks, got {max_stride}")

    def blocks(grid: Grid) -> BlockMask:
        i = torch.arange(grid.nq, device=grid.device)
        centre = i * grid.nk // grid.nq
        factors = (grid.nk - 1).bit_length() if max_stride is None else max_stride.bit_length() - 1
        partners = [centre, *(centre ^ (1 << f) for f in range(factors))]
        column = torch.stack(partners, dim=1)
        row = i[:, None].expand_as(column)
        inside = column < grid.nk
        return from_coordinates(grid, row[inside], column[inside])

    shown = "" if max_stride is None else max_stride
    return Pattern(f"butterfly({shown})", lambda grid: on_square_blocks(grid, blocks))
