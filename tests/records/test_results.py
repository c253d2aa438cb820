"""Records stay small, and each one is the source of a document."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "experiments/results").rglob("*.json"))
DOCUMENTS = [
    ROOT / "docs/performance.py",
    ROOT / "docs/long_context.py",
    *(ROOT / f"docs/{name}.py" for name in ("documents", "language_models", "lengths")),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "experiments/lra").rglob("*.md"),
]
pytestmark = pytest.mark.records


def device_of(path: Path) -> str:
    """The device in the name of a record; empty if it has none."""
    return path.stem.partition("-nvidia-")[2]


@pytest.mark.parametrize("device", sorted(set(map(device_of, RECORDS))))
def test_records_of_a_device_are_small(device):
    assert sum(path.stat().st_size for path in RECORDS if device_of(path) == device) < 2_000_000


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_document_cites_each_record(path):
    name = path.stem.removeprefix("lra-").partition("-nvidia-")[0]
    cited = re.compile(rf"[`\"(/-]{name}[`\").-]")
    assert any(cited.search(document.read_text()) for document in DOCUMENTS)
