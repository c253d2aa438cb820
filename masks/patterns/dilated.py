from masks.arguments import check_integer
from masks.builders import from_offsets
from masks.pattern import Pattern, builtin
from masks.patterns.align import check_align, diagonal


@builtin()
def dilated(window: int, dilation: int, *, align: str | None = None) -> Pattern:
    """Dilated sliding window: query q attends k = q + m * dilation for |m| <= window.

    window: neighbours on each side; dilation: tokens between neighbours; align: as in causal, when
        lengths differ.
    Raises TypeError or ValueError for a window below 0 or a dilation below 1, or no integers.
    Source: Beltagy et al. 2020, Longformer, section 3.1.
    """
    window, dilation = (
        check_integer("window", window, least=0),
        check_integer("dilation", dilation, least=1),
    )
    check_align(align)
    reach = window * dilation

    def attends(offset):
        return (offset.abs() <= reach) & (offset % dilation == 0)

    def build(grid):
        return from_offsets(grid, attends, reach, diagonal(grid, "dilated", align))

    return Pattern(f"dilated({window}, {dilation})", build)
