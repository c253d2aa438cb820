"""`python -m sparseflash`: check a machine, explain a call, choose patterns, simulate ranks."""

import os
from typing import Annotated

import typer

from sparseflash.commands.advise import advise, search
from sparseflash.commands.explain import explain_command
from sparseflash.commands.profile import profile_command
from sparseflash.commands.simulate import simulate

# Each needs about a gigabyte, on a GPU as well.
PROCESSES = max(1, min(16, (os.cpu_count() or 1) - 2))

app = typer.Typer(help="Exact block-sparse attention.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Exact block-sparse attention."""


@app.command("selfcheck")
def check(
    processes: Annotated[
        int, typer.Option(min=1, help="Number of parallel processes, which compile kernels.")
    ] = PROCESSES,
) -> None:
    """Compare every backend of this machine with float64; exit with status 1 on a failure."""
    from sparseflash.testing.selfcheck import selfcheck

    raise typer.Exit(selfcheck(processes=processes) > 0)


app.command("explain")(explain_command)
app.command("profile")(profile_command)
app.command()(advise)
app.command()(search)
app.command()(simulate)


if __name__ == "__main__":
    app()
