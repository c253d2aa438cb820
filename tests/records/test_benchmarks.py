"""Records of the benchmarks are complete and agree with their own rows."""

import json

import pytest

from experiments.cli import ROOT, SHIPPED
from experiments.record import Record, read_rows
from experiments.report import DRIFT_LIMIT

INTERRUPTED = "This measurement was interrupted: the last rows are missing"
RECORDS = [*SHIPPED.rglob("bench-*.json"), *SHIPPED.rglob("speedup-*.json")]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: str(path.relative_to(SHIPPED)))
def test_committed_records_hold_what_follows_from_their_rows(path, tmp_path):
    found = Record.load(path)
    if found.complete:
        assert 1 <= (found.drift or 0) <= DRIFT_LIMIT
    else:
        assert INTERRUPTED in (ROOT / "docs/performance.md").read_text()
    found.save(tmp_path / "again.json")
    was, now = (json.loads(p.read_text()) for p in (path, tmp_path / "again.json"))
    for name in ("tflops", "terabytes_per_second", "speedup", "ideal", "retention"):
        figures = [[row.get(name) or 0.0 for row in read_rows(record)] for record in (was, now)]
        assert figures[0] == pytest.approx(figures[1], rel=2e-5), name  # rows have six digits
    assert len(was["crossovers"]) == len(now["crossovers"])
    for old, new in zip(was["crossovers"], now["crossovers"], strict=True):
        for name, value in new.items():
            assert old[name] == (
                pytest.approx(value, rel=2e-5) if isinstance(value, float) else value
            ), name


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("bench-decode-*.json")), ids=str)
def test_a_long_cache_is_read_as_fast_as_it_is_copied(path):
    record = Record.load(path)
    ours = [row for row in record.rows if row.implementation == "sparseflash"]
    steps = [row for row in ours if (row.batch, row.seq_len, row.head_dim) == (8, 65536, 128)]
    assert steps
    for row in steps:
        if row.family == "full":
            rate, unit = row.useful
            assert unit == "TB/s"
            assert rate > 0.8 * record.roofline["copy_terabytes_per_second"]
        if row.family == "random 1/8":
            (full,) = (r for r in steps if r.group == row.group and r.family == "full")
            assert full.median_ms / row.median_ms > 5
