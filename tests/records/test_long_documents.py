"""The floors of long documents: complete, of a clean commit, and higher where more is read."""

import json

import pytest

from experiments.long_documents.__main__ import FLOORS, LENGTHS

pytestmark = pytest.mark.records


def test_floors():
    record = json.loads(FLOORS.read_text())
    assert (record["environment"]["git"]["dirty"], len(record["authors"])) == (False, 50)
    assert tuple(map(int, record["floors"])) == LENGTHS
    words, read = (
        [floor[name]["accuracy"] for floor in record["floors"].values()]
        for name in ("words", "bytes")
    )
    assert words == sorted(words)
    assert all(word > byte for word, byte in zip(words, read, strict=True))
