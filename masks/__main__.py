"""`python -m masks PATTERN` draws a pattern and prints its figures; other commands analyse it."""

import hashlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from masks import commands, plot
from masks.pattern import BUILTIN


def _known_patterns() -> str:
    """Every built-in pattern with its arguments and their defaults, a paragraph each."""
    calls = [f"{name}({', '.join(_arguments(make))})" for name, make in sorted(BUILTIN.items())]
    return "\n\n".join(["Patterns, joined by & | ^ - and ~:", *calls])


def _arguments(make: Callable) -> list[str]:
    """Names, and defaults where there are any."""
    parameters = inspect.signature(make).parameters.values()
    return [str(argument.replace(annotation=argument.empty)) for argument in parameters]


app = typer.Typer(cls=commands.DrawByDefault, epilog=_known_patterns(), add_completion=False)
app.command()(commands.reach)
app.command()(commands.lint)
app.command()(commands.gallery)
app.command()(commands.diff)


@app.command(epilog=_known_patterns())
def draw(
    pattern: commands.PatternText,
    seq_len: commands.SeqLen = "4096",
    block_size: commands.BlockSize = "128",
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="PNG, SVG or PDF to write; by default a PNG named after the pattern",
        ),
    ] = None,
) -> None:
    """Draw a sparsity pattern, in the terminal and as a picture, and print its figures."""
    with commands.usage_errors():
        plot.check_picture("--output", output)
    mask = commands.build(pattern, seq_len, block_size)
    path = output or _file_name(pattern)
    try:
        plot.save(mask, path, pattern)
    except OSError as error:
        raise typer.BadParameter(f"--output: {error}") from error
    table = Table(show_header=False, box=None)
    for name, value in plot.figures(mask).items():
        table.add_row(name, value)
    console = Console()
    console.print(plot.text(mask), highlight=False)
    console.print(table)
    console.print(f"wrote {path}")


def _file_name(pattern: str) -> Path:
    """A name of its own for every text: a digest tells apart what letters and digits do not."""
    name = re.sub(r"\W+", "_", pattern).strip("_")[:60]
    digest = hashlib.sha256(pattern.encode()).hexdigest()[:6]
    return Path(f"{name}.png" if name == pattern else f"{name}-{digest}.png")


if __name__ == "__main__":
    app()
