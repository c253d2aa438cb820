"""Measurements and records as a benchmark writes them."""

from dataclasses import replace

from experiments.record import Measurement, Record

FULL = Measurement(
    suite="density",
    implementation="sparseflash",
    family="full",
    pattern="full",
    batch=2,
    heads=4,
    seq_len=1024,
    head_dim=64,
    block_size=64,
    density=1.0,
    blocks_per_row=16.0,
    direction="forward",
    median_ms=8.0,
    low_ms=7.9,
    high_ms=8.1,
    runs=5,
    peak_bytes=2**20,
)
HALF = replace(FULL, family="local", pattern="local(64)", density=0.5, median_ms=5.0)
EIGHTH = replace(FULL, family="local", pattern="local(16)", density=0.125, median_ms=1.25)
BASELINE = replace(FULL, implementation="sdpa", median_ms=2.5)
ENVIRONMENT = {
    "device": "a device",
    "versions": {"torch": "2"},
    "date": "2026-01-01T00:00:00",
    "git": {"commit": "abc", "dirty": False},
}


def record(rows) -> Record:
    return Record(ENVIRONMENT, {"seed": 0}, list(rows))
