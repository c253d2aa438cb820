"""Records of the benchmarks are complete and agree with their own rows."""

import json

import pytest

from experiments.cli import SHIPPED
from experiments.record import Record
from experiments.report import DRIFT_LIMIT

RECORDS = [*SHIPPED.rglob("bench-*.json"), *SHIPPED.rglob("speedup-*.json")]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: str(path.relative_to(SHIPPED)))
def test_committed_records_hold_what_follows_from_their_rows(path, tmp_path):
    found = Record.load(path)
    assert found.complete
    assert 1 <= (found.drift or 0) <= DRIFT_LIMIT
    found.save(tmp_path / "again.json")
    was, now = (json.loads(p.read_text()) for p in (path, tmp_path / "again.json"))
    for name in ("tflops", "terabytes_per_second", "speedup", "ideal", "retention"):
        figures = [[row.get(name) for row in record["rows"]] for record in (was, now)]
        assert figures[0] == pytest.approx(figures[1]), name
    names = {"peer": "baseline", "against_peer": "against_baseline"}
    crossovers = [{names.get(k, k): v for k, v in entry.items()} for entry in was["crossovers"]]
    found = [
        {k: v for k, v in entry.items() if k != "implementation"} for entry in now["crossovers"]
    ]
    assert [pytest.approx(entry) for entry in crossovers] == found


def test_a_long_cache_is_read_as_fast_as_it_is_copied():
    record = Record.load(SHIPPED / "bench-decode-nvidia-h200.json")
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
