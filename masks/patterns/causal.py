from masks._core.grid import Grid
from masks._pattern import Pattern, builtin
from masks.block_mask import BlockMask
from masks.builders import from_band
from masks.patterns.align import check_align, diagonal


@builtin()
def causal(*, align: str | None = None) -> Pattern:
    """Query q attends the keys k <= q + offset.

    Args:
        align: "top-left" (offset 0) or "bottom-right" (offset k_len - q_len); must be given if the
            lengths differ.

    Raises:
        ValueError: `align` has another value. In a call of the pattern: the lengths differ, and
            `align` is None.

    Reference:
        Vaswani et al. 2017, Attention is all you need, section 3.2.3.
    """
    check_align(align)

    def build(grid: Grid) -> BlockMask:
        return from_band(grid, -grid.q_len, diagonal(grid, "causal", align) + 1)

    shown = "" if align is None else f"align={align!r}"
    return Pattern(f"causal({shown})", build, of_tokens=True)
