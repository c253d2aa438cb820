"""The assignment of a sequence to ranks: the strategies, and the model that compares them.

A sequence consists of units of as many tokens as the larger side of a block, so that a unit has
whole block rows and whole block columns. The rank that owns a unit has its queries, keys and
values.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from masks import BlockMask
from masks._core.intervals import Runs, union

Split = Literal["in place", "rows", "keys"]  # see ContextPlan
CHUNKS_PER_RANK = 8  # of balanced chunks and of repair; more chunks balance better, fetch more
# Rows with more than HEAVY times the mean work may be shared if less than 1 / FEW of all rows are.
HEAVY, FEW = 8, 16
NO_ROWS = torch.zeros(0, dtype=torch.int64)
GROWING_CHUNKS = 2048  # most chunks of graph growing, whose matrix of links has their square


@dataclass(frozen=True, eq=False)
class Workload:
    """A mask in the form that the strategies read.

    Attributes:
        whole: The mask, with as many queries as keys, on the CPU.
        shared: int64, block rows that all ranks share.
    """

    whole: BlockMask
    shared: Tensor = NO_ROWS

    @staticmethod
    def of(mask: BlockMask, shared: Tensor = NO_ROWS) -> "Workload":
        """The workload of a mask, which is stored with the mask."""
        key = ("workload", tuple(shared.tolist()))
        if key not in mask.cache:
            mask.cache[key] = Workload(mask, shared)
        return mask.cache[key]

    @cached_property
    def mask(self) -> BlockMask:
        """The mask without shared rows."""
        if not len(self.shared):
            return self.whole
        rows = torch.ones(self.whole.grid.nq, dtype=torch.bool).index_fill_(0, self.shared, False)
        rows = rows.nonzero().flatten()
        return self.whole.keep_rows(rows) if len(rows) else self.whole - self.whole

    @cached_property
    def shared_work(self) -> Tensor:
        """int64 (nk,): non-zero blocks of shared rows in each block column, summed over heads."""
        grid = self.whole.grid
        if not len(self.shared):
            return torch.zeros(grid.nk, dtype=torch.int64)
        rows = self.whole.take_blocks(self.shared, torch.arange(grid.nk))
        return rows.T.blocks_per_row().sum(0)

    @property
    def unit(self) -> int:
        """Tokens of a unit."""
        return max(self.mask.block_size)

    @property
    def units(self) -> int:
        """Number of units; the last one may be clipped."""
        return -(-self.whole.grid.q_len // self.unit)

    @cached_property
    def work(self) -> Tensor:
        """int64 (units,): non-zero blocks of the queries of each unit, summed over heads."""
        rows = self.mask.blocks_per_row().sum(0)
        return torch.zeros(self.units, dtype=torch.int64).index_add(0, self.rows, rows)

    @cached_property
    def rows(self) -> Tensor:
        """int64 (nq,): the unit of each block row."""
        return torch.arange(self.whole.grid.nq) // (self.unit // self.whole.grid.bq)

    @cached_property
    def columns(self) -> Tensor:
        """int64 (nk,): the unit of each block column."""
        return torch.arange(self.whole.grid.nk) // (self.unit // self.whole.grid.bk)

    @cached_property
    def shared_tokens(self) -> Tensor:
        """int64: tokens of each shared block row."""
        g = self.whole.grid
        return (g.q_len - self.shared * g.bq).clamp(max=g.bq)

    @cached_property
    def column_tokens(self) -> Tensor:
        """int64 (nk,): tokens of each block column."""
        g = self.whole.grid
        return (g.k_len - torch.arange(g.nk) * g.bk).clamp(max=g.bk)

    @cached_property
    def tokens_before(self) -> Tensor:
        """int64 (nk + 1,): tokens before each block column, and all tokens."""
        return torch.nn.functional.pad(self.column_tokens.cumsum(0), (1, 0))

    @cached_property
    def spans(self) -> tuple[Tensor, Tensor, Tensor]:
        """(row, first column, last column + 1) of the runs of full blocks and the partial blocks.

        int64 (spans,) each, for all masks.
        """
        _, row, begin, end = self.spans_of_masks
        return row, begin, end

    @cached_property
    def spans_of_masks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(mask, row, first column, last column + 1), as in `spans`."""
        blocks, g = self.mask.block_set, self.whole.grid
        mask, row, begin, end = g.locate_runs(blocks.full)
        partial_mask, partial_row, column = g.locate(blocks.partial)
        return (
            torch.cat([mask, partial_mask]),
            torch.cat([row, partial_row]),
            torch.cat([begin, column]),
            torch.cat([end, column + 1]),
        )

    @cached_property
    def runs_of_rows(self) -> Runs:
        """The key blocks that each block row attends in any head, numbered as one mask."""
        row, begin, end = self.spans
        return union(self.whole.grid.runs(0, row, begin, end))

    @cached_property
    def runs_before(self) -> Tensor:
        """int64 (nq + 1,): number of runs_of_rows before each block row, and of all."""
        g = self.whole.grid
        return torch.searchsorted(self.runs_of_rows.begin, torch.arange(g.nq + 1) * g.row_stride)

    @cached_property
    def links(self) -> tuple[Tensor, Tensor]:
        """(chunk of each unit, bool (chunks, chunks): whether one of two attends the other)"""
        return _links(self)

    @cached_property
    def halves(self) -> dict[tuple[tuple[int, bool], ...], Tensor]:
        """The halves that graph growing has found, which other numbers of ranks share."""
        return {}

    @cached_property
    def documents(self) -> Tensor:
        """int64 (documents + 1,): bounds of documents, in units.

        A document is a part of the sequence whose queries attend no key outside of it, and whose
        keys are attended by no query outside of it.
        """
        row, begin, end = self.spans
        own, first, last = self.rows[row], self.columns[begin], self.columns[end - 1]
        # A block connects all units between the unit of its queries and the unit of its keys.
        change = torch.zeros(self.units + 2, dtype=torch.int64)
        one = torch.ones_like(own)
        change.index_add_(0, torch.minimum(own, first) + 1, one)
        change.index_add_(0, torch.maximum(own, last) + 1, -one)
        joined = change.cumsum(0)[: self.units + 1]
        joined[self.units] = 0
        return (joined == 0).nonzero().flatten()


def heavy_rows(mask: BlockMask) -> Tensor:
    """int64: block rows that attend far more keys than others; none if there are many of them."""
    work = mask.blocks_per_row().sum(0)
    heavy = (work > HEAVY * work.double().mean()).nonzero().flatten()
    return heavy if len(heavy) * FEW < len(work) else NO_ROWS


def contiguous(workload: Workload, ranks: int) -> Tensor:
    """Assigns one run of consecutive units to each rank."""
    return torch.arange(workload.units) * ranks // workload.units


def zigzag(workload: Workload, ranks: int) -> Tensor:
    """Cuts the sequence into 2 * ranks runs; rank r has run r from the start and from the end."""
    return _level(_zigzag(workload.units, ranks), ranks)


def zigzag_by_document(workload: Workload, ranks: int) -> Tensor:
    """Assigns each document by zigzag; short documents go whole to the rank with least work."""
    owner = torch.empty(workload.units, dtype=torch.int64)
    # Views of numpy, in which many operations on few numbers take a fraction of the time.
    of_units, work = owner.numpy(), workload.work
    capacity = np.full(ranks, -(-workload.units // ranks))
    load = np.zeros(ranks, dtype=np.int64)
    bounds = workload.documents
    of_documents = torch.nn.functional.pad(work.cumsum(0), (1, 0))[bounds].diff()
    short = []
    for (begin, end), blocks in zip(pairwise(bounds.tolist()), of_documents.tolist(), strict=True):
        if end - begin < 2 * ranks:
            short.append((-blocks, begin, end))
            continue
        owner[begin:end] = _zigzag(end - begin, ranks)
        np.add.at(load, of_units[begin:end], work[begin:end].numpy())
        capacity -= np.bincount(of_units[begin:end], minlength=ranks)
    for blocks, begin, end in sorted(short):
        # A document that fits nowhere goes to the rank with the most capacity; `_level` then
        # moves the surplus.
        fits = capacity >= end - begin
        if fits.any():
            rank = int(np.where(fits, load, load.max() + 1).argmin())
        else:
            rank = int(capacity.argmax())
        of_units[begin:end] = rank
        load[rank] -= blocks
        capacity[rank] -= end - begin
    return _level(owner, ranks)


def balanced_chunks(workload: Workload, ranks: int) -> Tensor:
    """Assigns each chunk to the rank with least work, chunks with the most work first (LPT)."""
    chunk, work = _chunks(workload, ranks)
    most = -(-len(work) // ranks)
    taken = torch.empty_like(work)
    heap = [(0, rank, 0) for rank in range(ranks)]
    for number in torch.argsort(work, descending=True, stable=True).tolist():
        load, rank, count = heapq.heappop(heap)
        taken[number] = rank
        if count + 1 < most:
            heapq.heappush(heap, (load + int(work[number]), rank, count + 1))
    return _level(taken[chunk], ranks)


def contiguous_with_repair(workload: Workload, ranks: int, tolerance: float = 1.05) -> Tensor:
    """Contiguous, with chunks swapped between the ranks with the most and the least work.

    Ends when the largest work is at most `tolerance` times the mean.
    """
    chunk, work = _chunks(workload, ranks)
    taken = torch.arange(len(work)) * ranks // len(work)
    load = torch.zeros(ranks, dtype=torch.int64).index_add(0, taken, work)
    for _ in range(len(work)):
        high, low = int(load.argmax()), int(load.argmin())
        if int(load[high]) * ranks <= tolerance * int(load.sum()):
            break
        mine, theirs = ((taken == rank).nonzero().flatten() for rank in (high, low))
        gain = work[mine].unsqueeze(1) - work[theirs]
        # The swap that minimises the larger of both loads.
        larger = torch.maximum(load[high] - gain, load[low] + gain)
        best = int(larger.argmin())
        if int(larger.flatten()[best]) >= int(load[high]):
            break
        i, j = divmod(best, len(theirs))
        load[high] -= gain[i, j]
        load[low] += gain[i, j]
        taken[mine[i]], taken[theirs[j]] = low, high
    return _level(taken[chunk], ranks)


def graph_growing(workload: Workload, ranks: int) -> Tensor:
    """Halves the sequence repeatedly; a half is what few steps of attention reach from a unit.

    There are at most GROWING_CHUNKS chunks, so the shards of more ranks are contiguous.

    Chunks are linked if one attends the other. A half grows breadth-first from a chunk with few
    links. So few of its chunks are linked with the other half, and only these are exchanged, each
    once for many rows. In a butterfly a half has 45 % of such chunks, while each chunk of a
    contiguous half is linked with the other half.

    Reference:
        Karypis, Kumar, "A fast and high quality multilevel scheme for partitioning irregular
        graphs", 1998, section 3.2.
    """
    if ranks > GROWING_CHUNKS:
        return contiguous(workload, ranks)
    chunk, linked = workload.links
    taken = torch.empty(len(linked), dtype=torch.int64)
    # Members, first rank and number of ranks of a part, and the sizes and sides that led to it.
    parts: list[tuple[Tensor, int, int, tuple[tuple[int, bool], ...]]] = []
    parts.append((torch.arange(len(linked)), 0, ranks, ()))
    while parts:
        members, first, count, path = parts.pop()
        if count == 1:
            taken[members] = first
            continue
        low = count // 2
        size = len(members) * low // count
        if (*path, (size, True)) not in workload.halves:
            inside = _first_half(linked[members][:, members], size)
            workload.halves[*path, (size, True)] = members[inside]
            workload.halves[*path, (size, False)] = members[~inside]
        for is_low, start, number in ((True, first, low), (False, first + low, count - low)):
            at = (*path, (size, is_low))
            parts.append((workload.halves[at], start, number, at))
    return _level(taken[chunk], ranks)


Strategy = Callable[[Workload, int], Tensor]
STRATEGIES: dict[str, Strategy] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "zigzag by document": zigzag_by_document,
    "balanced chunks": balanced_chunks,
    "contiguous with repair": contiguous_with_repair,
    "graph growing": graph_growing,
}


def _zigzag(units: int, ranks: int) -> Tensor:
    run = torch.arange(units) * 2 * ranks // units
    return torch.minimum(run, 2 * ranks - 1 - run)


def _chunks(workload: Workload, ranks: int) -> tuple[Tensor, Tensor]:
    """(chunk of each unit, work of each chunk)"""
    count = min(CHUNKS_PER_RANK * ranks, workload.units)
    chunk = torch.arange(workload.units) * count // workload.units
    work = torch.zeros(count, dtype=torch.int64).index_add(0, chunk, workload.work)
    return chunk, work


def _links(workload: Workload) -> tuple[Tensor, Tensor]:
    """(chunk of each unit, bool (chunks, chunks): whether one of two chunks attends the other)"""
    count = min(GROWING_CHUNKS, workload.units)
    chunk = torch.arange(workload.units) * count // workload.units
    row, begin, end = workload.spans
    of_row, one = chunk[workload.rows[row]], torch.ones(len(row), dtype=torch.int32)
    change = torch.zeros(count * (count + 1), dtype=torch.int32)
    change.index_add_(0, of_row * (count + 1) + chunk[workload.columns[begin]], one)
    change.index_add_(0, of_row * (count + 1) + chunk[workload.columns[end - 1]] + 1, -one)
    linked = change.view(count, -1).cumsum(1, dtype=torch.int32)[:, :-1] > 0
    return chunk, (linked | linked.T).fill_diagonal_(False)


def _first_half(linked: Tensor, size: int) -> Tensor:
    """bool: `size` chunks in breadth-first order, from one with the fewest links.

    Of those that are equally far, the ones with the fewest links to chunks without a link yet.
    """
    inside = torch.zeros(len(linked), dtype=torch.bool)
    start = linked.sum(1).argmin()
    if size == 1:
        inside[start] = True
        return inside
    reached = inside.clone()
    reached[start] = True
    left = size
    while left:
        front = reached & ~inside
        if not bool(front.any()):  # the rest has no links with what is inside
            reached[(~inside).nonzero()[0]] = True
            continue
        if int(front.sum()) <= left:
            inside |= front
            left -= int(front.sum())
            reached |= linked[front].any(0)
            continue
        # float32, so that the product runs as a matrix product; counts are exact in it
        more = (linked[front].float() @ (~reached).float().unsqueeze(1)).squeeze(1)
        candidates = front.nonzero().flatten()
        for _ in range(left):
            best = int(more.argmin())
            more[best] = torch.inf
            inside[candidates[best]] = True
            new = linked[candidates[best]] & ~reached
            if bool(new.any()):
                reached |= new
                more -= linked[candidates][:, new].float().sum(1)
        left = 0
    return inside


def _level(owner: Tensor, ranks: int) -> Tensor:
    """Moves the last units of ranks that own too many units to ranks that own too few.

    Then the units of a rank differ from the mean by at most a sixteenth, and are at least one.
    """
    count = torch.bincount(owner, minlength=ranks)
    slack = len(owner) // ranks // 16
    most = -(-len(owner) // ranks) + slack
    least = max(1, len(owner) // ranks - slack)
    owner = owner.clone()
    while True:
        high, low = int(count.argmax()), int(count.argmin())
        if int(count[high]) <= most and int(count[low]) >= least:
            return owner
        most_moved = int(count[high] - count[low]) // 2
        moved = min(most_moved, max(int(count[high]) - most, least - int(count[low])))
        owner[(owner == high).nonzero().flatten()[-moved:]] = low
        count[high] -= moved
        count[low] += moved
