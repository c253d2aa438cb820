"""The tables of the README are those of the records."""

from pathlib import Path

import pytest

from experiments.record import Record
from experiments.report import markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["speedup-nvidia-h200", "bench-sparse-nvidia-h200"])
def test_the_tables_of_the_readme_are_those_of_the_records(name):
    record = Record.load(ROOT / f"experiments/results/{name}.json")
    assert markdown(record) in (ROOT / "README.md").read_text()
