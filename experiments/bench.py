"""The benchmark of attention on a GPU, in named suites.

    python -m experiments.bench dense sparse
    python -m experiments.bench --compare before.json after.json

Outputs and gradients of every implementation are checked against float64 before they are timed,
all in one run: median and quartiles of CUDA graphs with a flushed cache, peak memory, and the
roofline of the device (a matrix product and a copy) in the same record. One JSON file each goes to
`experiments/results/bench-<suite>-<gpu>.json`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from experiments.baselines import ANY_ORDER
from experiments.cli import (
    RESULTS,
    Dtype,
    Passes,
    carry_out,
    parse_baselines,
    slug,
)
from experiments.compare import compare
from experiments.measure import Case, Method
from experiments.record import OURS, Record, is_ours
from experiments.report import TABLE_WIDTH
from experiments.suites import SUITES
from experiments.timing import Clock
from sparseflash.backends import BACKENDS


def main(
    suites: Annotated[
        list[str] | None, typer.Argument(help=f"Any of {', '.join(SUITES)}; all by default.")
    ] = None,
    backends: Annotated[
        str,
        typer.Option(
            help="Ours: auto, or names of backends such as triton; with /any-order after a name, "
            "gradients may be summed in any order."
        ),
    ] = "auto",
    baselines: Annotated[
        tuple | None,
        typer.Option(
            "--baselines",
            "--peers",
            parser=parse_baselines,
            metavar="NAME,NAME",
            help="Only these, or none.",
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option()] = Dtype.BF16,
    passes: Annotated[Passes, typer.Option()] = Passes.BOTH,
    clock: Annotated[
        Clock, typer.Option(help="graph, or events with the host's time")
    ] = Clock.GRAPH,
    budget_ms: Annotated[float, typer.Option(min=1, help="Time spent on each median.")] = 60.0,
    output: Annotated[Path, typer.Option(file_okay=False)] = RESULTS,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on with interrupted suites.")] = False,
    compare_: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", exists=True, dir_okay=False, help="Two result files."),
    ] = None,
) -> None:
    """Measures suites of attention problems, or compares two results."""
    if compare_:
        try:
            table = compare(*map(Record.load, compare_))
        except ValueError as error:
            raise typer.BadParameter(f"--compare: {error}") from error
        Console(width=TABLE_WIDTH).print(table)
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("the benchmark measures a CUDA device; there is none")
    method = Method(
        device="cuda",
        dtype=dtype.value,
        backend="auto",
        directions=passes.directions,
        clock=clock.value,
        budget_ms=budget_ms,
        seed=seed,
    )
    ours, chosen = parse_backends(backends), parse_suites(suites)
    for suite in chosen:
        path = output / f"bench-{suite}-{slug('cuda')}.json"
        cases = partial(planned, suite, ours, baselines)
        carry_out(cases, method, path, resume, roofline=True)


def planned(
    suite: str,
    ours: tuple[str, ...],
    baselines: tuple[str, ...] | None,
    say: Callable[[str], None],
) -> Iterator[Case]:
    """The cases of a suite with the chosen baselines only."""
    for case in SUITES[suite](ours):
        implementations = [
            c for c in case.implementations if is_ours(c) or baselines is None or c in baselines
        ]
        yield replace(case, implementations=tuple(implementations))


def parse_suites(names: list[str] | None) -> list[str]:
    for name in names or ():
        if name not in SUITES:
            raise typer.BadParameter(f"unknown suite {name!r}; known: {', '.join(SUITES)}")
    return names or list(SUITES)


def parse_backends(text: str) -> tuple[str, ...]:
    """Implementations, "sparseflash" or "sparseflash:backend"."""
    known = [backend.name for backend in BACKENDS]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name.removesuffix(ANY_ORDER) not in ("auto", *known):
            raise typer.BadParameter(f"unknown backend {name!r}; known: auto, {', '.join(known)}")
    return tuple(OURS if name == "auto" else f"{OURS}:{name}" for name in names)


if __name__ == "__main__":
    typer.run(main)
