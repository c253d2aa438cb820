"""Prints a record as tables and pictures, or compares two records.

    python -m experiments.report experiments/results/speedup-nvidia-h200.json
    python -m experiments.report before.json after.json

`docs/benchmark-columns.md` explains the columns.
"""

import math
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.cli import RESULTS, Load, Output, Overwrite, output_folder, usage_errors
from experiments.record import (
    FROM_PYTHON,
    NO_GRAPH,
    Line,
    Measurement,
    Record,
    crossing_length,
    crossovers,
    from_python,
    is_ours,
    lines,
    relative,
)

DRIFT_LIMIT = 1.15
NOISE = 0.03  # relative difference of two runs of the same code
# Settings that records share whose times are compared, and what they are in records without them.
COMPARED = {
    "dtype": None,
    "clock": None,
    "timing": Load.RESTED,
    "dropout_p": 0.0,
    "padding": 0.0,
}
# In a narrower terminal lines wrap; a table with its width would truncate digits.
TABLE_WIDTH = 150
COLUMNS = (
    "pattern", "density", "blocks/row", "implementation", "ms", "±%", "useful", "speed-up",
    "ideal", "retention", "peak MiB"
)  # fmt: skip
OWN_TABLES = ("landscape", "parts")
SUSTAINED = ("sustained\nms", "sustained\nuseful")  # columns of a record that has them


def main(
    paths: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="One record, or two records to compare."),
    ],
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Print the tables of a record and draw its pictures, or compare two records."""
    console = wide_console()
    records = [load(path) for path in paths]
    if len(records) == 2:
        with usage_errors():
            console.print(compare(*records))
        return
    if len(records) > 2:
        raise typer.BadParameter(
            f"paths must be one record, or two to compare, got {len(records)}"
        )
    from experiments.plots import draw

    show(records[0], console)
    for written in draw(records[0], output_folder(output, overwrite) / paths[0].stem):
        print(f"wrote {written}")


def wide_console() -> Console:
    """A console with the width of the tables, whatever the width of the terminal."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    return console


def load(path: Path) -> Record:
    """Reads a record of a command line. Raises typer.BadParameter for other files."""
    with usage_errors():
        return Record.load(path)


def show(record: Record, console: Console) -> None:
    """Prints a table for every length and pass, the crossovers, and the skipped baselines."""
    _show_landscape(record.rows, console)
    for group in dict.fromkeys(r.group for r in record.rows if r.suite not in OWN_TABLES):
        console.print(_table([r for r in record.rows if r.group == group], record.rows))
    if found := crossovers(record.rows):
        console.print(_crossover_table(found))
    if record.gaps:
        _show_gaps(record.gaps, console)
    if record.roofline:
        roofline = ", ".join(f"{name} {limit:.4g}" for name, limit in record.roofline.items())
        console.print(f"Roofline in the same run: {roofline}", highlight=False)
    if record.drift and record.drift > DRIFT_LIMIT:
        console.print(
            f"[yellow]The times drifted:[/] when the first case was measured again, its"
            f" time had changed by a factor of {record.drift:.2f}. Repeat the measurement."
        )
    for implementation, pattern, reason in record.skipped:
        console.print(
            f"[yellow]{implementation} did not run on {pattern}:[/] {escape(reason)}",
            highlight=False,
        )


def _show_landscape(rows: list[Measurement], console: Console) -> None:
    """Time and memory over lengths, crossings with ours, and parts of standard attention."""
    found = lines(rows)
    if found:
        passes = {row.direction: None for row in rows if row.suite == "landscape"}
        marked = from_python(rows)
        console.print(_lengths_table(found, " and ".join(passes), marked))
        if marked:
            console.print(f"{FROM_PYTHON}: {NO_GRAPH}", highlight=False)
        console.print(_crossing_table(found))
    for group in dict.fromkeys(r.group for r in rows if r.suite == "parts"):
        console.print(_parts_table([r for r in rows if r.group == group]))


def _label(implementation: str, family: str) -> str:
    return implementation if family == "full" else f"{implementation} {family}"


def _lengths_table(
    found: dict[tuple[str, str], Line], passes: str, marked: Collection[str]
) -> Table:
    """marked: the implementations that were timed as called from Python."""
    lengths = sorted({n for line in found.values() for n in line})
    title = f"{passes}: ms, and below it peak MiB, at N tokens"
    table = plain_table(title, ["implementation"], [f"{n:,}" for n in lengths])
    for name, line in found.items():
        points = (line.get(n) for n in lengths)
        cells = ("" if p is None else f"{p[0]:.4g}\n{p[1] / 2**20:.4g}" for p in points)
        mark = f"\n{FROM_PYTHON}" if name[0] in marked else ""
        table.add_row(_label(*name) + mark, *cells)
    return table


def _crossing_table(found: dict[tuple[str, str], Line]) -> Table:
    ours = [name for name in found if is_ours(name[0])]
    title = "sparseflash at the longest length of both: faster or slower, and from which length on"
    table = plain_table(title, ["compared with"], ["longest", *(_label(*name) for name in ours)])
    for name, line in found.items():
        cells = ("" if name == own else _crossing(found[own], line) for own in ours)
        table.add_row(_label(*name), f"{max(line):,}", *cells)
    return table


def _crossing(ours: Line, other: Line) -> str:
    """Whether ours is faster at the longest length of both, and from which length on."""
    if (length := crossing_length(ours, other)) is not None:
        return f"faster from {length:,.0f}"
    length = crossing_length(other, ours)
    return "" if length is None else f"slower from {length:,.0f}"


def _parts_table(rows: list[Measurement]) -> Table:
    """Forward times of the parts of standard attention, and how many times ours is faster."""
    first, times = rows[0], {row.implementation: row.median_ms for row in rows}
    parts = {name: ms for name, ms in times.items() if name.startswith("standard:")}
    times |= {"sum of all parts": sum(parts.values())} if parts else {}
    ours = next((ms for name, ms in times.items() if is_ours(name)), None)
    problem = f"N = {first.seq_len:,}, batch {first.batch}, {first.size}"
    title = f"{first.direction}, {first.family}, dropout, {problem}"
    table = plain_table(title, ["part"], ["ms", "ms / ms of sparseflash"])
    for name, ms in times.items():
        table.add_row(name, f"{ms:.4g}", _optional(ours and ms / ours, "{:.2f}"))
    return table


def _show_gaps(gaps: list[dict], console: Console) -> None:
    from sparseflash.gap import Gap

    for gap in gaps:
        facts = {name: gap[name] for name in ("measured", "ideal", "parts", "noise")}
        name = f"{gap['pattern']} at N = {gap['seq_len']:,}, {gap['direction']}"
        console.print(f"{name}: {Gap(**facts)}", highlight=False)


def _table(rows: list[Measurement], everything: list[Measurement]) -> Table:
    first = rows[0]
    size = f"N = {first.seq_len:,}, batch {first.batch}, {first.size}"
    table = plain_table(f"{first.direction}, {size}; useful {first.useful[1]}")
    sustained = any(row.sustained_ms is not None for row in rows)
    for column in COLUMNS + SUSTAINED * sustained:
        justify = "left" if column in ("pattern", "implementation") else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        repeated = before is not None and before.pattern == row.pattern
        table.add_row(
            *_cells(row, everything, repeated),
            *_sustained(row) * sustained,
            style=None if is_ours(row.implementation) else "dim",
        )
    return table


def _cells(row: Measurement, everything: list[Measurement], repeated: bool) -> list[str]:
    versus = relative(row, everything)
    spread = (row.high_ms - row.low_ms) / 2 / row.median_ms
    mask = [row.pattern, f"{row.density:.4f}", f"{row.blocks_per_row:.1f}"]
    return [
        *(["", "", ""] if repeated else mask),
        *(row.implementation, f"{row.median_ms:.4g}", f"{spread:.1%}".rstrip("%")),
        *(f"{row.useful[0]:.3g}", _optional(versus["speedup"], "{:.2f}")),
        *(f"{versus['ideal']:.2f}", _optional(versus["retention"], "{:.2f}")),
        f"{row.peak_bytes / 2**20:.1f}",
    ]


def _sustained(row: Measurement) -> tuple[str, str]:
    return _optional(row.sustained_ms, "{:.4g}"), _optional(row.useful_sustained, "{:.3g}")


def _crossover_table(found: list[dict]) -> Table:
    words = ("N", "pass", "implementation", "pattern", "its full mask", "best dense baseline")
    table = plain_table("Sparse is faster than dense up to density", words)
    for entry in found:
        baseline = entry["baseline"]
        against = (
            f"{_limit(entry['against_baseline'])} ({baseline})" if baseline else "not measured"
        )
        names = (entry["direction"], entry["implementation"], entry["family"])
        limit = _limit(entry["against_full"])
        table.add_row(f"{entry['seq_len']:,}", *names, limit, against)
    return table


def _limit(density: float | None) -> str:
    return "none measured" if density is None else f"{density:.3f}"


def compare(before: Record, after: Record) -> Table:
    """The times of the rows in both records, and their geometric mean for each implementation.

    Raises:
        ValueError: The records have no row in common, or differ in a setting of which all times
            depend: see COMPARED.
    """
    for name, absent in COMPARED.items():
        values = [record.settings.get(name, absent) for record in (before, after)]
        # The times of a record are rested wherever these were measured.
        load = [Load.RESTED if value == Load.BOTH else value for value in values]
        if load[0] != load[1]:
            raise ValueError(f"the records must share their {name}, got {values[0]}, {values[1]}")
    earlier = {_key(row): row for row in before.rows}
    matched = [(earlier[_key(row)], row) for row in after.rows if _key(row) in earlier]
    if not matched:
        raise ValueError("the records have no case in common")
    words, figures = ("case", "pass", "implementation"), ("before, ms", "after, ms", "faster")
    table = plain_table(f"{origin(before)} to {origin(after)}", words, figures)
    for old, new in matched:
        table.add_row(*_compared(old, new))
    for implementation in dict.fromkeys(row.implementation for row in after.rows):
        ratios = [
            o.median_ms / n.median_ms for o, n in matched if n.implementation == implementation
        ]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            table.add_row("geometric mean", "", implementation, "", "", f"{mean:.3f}x")
    return table


def _key(row: Measurement) -> tuple:
    return row.implementation, row.family, row.pattern, row.group, row.clock


def _compared(old: Measurement, new: Measurement) -> list[str]:
    ratio = old.median_ms / new.median_ms
    style = "green" if ratio > 1 + NOISE else "red" if ratio < 1 - NOISE else "dim"
    case = f"{new.pattern}, N = {new.seq_len:,}, {new.size}"
    times = (f"{old.median_ms:.4g}", f"{new.median_ms:.4g}")
    return [case, new.direction, new.implementation, *times, f"[{style}]{ratio:.3f}x[/]"]


def origin(record: Record) -> str:
    commit = record.environment["git"]["commit"] or "unknown"
    return f"{commit[:10]} on {record.environment['device']}"


def plain_table(title: str, words: Iterable[str] = (), figures: Iterable[str] = ()) -> Table:
    """A table without a frame, with columns of text before columns of figures."""
    look: dict[str, Any] = {"title_justify": "left", "pad_edge": False, "padding": (0, 1)}
    table = Table(*words, title=title, box=SIMPLE_HEAD, **look)
    for figure in figures:
        table.add_column(figure, justify="right")
    return table


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


if __name__ == "__main__":
    typer.run(main)
