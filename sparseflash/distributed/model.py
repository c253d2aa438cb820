"""A model of the time of a rank, from what it computes and what it exchanges."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.distributed.assign import Costs, Split, Workload

# (split, groups): heads are fetched in groups; one group is computed while the next is fetched.
CHOICES: tuple[tuple[Split, int], ...] = (
    *(("in place", 1), ("rows", 1), ("rows", 2), ("rows", 4), ("keys", 1)),
)
FETCH_COST = 4.0  # time to fetch a block of keys and values over the time to compute a block
WORTH = 1.02  # a choice with more groups or with merging must be faster by this factor
# The time to merge two results of a row, over the time to compute a block: the bytes that are read
# and written are those of about two blocks, and short kernels have a fixed time.
MERGED_ROW = 4.0
# The time to write the result and dQ of a waiting row where they belong, and that to copy key and
# value of a block and gradients of them, over the time to compute a block: by their bytes.
WRITTEN_ROW, COPIED_BLOCK = 1.0, 2.0
# More of that where waiting rows are not consecutive: by their bytes, a row of query is copied in
# each pass, and of O and its gradient; and gradients of own keys are copied and added.
GATHERED_ROW, ADDED_BLOCK = 3.0, 3.7
MOST_PAIRWISE = 4  # rounds of pairwise exchanges: with each one rows are merged once more


@dataclass(frozen=True, eq=False)
class Division:
    """The non-zero blocks of each rank by kind; float64 (ranks,) each, summed over heads.

    Attributes:
        own: Blocks whose keys the rank owns.
        fetched: Blocks whose keys it fetches.
        ready: Blocks of ready rows, which attend only own keys.
        waiting: Blocks of waiting rows, which attend fetched keys too.
        waiting_rows: Number of waiting rows.
        gathered_rows: Number of waiting rows if they are not consecutive, else 0.
    """

    own: Tensor
    fetched: Tensor
    ready: Tensor
    waiting: Tensor
    waiting_rows: Tensor
    gathered_rows: Tensor

    def selected(self, share: float) -> "Division":
        """The same rows with a share of the blocks, as a DynamicMask selects them."""
        return Division(
            own=self.own * share,
            fetched=self.fetched * share,
            ready=self.ready * share,
            waiting=self.waiting * share,
            waiting_rows=self.waiting_rows,
            gathered_rows=self.gathered_rows,
        )

    def elapsed(
        self,
        split: Split,
        groups: int,
        block: float,
        exchange: Tensor,
        rounds: Tensor | float = 1.0,
    ) -> Tensor:
        """The predicted time of one pass without copies of keys and values, for each rank.

        in place  max(ready, exchange) + waiting
        rows    max(ready + waiting, exchange / groups + waiting, exchange + waiting / groups)
                + writing of the waiting rows, if they are not all rows of the only group,
                  and gathering them, if they are not consecutive
        keys    max(own, exchange) + fetched + merging of the waiting rows in each round

        Args:
            split, groups: As in ContextPlan.
            block: Time of a block, in any unit.
            exchange: Time of the exchange of each rank (ranks,), in the same unit.
            rounds: Number of rounds in which each rank receives keys (ranks,), by keys.

        Returns:
            float64 (ranks,), in the same unit.
        """
        if split == "keys":
            merged = self.fetched + MERGED_ROW * self.waiting_rows * rounds
            return torch.maximum(self.own * block, exchange) + merged * block
        ready, waiting = self.ready * block, self.waiting * block
        if split == "in place":
            return torch.maximum(ready, exchange) + waiting
        written = WRITTEN_ROW * self.waiting_rows * ((ready > 0) | (groups > 1))
        waiting = waiting + (written + GATHERED_ROW * self.gathered_rows) * block
        first = torch.maximum(ready, exchange / groups)
        return torch.maximum(first + waiting, exchange + waiting / groups)


def divide_blocks(workload: Workload, owner: Tensor, ranks: int) -> Division:
    """The blocks of each rank by kind, with the assignment `owner`, int64 (units,)."""
    mask, row, begin, end = workload.spans_of_masks
    owner_of_row = owner[workload.rows]
    fetched = workload.fetched_of_spans(owner, ranks)
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
    any_head = waits.any(0)
    of_ranks = [any_head[owner_of_row == rank].nonzero().flatten() for rank in range(ranks)]
    scattered = torch.tensor([bool((each.diff() != 1).any()) for each in of_ranks])
    return Division(own + shared, fetched, ready + shared, waiting, rows, rows * scattered)


def pairwise_distances(workload: Workload, owner: Tensor, traffic: Tensor) -> tuple[int, ...]:
    """The distances of pairwise exchanges if every rank computes by keys, in one round.

    What one rank sends arrives in the order of the sequence. So there are such rounds if what a
    rank receives in one round would not, unless there would be more than MOST_PAIRWISE.
    """
    receiver, sender = traffic.nonzero().unbind(1)
    distances = tuple((receiver ^ sender).unique().tolist())
    if len(distances) > MOST_PAIRWISE or not any(_mixed(workload, owner, len(traffic))):
        return ()
    return distances


def _mixed(workload: Workload, owner: Tensor, ranks: int) -> list[bool]:
    """Whether keys of all ranks, one rank after another, are not in the order of the sequence."""
    sender = owner[workload.columns]
    of_receivers = (sender[columns] for columns in workload.fetched(owner, ranks))
    return [bool((senders.diff() < 0).any()) for senders in of_receivers]


def receiving_rounds(workload: Workload, owner: Tensor, traffic: Tensor) -> Tensor:
    """int64 (ranks,): rounds in which each rank receives keys, by keys without round_tokens."""
    if pairwise_distances(workload, owner, traffic):
        return (traffic > 0).sum(1)
    return (traffic.sum(1) > 0).long()


def copied_tokens(workload: Workload, owner: Tensor, traffic: Tensor, split: Split) -> Tensor:
    """int64 (ranks,): tokens whose keys and values each rank copies in a forward pass.

    These are the ones that it packs before it sends them. By keys there are also received ones
    that do not arrive in the order of the sequence, and by rows all that waiting rows attend, own
    and received ones.
    """
    ranks, packed = len(traffic), traffic.sum(0)
    if split == "rows":
        waits = torch.zeros(workload.whole.grid.nq, dtype=torch.bool)
        row, few = workload.spans[0], workload.fetched_of_spans(owner, ranks) > 0
        waits[row[few]] = True
        attended = workload.needed(owner, ranks, rows=waits) * workload.column_tokens
        return packed + attended.sum(1)
    if split == "in place" or pairwise_distances(workload, owner, traffic):
        return packed
    return packed + traffic.sum(1) * torch.tensor(_mixed(workload, owner, ranks))


def can_be_in_place(workload: Workload) -> bool:
    """Whether all heads have one mask, and all of its blocks are whole."""
    grid = workload.whole.grid
    return workload.mask.num_heads == 1 and grid.q_len % workload.unit == 0


def choose_split(
    workload: Workload, owner: Tensor, costs: Costs, fetch_cost: float, split: str
) -> tuple[Split, int]:
    """The split and number of groups of heads with about the least predicted time.

    Args:
        workload, owner: The mask, and the rank of each unit.
        costs: The costs of this assignment.
        fetch_cost: Time to fetch a block of keys and values over the time to compute a block.
        split: "in place", "rows", "keys", "auto" for any of them, or "not in place".
    """
    mask, ranks = workload.mask, len(costs.traffic)
    # If a DynamicMask selects few blocks, fewer are computed, but not fewer are moved and copied.
    # If there are fewer key heads than heads, less is moved and copied.
    selected, share = min(FETCH_COST / fetch_cost, 1.0), min(fetch_cost / FETCH_COST, 1.0)
    division = divide_blocks(workload, owner, ranks).selected(selected)
    heads = mask.num_heads / mask.grid.bk
    exchange = torch.maximum(*costs.moved) * fetch_cost * selected * heads
    allowed = [choice for choice in CHOICES if split in (choice[0], "auto", "not in place")]
    # Without an exchange one call for all rows is best: its backward pass may be one kernel.
    alone = split == "auto" and not costs.traffic.any()
    if alone or split == "not in place" or not can_be_in_place(workload):
        allowed = [choice for choice in allowed if choice[0] != "in place"]
    copied = {each: copied_tokens(workload, owner, costs.traffic, each) for each in dict(allowed)}
    copies = {each: COPIED_BLOCK * share * heads * copied[each] for each in dict(allowed)}
    if "rows" in copies:
        own = copied["rows"] - costs.traffic.sum(0) - costs.traffic.sum(1)
        copies["rows"] += ADDED_BLOCK * share * heads * own * (division.gathered_rows > 0)
    rounds = receiving_rounds(workload, owner, costs.traffic)
    best, least = allowed[0], math.inf
    for choice in allowed:
        time = division.elapsed(*choice, 1.0, exchange, rounds) + copies[choice[0]]
        if float(time.max()) * WORTH < least:
            best, least = choice, float(time.max())
    return best
