import numpy as np
import torch

import masks
from sparseflash.io_model.l2_reuse import (
    MOST_STEPS,
    RandomReplacement,
    listed_blocks,
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
    monkeypatch.setattr("sparseflash.io_model.l2_reuse.MOST_STEPS", 1000)
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


def test_rows_far_longer_than_l2_are_cut():
    capacity = 8
    rows = [np.arange(10 * MOST_STEPS * capacity)]
    assert reads(rows, 1, capacity, resident=0) == len(rows[0])
    assert reads(rows * 2, 2, capacity, resident=0) <= 2 * len(rows[0])


def test_work_tiles_come_in_the_order_of_the_schedule():
    mask = masks.causal()(64, block_size=16)
    rows = mask.table().by_query
    assert [row.tolist() for row in listed_blocks(rows, 0)] == [
        [0],
        [1, 0],
        [2, 0, 1],
        [3, 0, 1, 2],
    ]
    both = torch.zeros(2, dtype=torch.long)
    alone = [tile.tolist() for tile in tiles_of(rows, both, [0, 1], 1, 1)]
    assert alone[:4] == [[3, 0, 1, 2], [2, 0, 1], [1, 0], [0]]
    assert alone[4] == [7, 4, 5, 6]  # row 3 of the other head, whose blocks begin at 4
    together = [tile.tolist() for tile in tiles_of(rows, both, [0, 1], 2, 1)]
    assert together[:3] == [[3, 0, 1, 2], [7, 4, 5, 6], [2, 0, 1]]
    shared = [tile.tolist() for tile in tiles_of(rows, both, [0, 0], 2, 2)]
    assert shared[:4] == [[3, 0, 1, 2]] * 4
