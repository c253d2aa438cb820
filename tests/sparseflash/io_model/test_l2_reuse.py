import numpy as np
import torch

import masks
from sparseflash.io_model.l2_reuse import RandomReplacement, listed_blocks, reads, waves_of


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


def test_a_step_of_a_wave_reads_a_block_once():
    wave = np.array([[0, 1, 2], [0, 1, -1], [0, 3, -1]])
    assert reads([wave], capacity=8, resident=0) == 4
    assert reads([wave, wave], capacity=8, resident=0) == 4
    assert reads([wave] * 4, capacity=2, resident=0) > 6
    assert reads([wave] * 4, capacity=8, resident=8) > 6


def test_waves_are_work_tiles_in_the_order_of_the_schedule():
    mask = masks.causal()(64, block_size=16)
    rows = mask.table().by_query
    assert [row.tolist() for row in listed_blocks(rows, 0)] == [
        [0],
        [1, 0],
        [2, 0, 1],
        [3, 0, 1, 2],
    ]
    both = torch.zeros(2, dtype=torch.long)
    alone = list(waves_of(rows, both, [0, 1], 1, 1, per_wave=3))
    assert [len(wave) for wave in alone] == [3, 3, 2]
    assert alone[0].tolist() == [[3, 0, 1, 2], [2, 0, 1, -1], [1, 0, -1, -1]]
    assert alone[2][-1].tolist() == [4, -1]  # row 0 of the other head, whose blocks begin at 4
    together = list(waves_of(rows, both, [0, 1], 2, 1, per_wave=3))
    assert together[0].tolist()[1] == [7, 4, 5, 6]
    shared = list(waves_of(rows, both, [0, 0], 2, 2, per_wave=8))
    assert [row.tolist() for row in shared[0][:4]] == [[3, 0, 1, 2]] * 4
