"""Predicted times are in the order of the measured ones that are kept."""

import json
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from experiments.record import read_rows
from masks import BlockMask
from masks._parse import parse
from sparseflash import io_model
from sparseflash.advisor import ordered_share
from sparseflash.advisor.choices import OVER_LEAST

RESULTS = Path(__file__).parents[2] / "experiments/results"
H200 = "nvidia-h200"
RECORDS = ["speedup", "bench-small-blocks", "bench-sparse"]


@cache
def mask_of(pattern: str, seq_len: int, block_size: int) -> BlockMask | None:
    """None for a mask that the record names in words of its own."""
    try:
        return parse(pattern)(seq_len, block_size)
    except ValueError:
        return None


# By the end of the names of records: the device of the model.
MODELS = {
    path.stem.removeprefix("speedup-"): model
    for path in RESULTS.glob("speedup-nvidia-*.json")
    for model in io_model.DEVICES
    if f"-{model.lower()}" in path.stem
}


@cache
def times(device: str, direction: str) -> list[tuple[float, float]]:
    """(predicted, measured) of every call of 16,384 tokens whose pattern can be read."""
    found = []
    for path in (RESULTS / f"{name}-{device}.json" for name in RECORDS):
        for row in read_rows(json.loads(path.read_text())) if path.exists() else ():
            implementation, _, backend = row["implementation"].partition(":")
            chosen = (implementation, row["direction"], row["seq_len"], row["head_dim"])
            if chosen != ("sparseflash", direction, 16384, 128) or "/" in backend:
                continue
            mask = mask_of(row["pattern"], 16384, row["block_size"])
            if mask is None or row.get("q_len"):
                continue
            cost = io_model.attention(
                *(mask, 128),
                batch=row["batch"],
                heads=row["heads"],
                direction=direction,
                device=MODELS[device],
                backend=backend or "auto",
            )
            found.append((cost.seconds * 1e3, row["median_ms"]))
    return found


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("device", MODELS)
def test_order_is_right_for_nine_of_ten_pairs_that_differ_by_a_tenth(device, direction):
    pairs = times(device, direction)
    assert len(pairs) > 20
    assert ordered_share(pairs) > 0.9


def test_the_bound_is_as_far_below_the_measurements_as_the_command_prints():
    over = [ms / least for each in ("forward", "backward") for least, ms in times(H200, each)]
    found = min(over), median(over), max(over)
    assert tuple(round(ratio, 1) for ratio in found) == OVER_LEAST
