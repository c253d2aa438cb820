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
    def blocks_of_rows(self) -> Tensor:
        """int64 (2, masks, nq): non-zero blocks of each block row, and those of fetched keys."""
        mask, row, begin, end = self.workload.spans_of_masks
        fetched = in_chunks(
            lambda row, begin: (self.owner_of_row[row] != self.owner_of_column[begin]).long(),
            row,
            begin,
        )
        longer = (end - begin > 1).nonzero().flatten()
        first, last = begin[longer], end[longer]
        # The blocks that a rank owns, in the order of ranks, numbered as those that it attends.
        stride, nq = self.workload.whole.grid.row_stride, len(self.owner_of_row)
        numbers = self.owner_of_column * stride + torch.arange(len(self.owner_of_column))
        numbers, start = numbers.sort().values, self.owner_of_row[row[longer]] * stride
        own = [torch.searchsorted(numbers, start + edge) for edge in (first, last)]
        fetched[longer] = last - first - (own[1] - own[0])
        masks = self.workload.mask.block_set.num_masks
        blocks = torch.zeros(2, masks * nq, dtype=torch.int64)
        number = row if masks == 1 else mask * nq + row
        blocks[0].index_add_(0, number, end - begin)
        blocks[1].index_add_(0, number, fetched)
        return blocks.view(2, masks, nq)

    @cached_property
    def waits(self) -> Tensor:
        """bool (nq,): whether a block row is a waiting row in any head."""
        return (self.blocks_of_rows[1] > 0).any(0)

    @cached_property
    def tokens_of_waiting(self) -> Tensor:
        """int64 (ranks,): key tokens, own and fetched ones, that the waiting rows attend."""
        tokens, before = torch.zeros(self.ranks, dtype=torch.int64), self.workload.tokens_before
        for rank, begin, end in self._attended(self.waits):
            tokens.index_add_(0, rank, before[end] - before[begin])
        return tokens

    def fetched(self) -> Tensor:
        """bool (ranks, nk): the key blocks that each rank attends but does not own."""
        stride = self.workload.whole.grid.row_stride
        fetched = torch.zeros(self.ranks, stride - 1, dtype=torch.bool)
        for rank, begin, end in self._attended():
            low, high = int(rank[0]), int(rank[-1]) + 1
            start = (rank - low) * stride
            attended = Runs(start + begin, start + end).to_bool((high - low) * stride)
            fetched[low:high] = attended.view(-1, stride)[:, :-1]
        return fetched & (self.owner_of_column != torch.arange(self.ranks).unsqueeze(1))

    def _attended(self, rows: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(rank, first column, last column + 1) of the key blocks that the ranks attend, as runs.

        Ranks and the runs of each rank are ascending. Each part has all runs of some ranks.

        Args:
            rows: bool (nq,), the block rows whose queries count; all by default.
        """
        runs, before = self.workload.runs_of_rows, self.workload.runs_before
        stride = self.workload.whole.grid.row_stride
        owner, order = self.owner_of_row.sort(stable=True)
        if rows is not None:
            owner, order = owner[rows[order]], order[rows[order]]
        count = before.diff()[order]
        for some in _parts(owner, count):
            row = order[some]
            each = Runs(before[row], before[row + 1]).expand()
            shift = torch.repeat_interleave((owner[some] - row) * stride, count[some])
            begin, end = union(Runs(runs.begin[each] + shift, runs.end[each] + shift))
            rank = begin // stride
            if len(rank):
                yield rank, begin - rank * stride, end - rank * stride

    def _fetched_pieces(self) -> Iterator[Pieces]:
        """The pieces whose sender is not their receiver, those of some receivers at a time."""
        owner = self.owner_of_column
        # Segments are consecutive columns with one owner.
        first = _starts(owner)
        segment_of = torch.zeros_like(owner).index_fill_(0, first[1:], 1).cumsum(0)
        last, sender_of = torch.cat([first[1:], first.new_tensor([len(owner)])]), owner[first]
        for of_part in self._attended():
            segments = segment_of[of_part[1]]
            counts = segment_of[of_part[2] - 1] - segments + 1
            for some in _parts(of_part[0], counts):
                receiver, begin, end = (each[some] for each in of_part)
                segment, count = segments[some], counts[some]
                if int(count.max()) > 1:
                    segment = Runs(segment, segment + count).expand()
                    receiver, begin, end = (
                        torch.repeat_interleave(each, count) for each in (receiver, begin, end)
                    )
                    begin = torch.maximum(begin, first[segment])
                    end = torch.minimum(end, last[segment])
                sender = sender_of[segment]
                other = sender != receiver
                yield Pieces(receiver[other], sender[other], begin[other], end[other])


def _starts(numbers: Tensor) -> Tensor:
    """int64: where equal consecutive numbers start, at least one number."""
    changes = (numbers.diff() != 0).nonzero().flatten() + 1
    return torch.cat([changes.new_zeros(1), changes])


def _parts(ranks: Tensor, sizes: Tensor) -> Iterator[slice]:
    """Slices with all elements of some ranks, of CHUNK in size or one rank more.

    Args:
        ranks: int64, ascending.
        sizes: int64, the size of each element.
    """
    if not len(ranks):
        return
    starts = _starts(ranks)
    part = (sizes.cumsum(0) - sizes)[starts] // CHUNK
    edges = [*starts[_starts(part)].tolist(), len(ranks)]
    yield from (slice(low, high) for low, high in pairwise(edges))
