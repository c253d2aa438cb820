"""Collects trained runs in one record, with a picture of their learning curves.

    python -m experiments.lra.results listops runs/listops-flash runs/listops-butterfly

Every folder is a group: the seeds of one configuration, as `python -m experiments.lra.seeds`
writes them, or curricula, each in a folder seed<n>. A run that was resumed from a checkpoint
counts once. It writes results/lra-<name>-<device>.json, with the command, commit and environment
of every run, and results/lra-<name>-<device>-curves.png, which is drawn from the JSON file.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from experiments.cli import RESULTS, Output, Overwrite, RecordName, output_folder, usage_errors
from experiments.files import RESULT, read_object, record_path, shared, write_json
from experiments.lra.curriculum import WHOLE_RESULT
from experiments.lra.seeds import summary_of
from experiments.markdown import in_percent
from experiments.pictures import COLOURS, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def main(
    name: RecordName,
    groups: Annotated[
        list[Path],
        typer.Argument(
            exists=True, file_okay=False, help="Folders, each with the seeds of a run."
        ),
    ],
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Write the record of trained runs and draw their curves."""
    output_folder(output, overwrite)
    with usage_errors():
        record = record_of(name, {group.name: ended(group) for group in groups})
    path = record_path(output, f"lra-{name}", record["device"])
    write_json(path, record)
    picture = draw_curves(path)
    Console().print(table_of(record), f"wrote {path} and {picture}", sep="\n")


def ended(group: Path) -> list[dict]:
    """The result of each seed of a group, or the newest one if a run was resumed.

    Seeds that were not tested are left out, and named.

    Raises ValueError for a folder without results, or with those of another command.
    """
    newest, untested = {}, {}
    results = sorted(group.rglob(RESULT), key=lambda path: path.stat().st_mtime)
    for path in (*results, *group.rglob(WHOLE_RESULT)):
        run = read_object(path, "a result of `experiments.lra`", ("seed", "stuck"))
        seed = path.relative_to(group).parts[0]
        # Pre-training, or ended before its test; the result of a stuck stage says so.
        if "test/accuracy" not in run and (path.name == WHOLE_RESULT or not run["stuck"]):
            untested[seed] = path
            continue
        if path.name == WHOLE_RESULT:
            run |= one_curve(run)
        newest[seed] = run
    if not newest:
        raise ValueError(f"{group} has no {RESULT}: none of its runs has finished")
    for seed in sorted(untested.keys() - newest.keys()):
        print(f"{untested[seed]} is left out: its run was not tested")
    return sorted(newest.values(), key=lambda result: result["seed"])


def one_curve(run: dict) -> dict:
    """The fields of a result that change if all stages count as one run: steps and curve."""
    begin, curve, stages = 0, [], []
    for stage in run["stages"]:
        curve += [[begin + step, *values] for step, *values in stage["curve"]]
        stages.append({name: value for name, value in stage.items() if name != "curve"})
        begin += stage["trained"]
    tested = begin - run["stages"][-1]["trained"] + run["tested_step"]
    return {"steps": begin, "tested_step": tested, "curve": curve, "stages": stages}


def record_of(name: str, groups: dict[str, list[dict]]) -> dict:
    """The record: floors, and for each group its mean, deviation and runs.

    Raises ValueError for runs of different tasks or devices.
    """
    runs = [run for group in groups.values() for run in group]
    return {
        "name": name,
        "task": shared("task", (run["task"] for run in runs)),
        "device": shared("device", (run["environment"]["device"] for run in runs)),
        "floors": floors_of(runs),
        "groups": {label: summary_of(group) | {"runs": group} for label, group in groups.items()},
    }


def floors_of(runs: list[dict]) -> dict[str, float]:
    """The floors of the task, and the class prior of the test set."""
    tested = [run for run in runs if not run["stuck"]]
    prior = {"class prior": tested[0]["test/class_prior"]} if tested else {}
    return prior | runs[0]["floors"]


def draw_curves(record_path: Path) -> Path:
    """Draws validation accuracy against steps, with a colour for each group, and the floors.

    Returns the path of the picture.
    """
    record = json.loads(record_path.read_text())
    figure, ax = panels(size=(7.5, 4.5), grid=False)
    for colour, (label, group) in zip(COLOURS, record["groups"].items(), strict=False):
        _draw_group(ax, colour, label, group)
    _draw_floors(ax, {name: 100 * floor for name, floor in record["floors"].items()})
    ax.set(xlabel="steps", ylabel="validation accuracy, %", title=record["task"])
    figure.legend(title="test accuracy", loc="outside lower left", ncols=2, frameon=False)
    return save(figure, record_path.with_name(f"{record_path.stem}-curves.png"))[0]


def _draw_floors(ax: "Axes", floors: dict[str, float]) -> None:
    """Draws floors that are not far above the curves, with names that do not overlap."""
    highest = ax.get_ylim()[1] + 10
    shown = sorted((floor, name) for name, floor in floors.items() if floor <= highest)
    for floor, _ in shown:
        ax.axhline(floor, color="#666666", linestyle=":", linewidth=1)
    bottom, top = ax.get_ylim()
    height = float("-inf")
    for floor, name in shown:
        height = max(floor, height + FLOOR_LINE * (top - bottom))
        ax.annotate(name, (1.01, height), xycoords=("axes fraction", "data"), **FLOOR_TEXT)


FLOOR_LINE = 0.035  # relative to the height of the picture
FLOOR_TEXT = {"ha": "left", "va": "center", "fontsize": 7, "color": "#666666"}


def _draw_group(ax: "Axes", colour: str, label: str, group: dict) -> None:
    for number, run in enumerate(group["runs"]):
        steps, accuracies = ([point[n] for point in run["curve"]] for n in (0, 1))
        style = ":" if run["stuck"] else "-"
        ax.plot(steps, [100 * a for a in accuracies], style, color=colour, linewidth=1)
        if number == 0:  # stages of other seeds end slightly earlier or later
            _draw_stages(ax, colour, run.get("stages", []))
    ax.plot([], [], color=colour, label=f"{label}: {in_words(group)}")


def _draw_stages(ax: "Axes", colour: str, stages: list[dict]) -> None:
    """Marks the first step of each stage of a curriculum, with its name."""
    begin = 0
    for stage in stages:
        ax.axvline(begin, color=colour, linestyle=":", linewidth=0.7)
        name = f" {stage['difficulty']}, {stage['shorter']:g} shorter"
        ax.annotate(name, (begin, 1), xycoords=("data", "axes fraction"), **STAGE_TEXT)
        begin += stage["trained"]


STAGE_TEXT = {"rotation": 90, "ha": "left", "va": "top", "fontsize": 6, "color": "#666666"}


def in_words(group: dict) -> str:
    """Test accuracy of a group: "37.10 ± 0.52 %, 3 runs, 1 stuck"."""
    if group["accuracy"] is None:
        return f"{group['stuck']} stuck"
    accuracy = in_percent(group["accuracy"], group["deviation"])
    stuck = f", {group['stuck']} stuck" if group["stuck"] else ""
    runs = "1 run" if group["finished"] == 1 else f"{group['finished']} runs"
    return f"{accuracy} %, {runs}{stuck}"


def table_of(record: dict) -> Table:
    """Test accuracy of each group, and how far it is above each floor."""
    floors = record["floors"]
    table = Table("", "test accuracy", *floors, title=f"{record['task']}: points above floors")
    for label, group in record["groups"].items():
        mean = group["accuracy"]
        above = [] if mean is None else [f"{100 * (mean - f):+.1f}" for f in floors.values()]
        table.add_row(label, in_words(group), *above)
    return table


if __name__ == "__main__":
    typer.run(main)
