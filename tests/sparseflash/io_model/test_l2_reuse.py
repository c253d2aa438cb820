import numpy as np
import pytest
import torch

import masks
from sparseflash.io_model.l2_reuse import (
    MAX_STEPS,
    RandomReplacement,
    reads,
    tiles_of,
)


def test_what_fits_is_read_once():
    cache = RandomReplacement(3)
    assert [cache.load(key) for key in "abcabcab"] == [True] * 3 + [False] * 5


def test_any_entry_is_replaced_and_each_run_is_the_same():
    first, again = (RandomReplacement(40) for _ in range(2))
    passes = [
        [sum(cache.load(k) for k in range(50)) for _ in range(20)] for cache in (first, again)
    ]
    assert passes[0] == passes[1]
    later = passes[0][1:]
    assert min(later) > 5
    assert max(later) < 40  # the least recently used of 40 would be missed in all 50


def blocks(*numbers):
    return np.array(numbers, dtype=np.int64)


def test_a_block_is_read_once_while_l2_holds_it():
    tiles = [blocks(0, 1, 2), blocks(0, 1), blocks(0, 3)]
    assert reads(tiles, 3, capacity=8, resident=0) == 4
    assert reads(tiles * 2, 3, capacity=8, resident=0) == 4
    assert reads(tiles * 4, 3, capacity=2, resident=0) > 6
    assert reads(tiles * 4, 3, capacity=8, resident=8) > 6
    assert reads([blocks(), blocks(5)], 1, capacity=8, resident=1) == 1
    assert reads([blocks()], 1, capacity=8, resident=1) == 0


def test_ctas_that_drift_apart_read_a_block_again(monkeypatch):
    """Two CTAs list the same blocks, of which L2 holds far fewer than they drift apart."""
    tiles = [np.arange(2000)] * 2
    drifting = reads(tiles, 2, capacity=16, resident=0)
    assert 1.2 * 2000 < drifting <= 2 * 2000
    assert reads(tiles, 2, capacity=400, resident=0) < 1.1 * 2000
    assert reads(tiles, 2, capacity=16, resident=0) == drifting  # the same in every run
    monkeypatch.setattr("sparseflash.io_model.l2_reuse.DRIFT", 0.0)
    assert reads(tiles, 2, capacity=16, resident=0) == 2000


def test_a_cta_takes_the_next_work_tile_when_it_is_free():
    """The short ones follow one another beside the long one, whose blocks they find in L2."""
    long, short = np.arange(100), blocks(*range(10))
    apart = [np.arange(200, 300), *(short + 10 * i for i in range(9))]
    together = [long, *(short + 10 * i for i in range(9))]
    assert reads(apart, 2, capacity=40, resident=0) == 190
    assert reads(together, 2, capacity=40, resident=0) < 150


def tiles(mask, heads, streams, heads_per_group=1, rows_per_block=1, ctas=2, capacity=8):
    rows = mask.table().by_query
    found, share = tiles_of(
        *(rows, torch.zeros(heads, dtype=torch.long), streams, heads_per_group, rows_per_block),
        *(ctas, capacity),
    )
    return [tile.tolist() for tile in found], share


def test_rows_far_longer_than_l2_are_cut():
    found, share = tiles(masks.full()(4096, block_size=16), 1, [0])
    assert {len(tile) for tile in found} == {8 * MAX_STEPS}
    assert share == 8 * MAX_STEPS / 256


def test_evenly_spaced_parts_stand_for_many_work_tiles(monkeypatch):
    mask = masks.local(24)(8192, block_size=16)
    everything, share = tiles(mask, 1, [0], ctas=8)
    assert (len(everything), share) == (512, 1)
    monkeypatch.setattr("sparseflash.io_model.l2_reuse.MAX_LOADS", 1000)
    found, share = tiles(mask, 1, [0], ctas=8)
    assert len(found) == 3 * 64
    assert share == pytest.approx(3 / 8, rel=0.05)
    middles = sorted(sum(tile) / len(tile) for tile in found)
    assert middles[0] < 130
    assert middles[-1] > 380
    whole, parts = (reads([*map(np.array, each)], 8, 16, 0) for each in (everything, found))
    assert parts / share == pytest.approx(whole, rel=0.15)


def test_work_tiles_come_in_the_order_of_the_schedule():
    mask = masks.causal()(64, block_size=16)
    alone, _ = tiles(mask, 2, [0, 1])
    assert alone[:4] == [[3, 0, 1, 2], [2, 0, 1], [1, 0], [0]]
    assert alone[4] == [7, 4, 5, 6]  # row 3 of the other head, whose blocks begin at 4
    together, _ = tiles(mask, 2, [0, 1], heads_per_group=2)
    assert together[:3] == [[3, 0, 1, 2], [7, 4, 5, 6], [2, 0, 1]]
    shared, _ = tiles(mask, 2, [0, 0], heads_per_group=2, rows_per_block=2)
    assert shared[:4] == [[3, 0, 1, 2]] * 4
