"""What ranks compute and exchange with an assignment of the units of a sequence to them.

All of it is counted on runs of blocks, so that it takes time in proportion to the runs that ranks
attend and not to all block columns of all ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from masks._core.intervals import CHUNK, Runs, in_chunks, union
from sparseflash.distributed.assign import Workload


@dataclass(frozen=True, eq=False)
class Costs:
    """The work and traffic of each rank, by which the strategies are compared.

    blocks:  int64 (ranks,), non-zero blocks that it computes, summed over heads
    traffic: int64 (ranks, ranks), key tokens that [receiver, sender] exchange; 0 on the diagonal
    shared:  int64 (ranks,), tokens of shared rows that it owns
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
        """float64 (ranks,) twice: what each rank receives and sends, in tokens of key and value.

        For shared rows, a query counts as half a token, and O with LSE as one.
        """
        received, sent = self.moved_of_shared(0.5, 1.0)
        return self.receive + received, self.send + sent

    def moved_of_shared(self, there: float, back: float) -> tuple[Tensor, Tensor]:
        """float64 (ranks,) twice: what each rank receives and sends for shared rows.

        A token counts `there` when it is sent to a rank, and `back` when its owner receives it.
        """
        copies = self.shared.double() * (len(self.shared) - 1)
        others = (self.shared.sum() - self.shared).double()
        return others * there + copies * back, copies * there + others * back

    def time(self, heads: int, block: int, fetch_cost: float) -> float:
        """The predicted time of the slowest rank; the unit is the time of a block of all heads."""
        moved = torch.maximum(*self.moved) * fetch_cost / block
        return float(torch.maximum(self.blocks.double() / heads, moved).max())


class Pieces(NamedTuple):
    """Consecutive key blocks [begin, end) of one sender that one receiver attends.

    int64 (pieces,) each, in the order of receivers, and of the sequence for each of them.
    """

    receiver: Tensor
    sender: Tensor
    begin: Tensor
    end: Tensor


@dataclass(frozen=True, eq=False)
class Assignment:
    """A workload whose units are assigned to ranks.

    Attributes:
        workload: The mask in the form that the strategies read.
        owner: int64 (units,), the rank that owns each unit.
        ranks: Number of ranks.
    """

    workload: Workload
    owner: Tensor
    ranks: int

    @cached_property
    def owner_of_row(self) -> Tensor:
        """int64 (nq,): the rank that owns each block row."""
        return self.owner[self.workload.rows]

    @cached_property
    def owner_of_column(self) -> Tensor:
        """int64 (nk,): the rank that owns each block column."""
        return self.owner[self.workload.columns]

    @cached_property
    def shared_blocks(self) -> Tensor:
        """int64 (ranks,): non-zero blocks of shared rows that each rank computes."""
        blocks = torch.zeros(self.ranks, dtype=torch.int64)
        return blocks.index_add_(0, self.owner_of_column, self.workload.shared_work)

    @cached_property
    def blocks(self) -> Tensor:
        """int64 (ranks,): non-zero blocks that each rank computes, summed over heads."""
        return self.shared_blocks.index_add(0, self.owner, self.workload.work)

    @cached_property
    def tokens(self) -> Tensor:
        """int64 (ranks,): tokens that each rank owns."""
        tokens = torch.zeros(self.ranks, dtype=torch.int64)
        return tokens.index_add_(0, self.owner_of_column, self.workload.column_tokens)

    @cached_property
    def costs(self) -> Costs:
        """The work and traffic of each rank."""
        traffic = torch.zeros(self.ranks * self.ranks, dtype=torch.int64)
        before = self.workload.tokens_before
        for receiver, sender, begin, end in self._fetched_pieces():
            traffic.index_add_(0, receiver * self.ranks + sender, before[end] - before[begin])
        workload, shared = self.workload, torch.zeros(self.ranks, dtype=torch.int64)
        shared.index_add_(0, self.owner_of_row[workload.shared], workload.shared_tokens)
        return Costs(self.blocks, traffic.view(self.ranks, -1), shared)

    @cached_property
    def arrives_mixed(self) -> Tensor:
        """bool (ranks,): whether received keys would arrive in another order than the sequence's.

        The keys of each rank arrive in this order, one rank after another.
        """
        mixed = torch.zeros(self.ranks, dtype=torch.bool)
        for receiver, sender, _, _ in self._fetched_pieces():
            mixed[receiver[1:][(receiver.diff() == 0) & (sender.diff() < 0)]] = True
        return mixed

    @cached_property
    def fetched_of_spans(self) -> Tensor:
        """int64: of each span of the workload, the blocks that the owner of its row fetches."""
        _, row, begin, end = self.workload.spans_of_masks
        fetched = in_chunks(
            lambda row, begin: (self.owner_of_row[row] != self.owner_of_column[begin]).long(),
            row,
            begin,
        )
        longer = self.workload.longer_spans
        row, begin, end = row[longer], begin[longer], end[longer]
        # The blocks that a rank owns, in the order of ranks, numbered as in `attended`.
        stride = self.workload.whole.grid.row_stride
        numbers = self.owner_of_column * stride + torch.arange(len(self.owner_of_column))
        numbers, start = numbers.sort().values, self.owner_of_row[row] * stride
        own = [torch.searchsorted(numbers, start + edge) for edge in (begin, end)]
        fetched[longer] = end - begin - (own[1] - own[0])
        return fetched

    def attended(self, rows: Tensor | None = None) -> Runs:
        """The key blocks that the queries of each rank attend, as runs.

        Args:
            rows: bool (nq,), the block rows whose queries count; all by default.

        Returns:
            Runs of rank * (nk + 1) + column.
        """
        runs, row = self.workload.runs_of_rows, self.workload.row_of_runs
        if rows is not None:
            chosen = rows[row]
            runs, row = runs.select(chosen), row[chosen]
        stride = self.workload.whole.grid.row_stride
        shift = ((self.owner_of_row - torch.arange(len(self.owner_of_row))) * stride)[row]
        return union(Runs(runs.begin + shift, runs.end + shift))

    def attended_tokens(self, rows: Tensor) -> Tensor:
        """int64 (ranks,): key tokens that the queries of each rank in some block rows attend."""
        stride, before = self.workload.whole.grid.row_stride, self.workload.tokens_before
        begin, end = self.attended(rows)
        rank = begin // stride
        count = before[end - rank * stride] - before[begin - rank * stride]
        return torch.zeros(self.ranks, dtype=torch.int64).index_add_(0, rank, count)

    def fetched(self) -> Tensor:
        """bool (ranks, nk): the key blocks that each rank attends but does not own."""
        stride = self.workload.whole.grid.row_stride
        attended = self.attended().to_bool(self.ranks * stride).view(-1, stride)[:, :-1]
        return attended & (self.owner_of_column != torch.arange(self.ranks).unsqueeze(1))

    def _fetched_pieces(self) -> Iterator[Pieces]:
        """The pieces whose sender is not their receiver, those of some receivers at a time."""
        stride, owner = self.workload.whole.grid.row_stride, self.owner_of_column
        # Segments are consecutive columns with one owner.
        is_first = torch.ones_like(owner, dtype=torch.bool)
        is_first[1:] = owner[1:] != owner[:-1]
        segment_of, first = is_first.cumsum(0) - 1, is_first.nonzero().flatten()
        last, sender_of = torch.cat([first[1:], first.new_tensor([len(owner)])]), owner[first]
        runs, receivers = self.attended(), torch.arange(self.ranks + 1)
        bounds = torch.searchsorted(runs.begin, receivers * stride)
        receiver = torch.repeat_interleave(receivers[:-1], bounds.diff())
        begin, end = (edge - receiver * stride for edge in runs)
        segment = segment_of[begin]
        count = segment_of[end - 1] - segment + 1
        pieces_before = torch.nn.functional.pad(count.cumsum(0), (1, 0))
        part = pieces_before[bounds[:-1]] // CHUNK
        edges = [0, *((part.diff() > 0).nonzero().flatten() + 1).tolist(), self.ranks]
        for low, high in pairwise(bounds[edges].tolist()):
            if low == high:
                continue
            each = torch.arange(low, high)
            if int(count[low:high].max()) > 1:
                each = torch.repeat_interleave(each, count[low:high])
            number = torch.arange(len(each)) + pieces_before[low] - pieces_before[each]
            found = segment[each] + number
            senders = sender_of[found]
            other = senders != receiver[each]
            each, found = each[other], found[other]
            yield Pieces(
                receiver=receiver[each],
                sender=senders[other],
                begin=torch.maximum(begin[each], first[found]),
                end=torch.minimum(end[each], last[found]),
            )
