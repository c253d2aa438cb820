import torch

from masks._core.grid import Grid
from masks._pattern import Pattern, builtin
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.builders import from_spans, on_square_blocks


@builtin()
def neighborhood2d(columns: int, radius: int) -> Pattern:
    """Two-dimensional local attention: block i attends blocks within `radius` rows and columns.

    Blocks form a grid with `columns` blocks in a row. The pattern is for images whose pixels are
    ordered by patches, with one patch in each block. If q_len and k_len differ, query block i has
    the position of key block floor(i * nk / nq).

    Args:
        columns: Number of blocks in a row, at least 1: block i is in row i // columns and column
            i % columns.
        radius: Radius in blocks, at least 0.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: An argument is too small.

    Reference:
        Parmar et al. 2018, Image Transformer (two-dimensional local attention).
    """
    columns = check_integer("columns", columns, least=1)
    radius = check_integer("radius", radius, least=0)

    def blocks(grid: Grid) -> BlockMask:
        wide = min(columns, grid.nk)
        reach = min(radius, grid.nk)
        i = torch.arange(grid.nq, device=grid.device)[:, None]
        centre = i * grid.nk // grid.nq
        above = min(reach, -(-grid.nk // wide))
        row = centre // wide
        if reach >= wide - 1:  # of every row all columns: one run
            return from_spans(grid, i, (row - above) * wide, (row + above + 1) * wide)
        row = row + torch.arange(-above, above + 1, device=grid.device)
        column = centre % wide
        first = row * wide + (column - reach).clamp(min=0)
        last = row * wide + (column + reach + 1).clamp(max=wide)
        return from_spans(grid, i, first, last)

    return Pattern(
        f"neighborhood2d({columns}, {radius})", lambda grid: on_square_blocks(grid, blocks)
    )
