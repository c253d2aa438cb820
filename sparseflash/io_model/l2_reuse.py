"""Which blocks are loaded from device memory again: a simulation of L2.

Work tiles run in waves. All of a wave load their next block at the same time, so a block that
several of them load in one step is read once. Each load may replace any other block: NVIDIA does
not say which one L2 replaces, and one at random explains what counters measure, where the least
recently used one does not (a cyclic pass over slightly more than fits would find nothing).
"""

import random
from collections.abc import Iterable
from itertools import count

import numpy as np
from torch import Tensor

from masks.lookup_table import BlockLists

# Of the bytes of L2; by the record io-complexity of an H200.
USABLE_SHARE = 0.8


class RandomReplacement:
    """A cache of equal entries that replaces any of them, the same in every run."""

    def __init__(self, capacity: int):
        self.capacity = max(capacity, 1)
        self._slots: list[object] = []
        self._where: dict[object, int] = {}
        self._random = random.Random(0)

    def load(self, key: object) -> bool:
        """Whether an entry had to be read."""
        if key in self._where:
            return False
        if len(self._slots) < self.capacity:
            self._where[key] = len(self._slots)
            self._slots.append(key)
        else:
            slot = self._random.randrange(self.capacity)
            del self._where[self._slots[slot]]
            self._slots[slot], self._where[key] = key, slot
        return True


def reads(waves: Iterable[np.ndarray], capacity: int, resident: float) -> int:
    """How many blocks are read from device memory.

    Args:
        waves: Of each wave, int64 (work tiles, steps): the number of the block that a work tile
            loads in a step, -1 for none.
        capacity: Blocks that L2 holds.
        resident: What a work tile reads and writes besides, in blocks; it takes its share of L2.
    """
    cache, found, others = RandomReplacement(capacity), 0, count()
    for wave in waves:
        blocks = int(wave.max(initial=-1)) + 1
        step = np.arange(wave.shape[1]) * blocks
        loads = np.unique((wave + step)[wave >= 0])
        debt, share = 0.0, resident * len(wave) / max(len(loads), 1)
        for load in loads.tolist():
            found += cache.load(load % blocks)
            debt += share
            while debt >= 1:
                cache.load((next(others),))
                debt -= 1
    return found


def listed_blocks(rows: BlockLists, mask: int) -> list[np.ndarray]:
    """The columns that each row of a mask lists, partial ones first, as kernels load them."""
    full, partial = (x.cpu().numpy() for x in (rows.full_index, rows.partial_index))
    return [
        np.concatenate([partial[p : p + partials], full[f : f + fulls]]).astype(np.int64)
        for f, fulls, p, partials in rows.row_ptr[mask].tolist()
    ]


def waves_of(
    rows: BlockLists,
    mask_of_head: Tensor,
    stream_of_head: list[int],
    heads_per_group: int,
    rows_per_block: int,
    per_wave: int,
) -> Iterable[np.ndarray]:
    """The waves of the first heads.

    Args:
        rows: The direction of the table that the kernel reads.
        mask_of_head: Of each head, its mask.
        stream_of_head: Of each head, which streamed tensors it reads: heads of a group the same.
        heads_per_group: Heads whose work tiles are scheduled together, row after row.
        rows_per_block: Work tiles of a block row.
        per_wave: Work tiles that run at a time.
    """
    masks, schedule = mask_of_head.tolist(), rows.schedule.tolist()
    lists = {mask: listed_blocks(rows, mask) for mask in set(masks)}
    order = [
        (head, schedule[masks[head]][position])
        for first in range(0, len(masks), heads_per_group)
        for position in range(rows.num_rows)
        for head in range(first, min(first + heads_per_group, len(masks)))
        for _ in range(rows_per_block)
    ]
    columns = 1 + max(
        (int(row.max(initial=0)) for listed in lists.values() for row in listed), default=0
    )
    for begin in range(0, len(order), per_wave):
        tiles = order[begin : begin + per_wave]
        loads = [lists[masks[head]][row] + stream_of_head[head] * columns for head, row in tiles]
        wave = np.full((len(tiles), max(map(len, loads))), -1, dtype=np.int64)
        for tile, blocks in zip(wave, loads, strict=True):
            tile[: len(blocks)] = blocks
        yield wave
