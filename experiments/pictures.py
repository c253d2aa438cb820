"""Shared parts of the pictures of all records.

Functions import matplotlib, so that programs that draw at the end print their --help at once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    **options: Any,
) -> tuple["Figure", Any]:
    """A figure, and its axes without upper and right frame: one, or an array of them.

    Args:
        rows, columns: Of axes.
        size: Inches.
        grid: Whether there are lines behind the data.
        **options: Those of Figure.subplots.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, **options)
    for ax in np.ravel(axes):
        ax.spines[["top", "right"]].set_visible(False)
        if grid:
            ax.grid(color="#DDDDDD", linewidth=0.6)
    return figure, axes


def look(number: int) -> dict[str, Any]:
    """The colour and the marker of a line, by its number; of 64 lines no two have the same."""
    turn, place = divmod(number, len(COLOURS))
    return {"color": COLOURS[place], "marker": MARKERS[(place + turn) % len(MARKERS)]}


def origin(environment: dict) -> str:
    """Where and when a record was measured, and of which commit."""
    commit = (environment["git"]["commit"] or "no commit")[:10]
    device, torch = environment["device"], environment["versions"]["torch"]
    return f"{device}, torch {torch}, {environment['date'][:10]}, {commit}"


def octaves(ax: "Axes", ticks: Sequence[float], text: Callable[[float], str]) -> None:
    """Makes x logarithmic, with these ticks alone, each named by `text`."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(list(ticks)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def plain_values(ax: "Axes") -> None:
    """Writes the values of y as numbers, on a logarithmic axis too."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def save(figure: "Figure", path: Path, suffixes: Sequence[str] = (".png",)) -> list[Path]:
    """Writes a figure to files that differ from `path` in their suffixes; returns their paths."""
    paths = [path.with_suffix(suffix) for suffix in suffixes]
    for each in paths:
        figure.savefig(each, dpi=150)
    return paths
