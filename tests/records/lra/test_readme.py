"""The figures of the page of Long Range Arena are those of the records."""

import json
import re
from pathlib import Path

import pytest

from experiments.lra import floors, results, speed

PAGE = (Path(speed.__file__).parent / "README.md").read_text().splitlines()


def row(name: str) -> list[str]:
    (found,) = (line for line in PAGE if line.startswith(f"| {name}"))
    return [cell.strip() for cell in found.split("|")[2:-1]]


@pytest.mark.parametrize("record", ["arena", "reformer"])
def test_speed_ups(record):
    measured = json.loads((speed.RESULTS / f"lra-{record}-nvidia-h200.json").read_text())
    for attention, mean in measured["geometric_mean_speedup"]["graph"].items():
        if attention != "standard":
            assert row(f"{attention} |")[-2] == f"{mean:.2f}"


def test_floors():
    recorded = json.loads(floors.RESULTS.read_text())["floors"]
    assert row("root operator only")[0] == f"{100 * recorded['listops']['root operator only']:.1f}"
    for name, label in (
        ("distance of the discs", "distance of the discs only"),
        ("coordinates of the discs, turned and mirrored",) * 2,
        ("coordinates of the discs", "coordinates of the discs only"),
    ):
        measured = [recorded[f"pathfinder{side}-hard"].get(name) for side in floors.SIDES]
        printed = ["" if value is None else f"{100 * value:.1f}" for value in measured]
        assert row(label)[1:] == printed
    assert f"give {100 * recorded['film-pairs']['shared words']:.1f}." in " ".join(PAGE)


@pytest.mark.parametrize(
    ("record", "task", "printed"),
    [
        (
            "path",
            "path-x",
            "208 images/s block-sparse, 79 with our dense attention, 71 with torch's",
        ),
        ("path", "path-x", "each in 17,605 MiB"),
        ("path-256", "path-256", "58 images/s block-sparse, 6 and 5 dense"),
        ("path-256", "path-256", "each in 17,677 MiB"),
    ],
)
def test_long_sequences(record, task, printed):
    path = speed.RESULTS / f"lra-{record}-nvidia-h200.json"
    steps = [step for step in json.loads(path.read_text())["steps"] if step["task"] == task]
    measured = {f"{step['peak_bytes'] // 2**20:,}" for step in steps} | {
        f"{1e3 * step['batch'] / step['median_ms']:.0f}"
        for step in steps
        if step["clock"] == "graph"
    }
    assert printed in " ".join(PAGE)
    assert set(re.findall(r"[\d,]+\d|\d", printed)) <= measured


def test_memory_is_linear():
    arena = json.loads((speed.RESULTS / "lra-arena-nvidia-h200.json").read_text())["steps"]
    tokens = {step["seq_len"]: {} for step in arena}
    for step in arena:
        if step["task"] != "retrieval":  # two documents a sample
            taken = step["peak_bytes"] / step["batch"] / step["seq_len"] / 2**10
            tokens[step["seq_len"]].setdefault(step["attention"], taken)
    assert [round(tokens[n]["standard"]) for n in sorted(tokens)] == [47, 91, 179]
    linear = ("sdpa", "flash", "butterfly()", "butterfly(2)", "local(64)", "bigbird(3, 1, 1)")
    assert {f"{tokens[n][name]:.1f}" for n in tokens for name in linear} == {"5.1"}


@pytest.mark.parametrize(
    ("record", "label", "begins"),
    [
        ("listops", "listops-flash", "ListOps, Nystromformer protocol"),
        ("listops-large", "listops-large", "ListOps, larger model"),
        ("listops-large", "listops-large-more", "the same, 5,000 steps more"),
        ("pathfinder32", "pathfinder32-traced", "Pathfinder 32, traced |"),
        ("pathfinder32", "pathfinder32-traced-raster", "Pathfinder 32, traced, raster order"),
        ("pathfinder64", "pathfinder64-traced", "Pathfinder 64, traced"),
        ("path-x", "path-x-traced", "Path-X, traced"),
        ("pathfinder32", "pathfinder32-labels", "Pathfinder 32, labels alone, at once"),
        ("pathfinder32-labels", "pathfinder32-curriculum", "**Pathfinder 32, labels alone, curr"),
    ],
)
def test_trained_runs(record, label, begins):
    trained = json.loads((results.RESULTS / f"lra-{record}-nvidia-h200.json").read_text())
    accuracy = 100 * trained["groups"][label]["accuracy"]
    *_, printed, floor, above = row(begins)
    assert printed.split(" ±")[0] == f"{accuracy:.2f}"
    below = trained["floors"][floor.replace("one level", "1 levels")]
    assert float(above) == pytest.approx(accuracy - 100 * below, abs=0.06)
