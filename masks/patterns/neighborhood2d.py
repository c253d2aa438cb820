import torch

from masks._core.grid import Grid
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.builders import from_coordinates, on_square_blocks
from masks.pattern import Pattern, builtin


@builtin()
def neighborhood2d(columns: int, radius: int) -> Pattern:
    """Blocks as points of a plane: block i attends j where both their rows and their columns are
    at most `radius` apart.

    columns: blocks in a row of the plane, so that block i stands in row i // columns and column
    i % columns; radius: in blocks. For images whose pixels are taken patch by patch, a patch to a
    block. When q_len and k_len differ, query block i stands at key block floor(i * nk / nq).
    Raises TypeError or ValueError for fewer than 1 column or a radius below 0, or no integers.
    Source: Parmar et al. 2018, Image Transformer (two-dimensional local attention).
    """
    columns, radius = (
        check_integer("columns", columns, least=1),
        check_integer("radius", radius, least=0),
    )

    def blocks(grid: Grid) -> BlockMask:
        i = torch.arange(grid.nq, device=grid.device)
        centre = (i * grid.nk // grid.nq)[:, None, None]
        near = torch.arange(-radius, radius + 1, device=grid.device)
        row = centre // columns + near[:, None]
        column = centre % columns + near
        j = row * columns + column
        inside = (row >= 0) & (column >= 0) & (column < columns) & (j < grid.nk)
        return from_coordinates(grid, i[:, None, None].expand_as(j)[inside], j[inside])

    return Pattern(
        f"neighborhood2d({columns}, {radius})", lambda grid: on_square_blocks(grid, blocks)
    )
