"""The pictures of a record: speed-up against density, time and memory against sequence length."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.cli import Baseline
from experiments.pictures import COLOURS, ORIGIN, look, octaves, origin, panels, plain_values, save
from experiments.record import (
    BASELINE_NAMES,
    FROM_PYTHON,
    OURS,
    Line,
    Measurement,
    Record,
    from_python,
    is_ours,
    lines,
)

# Line styles distinguish implementations, colours and markers patterns.
STYLES: dict[str, Any] = {
    "sparseflash": "-",
    "flex": "--",
    "cudnn": "-.",
    "flash": ":",
    "flash4": (0, (5, 1)),
    "cudnn-bsa": (0, (5, 1, 1, 1)),
    "cudnn-flex": (0, (1, 1)),
    "flashinfer": (0, (3, 1)),
    "sdpa": "-.",
    "standard": (0, (3, 1, 1, 1, 1, 1)),
}

# The name of the limit of each unit, in records and in pictures.
ROOFLINE = {
    "TFLOP/s": ("matrix_product_tflops", "a matrix product"),
    "TB/s": ("copy_terabytes_per_second", "a copy"),
}
LENGTH_SWEEPS = ("length", "memory")
OWN_PICTURES = ("landscape", "parts")


def draw(record: Record, stem: Path) -> list[Path]:
    """Writes stem-speedup-N.png, -time.png, -memory.png and bars, if there are rows for them.

    Pictures of landscape and parts are written as .svg too.
    """
    density = [r for r in record.rows if r.suite == "density"]
    length = [r for r in record.rows if r.suite in LENGTH_SWEEPS]
    figures = {
        f"speedup-{seq_len}": _speedup([r for r in density if r.seq_len == seq_len])
        for seq_len in sorted({r.seq_len for r in density})
    }
    if length:
        figures["time"] = _against_length(length, lambda r: r.median_ms, "Time", "milliseconds")
        figures["memory"] = _against_length(
            length, lambda r: r.peak_bytes / 2**20, "Peak memory", "MiB beyond the inputs"
        )
    if found := lines(record.rows):
        figures["landscape"] = _landscape(found, record)
    if parts := [r for r in record.rows if r.suite == "parts"]:
        figures["parts"] = _parts(parts)
    for suite in {r.suite for r in record.rows} - {"density", *LENGTH_SWEEPS, *OWN_PICTURES}:
        figures[suite] = _bars([r for r in record.rows if r.suite == suite], record)
    paths = []
    for name, figure in figures.items():
        figure.supxlabel(origin(record.environment), x=0.995, **ORIGIN)
        suffixes = (".png", ".svg") if name in OWN_PICTURES else (".png",)
        paths += save(figure, stem.with_name(f"{stem.name}-{name}.png"), suffixes)
    return paths


def _speedup(rows: list[Measurement]) -> Figure:
    """Time of our full mask over the time of each row; other full masks are levels.

    If several of our backends were measured, it is the full mask of the first one.
    """
    figure, axes = _panels(rows)
    families = _families(r for r in rows if r.family != "full")
    own = _own(rows)
    for direction, ax in axes.items():
        here = [r for r in rows if r.direction == direction]
        full = next((r for r in here if (r.implementation, r.family) == (own, "full")), None)
        if full is None:
            continue
        for (implementation, family), points in _lines(here).items():
            look = _look(implementation, family, families, own)
            if family == "full" and implementation != own:
                _level(ax, full.median_ms / points[0].median_ms, implementation)
            elif family != "full":
                line = sorted((r.density, full.median_ms / r.median_ms) for r in points)
                ax.plot(*zip(*line, strict=True), **look)
        least = min(r.density for r in here)
        ax.plot([least, 1], [1 / least, 1], color="black", linewidth=1, linestyle=(0, (1, 2)))
        end: dict[str, Any] = {
            "textcoords": "offset points",
            "fontsize": 8,
            "ha": "right",
            "va": "bottom",
        }
        ax.annotate("ideal 1/s", (least, 1 / least), (-10, 2), **end)
        _density_axis(ax)
    title = f"Speed-up over the full mask of {own}, N = {rows[0].seq_len:,}"
    figure.suptitle(f"{title}\n{_size(rows[0])}", fontsize=10)
    next(iter(axes.values())).set_ylabel("times faster")
    _legend(figure, rows, families)
    return figure


def _bars(rows: list[Measurement], record: Record) -> Figure:
    """Useful TFLOP/s or TB/s of every implementation, with the limit of the device."""
    directions = list(dict.fromkeys(r.direction for r in rows))
    implementations = list(dict.fromkeys(r.implementation for r in rows))
    cases = list(dict.fromkeys((r.pattern, _sizes(r)) for r in rows))
    width = max(7.0, 0.14 * len(cases) * len(implementations) + 2)
    size = (width, 2.6 * len(directions) + 2.6)
    figure, axes = panels(len(directions), size=size, grid=False, sharex=True, squeeze=False)
    unit, bar = rows[0].useful[1], 0.8 / len(implementations)
    limit, label = ROOFLINE[unit]
    for direction, ax in zip(directions, axes[:, 0], strict=True):
        for i, name in enumerate(implementations):
            own = [r for r in rows if (r.direction, r.implementation) == (direction, name)]
            where = [cases.index((r.pattern, _sizes(r))) + i * bar for r in own]
            heights = [r.useful[0] for r in own]
            ax.bar(where, heights, bar, color=COLOURS[i], label=BASELINE_NAMES.get(name, name))
        if limit in record.roofline:
            ax.axhline(record.roofline[limit], color="#444444", lw=1, ls=":", label=label)
        ax.set_ylabel(f"{direction}, useful {unit}", fontsize=8)
        ax.tick_params(labelsize=7)
    ticks = [i + 0.4 - bar / 2 for i in range(len(cases))]
    axes[-1, 0].set_xticks(ticks, map(", ".join, cases), rotation=60, ha="right")
    axes[0, 0].set_xlim(-0.4, len(cases))
    labelled = axes[0, 0].get_legend_handles_labels()
    figure.legend(*labelled, loc="outside right upper", fontsize=7, frameon=False)
    return figure


def _sizes(row: Measurement) -> str:
    """The common part of the names of patterns in a picture."""
    if row.q_len is None:
        return f"N {row.seq_len:,}, d {row.head_dim}, blocks of {row.block_size}"
    heads = f"batch {row.batch}, {row.heads} heads on {row.kv_heads} of {row.head_dim}"
    return f"{row.q_len} of N {row.seq_len:,}, {heads}"


def _against_length(
    rows: list[Measurement], value: Callable[[Measurement], float], title: str, unit: str
) -> Figure:
    figure, axes = _panels(rows)
    families, own = _families(rows), _own(rows)
    for direction, ax in axes.items():
        here = [r for r in rows if r.direction == direction]
        for (implementation, family), points in _lines(here).items():
            line = sorted((r.seq_len, value(r)) for r in points)
            ax.plot(*zip(*line, strict=True), **_look(implementation, family, families, own))
        _length_axis(ax, sorted({r.seq_len for r in rows}))
    next(iter(axes.values())).set_ylabel(unit)
    figure.suptitle(f"{title} against sequence length\n{_size(rows[0])}", fontsize=10)
    _legend(figure, rows, families)
    return figure


def _landscape(found: dict[tuple[str, str], Line], record: Record) -> Figure:
    """Time and memory over lengths: ours solid, exact ones dashed, approximations dotted.

    An approximation looks the same in every picture, whichever others were measured.
    """
    figure, axes = panels(1, 2, size=(13, 5.6))
    marked = from_python(record.rows)
    approximations = [b.value for b in Baseline if b.approximate]
    others = [label for label in found if label[0] not in approximations]
    for label, line in found.items():
        implementation, family = label
        approximate = implementation in approximations
        kind = f"approximate, {FROM_PYTHON}" if implementation in marked else "approximate"
        known = BASELINE_NAMES.get(implementation, implementation)
        place = approximations.index(implementation) if approximate else others.index(label)
        style = look(place) | {
            "linestyle": "-" if is_ours(implementation) else ":" if approximate else "--",
            "markerfacecolor": "white" if approximate else None,
            "markersize": 4.5,
            "linewidth": 2 if is_ours(implementation) else 1.3,
            "label": f"{known} ({kind})" if approximate else f"{known}, {family}",
        }
        lengths = sorted(line)
        axes[0].plot(lengths, [line[n][0] for n in lengths], **style)
        axes[1].plot(lengths, [line[n][1] / 2**20 for n in lengths], **style)
    ticks = sorted({n for line in found.values() for n in line})
    for ax, unit in zip(axes, ("milliseconds", "peak MiB beyond the inputs"), strict=True):
        _length_axis(ax, ticks)
        ax.set_ylabel(unit)
    first = next(r for r in record.rows if r.suite == "landscape")
    asked = (("dropout", "dropout_p"), ("key padding", "padding"))
    extras = "".join(f", {name} {p:g}" for name, k in asked if (p := record.settings.get(k)))
    passes = dict.fromkeys(r.direction for r in record.rows if r.suite == "landscape")
    title = f"{' and '.join(passes)} over lengths\n{_size(first)}{extras}"
    figure.suptitle(title, fontsize=10)
    labelled = axes[0].get_legend_handles_labels()
    figure.legend(*labelled, loc="outside right center", fontsize=8, frameon=False)
    return figure


def _parts(rows: list[Measurement]) -> Figure:
    """Forward times: stacked parts of standard attention, and ours."""
    problems = list(dict.fromkeys((r.batch, r.heads, r.seq_len) for r in rows))
    size = (3.6 * len(problems), 4.6)
    figure, axes = panels(1, len(problems), size=size, grid=False, sharey=True)
    for ax, problem in zip(np.atleast_1d(axes), problems, strict=True):
        here = {
            r.implementation: r.median_ms for r in rows if (r.batch, r.heads, r.seq_len) == problem
        }
        height = 0.0
        for i, (name, ms) in enumerate(here.items()):
            if is_ours(name):
                ax.bar(name, ms, color=COLOURS[0])
            elif part := name.partition(":")[2]:
                ax.bar("standard, its parts", ms, bottom=height, color=COLOURS[i % len(COLOURS)])
                label = f"{part}, {ms:.3g}"
                ax.annotate(label, (1.45, height + ms / 2), fontsize=7, va="center")
                height += ms
        ax.set_xlim(-0.6, 2.6)
        ours = next((ms for name, ms in here.items() if is_ours(name)), None)
        ratio = f"\nparts over ours: {height / ours:.2f}" if ours and height else ""
        ax.set_title("batch {}, {} heads, N {:,}".format(*problem) + ratio, fontsize=9)
        ax.tick_params(axis="x", labelsize=7)
    np.atleast_1d(axes)[0].set_ylabel("milliseconds, forward")
    return figure


def _panels(rows: list[Measurement]) -> tuple[Figure, dict[str, Axes]]:
    """A figure with one panel for each pass."""
    directions = sorted({r.direction for r in rows}, reverse=True)
    size = (5.2 * len(directions) + 2.5, 4.6)
    figure, axes = panels(1, len(directions), size=size, sharey=True, squeeze=False)
    for ax, direction in zip(axes[0], directions, strict=True):
        ax.set_title(direction, fontsize=10)
    return figure, dict(zip(directions, axes[0], strict=True))


def _lines(rows: Iterable[Measurement]) -> dict[tuple[str, str], list[Measurement]]:
    lines = {}
    for row in rows:
        lines.setdefault((row.implementation, row.family), []).append(row)
    return lines


def _families(rows: Iterable[Measurement]) -> dict[str, int]:
    return {family: i for i, family in enumerate(dict.fromkeys(r.family for r in rows))}


def _own(rows: Iterable[Measurement]) -> str:
    """The first of our implementations, whose points are filled: OURS, or OURS:backend."""
    return next((r.implementation for r in rows if is_ours(r.implementation)), OURS)


def _look(implementation: str, family: str, families: dict[str, int], own: str) -> dict:
    style = look(families.get(family, 0))
    return style | {
        "linestyle": STYLES.get(implementation, "-"),
        "markersize": 4,
        "linewidth": 1.4,
        "markerfacecolor": style["color"] if implementation == own else "white",
    }


def _level(ax: Axes, height: float, implementation: str) -> None:
    """A line at the height of a dense baseline."""
    ax.axhline(height, color="#444444", linewidth=1, linestyle=STYLES.get(implementation, "-"))
    below = implementation == "flash"  # the slowest one; the line of FlexAttention is above it
    label = f"{BASELINE_NAMES.get(implementation, implementation)} dense"
    look: dict[str, Any] = {
        "fontsize": 7,
        "color": "#444444",
        "ha": "right",
        "va": "top" if below else "bottom",
    }
    place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    ax.annotate(label, (1, height), (-3, -3 if below else 3), **place, **look)


def _length_axis(ax: Axes, lengths: list[int]) -> None:
    """Lengths and values in log-log."""
    octaves(ax, lengths, lambda n: f"{n:g}" if n < 1024 else f"{n / 1024:g}K")
    ax.set_yscale("log")
    plain_values(ax)
    ax.set_xlabel("sequence length N (tokens)")


def _density_axis(ax: Axes) -> None:
    """Densities in octaves, from dense on the left to sparse on the right."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.invert_xaxis()
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda s, _: f"1/{1 / s:g}" if s < 1 else f"{s:g}"))
    plain_values(ax)
    ax.set_xlabel("density s (non-zero blocks / all blocks)")


def _legend(figure: Figure, rows: list[Measurement], families: dict[str, int]) -> None:
    """Patterns by colour, then implementations by line and fill, at the right of the panels."""
    own = _own(rows)
    patterns = [
        Line2D([], [], label=family, **_look(own, family, families, own)) for family in families
    ]
    implementations = [
        Line2D(
            *([], []),
            color="#444444",
            linestyle=STYLES.get(name, "-"),
            marker="o",
            markersize=4,
            fillstyle="full" if name == own else "none",
            label=BASELINE_NAMES.get(name, name),
        )
        for name in dict.fromkeys(r.implementation for r in rows)
    ]
    handles = [*patterns, Line2D([], [], linestyle="none"), *implementations]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)


def _size(row: Measurement) -> str:
    heads = "1 head" if row.heads == 1 else f"{row.heads} heads"
    return f"batch {row.batch}, {heads} of {row.head_dim}, blocks of {row.block_size}"
