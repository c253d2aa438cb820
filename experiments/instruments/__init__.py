"""Instruments: commands that each measure one property of the kernels.

    python -m experiments.instruments.NAME --help

describes `counters`, `power`, `host_time`, `first_call`, `lab` and `tune`. Each measures rows,
writes them with the environment as JSON after every problem, and prints a table.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from experiments.cli import output_file, output_folder
from experiments.files import record_path


class Log:
    """The rows of an instrument, on disk and as a table."""

    def __init__(
        self,
        name: str,
        device: str,
        output: Path,
        overwrite: bool,
        measured_on: str | None = None,
        **facts: object,
    ):
        """An empty log.

        Args:
            name: Name of the instrument, with which the name of its file begins.
            device: "cpu" or "cuda".
            output: Folder of the file.
            overwrite: Whether the folder may be that of the shipped records.
            measured_on: Full name of the device whose figures these are, in the name of the file;
                by default that of this machine.
            facts: What the file says of all rows.
        """
        import torch

        from experiments.environment import environment

        if measured_on is None:
            self.path = output_file(output, name, device, overwrite)
        else:
            self.path = record_path(output_folder(output, overwrite), name, measured_on)
            facts = {"measured_on": measured_on, **facts}
        self.facts = {"environment": environment(torch.device(device)), **facts}
        self.rows: list[Any] = []
        self.skipped: dict[str, dict[str, str]] = {}

    def add(self, problem: str, rows: Iterable, skipped: dict[str, str], complete: bool) -> None:
        """Adds the rows of a problem and writes the file.

        Args:
            problem: Name of the problem.
            rows: Instances of a dataclass.
            skipped: By implementation, why it was not measured.
            complete: Whether this is the last problem.
        """
        from experiments.files import write_json

        self.rows += rows
        if skipped:
            self.skipped[problem] = skipped
        results = {
            "complete": complete,
            "skipped": self.skipped,
            "rows": list(map(asdict, self.rows)),
        }
        write_json(self.path, self.facts | results)

    def show(
        self, title: str, names: Sequence[str], figures: dict[str, Callable[[Any], str]]
    ) -> None:
        """Prints a table of the rows, what was skipped, and the path of the file.

        Args:
            title: Title of the table.
            names: Attributes of a row that are words. They are the first columns.
            figures: The other columns: the text of a row by heading.
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
