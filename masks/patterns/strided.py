import torch
from torch import Tensor

from masks._core.grid import Grid
from masks._pattern import Pattern, builtin
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.builders import from_columns, on_square_blocks
from masks.patterns.align import check_align, diagonal


@builtin()
def strided(stride: int, *, window: int = 0, align: str | None = None) -> Pattern:
    """Block (i, j) is full if (i - j) mod stride = 0 or |i - j| <= window.

    This is the strided attention of Sparse Transformers with blocks in place of tokens, like their
    GPU kernels. For one key in every `dilation` tokens use dilated. If blocks are not square, the
    pattern is made in square blocks of the longer side.

    Args:
        stride: Distance of two full blocks of a row, in blocks, at least 1.
        window: Number of blocks on each side of the diagonal, at least 0.
        align: Which blocks of queries and keys are aligned if the lengths differ: "top-left" the
            first ones, "bottom-right" the last ones.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: An argument is too small.

    Reference:
        Child et al. 2019, Generating Long Sequences with Sparse Transformers.
    """
    stride = check_integer("stride", stride, least=1)
    window = check_integer("window", window, least=0)
    check_align(align)

    def blocks(grid: Grid) -> BlockMask:
        shift = grid.nk - grid.nq if diagonal(grid, "strided", align) else 0
        steps = torch.arange(-(-grid.nk // stride), device=grid.device) * stride
        reach = min(window, grid.nq + grid.nk)
        near = torch.arange(-reach, reach + 1, device=grid.device)

        def columns(row: Tensor) -> Tensor:
            centre = (row + shift)[:, None]
            return torch.cat([centre % stride + steps, centre + near], dim=1)

        return from_columns("strided", grid, columns)

    shown = f", window={window}" if window else ""
    return Pattern(f"strided({stride}{shown})", lambda grid: on_square_blocks(grid, blocks))
