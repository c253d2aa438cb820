"""The accuracy of trivial predictors of each task, the floor of every result.

    python -m experiments.lra.floors --samples 20000

`floor_readers` defines these predictors.
"""

import json
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from experiments.cli import (
    RESULTS,
    SHIPPED,
    Overwrite,
    check_known,
    needs_extra,
    output_folder,
    usage_errors,
)
from experiments.files import read_json, write_json

if TYPE_CHECKING:
    from experiments.lra.tasks import Task

RECORD = SHIPPED / "lra-floors.json"
SIDES = (32, 64, 128, 256)


def floors(task: "Task") -> dict[str, float]:
    """The measured floors of a task; empty for tasks whose only floor is the class prior."""
    return recorded().get(task.floors_of or task.name, {})


@cache
def recorded() -> dict[str, dict[str, float]]:
    """The floors of the shipped record: by the name of a task, by that of a predictor."""
    return json.loads(RECORD.read_text())["floors"]


def main(
    samples: Annotated[
        int, typer.Option(help="Samples of each task. A fifth of them is for testing.", min=100)
    ] = 20_000,
    output: Annotated[Path, typer.Option(dir_okay=False, help="The record.")] = RESULTS
    / RECORD.name,
    task: Annotated[
        list[str] | None, typer.Option(help="Measure only this task; repeatable.")
    ] = None,
    data_root: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the data of film pairs.")
    ] = Path("data"),
    overwrite: Overwrite = False,
) -> None:
    """Measure the floors of ListOps, Pathfinder and film pairs.

    Other tasks of the record are not changed.
    """
    import torch

    needs_extra("lra", "numba")
    from experiments.environment import environment
    from experiments.lra import floor_readers
    from experiments.lra.tasks import FilmPairs, ListOps, MissingData, Pathfinder, films

    measures = {ListOps().name: partial(floor_readers.listops_floors, samples)}
    clipped = [Pathfinder(side, resampling="clipped") for side in SIDES]
    undirected = [
        Pathfinder(side, distractors="described", directions="any", resampling="clipped")
        for side in SIDES[:2]
    ]
    for pathfinder in (*map(Pathfinder, SIDES), *clipped, *undirected):
        measures[pathfinder.name] = partial(floor_readers.pathfinder_floors, pathfinder, samples)
    if task is not None or (data_root / films.FOLDER).exists():
        measures[FilmPairs.name] = partial(floor_readers.film_pairs_floors, data_root)
    check_known("task", task or (), measures)
    output_folder(output.parent, overwrite)
    record = read_json(output, {"floors": {}, "measured": {}})
    facts = environment(torch.device("cpu")) | {"samples": samples}
    for name in task or measures:
        Console().print(f"measuring {name}")
        with usage_errors(MissingData):
            record["floors"][name] = measures[name]()
        record["measured"][name] = facts
        write_json(output, record)
        Console().print({name: record["floors"][name]})
    print(f"wrote {output}")


if __name__ == "__main__":
    typer.run(main)
