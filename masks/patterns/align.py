"""The position of the diagonal if q_len and k_len differ."""

from masks._core.grid import Grid

ALIGNMENTS = ("top-left", "bottom-right")


def check_align(align: str | None) -> None:
    """Raises ValueError unless `align` is None or one of ALIGNMENTS."""
    if align is not None and align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {ALIGNMENTS} or None, got {align!r}")


def diagonal(grid: Grid, name: str, align: str | None) -> int:
    """The key, in tokens, that is on the diagonal with query 0.

    "top-left" puts query 0 on key 0, "bottom-right" the last query on the last key.

    Raises:
        ValueError: The lengths differ and `align` is None.
    """
    if align is None and grid.q_len != grid.k_len:
        raise ValueError(
            f"align must be one of {ALIGNMENTS} for {name} with seq_len {grid.seq_len}, got None"
        )
    return grid.k_len - grid.q_len if align == "bottom-right" else 0
