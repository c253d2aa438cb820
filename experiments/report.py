"""A record as tables.

    python -m experiments.report experiments/results/speedup-nvidia-h200.json

prints the tables of a record, draws its pictures anew beside it, and prints the table of the
README.
"""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments.plots import draw
from experiments.record import OURS, Measurement, Record, crossovers, is_ours, relative

DRIFT_LIMIT = 1.15
SHOWN_SPARSITY = 16  # 1 / s of the masks that the README shows
# A narrower terminal wraps lines; a table fitted to it would cut digits off.
TABLE_WIDTH = 132
COLUMNS = (
    "pattern", "density", "blocks/row", "kernels", "ms", "±%", "useful", "speed-up", "ideal",
    "retention", "peak MiB"
)  # fmt: skip


def main(
    path: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A record, JSON.")],
) -> None:
    """Prints the tables of a record and draws its pictures."""
    record, console = load(path), wide_console()
    show(record, console)
    for written in draw(record, path.with_suffix("")):
        console.print(f"wrote {written}", highlight=False)
    print(markdown(record))


def wide_console() -> Console:
    """A console with room for tables, however narrow the terminal is."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    return console


def load(path: Path) -> Record:
    """A record named on a command line. Raises typer.BadParameter for any other file."""
    try:
        return Record.load(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def markdown(record: Record) -> str:
    """The table of the README."""
    return _of_densities(record) if record.rows[0].suite == "density" else _of_suite(record)


def _of_suite(record: Record) -> str:
    """Useful TFLOP/s, or TB/s, of every implementation on the cases of the first size."""
    size = record.rows[0].group[:-1]
    rows = [r for r in record.rows if r.group[:-1] == size]
    pairs = dict.fromkeys((r.direction, r.implementation) for r in rows)
    columns = sorted(pairs, key=lambda pair: pair[0] == "backward")
    names = [
        f"{direction}, {implementation.split(':')[-1]}" for direction, implementation in columns
    ]
    lines = [f"| pattern | density s | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for pattern in dict.fromkeys(r.pattern for r in rows):
        found = {(r.direction, r.implementation): r for r in rows if r.pattern == pattern}
        cells = [
            _rounded(found[column].useful[0]) if column in found else "" for column in columns
        ]
        density = next(iter(found.values())).density
        lines.append(f"| {pattern} | {density:.3g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rounded(useful: float) -> str:
    return f"{useful:.0f}" if useful >= 10 else f"{useful:.2f}"


def show(record: Record, console: Console) -> None:
    """Prints a table for every length and pass, the crossovers, and the baselines left out."""
    for group in dict.fromkeys(r.group for r in record.rows):
        console.print(_table([r for r in record.rows if r.group == group], record.rows))
    if found := crossovers(record.rows):
        console.print(_crossover_table(found))
    if record.roofline:
        roofline = ", ".join(f"{name} {limit:.4g}" for name, limit in record.roofline.items())
        console.print(f"Roofline in the same run: {roofline}", highlight=False)
    if record.drift and record.drift > DRIFT_LIMIT:
        console.print(
            f"[yellow]The machine was not quiet:[/] the first case, measured once more, took"
            f" {record.drift:.2f} times as long or as short: do not trust these figures."
        )
    for implementation, pattern, reason in record.skipped:
        console.print(
            f"[yellow]{implementation} did not run on {pattern}:[/] {reason}", highlight=False
        )


def _table(rows: list[Measurement], everything: list[Measurement]) -> Table:
    first = rows[0]
    size = f"N = {first.seq_len:,}, batch {first.batch}, {first.size}"
    table = plain_table(f"{first.direction}, {size}; useful {first.useful[1]}")
    for column in COLUMNS:
        justify = "left" if column in ("pattern", "kernels") else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        repeated = before is not None and before.pattern == row.pattern
        table.add_row(
            *_cells(row, everything, repeated),
            style=None if is_ours(row.implementation) else "dim",
        )
    return table


def _cells(row: Measurement, everything: list[Measurement], repeated: bool) -> list[str]:
    versus = relative(row, everything)
    spread = (row.high_ms - row.low_ms) / 2 / row.median_ms
    return [
        "" if repeated else row.pattern,
        "" if repeated else f"{row.density:.4f}",
        "" if repeated else f"{row.blocks_per_row:.1f}",
        row.implementation,
        f"{row.median_ms:.4g}",
        f"{spread:.1%}".rstrip("%"),
        f"{row.useful[0]:.3g}",
        _optional(versus["speedup"], "{:.2f}"),
        f"{versus['ideal']:.2f}",
        _optional(versus["retention"], "{:.2f}"),
        f"{row.peak_bytes / 2**20:.1f}",
    ]


def _crossover_table(found: list[dict]) -> Table:
    table = plain_table("Sparse beats dense up to density")
    for column in ("N", "pass", "pattern", "our full mask", "best dense baseline"):
        table.add_column(column)
    for entry in found:
        baseline = f" ({entry['baseline']})" if entry["baseline"] else ""
        against_baseline = (
            _limit(entry["against_baseline"]) + baseline if entry["baseline"] else "not measured"
        )
        table.add_row(
            f"{entry['seq_len']:,}",
            entry["direction"],
            entry["family"],
            _limit(entry["against_full"]),
            against_baseline,
        )
    return table


def _limit(density: float | None) -> str:
    return "at none measured" if density is None else f"{density:.3f}"


def _of_densities(record: Record) -> str:
    """The full mask and, of every family, the mask of a density next to 1/16, at the longest
    sequences of the sweep over densities: a table for the README."""
    sweep = [r for r in record.rows if r.suite == "density" and r.family != "causal"]
    longest = max(r.seq_len for r in sweep)
    rows = [r for r in sweep if r.seq_len == longest]
    ours = [r for r in rows if r.implementation == OURS and r.direction == "forward"]
    lines = [
        "| pattern | density s | forward, ms | faster than full | than FlexAttention "
        "| backward, ms | faster than full | than FlexAttention |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in dict.fromkeys(r.family for r in ours):
        near = min(
            (r for r in ours if r.family == family),
            key=lambda r: abs(math.log(r.density * SHOWN_SPARSITY)),
        )
        figures = [
            figure
            for direction in ("forward", "backward")
            for figure in _markdown_figures(near.pattern, direction, rows)
        ]
        lines.append(f"| `{near.pattern}` | {near.density:.4g} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _markdown_figures(pattern: str, direction: str, rows: list[Measurement]) -> list[str]:
    by_implementation = {
        r.implementation: r for r in rows if (r.pattern, r.direction) == (pattern, direction)
    }
    row, flex = by_implementation[OURS], by_implementation.get("flex")
    return [
        f"{row.median_ms:.3g}",
        _optional(relative(row, rows)["speedup"], "{:.2f}x"),
        _optional(flex and flex.median_ms / row.median_ms, "{:.2f}x"),
    ]


def plain_table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


if __name__ == "__main__":
    typer.run(main)
