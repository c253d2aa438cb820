"""The order in which the CTAs of the fused backward kernel add to dQ, the same in every run.

The work tiles of each CTA are fixed. A simulation of the kernel, in which all steps take equally
long, gives the order in which CTAs reach the tiles of dQ: the *ordinal* of a block is the number
of blocks of the same queries that are added before it. On the device a CTA adds a tile when the
counter of the tile has reached its ordinal, and then increments it.

Nothing waits for ever. The simulation computes blocks one after another. Within a CTA the order of
the simulation is that of the kernel, and ordinals of the same queries are given in that order.
So a tile waits only for tiles of blocks that the simulation has computed before its own, and the
first that has not been added can be. All CTAs of the grid must run at the same time.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from masks.lookup_table import BlockLists, LookupTable
from sparseflash.backends.hopper import configs
from sparseflash.dispatch.spec import AttentionSpec


class Order(NamedTuple):
    """What kernels read, int32; see kernels.backward_fused.Order.

    next_of_work:   (work tiles,), the number of work tiles after the last one of a CTA
    first_ordinals: (batch * heads, rows of keys), where the ordinals of a row start
    ordinals:       (entries,), for each block of a row: partial blocks, then full ones
    """

    next_of_work: Tensor
    first_ordinals: Tensor
    ordinals: Tensor


class _Row(NamedTuple):
    """A row of keys of one query head: where its ordinals start, and its columns of queries."""

    first_ordinal: int
    columns: list[int]


def plan_order(table: LookupTable, spec: AttentionSpec, ctas: int, heads_per_group: int) -> Order:
    """The order of one call, in O(ordinals * log CTAs) on the host.

    Args:
        table: Its lookup table, of whose blocks the host knows the number.
        spec: Its spec.
        ctas: The number of CTAs, all of which run at the same time.
        heads_per_group: As in params.Sizes, of heads of keys.
    """
    rows_of_masks = _rows_of_masks(table.by_key)
    head_to_mask = table.head_to_mask.tolist()
    group, num_rows = spec.heads // spec.kv_heads, table.by_key.num_rows
    rows: list[list[_Row]] = []
    total = 0
    for batch in range(spec.batch):
        of_batch = head_to_mask[batch % len(head_to_mask)]
        for head in range(spec.heads):
            rows.append([])
            for columns in rows_of_masks[of_batch[head % len(of_batch)]]:
                rows[-1].append(_Row(total, columns))
                total += len(columns)
    schedules = table.by_key.schedule.tolist()

    def work_tiles() -> Iterator[list[tuple[int, _Row]]]:
        """(query head, row) of each work tile, in the order of scheduler.decode_work_id."""
        num_bh = spec.batch * spec.kv_heads
        for first in range(0, num_bh, heads_per_group):
            of_group = range(first, min(first + heads_per_group, num_bh))
            for index in range(num_rows):
                for kv_bh in of_group:
                    batch, kv_head = divmod(kv_bh, spec.kv_heads)
                    of_batch = head_to_mask[batch % len(head_to_mask)]
                    mask = of_batch[kv_head * group % len(of_batch)]
                    row, first_bh = schedules[mask][index], kv_bh * group
                    yield [(bh, rows[bh][row]) for bh in range(first_bh, first_bh + group)]

    works = list(work_tiles())
    queues, next_of_work = _assign(works, min(ctas, len(works)))
    tiles = spec.batch * spec.heads * table.by_query.num_rows
    ordinals = _ordinals(queues, total, tiles, table.by_query.num_rows)
    first_ordinals = [[row.first_ordinal for row in of_head] for of_head in rows]

    def on_device(numbers: list) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=table.device)

    return Order(on_device(next_of_work), on_device(first_ordinals), on_device(ordinals or [0]))


def _rows_of_masks(lists: BlockLists) -> list[list[list[int]]]:
    """The columns of each row of each mask, in the order in which kernels compute them."""
    full_index, partial_index = lists.full_index.tolist(), lists.partial_index.tolist()
    return [
        [
            partial_index[partial : partial + n_partial] + full_index[full : full + n_full]
            for full, n_full, partial, n_partial in mask
        ]
        for mask in lists.row_ptr.tolist()
    ]


Work = list[tuple[int, _Row]]


def _assign(works: list[Work], ctas: int) -> tuple[list[list[Work]], list[int]]:
    """(work tiles of each CTA, the next one of the same CTA): each goes to the first free CTA."""
    queues: list[list[Work]] = [[] for _ in range(ctas)]
    last = [0] * ctas
    next_of_work = [len(works)] * len(works)
    free = [(0.0, cta) for cta in range(ctas)]
    for number, work in enumerate(works):
        time, cta = free[0]
        blocks = sum(len(row.columns) for _, row in work)
        heapq.heapreplace(free, (time + 2 * blocks + configs.ORDER_TIMES.work_tile, cta))
        if queues[cta]:
            next_of_work[last[cta]] = number
        last[cta] = number
        queues[cta].append(work)
    return queues, next_of_work


def _ordinals(queues: list[list[Work]], total: int, tiles: int, rows_of_queries: int) -> list[int]:
    """The ordinal of each block, in the order in which steps of equal length reach it."""
    times = configs.ORDER_TIMES
    ordinals, counts, free_from = [0] * total, [0] * tiles, [0.0] * tiles

    def blocks_of(works: list[Work]) -> Iterator[tuple[int, int, float]]:
        """(index of its ordinal, index of its queries, time before it) of each block of a CTA."""
        before = 0.0
        for work in works:
            for bh, row in work:
                first = bh * rows_of_queries
                for ordinal, column in enumerate(row.columns, row.first_ordinal):
                    yield ordinal, first + column, before
                    before = 0.0
            before += times.work_tile

    blocks = [blocks_of(works) for works in queues]
    nothing = (-1, -1, 0.0)
    coming = [next(x, nothing) for x in blocks]
    ready = [(before, cta) for cta, (ordinal, _, before) in enumerate(coming) if ordinal >= 0]
    heapq.heapify(ready)
    while ready:
        time, cta = ready[0]
        ordinal, queries, _ = coming[cta]
        added = max(time, free_from[queries])
        free_from[queries] = added + times.handover
        ordinals[ordinal] = counts[queries]
        counts[queries] += 1
        coming[cta] = following = next(blocks[cta], nothing)
        if following[0] < 0:
            heapq.heappop(ready)
        else:
            time = max(time, added - times.slack) + 2 + following[2]
            heapq.heapreplace(ready, (time, cta))
    return ordinals
