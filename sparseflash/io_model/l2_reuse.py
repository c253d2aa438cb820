"""A simulation of L2, which finds how often blocks are read from device memory.

Each CTA takes the next work tile as soon as it is idle, and loads one block in each step. The time
of a step is random, so CTAs that start at the same time drift apart. A block that several of them
list is read from device memory only once if L2 still holds it. A load replaces a random block:
NVIDIA does not document the policy of L2. Random replacement agrees with hardware counters; least
recently used does not, because a cyclic pass over slightly more than fits would never hit.
"""

import heapq
import random
from collections.abc import Sequence
from itertools import count

import numpy as np
from torch import Tensor

from masks.lookup_table import BlockLists

# Both are fitted to records io-complexity of an H200.
USABLE_SHARE = 0.8  # share of L2 that holds operands
DRIFT = 0.5  # standard deviation of the time of a step over its mean
SHORTEST_STEP = 0.1  # over the mean
BETWEEN = 1.0  # steps from the end of a work tile to the beginning of the next
# Rows are cut to this multiple of the blocks that L2 holds: more steps do not change the hit rate.
MAX_STEPS = 4
# The drift of CTAs is bounded: a CTA that is ahead waits for device memory, and those behind it
# hit its blocks in L2. So all CTAs start at the same time again after so many waves of work tiles.
PART_WAVES = 8
MAX_LOADS = 1 << 22  # if there are more loads, evenly spaced parts are simulated


class RandomReplacement:
    """A cache of entries of equal size with random replacement, deterministic by its seed."""

    def __init__(self, capacity: int):
        self.capacity = max(capacity, 1)
        self._slots: list[object] = []
        self._where: dict[object, int] = {}
        self._random = random.Random(0)

    def load(self, key: object) -> bool:
        """Loads an entry; returns whether it was a miss."""
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


def reads(tiles: Sequence[np.ndarray], ctas: int, capacity: int, resident: float) -> int:
    """The number of blocks that are read from device memory.

    Args:
        tiles: For each work tile, in the order in which they start, the blocks that it loads,
            int64.
        ctas: Number of work tiles that run at a time.
        capacity: Number of blocks that fit in L2.
        resident: What a work tile reads and writes besides, in blocks; it also occupies L2.
    """
    loads = np.concatenate([*tiles, np.empty(0, np.int64)])
    order = np.argsort(_load_times(tiles, ctas), kind="stable")
    shares = np.concatenate([*(np.full(len(t), resident / len(t)) for t in tiles if len(t)), [0]])
    besides = np.diff(np.cumsum(shares[order]).astype(int), prepend=0)
    cache, misses, others = RandomReplacement(capacity), 0, count()
    for load, number in zip(loads[order].tolist(), besides.tolist(), strict=True):
        misses += cache.load(load)
        for _ in range(number):
            cache.load((next(others),))
    return misses


def _load_times(tiles: Sequence[np.ndarray], ctas: int) -> np.ndarray:
    """The time at which each load starts, in steps."""
    draw = np.random.default_rng(0)
    times, free = [np.empty(0)], [0.0]
    for number, tile in enumerate(tiles):
        if number % (PART_WAVES * ctas) == 0:
            free = sorted(max(free) + DRIFT * draw.random(min(ctas, len(tiles))))
        steps = np.maximum(1 + DRIFT * draw.standard_normal(len(tile)), SHORTEST_STEP)
        ends = free[0] + np.cumsum(steps)
        times.append(ends - steps)
        heapq.heapreplace(free, (ends[-1] if len(ends) else free[0]) + BETWEEN)
    return np.concatenate(times)


def tiles_of(
    rows: BlockLists,
    mask_of_head: Tensor,
    stream_of_head: list[int],
    heads_per_group: int,
    rows_per_block: int,
    ctas: int,
    capacity: int,
) -> tuple[list[np.ndarray], float]:
    """The blocks that each work tile of the first heads loads, partial blocks first.

    Args:
        rows: The direction of the table that the kernel reads.
        mask_of_head: The mask of each head.
        stream_of_head: For each head, which streamed tensors it reads: the same for all query
            heads of a key head.
        heads_per_group: Number of heads whose work tiles are scheduled together, row after row.
        rows_per_block: Number of work tiles of a block row.
        ctas: Number of work tiles that run at a time.
        capacity: Number of blocks that fit in L2.

    Returns:
        The blocks of each work tile, in the order in which they start; and the share of all loads
        of these heads that they contain.
    """
    masks, schedule = mask_of_head.tolist(), rows.schedule.tolist()
    order = [
        (head, schedule[masks[head]][position])
        for first in range(0, len(masks), heads_per_group)
        for position in range(rows.num_rows)
        for head in range(first, min(first + heads_per_group, len(masks)))
        for _ in range(rows_per_block)
    ]
    row_ptr = rows.row_ptr.cpu().numpy()
    full, partial = (x.cpu().numpy() for x in (rows.full_index, rows.partial_index))
    columns = 1 + max(int(full.max(initial=0)), int(partial.max(initial=0)))
    most = MAX_STEPS * capacity
    lengths = row_ptr[..., [1, 3]].sum(-1)
    tiles = []
    for head, row in _spread(order, min(most, float(lengths.mean())), PART_WAVES * ctas):
        f, fulls, p, partials = row_ptr[masks[head], row].tolist()
        listed = np.concatenate([partial[p : p + partials][:most], full[f : f + fulls][:most]])
        tiles.append(listed[:most].astype(np.int64) + stream_of_head[head] * columns)
    loads = sum(int(lengths[masks[head], row]) for head, row in order)
    return tiles, sum(map(len, tiles)) / max(loads, 1)


def _spread(order: list[tuple[int, int]], steps: float, part: int) -> list[tuple[int, int]]:
    """All work tiles, or evenly spaced parts with about MAX_LOADS loads, at least one part."""
    parts = [order[begin : begin + part] for begin in range(0, len(order), part)]
    num_parts = max(int(MAX_LOADS / max(part * steps, 1)), 1)
    if num_parts >= len(parts):
        return order
    chosen = ((2 * i + 1) * len(parts) // (2 * num_parts) for i in range(num_parts))
    return [tile for number in chosen for tile in parts[number]]
