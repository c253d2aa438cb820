"""Instruments: commands that each measure one property of the kernels.

    python -m experiments.instruments.NAME --help

explains `counters`, `power`, `host_time` and `tune`. Each of them measures rows, saves them after
every problem as JSON with the environment, and prints a table.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from experiments.cli import output_file


class Log:
    """The rows of an instrument, on disk and as a table."""

    def __init__(self, name: str, device: str, output: Path, overwrite: bool, **facts: object):
        """An empty log.

        Args:
            name: of the instrument and of its file.
            device: "cpu" or "cuda".
            output: folder of the file.
            overwrite: whether it may be that of the shipped records.
            facts: of all rows, for the file.
        """
        import torch

        from experiments.environment import environment

        self.path = output_file(output, name, device, overwrite)
        self.facts = {"environment": environment(torch.device(device)), **facts}
        self.rows: list[Any] = []
        self.skipped: dict[str, dict[str, str]] = {}

    def add(self, problem: str, rows: Iterable, skipped: dict[str, str], complete: bool) -> None:
        """Adds the rows of a problem, which are dataclasses, and saves all."""
        from experiments.files import write_json

        self.rows += rows
        if skipped:
            self.skipped[problem] = skipped
        found = {
            "complete": complete,
            "skipped": self.skipped,
            "rows": list(map(asdict, self.rows)),
        }
        write_json(self.path, self.facts | found)

    def show(
        self, title: str, names: Sequence[str], figures: dict[str, Callable[[Any], str]]
    ) -> None:
        """Prints a table, what was skipped and where the file is.

        Args:
            title: of the table.
            names: fields of a row that are words, in the first columns.
            figures: heading and text of every other column.
        """
        from rich.table import Table

        from experiments.report import wide_console

        table = Table(title=title, title_justify="left")
        for name in names:
            table.add_column(name.replace("_", " "), max_width=32)
        for heading in figures:
            table.add_column(heading, justify="right")
        for row in self.rows:
            words = (str(getattr(row, name)) for name in names)
            table.add_row(*words, *(text(row) for text in figures.values()))
        console = wide_console()
        console.print(table)
        for problem, reasons in self.skipped.items():
            for name, reason in reasons.items():
                console.print(f"[yellow]{name} did not run on {problem}:[/] {escape(reason)}")
        print(f"wrote {self.path}")


def command(main: Callable[..., None]) -> None:
    """Runs an instrument from the command line."""
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app(prog_name=f"python -m {main.__globals__['__spec__'].name}")
