"""Where the diagonal lies when q_len and k_len differ."""

from masks._core.grid import Grid

ALIGNMENTS = ("top-left", "bottom-right")


def check_align(align: str | None) -> None:
    """Raises ValueError for what is neither None nor one of ALIGNMENTS."""
    if align is not None and align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {ALIGNMENTS} or None, got {align!r}")


def diagonal(grid: Grid, name: str, align: str | None) -> int:
    """The key (in tokens) that lies on the diagonal with query 0.

    "top-left" puts query 0 on key 0, "bottom-right" the last query on the last key.

    Raises:
        ValueError: The lengths differ and no alignment was chosen.
    """
    if align is None and grid.q_len != grid.k_len:
        raise ValueError(
            f"{name} with seq_len {grid.seq_len} needs align, one of {ALIGNMENTS}, got None"
        )
    return grid.k_len - grid.q_len if align == "bottom-right" else 0
