"""Which rank owns which part of a sequence: the strategies, and the model that compares them.

A sequence is cut into units, each of the larger side of a block, so that a unit is made of whole
block rows and whole block columns. The rank that owns a unit has its queries, keys and values.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from masks import BlockMask

CHUNKS_PER_RANK = 8  # that balanced chunks and repair deal with: more balance, and fetch more
HEAVY, FEW = 8, 16  # rows of so many times the mean work, at most one of so many rows
NO_ROWS = torch.zeros(0, dtype=torch.int64)
RANKS_AT_ONCE = 64  # whose key blocks are marked together


@dataclass(frozen=True, eq=False)
class Workload:
    """What the strategies see of a mask of as many queries as keys, on the CPU.

    Attributes:
        whole: The mask.
        shared: int64, block rows that all ranks share; each attends its own keys.
    """

    whole: BlockMask
    shared: Tensor = NO_ROWS

    @cached_property
    def mask(self) -> BlockMask:
        """The mask without the rows that ranks share."""
        if not len(self.shared):
            return self.whole
        rows = torch.ones(self.whole.grid.nq, dtype=torch.bool).index_fill_(0, self.shared, False)
        rows = rows.nonzero().flatten()
        return self.whole.keep_rows(rows) if len(rows) else self.whole - self.whole

    def shared_work(self, owner: Tensor, ranks: int) -> Tensor:
        """int64 (ranks,): non-zero blocks of the shared rows whose keys each rank owns."""
        work = torch.zeros(ranks, dtype=torch.int64)
        if not len(self.shared):
            return work
        rows = self.whole.take_blocks(self.shared, torch.arange(self.whole.grid.nk))
        return work.index_add_(0, owner[self.columns], rows.T.blocks_per_row().sum(0))

    @property
    def unit(self) -> int:
        """Tokens of a unit."""
        return max(self.mask.block_size)

    @property
    def units(self) -> int:
        """How many there are; the last one may be clipped."""
        return -(-self.whole.grid.q_len // self.unit)

    def tokens_of(self, owner: Tensor, ranks: int) -> Tensor:
        """int64 (ranks,): tokens that each rank owns."""
        tokens = torch.zeros(ranks, dtype=torch.int64)
        return tokens.index_add_(0, owner[self.columns], self.column_tokens)

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
    def spans(self) -> tuple[Tensor, Tensor, Tensor]:
        """(row, first column, column after the last) of every run of full blocks and of every
        partial block, of all masks: int64 (spans,) each.
        """
        _, row, begin, end = self.spans_of_masks
        return row, begin, end

    @cached_property
    def spans_of_masks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(mask, row, first column, column after the last), as in spans."""
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
    def documents(self) -> Tensor:
        """int64 (documents + 1,): where the parts of the sequence begin and end, in units, between
        which no query attends a key of another part.
        """
        row, begin, end = self.spans
        own, first, last = self.rows[row], self.columns[begin], self.columns[end - 1]
        # A block joins all units between those of its queries and of its keys.
        change = torch.zeros(self.units + 2, dtype=torch.int64)
        one = torch.ones_like(own)
        change.index_add_(0, torch.minimum(own, first) + 1, one)
        change.index_add_(0, torch.maximum(own, last) + 1, -one)
        joined = change.cumsum(0)[: self.units + 1]
        joined[self.units] = 0
        return (joined == 0).nonzero().flatten()

    def needed(self, owner: Tensor, ranks: int, first: int = 0, last: int | None = None) -> Tensor:
        """bool (ranks, nk): the key blocks that the queries of each rank attend; of the ranks from
        `first` to before `last`.
        """
        last = ranks if last is None else last
        row, begin, end = self.spans
        rank = owner[self.rows[row]] - first
        here = (rank >= 0) & (rank < last - first)
        stride = self.whole.grid.nk + 1
        change = torch.zeros((last - first) * stride, dtype=torch.int32)
        start, one = rank[here] * stride, torch.ones(int(here.sum()), dtype=torch.int32)
        change.index_add_(0, start + begin[here], one)
        change.index_add_(0, start + end[here], -one)
        return change.view(-1, stride).cumsum(1, dtype=torch.int32)[:, :-1] > 0

    def fetched(self, owner: Tensor, ranks: int) -> Tensor:
        """bool (ranks, nk): the key blocks that each rank attends and does not own."""
        own = owner[self.columns] == torch.arange(ranks).unsqueeze(1)
        return self.needed(owner, ranks) & ~own


@dataclass(frozen=True, eq=False)
class Costs:
    """What an assignment asks of each rank, by which the strategies are compared.

    blocks:  int64 (ranks,) non-zero blocks that it computes, summed over heads
    traffic: int64 (ranks, ranks) key tokens that [receiver, sender] move; 0 on the diagonal
    shared:  int64 (ranks,) tokens that it owns of rows that ranks share
    """

    blocks: Tensor
    traffic: Tensor
    shared: Tensor

    @property
    def receive(self) -> Tensor:
        """int64 (ranks,): key tokens that each rank receives."""
        return self.traffic.sum(1)

    @property
    def send(self) -> Tensor:
        """int64 (ranks,): key tokens that each rank sends."""
        return self.traffic.sum(0)

    @property
    def moved(self) -> tuple[Tensor, Tensor]:
        """float64 (ranks,): tokens that each rank receives and sends, in sizes of a key and value;
        of shared rows a query is half of one, and what a rank found about one.
        """
        received, sent = self.moved_of_shared(0.5, 1.0)
        return self.receive + received, self.send + sent

    def moved_of_shared(self, there: float, back: float) -> tuple[Tensor, Tensor]:
        """float64 (ranks,): what each rank receives and sends of shared rows, of which a token is
        worth `there` on the way to each other rank, and `back` on the way to its owner.
        """
        copies = self.shared.double() * (len(self.shared) - 1)
        others = (self.shared.sum() - self.shared).double()
        return others * there + copies * back, copies * there + others * back

    def time(self, heads: int, block: int, fetch_cost: float) -> float:
        """The modelled time of the slowest rank, in times to compute a block of all heads."""
        moved = torch.maximum(*self.moved) * fetch_cost / block
        return float(torch.maximum(self.blocks.double() / heads, moved).max())


def costs(workload: Workload, owner: Tensor, ranks: int) -> Costs:
    """What the assignment `owner`, int64 (units,), asks of each rank."""
    blocks = workload.shared_work(owner, ranks).index_add(0, owner, workload.work)
    traffic = torch.zeros(ranks, ranks, dtype=torch.int64)
    sender = owner[workload.columns]
    for first in range(0, ranks, RANKS_AT_ONCE):
        last = min(first + RANKS_AT_ONCE, ranks)
        tokens = workload.needed(owner, ranks, first, last) * workload.column_tokens
        traffic[first:last].index_add_(1, sender, tokens)
    traffic.fill_diagonal_(0)
    shared = torch.zeros(ranks, dtype=torch.int64)
    shared.index_add_(0, owner[workload.rows[workload.shared]], workload.shared_tokens)
    return Costs(blocks, traffic, shared)


def heavy_rows(mask: BlockMask) -> Tensor:
    """int64: the few block rows that attend far more keys than others, which ranks may share."""
    work = mask.blocks_per_row().sum(0)
    heavy = (work > HEAVY * work.double().mean()).nonzero().flatten()
    return heavy if len(heavy) * FEW < len(work) else NO_ROWS


def contiguous(workload: Workload, ranks: int) -> Tensor:
    """One run of units for each rank."""
    return torch.arange(workload.units) * ranks // workload.units


def zigzag(workload: Workload, ranks: int) -> Tensor:
    """Twice as many runs as ranks: rank r has run r from the start and run r from the end."""
    return _levelled(_zigzag(workload.units, ranks), ranks)


def zigzag_by_document(workload: Workload, ranks: int) -> Tensor:
    """Each document in zigzag; one too short for that goes whole to the rank with least work."""
    owner = torch.empty(workload.units, dtype=torch.int64)
    capacity = torch.full((ranks,), -(-workload.units // ranks))
    load = torch.zeros(ranks, dtype=torch.int64)
    bounds = workload.documents.tolist()
    short = []
    for begin, end in pairwise(bounds):
        if end - begin < 2 * ranks:
            short.append((-int(workload.work[begin:end].sum()), begin, end))
            continue
        owner[begin:end] = _zigzag(end - begin, ranks)
        load.index_add_(0, owner[begin:end], workload.work[begin:end])
        capacity -= torch.bincount(owner[begin:end], minlength=ranks)
    for work, begin, end in sorted(short):
        # What fits nowhere goes where most capacity is left, and levelling moves the rest.
        fits = capacity >= end - begin
        rank = int(
            load.masked_fill(~fits, load.max() + 1).argmin() if fits.any() else capacity.argmax()
        )
        owner[begin:end] = rank
        load[rank] -= work
        capacity[rank] -= end - begin
    return _levelled(owner, ranks)


def balanced_chunks(workload: Workload, ranks: int) -> Tensor:
    """Chunks dealt to the rank with least work, those of most work first (LPT)."""
    chunk, work = _chunks(workload, ranks)
    most = -(-len(work) // ranks)
    taken = torch.empty_like(work)
    heap = [(0, rank, 0) for rank in range(ranks)]
    for number in torch.argsort(work, descending=True, stable=True).tolist():
        load, rank, count = heapq.heappop(heap)
        taken[number] = rank
        if count + 1 < most:
            heapq.heappush(heap, (load + int(work[number]), rank, count + 1))
    return _levelled(taken[chunk], ranks)


def contiguous_with_repair(workload: Workload, ranks: int, tolerance: float = 1.05) -> Tensor:
    """Contiguous, then chunks of the rank with most work are exchanged for chunks of the rank with
    least, until the most is within `tolerance` of the mean.
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
        # The exchange after which the larger of both loads is least.
        larger = torch.maximum(load[high] - gain, load[low] + gain)
        best = int(larger.argmin())
        if int(larger.flatten()[best]) >= int(load[high]):
            break
        i, j = divmod(best, len(theirs))
        load[high] -= gain[i, j]
        load[low] += gain[i, j]
        taken[mine[i]], taken[theirs[j]] = low, high
    return _levelled(taken[chunk], ranks)


Strategy = Callable[[Workload, int], Tensor]
STRATEGIES: dict[str, Strategy] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "zigzag by document": zigzag_by_document,
    "balanced chunks": balanced_chunks,
    "contiguous with repair": contiguous_with_repair,
}


def _zigzag(units: int, ranks: int) -> Tensor:
    run = torch.arange(units) * 2 * ranks // units
    return torch.minimum(run, 2 * ranks - 1 - run)


def _chunks(workload: Workload, ranks: int) -> tuple[Tensor, Tensor]:
    """The chunk of each unit, and the work of each chunk."""
    count = min(CHUNKS_PER_RANK * ranks, workload.units)
    chunk = torch.arange(workload.units) * count // workload.units
    work = torch.zeros(count, dtype=torch.int64).index_add(0, chunk, workload.work)
    return chunk, work


def _levelled(owner: Tensor, ranks: int) -> Tensor:
    """The assignment with the last units of ranks that own too many given to ranks with too few.

    Every rank then has a sixteenth more or fewer units than the mean at most, and at least one.
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
