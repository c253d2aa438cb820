"""docs/performance.md, docs/paper.md and figures of the README are what the records say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.cli import SHIPPED
from experiments.record import read_rows

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.records


@pytest.mark.parametrize("script", ["docs/performance.py", "docs/paper.py"])
def test_pages_about_measurements_are_current(script):
    command = [sys.executable, script, "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run: python {script}"


def ratios(record: str, ours: str, baseline: str, **chosen: object) -> list[float]:
    """The time of ours over that of a baseline, for each mask, size and pass of an H200."""
    rows = read_rows(json.loads((SHIPPED / f"{record}-nvidia-h200.json").read_text()))
    names = ("batch", "heads", "seq_len", "head_dim", "pattern", "direction")
    times = {
        (row["implementation"], *(row[name] for name in names)): row["median_ms"]
        for row in rows
        if all(row[name] == value for name, value in chosen.items())
    }
    problems = [problem for name, *problem in times if name == ours]
    return [
        times[ours, *problem] / times[baseline, *problem]
        for problem in problems
        if (baseline, *problem) in times
    ]


def test_the_readme_says_how_often_and_by_how_much_baselines_are_faster():
    text = " ".join((ROOT / "README.md").read_text().split())
    for ours, named in (
        ("sparseflash", "the default"),
        ("sparseflash:auto/any-order", "`deterministic=False`"),
    ):
        found = ratios("bench-sparse", ours, "cudnn-flex", head_dim=64, direction="backward")
        faster = sum(ratio > 1 for ratio in found)
        told = f"than {named} in {faster} of {len(found)} rows, up to"
        assert f"{told} {100 * (1 - 1 / max(found)):.0f} % less" in text
    for baseline, named in (("cudnn", "cuDNN"), ("flash4", "FlashAttention-4")):
        found = ratios("bench-dense", "sparseflash", baseline)
        assert f"{min(found):.2f} to {max(found):.2f} times as long as with {named}" in text
