"""`python -m masks PATTERN`: draws a pattern and prints its figures."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import masks
from masks import plot

app = typer.Typer()


@app.command()
def main(
    pattern: Annotated[
        str, typer.Argument(help='"butterfly", "local(256) & causal()", "my_patterns.py:name"')
    ],
    seq_len: Annotated[int, typer.Option(help="tokens")] = 4096,
    block_size: Annotated[int, typer.Option(help="tokens: 16, 32, 64, 128 or 256")] = 128,
    output: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="PNG to write; by default named after the pattern"),
    ] = None,
) -> None:
    """Draw a sparsity pattern, in the terminal and as a PNG, and print its figures."""
    if output is not None and output.suffix != ".png":
        raise typer.BadParameter(f"--output must end in .png, got {output}")
    try:
        mask = masks.parse(pattern)(seq_len, block_size)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    path = output or Path(re.sub(r"\W+", "_", pattern).strip("_") + ".png")
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


if __name__ == "__main__":
    app()
