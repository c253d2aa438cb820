"""Two records of the same cases, before and after."""

import math

from rich.table import Table

from experiments.record import Measurement, Record
from experiments.report import plain_table

NOISE = 0.03  # part of a time that two runs of the same code may differ by


def compare(before: Record, after: Record) -> Table:
    """Times of the rows that both records hold, and their geometric mean for each implementation.

    Raises ValueError where they hold no row in common, or were measured in another dtype or by
    another clock.
    """
    for name in ("dtype", "clock"):
        values = before.settings.get(name), after.settings.get(name)
        if values[0] != values[1]:
            raise ValueError(f"the records must share their {name}, got {values[0]}, {values[1]}")
    earlier = {_key(row): row for row in before.rows}
    pairs = [(earlier[_key(row)], row) for row in after.rows if _key(row) in earlier]
    if not pairs:
        raise ValueError("the records have no case in common")
    table = plain_table(f"{_origin(before)} to {_origin(after)}")
    for column in ("case", "pass", "kernels"):
        table.add_column(column)
    for column in ("before, ms", "after, ms", "faster"):
        table.add_column(column, justify="right")
    for old, new in pairs:
        table.add_row(*_cells(old, new))
    for implementation in dict.fromkeys(row.implementation for row in after.rows):
        ratios = [
            o.median_ms / n.median_ms for o, n in pairs if n.implementation == implementation
        ]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            table.add_row("geometric mean", "", implementation, "", "", f"{mean:.3f}x")
    return table


def _key(row: Measurement) -> tuple:
    return row.implementation, row.family, row.pattern, row.group


def _cells(old: Measurement, new: Measurement) -> list[str]:
    ratio = old.median_ms / new.median_ms
    style = "green" if ratio > 1 + NOISE else "red" if ratio < 1 - NOISE else "dim"
    case = f"{new.pattern}, N = {new.seq_len:,}, {new.size}"
    times = (f"{old.median_ms:.4g}", f"{new.median_ms:.4g}")
    return [case, new.direction, new.implementation, *times, f"[{style}]{ratio:.3f}x[/]"]


def _origin(record: Record) -> str:
    commit = record.environment["git"]["commit"] or "unknown"
    return f"{commit[:10]} on {record.environment['device']}"
