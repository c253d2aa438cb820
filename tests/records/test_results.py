"""Records stay small, and each one is the source of a document."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "experiments/results").rglob("*.json"))
DOCUMENTS = [
    ROOT / "docs/performance.py",
    ROOT / "docs/paper.py",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "experiments/lra").rglob("*.md"),
]
pytestmark = pytest.mark.records


def test_records_take_less_than_a_megabyte():
    assert sum(path.stat().st_size for path in RECORDS) < 1_000_000


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_document_cites_each_record(path):
    name = path.stem.removeprefix("lra-").removesuffix("-nvidia-h200")
    cited = re.compile(rf"[`\"(/-]{name}[`\").-]")
    assert any(cited.search(document.read_text()) for document in DOCUMENTS)
