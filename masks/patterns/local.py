from masks._core.grid import Grid
from masks._pattern import Pattern, builtin
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.builders import from_band
from masks.patterns.align import check_align, diagonal


@builtin()
def local(window: int | tuple[int, int], *, align: str | None = None) -> Pattern:
    """Sliding window: query q attends the keys with |q - k| <= window, in tokens.

    Args:
        window: One integer for both sides, or (left, right) for q - left <= k <= q + right, in
            tokens. (w, 0) is a window of the past.
        align: As in causal.

    Raises:
        TypeError: `window` is not one or two integers.
        ValueError: A side is below 0.

    Reference:
        Beltagy et al. 2020, Longformer.
    """
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window must be one integer or (left, right), got {window!r}")
    left, right = (check_integer("window", side, least=0) for side in sides)
    check_align(align)

    def build(grid: Grid) -> BlockMask:
        shift = diagonal(grid, "local", align)
        below, above = (min(side, grid.q_len + grid.k_len) for side in (left, right))
        return from_band(grid, shift - below, shift + above + 1)

    shown = (left, right) if sides is window else left
    return Pattern(f"local({shown})", build, of_tokens=True)
