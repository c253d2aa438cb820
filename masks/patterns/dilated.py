from torch import Tensor

from masks._core.grid import Grid
from masks._pattern import Pattern, builtin
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.builders import from_offsets
from masks.patterns.align import check_align, diagonal


@builtin()
def dilated(window: int, dilation: int, *, align: str | None = None) -> Pattern:
    """Dilated sliding window: query q attends k = q + m * dilation for |m| <= window.

    Args:
        window: Number of neighbours on each side, at least 0.
        dilation: Distance of two neighbours in tokens, at least 1.
        align: As in causal.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: An argument is too small.

    Reference:
        Beltagy et al. 2020, Longformer, section 3.1.
    """
    window = check_integer("window", window, least=0)
    dilation = check_integer("dilation", dilation, least=1)
    check_align(align)

    def build(grid: Grid) -> BlockMask:
        reach = min(window * dilation, grid.q_len + grid.k_len)

        def attends(offset: Tensor) -> Tensor:
            return (offset.abs() <= reach) & (offset % dilation == 0)

        return from_offsets(grid, attends, reach, dilation, diagonal(grid, "dilated", align))

    return Pattern(f"dilated({window}, {dilation})", build, of_tokens=True)
