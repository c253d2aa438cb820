"""Writes the tables of README.md here, and three sentences of the project's README, from records.

    python -m experiments.lra.page
    python -m experiments.lra.page --check   # writes nothing; exits with 1 if a page is outdated

A table is between `<!-- name -->` and `<!-- /name -->`. A row without a record has "not run".
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Annotated

import typer
import yaml

from experiments.cli import SHIPPED, needs
from experiments.lra import TASKS, floors
from experiments.markdown import in_percent, table, update, written

README = Path(__file__).parent / "README.md"
FRONT = Path(__file__).parents[2] / "README.md"
NOT_RUN, OPEN = "not run", "–"
COLUMNS = (*TASKS, "path-x", "path-256")
SWEPT = ("listops", "text", "image", "pathfinder", "path-x")  # tasks of runs/attentions.sh
# Columns of the measurement on real batches, by the clock of its steps.
REAL_CLOCKS = {"graph": "on real batches", "events": "on real batches, called from Python"}
SPEED_HEAD = ("attention", "ListOps", "Text", "Retrieval", "Image", "Pathfinder")
SUPPLEMENTS = {"arena": ("reformer", "smyrf")}  # speed tables of further attentions


@dataclass(frozen=True)
class Row:
    """A row of the comparison of attentions.

    Attributes:
        name: Name in the table.
        label: Name in the speed table, or None if its speed was not measured.
        published: Accuracies in per cent of the five tasks, Path-X and Path-256; "chance"
            if the publication reports a failure to learn, None if it reports nothing.
        speed_up: Published speed-up, or None.
        source: Publication of these figures.
        trained: Record and group of our runs of each task.
        swept: Name in the runs of runs/attentions.sh, or None.
    """

    name: str
    label: str | None = None
    published: Sequence[float | str | None] = (None,) * len(COLUMNS)
    speed_up: float | None = None
    source: str = ""
    trained: dict[str, tuple[str, str]] = field(default_factory=dict)
    swept: str | None = None

    def __post_init__(self) -> None:
        for task in () if self.swept is None else SWEPT:
            self.trained[task] = (f"{task}-attentions", f"{task}-{self.swept}")
        for task, run in self.trained.items():
            self.trained[task] = (run[0], run[1])


# The best predictor that reads no context or no contour; else the most frequent class.
BEST_FLOOR = {
    "listops": ("listops", "root operator only"),
    "pathfinder": ("pathfinder32-hard", "coordinates of the discs"),
    "path-x": ("pathfinder128-hard", "coordinates of the discs"),
    "path-256": ("pathfinder256-hard", "coordinates of the discs"),
}
PRIORS = {"text": 0.5, "retrieval": 0.5, "image": 0.1}


@dataclass(frozen=True)
class Trained:
    """A row of the table of trained runs: a group of a record, and its floor."""

    name: str
    record: str
    group: str
    floor: str
    attention: str | None = None


PAGE = yaml.safe_load(Path(__file__).with_name("page.yaml").read_text())
ROWS = [Row(**facts) for facts in PAGE["comparison"]]
TRAINED = [Trained(*facts) for facts in PAGE["trained"]]
DISCS = "coordinates of the discs"
TURNED = f"{DISCS}, turned and mirrored"
FLOORS = {
    "root operator only": "root operator only",
    "root operator and one level below": "root and 1 levels",
    "distance of the discs only": "distance of the discs",
    "coordinates of the discs, rotated and mirrored at random": TURNED,
    "coordinates of the discs only": DISCS,
}


def main(
    check: Annotated[
        bool, typer.Option(help="Write nothing; exit with 1 if a page is not current.")
    ] = False,
) -> None:
    """Writes the tables of the page of Long Range Arena from the records."""
    needs(README.exists(), "a checkout of the repository, which has the page")
    wanted = {
        README: written(README.read_text(), TABLES),
        FRONT: written(FRONT.read_text(), SENTENCES, between=""),
    }
    old = update(wanted, check)
    if check:
        raise typer.Exit(min(old, 1))


def path_of(name: str) -> Path | None:
    """The file of a record, or None. Of several GPUs, the H200 is preferred."""
    found = sorted(SHIPPED.glob(f"lra-{name}-nvidia-*.json"))
    preferred = [path for path in found if path.stem.endswith("-nvidia-h200")]
    return next(iter(preferred or found), None)


@cache
def record(name: str) -> dict | None:
    """A record of results/, or None."""
    path = path_of(name)
    return None if path is None else json.loads(path.read_text())


def group_of(name: str, group: str) -> dict | None:
    """A group of trained runs, or None. A group that is stuck at chance has no accuracy."""
    found = record(name)
    return None if found is None else found["groups"].get(group)


def comparison() -> str:
    """Accuracies of each attention, ours and published, and its speed-up."""
    titles = ("ListOps", "Text", "Retrieval", "Image", "Pathfinder", "Path-X", "Path-256")
    rows = [
        [
            row.name,
            *(
                f"{ours(row, task)}{in_brackets(published)}"
                for task, published in zip(COLUMNS, row.published, strict=True)
            ),
            f"{speed_up(row.label)}{in_brackets(row.speed_up)}",
            row.source,
        ]
        for row in ROWS
    ]
    reading = ["*floor*", *(f"{100 * floor(task):.1f}" for task in COLUMNS)]
    return table(["attention", *titles, "speed-up", "published by"], [[*reading, "", ""], *rows])


def ours(row: Row, task: str) -> str:
    group = group_of(*row.trained[task]) if task in row.trained else None
    return OPEN if group is None else accuracy_of(group)


def in_brackets(published: float | str | None) -> str:
    return "" if published is None else f" ({published})"


def accuracy_of(group: dict) -> str:
    """Mean and standard deviation of a group, in per cent."""
    if group["accuracy"] is None:
        return "stuck at chance"
    return in_percent(group["accuracy"], group["deviation"])


def floor(task: str) -> float:
    if task in PRIORS:
        return PRIORS[task]
    name, which = BEST_FLOOR[task]
    return floors.recorded()[name][which]


def speed_up(label: str | None) -> str:
    """Geometric mean over the five tasks of the speed-up over standard attention."""
    mean = means("arena").get(label) if label else None
    return OPEN if mean is None else f"{mean:.2f}"


def means(name: str, clock: str = "graph") -> dict[str, float]:
    """Geometric means of a speed table by a clock. Reformer has a record of its own."""
    found: dict[str, float] = {}
    for part in (name, *SUPPLEMENTS.get(name, ())):
        if measured := record(part):
            found |= measured["geometric_mean_speedup"].get(clock, {})
    return found


def speed_table() -> str:
    """Speed-ups of training steps over standard attention, for every attention."""
    rows = []
    for part in ("arena", *SUPPLEMENTS["arena"]):
        if measured := record(part):
            steps = [step for step in measured["steps"] if step["clock"] == "graph"]
            rows += speed_rows(steps)[bool(rows) :]  # standard attention once
    return table([*SPEED_HEAD, "geometric mean", *REAL_CLOCKS.values(), "peak MiB, Text"], rows)


def speed_rows(steps: list[dict]) -> list[list[str]]:
    """A row for each attention of a record. The record also has standard attention."""
    found = {(label_of(step), task_of(step)): step for step in steps}
    rows = []
    for label in dict.fromkeys(map(label_of, steps)):
        ratios = [
            found["standard", task]["median_ms"] / found[label, task]["median_ms"]
            for task in TASKS
        ]
        cells = [f"{ratio:.1f}" for ratio in ratios]
        if label == "standard":
            cells = [f"{found[label, task]['median_ms']:.1f} ms" for task in TASKS]
        means_of = [
            geometric_mean(ratios),
            *(means("real", clock).get(label) for clock in REAL_CLOCKS),
        ]
        cells += [OPEN if mean is None else f"{mean:.2f}" for mean in means_of]
        peak = f"{found[label, 'text']['peak_bytes'] / 2**20:,.0f}"
        rows.append([label, *cells, peak])
    return rows


def task_of(step: dict) -> str:
    """The task of a step; older records have the name of Pathfinder's images."""
    return "pathfinder" if step["task"].startswith("pathfinder") else step["task"]


def label_of(step: dict) -> str:
    from experiments.lra.steps import Implementation

    return Implementation(step["attention"], step["block_size"]).label


def floor_table() -> str:
    """The accuracy of trivial predictors."""
    known = floors.recorded()
    tasks = ["listops", *(f"pathfinder{side}-hard" for side in floors.SIDES)]
    rows = [["most frequent class", "17", "50", "50", "50", "50"]]
    for title, name in FLOORS.items():
        cells = (known[task].get(name) for task in tasks)
        rows.append([title, *("" if cell is None else f"{100 * cell:.1f}" for cell in cells)])
    return table(
        ["floor, test accuracy in %", "ListOps", "Pathfinder 32", "64", "Path-X", "Path-256"], rows
    )


def trained_table() -> str:
    """Every group of trained runs and its floor."""
    head = ["model", "record", "runs", "attention", "test accuracy, %", "floor, %"]
    return table([*head, "above the floor", "disc pairs correct, %"], map(trained_row, TRAINED))


def trained_row(row: Trained) -> list[str]:
    found, group = record(row.record), group_of(row.record, row.group)
    if found is None or group is None:
        return [row.name, "", "", "", NOT_RUN, "", "", ""]
    runs = group["runs"]
    below = found["floors"][row.floor]
    pairs = [moved["both right"] for run in runs if (moved := run.get("moved discs"))]
    attention = row.attention or str(runs[0]["attention"])
    return [
        row.name,
        f"`{row.record}`",
        str(len(runs)),
        attention.replace("|", "\\|"),
        accuracy_of(group),
        f"{row.floor}, {100 * below:.1f}",
        "" if group["accuracy"] is None else f"{100 * (group['accuracy'] - below):.1f}",
        f"{100 * fmean(pairs):.1f}" if pairs else "",
    ]


def runs_table() -> str:
    """Every run of every record: its training and its test."""
    head = ["group", "seed", "GPU", "steps", "tested at step", "training samples", "seconds"]
    head += ["test accuracy ± standard error, %", "test samples", "disc pairs correct, %"]
    rows = []
    for name, label in trained_groups():
        group = group_of(name, label)
        rows += [run_row(label, run) for run in group["runs"]] if group else []
    return table(head, rows)


def trained_groups() -> list[tuple[str, str]]:
    """The records and groups in both tables of accuracies, without repetition."""
    compared = (run for row in ROWS for run in row.trained.values())
    return [*dict.fromkeys([*((row.record, row.group) for row in TRAINED), *compared])]


def run_row(label: str, run: dict) -> list[str]:
    gpu = run["environment"]["device"].split()[1]  # of "NVIDIA H100 80GB HBM3"
    cells = [f"`{label}`", str(run["seed"]), gpu, f"{run['steps']:,}"]
    cells += [f"{run['tested_step']:,}" if "tested_step" in run else ""]
    cells += [f"{run['steps'] * run['batch_size']:,}"]
    cells += [f"{run['seconds']:,.0f}" if run.get("seconds") else ""]
    if run["stuck"]:
        return [*cells, "stuck at chance", "", ""]
    accuracy, error = (100 * run[f"test/{name}"] for name in ("accuracy", "standard_error"))
    moved = run.get("moved discs")
    pairs = f"{100 * moved['both right']:.1f}" if moved else ""
    return [*cells, f"{accuracy:.2f} ± {error:.2f}", f"{run['test/samples']:,.0f}", pairs]


def pictures() -> str:
    """The curves of every record, in the order of the tables."""
    shown = []
    for name in dict.fromkeys(name for name, _ in trained_groups()):
        path = path_of(name)
        if path is not None and (curves := path.with_name(f"{path.stem}-curves.png")).exists():
            shown.append(f"![Curves of {name}](../results/{curves.name})")
    return "\n".join(shown)


def on_path_x() -> str:
    """A part of a sentence: accuracy, seeds and time of Path-X."""
    group = group_of("path-x-labels", "path-x-curriculum")
    if group is None:
        return "not run"
    smaller = (
        group_of(f"{n}-labels", f"{n}-curriculum") for n in ("pathfinder32", "pathfinder64")
    )
    before = sum(longest(each) for each in smaller if each)
    return (
        f"{briefly(group)} with block-sparse attention, {seeds_of(group)}, in "
        f"{longest(group)} minutes on one H200 after at most {before} minutes on smaller images"
    )


def longest(group: dict) -> int:
    """Minutes of the longest run of a group."""
    return ceil(max(run["seconds"] for run in group["runs"]) / 60)


def on_text() -> str:
    """A part of a sentence: accuracies of Text with the published protocol."""
    dense, sparse = (group_of("text", f"text-{name}") for name in ("flash", "butterfly"))
    if not dense or not sparse:
        return "not run"
    return f"{briefly(dense)} dense and {briefly(sparse)} block-sparse, {seeds_of(sparse)} each"


def pre_trained() -> str:
    """A part of a sentence: accuracies of Text and Image after masked pre-training."""
    tasks = ("text", "image")
    found = {task: group_of(f"{task}-masked", f"{task}-tuned-sparse") for task in tasks}
    told = [
        f"{briefly(group)} on {task.title()} ({seeds_of(group)})"
        for task, group in found.items()
        if group
    ]
    return " and ".join(told) or "not run"


def briefly(group: dict) -> str:
    return f"{100 * group['accuracy']:.1f} %"


def seeds_of(group: dict) -> str:
    number = len(group["runs"])
    return "one seed" if number == 1 else f"{number} seeds"


TABLES: dict[str, Callable[[], str]] = {
    "comparison": comparison,
    "floors": floor_table,
    "speed": speed_table,
    "trained": trained_table,
    "runs": runs_table,
    "pictures": pictures,
}
SENTENCES: dict[str, Callable[[], str]] = {
    "path-x": on_path_x,
    "text": on_text,
    "pre-trained": pre_trained,
}


if __name__ == "__main__":
    typer.run(main)
