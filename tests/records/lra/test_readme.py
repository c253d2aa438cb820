"""The figures of the page of Long Range Arena are those of the records."""

import json
import re
from pathlib import Path

import pytest

from experiments.cli import SHIPPED
from experiments.lra import page, speed

PAGE = (Path(speed.__file__).parent / "README.md").read_text().splitlines()


def test_tables_are_those_of_the_records():
    assert page.written(page.README.read_text(), page.TABLES) == page.README.read_text()


def test_speed_ups_in_sentences():
    means = page.means("arena")
    sparse, dense = means["butterfly() of 64"], means["flash"]
    assert f"are {sparse:.2f} times as fast as standard ones" in " ".join(PAGE)
    assert f"and {sparse / dense:.2f} times as fast as those of dense flash" in " ".join(PAGE)


def test_floors_in_sentences():
    recorded = page.floors.recorded()
    pairs = recorded["film-pairs"]
    text = " ".join(PAGE)
    assert f"accuracy of {100 * pairs['shared words']:.1f}% on all 10,000 test pairs" in text
    undivided = pairs["shared words, not divided by the lengths"]
    assert f"Without the division the accuracy is {100 * undivided:.1f}%," in text
    for side in (32, 64):
        floor = 100 * recorded[f"pathfinder{side}-hard"]["coordinates of the discs"]
        assert f"{floor:.1f}%" in " ".join(PAGE)
    unclipped = [
        f"{100 * recorded[f'pathfinder{side}-hard-unclipped']['coordinates of the discs']:.1f}%"
        for side in page.floors.SIDES
    ]
    told = f"{', '.join(unclipped[:3])} and {unclipped[3]}"
    assert f"floors of coordinates of all four sizes are {told} (32 to 256 pixels)" in text


def test_images_of_all_records_are_clipped():
    assert "All results on this page are of images whose stamps are clipped" in " ".join(PAGE)
    for name, _ in page.trained_groups():
        found = page.record(name)
        assert found is None or not found["task"].endswith(("-unclipped", "-released"))


def test_sentences_of_the_front_page_are_those_of_the_records():
    front = page.FRONT.read_text()
    assert page.written(front, page.SENTENCES, between="") == front


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
    path = SHIPPED / f"lra-{record}-nvidia-h200.json"
    steps = [step for step in json.loads(path.read_text())["steps"] if step["task"] == task]
    measured = {f"{step['peak_bytes'] // 2**20:,}" for step in steps} | {
        f"{1e3 * step['batch'] / step['median_ms']:.0f}"
        for step in steps
        if step["clock"] == "graph"
    }
    assert printed in " ".join(PAGE)
    assert set(re.findall(r"[\d,]+\d|\d", printed)) <= measured


def test_memory_is_linear():
    arena = json.loads((SHIPPED / "lra-arena-nvidia-h200.json").read_text())["steps"]
    tokens = {step["seq_len"]: {} for step in arena}
    for step in arena:
        if step["task"] != "retrieval":  # two documents a sample
            taken = step["peak_bytes"] / step["batch"] / step["seq_len"] / 2**10
            tokens[step["seq_len"]].setdefault(step["attention"], taken)
    assert [round(tokens[n]["standard"]) for n in sorted(tokens)] == [47, 91, 179]
    linear = ("sdpa", "flash", "butterfly()", "butterfly(2)", "local(64)", "bigbird(3, 1, 1)")
    assert {f"{tokens[n][name]:.1f}" for n in tokens for name in linear} == {"5.1"}
