from masks.block_mask import BlockMask
from masks.pattern import Pattern, builtin


@builtin()
def full() -> Pattern:
    """Every query attends every key: dense attention."""
    return Pattern("full()", lambda grid: BlockMask.of_full(grid, grid.every_row()))
