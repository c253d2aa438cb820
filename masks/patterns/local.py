import torch

from masks.block_mask import BlockMask
from masks.build import from_intervals
from masks.grid import Grid
from masks.pattern import Pattern, builtin
from masks.patterns.align import check_align, diagonal


@builtin
def local(window: int | tuple[int, int], *, align: str | None = None) -> Pattern:
    """Sliding window: query q attends the keys with |q - k| <= window, in tokens.

    window: one int for both sides, or (left, right) for q - left <= k <= q + right; (w, 0) looks
        at the past only.
    align: as in causal, when the lengths differ.
    Raises TypeError or ValueError for a window that is not one or two ints of at least 0.
    Source: Beltagy et al. 2020, Longformer.
    """
    left, right = (window, window) if isinstance(window, int) else window
    if not all(isinstance(side, int) and side >= 0 for side in (left, right)):
        raise ValueError(f"window must be one int or two of at least 0, got {window!r}")
    check_align(align)

    def build(grid: Grid) -> BlockMask:
        centre = torch.arange(grid.q_len, device=grid.device) + diagonal(grid, "local", align)
        return from_intervals(grid, centre - left, centre + right + 1)

    return Pattern(f"local({window})", build)
