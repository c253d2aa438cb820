"""Blocks renumbered in the transposed grid."""

from torch import Tensor

from masks.grid import Grid
from masks.intervals import Runs, combine


def transpose_points(number: Tensor, grid: Grid) -> Tensor:
    """Numbers of the same blocks in the transposed grid, in the same order."""
    row, column = grid.split(number)
    layer, row = row // grid.nq, row % grid.nq
    return (layer * grid.nk + column) * grid.T.line + row


def transpose_runs(full: Runs, grid: Grid) -> Runs:
    """The same blocks as runs of the transposed grid, in the order of the runs that come in and go
    out.

    A run down a column begins where a block is in and the one above it is not, and ends where the
    one above is in and it is not; those blocks are a difference of two sets of runs, so nothing
    else is ever expanded.
    """
    # One more row in each layer lets runs end below the last row.
    spread = Runs(*(t + (t // grid.layer) * grid.line for t in full))
    above = spread.shift(grid.line)

    def columns(points: Tensor) -> Tensor:
        row, column = grid.split(points)
        layer, row = row // (grid.nq + 1), row % (grid.nq + 1)
        return ((layer * grid.nk + column) * grid.T.line + row).sort().values

    begin = combine(lambda here, there: here & ~there, spread, above).expand()
    end = combine(lambda here, there: there & ~here, spread, above).expand()
    return Runs(columns(begin), columns(end))
