"""A model of the time of a rank, from what it computes and what it exchanges."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparseflash.distributed.assign import RANKS_AT_ONCE, Workload

Split = Literal["rows", "keys"]
# (split, groups): heads are fetched in groups; one group is computed while the next is fetched.
CHOICES: tuple[tuple[Split, int], ...] = (("rows", 1), ("rows", 2), ("rows", 4), ("keys", 1))
WORTH = 1.02  # a choice with more groups or with merging must be faster by this factor
# The time to merge two results of a row, over the time to compute a block: the bytes that are read
# and written are those of about two blocks, and short kernels have a fixed time.
MERGED_ROW = 4.0


@dataclass(frozen=True, eq=False)
class Division:
    """The non-zero blocks of each rank by kind; float64 (ranks,) each, summed over heads.

    Attributes:
        own: Blocks whose keys the rank owns.
        fetched: Blocks whose keys it fetches.
        ready: Blocks of ready rows, which attend only own keys.
        waiting: Blocks of waiting rows, which attend fetched keys too.
        waiting_rows: Number of waiting rows.
    """

    own: Tensor
    fetched: Tensor
    ready: Tensor
    waiting: Tensor
    waiting_rows: Tensor

    def elapsed(self, split: Split, groups: int, block: float, exchange: Tensor) -> Tensor:
        """The predicted time of one pass, for each rank.

        rows    max(ready + waiting, exchange / groups + waiting, exchange + waiting / groups)
        keys    max(own, exchange) + fetched + merging of the waiting rows

        Args:
            split, groups: As in ContextPlan.
            block: Time of a block, in any unit.
            exchange: Time of the exchange of each rank (ranks,), in the same unit.

        Returns:
            float64 (ranks,), in the same unit.
        """
        if split == "keys":
            merged = self.fetched + MERGED_ROW * self.waiting_rows
            return torch.maximum(self.own * block, exchange) + merged * block
        ready, waiting = self.ready * block, self.waiting * block
        first = torch.maximum(ready, exchange / groups)
        return torch.maximum(first + waiting, exchange + waiting / groups)


def divide_blocks(workload: Workload, owner: Tensor, ranks: int) -> Division:
    """The blocks of each rank by kind, with the assignment `owner`, int64 (units,)."""
    mask, row, begin, end = workload.spans_of_masks
    owner_of_row, owner_of_column = owner[workload.rows], owner[workload.columns]
    rank, fetched = owner_of_row[row], torch.empty_like(row)
    for first in range(0, ranks, RANKS_AT_ONCE):
        here = (rank >= first) & (rank < first + RANKS_AT_ONCE)
        each = torch.arange(first, min(first + RANKS_AT_ONCE, ranks)).unsqueeze(1)
        before = (owner_of_column != each).cumsum(1, dtype=torch.int32)
        before = torch.nn.functional.pad(before, (1, 0))
        index = rank[here] - first
        fetched[here] = (before[index, end[here]] - before[index, begin[here]]).long()
    heads = torch.bincount(torch.tensor(workload.mask.head_to_mask))
    of_row = torch.zeros(2, len(heads) * len(owner_of_row), dtype=torch.int64)
    of_row.index_add_(1, mask * len(owner_of_row) + row, torch.stack([end - begin, fetched]))
    every, fetched = of_row.view(2, len(heads), -1)
    waits = fetched > 0
    counts = torch.stack([every - fetched, fetched, every * ~waits, every * waits, waits])
    of_heads = (counts * heads.unsqueeze(1)).sum(1).double()
    sums = torch.zeros(len(counts), ranks, dtype=torch.float64)
    sums.index_add_(1, owner_of_row, of_heads)
    own, fetched, ready, waiting, rows = sums
    shared = workload.shared_work(owner, ranks)  # these blocks have own keys and are ready
    return Division(own + shared, fetched, ready + shared, waiting, rows)


def choose_split(
    workload: Workload, owner: Tensor, ranks: int, exchange: Tensor, split: str
) -> tuple[Split, int]:
    """The split and number of groups of heads with about the least predicted time.

    Args:
        workload, owner, ranks: The mask, the rank of each unit, and the number of ranks.
        exchange: (ranks,), time of the exchange of all keys over the time of a block of one head.
        split: "rows", "keys" or "auto".
    """
    division = divide_blocks(workload, owner, ranks)
    allowed = [choice for choice in CHOICES if split in (choice[0], "auto")]
    best = allowed[0]
    least = float(division.elapsed(*best, 1.0, exchange).max())
    for choice in allowed[1:]:
        time = float(division.elapsed(*choice, 1.0, exchange).max())
        if time * WORTH < least:
            best, least = choice, time
    return best
