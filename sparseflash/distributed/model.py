"""A model of the time of a rank, from what it computes and what it exchanges."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflash.distributed.assign import Split, Workload
from sparseflash.distributed.traffic import Assignment

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
# The kernel of dK and dV over both kernels of a backward pass: four of seven products.
OF_KEYS = 4 / 7
BACKWARD = 2.5  # FLOPs of the backward pass over those of the forward pass
MAX_PAIRWISE = 4  # rounds of pairwise exchanges: with each one rows are merged once more


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
        backward: bool = False,
    ) -> Tensor:
        """The predicted time of one pass without copies of keys and values, for each rank.

        An exchange runs beside the kernels that are started when it is: one that follows another
        exchange waits until no kernel of attention runs.

        in place  max(ready, exchange) + waiting; in the backward pass
                  blocks + max(exchange - dK and dV of own blocks, 0)
        rows, keys    max(first, exchange / n) + (n - 1) max(later / n, exchange / n) + later / n
            rows    n groups, first = ready, later = waiting
                    + writing of the waiting rows, if they are not all rows of the only group,
                    and gathering them, if they are not consecutive
            keys    n rounds, first = own, later = fetched + merging of the waiting rows in each

        By rows and by keys the order in the backward pass is the reverse one, and takes as long.

        Args:
            split, groups: As in ContextPlan.
            block: Time of a block in this pass, in any unit.
            exchange: Time of the exchange of each rank (ranks,), in the same unit.
            rounds: Number of rounds in which each rank receives keys (ranks,), by keys.
            backward: Whether it is the backward pass.

        Returns:
            float64 (ranks,), in the same unit.
        """
        if split == "in place":
            if backward:
                exposed = (exchange - OF_KEYS * self.own * block).clamp(min=0)
                return (self.own + self.fetched) * block + exposed
            return torch.maximum(self.ready * block, exchange) + self.waiting * block
        if split == "keys":
            parts: Tensor | float = torch.as_tensor(rounds).clamp(min=1)
            first, later = self.own, self.fetched + MERGED_ROW * self.waiting_rows * rounds
        else:
            parts, first = groups, self.ready
            written = WRITTEN_ROW * self.waiting_rows * ((first > 0) | (groups > 1))
            later = self.waiting + written + GATHERED_ROW * self.gathered_rows
        first, later, exchange = first * block, later * block / parts, exchange / parts
        between = (parts - 1) * torch.maximum(later, exchange)
        return torch.maximum(first, exchange) + between + later


def divide_blocks(assignment: Assignment) -> Division:
    """The blocks of each rank by kind."""
    owner_of_row = assignment.owner_of_row
    heads = torch.bincount(torch.tensor(assignment.workload.mask.head_to_mask))
    every, fetched = assignment.blocks_of_rows
    waits = fetched > 0
    counts = torch.stack([every - fetched, fetched, every * ~waits, every * waits, waits])
    of_heads = (counts * heads.unsqueeze(1)).sum(1).double()
    sums = torch.zeros(len(counts), assignment.ranks, dtype=torch.float64)
    sums.index_add_(1, owner_of_row, of_heads)
    own, fetched, ready, waiting, rows = sums
    shared = assignment.shared_blocks  # these blocks have own keys and are ready
    # All rows, those of one rank after those of another, and where waiting ones are among them.
    owner, order = owner_of_row.sort(stable=True)
    at = assignment.waits[order].nonzero().flatten()
    apart = (owner[at].diff() == 0) & (at.diff() != 1)
    scattered = torch.zeros(assignment.ranks, dtype=torch.bool)
    scattered[owner[at][1:][apart]] = True
    return Division(own + shared, fetched, ready + shared, waiting, rows, rows * scattered)


def pairwise_distances(assignment: Assignment) -> tuple[int, ...]:
    """The distances of pairwise exchanges if every rank computes by keys, in one round.

    What one rank sends arrives in the order of the sequence. So there are such rounds if what a
    rank receives in one round would not, unless there would be more than MAX_PAIRWISE.
    """
    receiver, sender = assignment.costs.traffic.nonzero().unbind(1)
    distances = tuple((receiver ^ sender).unique().tolist())
    if len(distances) > MAX_PAIRWISE or not bool(assignment.arrives_mixed.any()):
        return ()
    return distances


def receiving_rounds(assignment: Assignment) -> Tensor:
    """int64 (ranks,): rounds in which each rank receives keys, by keys without round_tokens."""
    traffic = assignment.costs.traffic
    if pairwise_distances(assignment):
        return (traffic > 0).sum(1)
    return (traffic.sum(1) > 0).long()


def copied_tokens(assignment: Assignment, split: Split) -> Tensor:
    """int64 (ranks,): tokens whose keys and values each rank copies in a forward pass.

    These are the ones that it packs before it sends them. By keys there are also received ones
    that do not arrive in the order of the sequence, and by rows all that waiting rows attend, own
    and received ones.
    """
    costs = assignment.costs
    if split == "rows":
        return costs.send + assignment.tokens_of_waiting
    if split == "in place" or pairwise_distances(assignment):
        return costs.send
    return costs.send + costs.receive * assignment.arrives_mixed


def can_be_in_place(workload: Workload) -> bool:
    """Whether all heads have one mask, and all of its blocks are whole."""
    grid = workload.whole.grid
    return workload.mask.num_heads == 1 and grid.q_len % workload.unit == 0


def choose_split(assignment: Assignment, fetch_cost: float, split: str) -> tuple[Split, int]:
    """The split and number of groups of heads with about the least predicted time.

    Args:
        assignment: The mask, and the rank of each unit.
        fetch_cost: Time to fetch a block of keys and values over the time to compute a block.
        split: "in place", "rows", "keys", "auto" for any of them, or "not in place".
    """
    workload, costs = assignment.workload, assignment.costs
    # If a DynamicMask selects few blocks, fewer are computed, but not fewer are moved and copied.
    # If there are fewer key heads than heads, less is moved and copied.
    selected, share = min(FETCH_COST / fetch_cost, 1.0), min(fetch_cost / FETCH_COST, 1.0)
    division = divide_blocks(assignment).selected(selected)
    heads = workload.mask.num_heads / workload.mask.grid.bk
    exchange = torch.maximum(*costs.moved) * fetch_cost * selected * heads
    allowed = [choice for choice in CHOICES if split in (choice[0], "auto", "not in place")]
    # Without an exchange one call for all rows is best: its backward pass may be one kernel.
    alone = split == "auto" and not costs.traffic.any()
    if alone or split == "not in place" or not can_be_in_place(workload):
        allowed = [choice for choice in allowed if choice[0] != "in place"]
    copied = {each: copied_tokens(assignment, each) for each in dict(allowed)}
    copies = {each: COPIED_BLOCK * share * heads * copied[each] for each in dict(allowed)}
    if "rows" in copies:
        own = copied["rows"] - costs.send - costs.receive
        copies["rows"] += ADDED_BLOCK * share * heads * own * (division.gathered_rows > 0)
    rounds = receiving_rounds(assignment)
    best, least = allowed[0], math.inf
    for choice in allowed:
        # The time of a block, 1, is the mean of both passes.
        block = 2 / (1 + BACKWARD)
        forward = division.elapsed(*choice, block, exchange, rounds)
        backward = division.elapsed(*choice, BACKWARD * block, exchange, rounds, backward=True)
        time = (forward + backward) / 2 + copies[choice[0]]
        if float(time.max()) * WORTH < least:
            best, least = choice, float(time.max())
    return best
