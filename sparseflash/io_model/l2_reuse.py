"""Which blocks are loaded from device memory again: a simulation of L2.

Each CTA takes the next work tile as soon as it is free, and loads one block in a step. Steps take
unequal times, so CTAs that begin together drift apart: a block that several of them list is read
once only as long as L2 holds it. Each load may replace any other block: NVIDIA does not say which
one L2 replaces, and one at random explains what counters measure, where the least recently used
one does not (a cyclic pass over slightly more than fits would find nothing).
"""

import heapq
import random
from collections.abc import Sequence
from itertools import count

import numpy as np
from torch import Tensor

from masks.lookup_table import BlockLists

# Of the bytes of L2, and the standard deviation of the time of a step over its mean: both fitted
# to the record io-complexity of an H200.
USABLE_SHARE = 0.84
DRIFT = 0.4
SHORTEST_STEP = 0.1  # of the mean
BETWEEN = 1.0  # steps from the end of a work tile to the next
# Longer rows are cut: what they find in L2 does not change any more.
MOST_STEPS = 8  # times what L2 holds


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


def reads(tiles: Sequence[np.ndarray], ctas: int, capacity: int, resident: float) -> float:
    """How many blocks are read from device memory.

    Args:
        tiles: Of each work tile, in the order in which they begin, int64: the numbers of the
            blocks that it loads.
        ctas: Work tiles that run at a time.
        capacity: Blocks that L2 holds.
        resident: What a work tile reads and writes besides, in blocks; it takes its share of L2.
    """
    cut = [tile[: MOST_STEPS * capacity] for tile in tiles]
    loads = np.concatenate([*cut, np.empty(0, np.int64)])
    order = np.argsort(_load_times(cut, ctas), kind="stable")
    shares = np.concatenate([*(np.full(len(t), resident / len(t)) for t in cut if len(t)), [0.0]])
    besides = np.diff(np.cumsum(shares[order]).astype(int), prepend=0)
    cache, found, others = RandomReplacement(capacity), 0, count()
    for load, number in zip(loads[order].tolist(), besides.tolist(), strict=True):
        found += cache.load(load)
        for _ in range(number):
            cache.load((next(others),))
    return found * sum(map(len, tiles)) / max(len(loads), 1)


def _load_times(tiles: Sequence[np.ndarray], ctas: int) -> np.ndarray:
    """When each load begins, in steps."""
    draw = np.random.default_rng(0)
    free = sorted(DRIFT * draw.random(min(ctas, len(tiles))))
    times = [np.empty(0)]
    for tile in tiles:
        steps = np.maximum(1 + DRIFT * draw.standard_normal(len(tile)), SHORTEST_STEP)
        ends = free[0] + np.cumsum(steps)
        times.append(ends - steps)
        heapq.heapreplace(free, (ends[-1] if len(ends) else free[0]) + BETWEEN)
    return np.concatenate(times)


def listed_blocks(rows: BlockLists, mask: int) -> list[np.ndarray]:
    """The columns that each row of a mask lists, partial ones first, as kernels load them."""
    full, partial = (x.cpu().numpy() for x in (rows.full_index, rows.partial_index))
    return [
        np.concatenate([partial[p : p + partials], full[f : f + fulls]]).astype(np.int64)
        for f, fulls, p, partials in rows.row_ptr[mask].tolist()
    ]


def tiles_of(
    rows: BlockLists,
    mask_of_head: Tensor,
    stream_of_head: list[int],
    heads_per_group: int,
    rows_per_block: int,
) -> list[np.ndarray]:
    """The blocks that each work tile of the first heads loads, in the order in which they begin.

    Args:
        rows: The direction of the table that the kernel reads.
        mask_of_head: The mask of each head.
        stream_of_head: The streamed tensors that each head reads: heads of a group the same.
        heads_per_group: Heads whose work tiles are scheduled together, row after row.
        rows_per_block: Work tiles of a block row.
    """
    masks, schedule = mask_of_head.tolist(), rows.schedule.tolist()
    lists = {mask: listed_blocks(rows, mask) for mask in set(masks)}
    columns = 1 + max(
        (int(row.max(initial=0)) for listed in lists.values() for row in listed), default=0
    )
    return [
        lists[masks[head]][schedule[masks[head]][position]] + stream_of_head[head] * columns
        for first in range(0, len(masks), heads_per_group)
        for position in range(rows.num_rows)
        for head in range(first, min(first + heads_per_group, len(masks)))
        for _ in range(rows_per_block)
    ]
