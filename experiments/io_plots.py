"""Pictures of `experiments.io_complexity`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.pictures import COLOURS, ORIGIN, look, octaves, origin, panels, plain_values, save
from experiments.record import BASELINE_NAMES

if TYPE_CHECKING:
    from experiments.io_complexity import Row

FIGURES = {  # the attributes of Row that are predicted and measured, by label of the y axis
    "time (ms)": ("predicted_ms", "measured_ms"),
    "device memory (GB)": ("memory_gb", "measured_gb"),
}
PREDICTED: dict[str, Any] = {"linestyle": "--", "markerfacecolor": "white"}


def draw(rows: Sequence["Row"], environment: dict, model: str, stem: Path) -> list[Path]:
    """Writes the figures whose panels are among the rows, as PNG and SVG.

    Args:
        rows: The rows of the record.
        environment: The environment of the record.
        model: Name of the device of the prediction.
        stem: Path of the record, from which the paths of the figures are made.

    Returns:
        The paths.
    """
    parts = {panel: [r for r in rows if r.panel == panel] for panel in {r.panel for r in rows}}
    figures = {}
    if {"left", "middle", "right"} <= parts.keys():
        figures["figure-2"] = _figure_2(parts)
    if "scaling" in parts:
        figures["scaling"] = _scaling(parts["scaling"])
    source = f"model of {model}; {origin(environment)}"
    paths = []
    for name, figure in figures.items():
        figure.supxlabel(source, x=0.995, **ORIGIN)
        paths += save(figure, stem.with_name(f"{stem.stem}-{name}.png"), (".png", ".svg"))
    return paths


def _figure_2(parts: dict[str, list["Row"]]) -> Figure:
    """Figures of both passes together: of implementations, by block size and by density."""
    figure, axes = panels(2, 3, size=(11, 6.2), grid=False)
    for row, (heading, fields) in enumerate(FIGURES.items()):
        _bars(axes[row, 0], parts["left"], heading, fields)
        _line(axes[row, 1], parts["middle"], "block_size", fields)
        _line(axes[row, 2], parts["right"], "density", fields)
        octaves(axes[row, 1], sorted({r.block_size for r in parts["middle"]}), "{:g}".format)
        densities = sorted({round(1 / r.density) for r in parts["right"]})
        octaves(
            axes[row, 2], [1 / n for n in densities], lambda s: f"1/{1 / s:g}" if s < 1 else "1"
        )
        axes[row, 1].set_yscale("linear")
        axes[row, 1].autoscale()
        axes[row, 1].set_ylim(0, 1.1 * axes[row, 1].dataLim.y1)
        axes[row, 2].invert_xaxis()
    left, middle, right = (parts[name][0] for name in ("left", "middle", "right"))
    axes[0, 0].set_title(f"FlashAttention and standard\n{_size(left)}", fontsize=9)
    axes[0, 1].set_title(f"block size, {middle.name}\n{_size(middle)}", fontsize=9)
    axes[0, 2].set_title(f"density, blocks of {right.block_size}\n{_size(right)}", fontsize=9)
    axes[1, 1].set_xlabel("block size (tokens)")
    axes[1, 2].set_xlabel("density s")
    axes[0, 1].legend(fontsize=8, frameon=False)
    measured = any(row.measured_ms is not None for rows in parts.values() for row in rows)
    what = "predicted and measured" if measured else "predicted"
    figure.suptitle(f"Forward and backward pass: time and bytes, {what}")
    return figure


def _bars(ax: Axes, rows: Sequence["Row"], heading: str, fields: tuple[str, str]) -> None:
    """A predicted and a measured bar for each implementation."""
    names = list(dict.fromkeys(row.implementation for row in rows))
    drawn = 0
    styles: tuple[dict[str, Any], ...] = (
        {"color": "white", "edgecolor": COLOURS[0], "hatch": "//", "label": "predicted"},
        {"color": COLOURS[0], "label": "measured"},
    )
    for i, (field, style) in enumerate(zip(fields, styles, strict=True)):
        heights = [_sum([r for r in rows if r.implementation == name], field) for name in names]
        if not math.isnan(heights[0]):
            drawn += 1
            positions = [n + 0.4 * i for n in range(len(names))]
            bars = ax.bar(positions, heights, 0.38, **style)
            ax.bar_label(bars, fmt="{:.3g}", fontsize=7)
    labels = []
    for name in names:
        gflop = _sum([r for r in rows if r.implementation == name], "gflop")
        labels.append(f"{BASELINE_NAMES.get(name, name)}\n{gflop:,.0f} GFLOP")
    ax.set_xticks([n + 0.2 * (drawn - 1) for n in range(len(names))], labels, fontsize=8)
    ax.margins(x=0.15)
    ax.set_ylabel(heading)
    ax.legend(fontsize=7, frameon=False)


def _line(ax: Axes, rows: Sequence["Row"], x: str, fields: tuple[str, str]) -> None:
    """Predicted and measured figures of both passes against the attribute `x` of the rows."""
    values = sorted({getattr(row, x) for row in rows})
    for i, (field, label) in enumerate(zip(fields, ("predicted", "measured"), strict=True)):
        heights = [_sum([r for r in rows if getattr(r, x) == value], field) for value in values]
        if not math.isnan(heights[0]):
            style = look(i) | (PREDICTED if i == 0 else {})
            ax.plot(values, heights, label=label, **style)
    if fields[0] == "memory_gb":
        heights = [_sum([r for r in rows if getattr(r, x) == value], "l2_gb") for value in values]
        ax.plot(values, heights, label="predicted, through L2", linestyle=":", **look(2))
        ax.legend(fontsize=7, frameon=False)
    ax.set_yscale("log")
    plain_values(ax)
    ax.grid(color="#DDDDDD", linewidth=0.6)


def _scaling(rows: Sequence["Row"]) -> Figure:
    """Time and bytes of both passes against length."""
    figure, axes = panels(1, 2, size=(10, 4.4))
    lengths = sorted({row.seq_len for row in rows})
    for i, name in enumerate(dict.fromkeys(row.name for row in rows)):
        passes = [[r for r in rows if (r.name, r.seq_len) == (name, length)] for length in lengths]
        for ax, field, label, style in (
            (axes[0], "predicted_ms", "predicted", PREDICTED),
            (axes[0], "measured_ms", "measured", {}),
            (axes[1], "l2_gb", "predicted, through L2", PREDICTED),
            (axes[1], "memory_gb", "predicted, device memory", PREDICTED | {"linestyle": ":"}),
            (axes[1], "measured_gb", "measured, device memory", {}),
        ):
            heights = [_sum(both, field) for both in passes]
            if not math.isnan(heights[0]):
                ax.plot(lengths, heights, label=f"{name}, {label}", **look(i) | style)
    for ax, heading in zip(axes, ("time (ms)", "bytes (GB)"), strict=True):
        octaves(ax, lengths, lambda n: f"{n / 1024:g}K")
        ax.set_yscale("log")
        plain_values(ax)
        ax.set_xlabel("sequence length N (tokens)")
        ax.set_ylabel(heading)
        ax.legend(fontsize=7, frameon=False)
    title = (
        "Forward and backward pass against length: strided s ~ N^(-1/2), butterfly s ~ log N / N"
    )
    figure.suptitle(f"{title}\nbatch {rows[0].batch}, {rows[0].heads} heads of {rows[0].head_dim}")
    return figure


def _sum(rows: Sequence["Row"], field: str) -> float:
    """The sum of a figure over both passes; NaN if it was not measured."""
    values = [getattr(row, field) for row in rows]
    return math.nan if None in values else sum(values)


def _size(row: "Row") -> str:
    return f"N = {row.seq_len:,}, batch {row.batch}, {row.heads} heads of {row.head_dim}"
