"""python -m sparseflash selfcheck: is attention right on this machine?"""

import typer

from sparseflash.conformance import selfcheck

app = typer.Typer(help="Exact block-sparse attention.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Exact block-sparse attention."""


@app.command("selfcheck")
def check() -> None:
    """Compares every backend of this machine with float64; exits with 1 on a failure."""
    raise typer.Exit(selfcheck() > 0)


if __name__ == "__main__":
    app()
