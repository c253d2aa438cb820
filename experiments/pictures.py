"""What the pictures of all records have in common."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

# Okabe and Ito's colours, which people who see colours differently can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
MARKERS = "osD^vPX*"
# Of the line that says where a record was measured.
ORIGIN: dict[str, Any] = {"ha": "right", "fontsize": 6.5, "color": "#666666"}


def panels(
    rows: int = 1,
    columns: int = 1,
    *,
    size: tuple[float, float],
    grid: bool = True,
    layout: Any = "constrained",
    **options: Any,
) -> tuple[Figure, Any]:
    """A figure, and its axes without upper and right frame: one, or an array of them.

    Args:
        rows, columns: Of axes.
        size: Inches.
        grid: Whether there are lines behind the data.
        layout: As Figure takes it.
        **options: Those of Figure.subplots.
    """
    figure = Figure(figsize=size, layout=layout)
    axes = figure.subplots(rows, columns, **options)
    for ax in np.ravel(axes):
        ax.spines[["top", "right"]].set_visible(False)
        if grid:
            ax.grid(color="#DDDDDD", linewidth=0.6)
    return figure, axes


def save(figure: Figure, path: Path, suffixes: Sequence[str] = (".png",)) -> list[Path]:
    """Writes a figure to files that differ from `path` in their suffixes; returns their paths."""
    paths = [path.with_suffix(suffix) for suffix in suffixes]
    for each in paths:
        figure.savefig(each, dpi=150)
    return paths
