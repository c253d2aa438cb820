"""A profile of a large model takes minutes at most, and less memory than scores would."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "experiments/results"
pytestmark = pytest.mark.records


@pytest.mark.parametrize("path", sorted(RESULTS.glob("lab-*.json")), ids=lambda path: path.stem)
def test_32_layers_of_32_heads_at_32k_tokens(path):
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["layers"], row["heads"], row["tokens"], row["loss"]) == (32, 32, 32_768, True)
    assert row["patterns"] >= 8
    assert row["seconds"] < 300
    assert row["peak_gb"] < row["scores_gb"]
