import torch

from masks._core.grid import Grid
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.builders import from_coordinates, on_square_blocks
from masks.pattern import Pattern, builtin
from masks.patterns.align import check_align, diagonal


@builtin()
def strided(stride: int, *, window: int = 0, align: str | None = None) -> Pattern:
    """Block (i, j) is full where (i - j) mod stride = 0 or |i - j| <= window; stride and window in
    blocks.

    The strided attention of sparse transformers drawn with blocks, as their GPU kernels did; for
    one key in every `dilation` tokens use dilated. align: "top-left" or "bottom-right" lines up
    the first or last blocks when the lengths differ. Blocks that are not square are cut out of
    square ones of the longer side.
    Raises TypeError or ValueError for a stride below 1 or a window below 0, or no integers.
    Source: Child et al. 2019, Generating Long Sequences with Sparse Transformers.
    """
    stride, window = (
        check_integer("stride", stride, least=1),
        check_integer("window", window, least=0),
    )
    check_align(align)

    def blocks(grid: Grid) -> BlockMask:
        shift = grid.nk - grid.nq if diagonal(grid, "strided", align) else 0
        i = torch.arange(grid.nq, device=grid.device)
        steps = torch.arange(-(-grid.nk // stride), device=grid.device)
        near = torch.arange(-window, window + 1, device=grid.device)
        column = torch.cat(
            [(i + shift)[:, None] % stride + steps * stride, (i + shift)[:, None] + near], dim=1
        )
        row = i[:, None].expand_as(column)
        inside = (column >= 0) & (column < grid.nk)
        return from_coordinates(grid, row[inside], column[inside])

    shown = f", window={window}" if window else ""
    return Pattern(f"strided({stride}{shown})", lambda grid: on_square_blocks(grid, blocks))
