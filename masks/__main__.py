"""`python -m masks PATTERN` draws a pattern and prints its figures; other commands analyse it."""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from masks import commands

PATTERNS = Path(__file__).with_name("patterns")


def _known_patterns() -> str:
    """Every built-in pattern with its arguments and their defaults, a line each."""
    calls = [call for file in PATTERNS.glob("*.py") for call in _builtin_calls(file)]
    return "\n".join(["Built-in patterns, which & | ^ - and ~ combine:", *sorted(calls)])


def _builtin_calls(file: Path) -> Iterator[str]:
    """The built-in patterns that a file defines: parsed, since to import it would import torch."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef) and any(map(_is_builtin, node.decorator_list)):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            yield f"{node.name}({ast.unparse(node.args)})"


def _is_builtin(decorator: ast.expr) -> bool:
    """Whether it is `builtin(...)`."""
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "builtin"


app = typer.Typer(
    cls=commands.DrawByDefault,
    help="Draw and analyse sparsity patterns. A pattern without a command is drawn.",
    epilog=_known_patterns(),
    add_completion=False,
)
for command in (commands.reach, commands.lint, commands.gallery, commands.diff):
    app.command()(command)


@app.command(epilog=_known_patterns())
def draw(
    pattern: commands.PatternText,
    seq_len: commands.SeqLen = "4096",
    block_size: commands.BlockSize = "128",
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Picture to write (PNG, SVG or PDF). Default: a PNG named after the pattern.",
        ),
    ] = None,
    as_json: commands.Json = False,
) -> None:
    """Draw a pattern in the terminal and as a picture, and print its figures."""
    from masks import plot

    with commands.usage_errors():
        plot.check_picture("--output", output)
    path = output or _file_name(pattern)
    with commands.progress_bar("drawing"):
        mask = commands.build(pattern, seq_len, block_size)
        with commands.usage_errors("--output"):
            plot.save(mask, path, pattern)
        figures = plot.figures(mask)
    if as_json:
        print(json.dumps({"picture": str(path), "figures": figures}))
        return
    table = Table(show_header=False, box=None)
    for name, value in figures.items():
        table.add_row(name, value)
    console = Console()
    console.print(plot.text(mask), highlight=False)
    console.print("rows are queries, columns are keys; darker where more pairs attend")
    console.print(table)
    print(f"wrote {path}")


def _file_name(pattern: str) -> Path:
    """A file name for each pattern: a digest distinguishes texts with equal letters and digits."""
    name = re.sub(r"\W+", "_", pattern).strip("_")[:60]
    digest = hashlib.sha256(pattern.encode()).hexdigest()[:6]
    return Path(f"{name}.png" if name == pattern else f"{name}-{digest}.png")


if __name__ == "__main__":
    app()
