"""make_plan: the assignment of tokens to ranks with the least predicted time."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from masks import BlockMask, MaskBatch
from masks.arguments import check_integers
from sparseflash.distributed.assign import STRATEGIES, Split, Strategy, Workload, heavy_rows
from sparseflash.distributed.model import FETCH_COST, can_be_in_place, choose_split
from sparseflash.distributed.plan import ContextPlan
from sparseflash.distributed.plan_arguments import (
    check_owner,
    check_plan_mask,
    checked_rounds,
    checked_rows,
    ranks_of,
    union_of,
)
from sparseflash.distributed.traffic import Assignment

ABOUT = 1.05  # predicted times, or traffic, within this factor count as equal


def make_plan(
    mask: BlockMask | MaskBatch,
    ranks: int | ProcessGroup | DeviceMesh,
    strategy: str | Sequence[int] | Tensor = "auto",
    *,
    round_tokens: int | None = None,
    split: Split | Literal["auto"] = "auto",
    shared_rows: Sequence[int] | Tensor | None = None,
    fetch_cost: float = FETCH_COST,
) -> ContextPlan:
    """Makes a context plan: which tokens each rank owns, and which keys the ranks exchange.

    Every rank that calls it with equal arguments gets an equal plan, without communication. The
    plan is cached with the mask.

    Args:
        mask: The mask of the whole sequence, with as many queries as keys; or one for each batch
            element. Then a rank receives the keys that its queries attend in any of them, and the
            counts of the plan are those of the union of the masks.
        ranks: Number of ranks, at most one for each unit of max(block_size) tokens; or the process
            group or one-dimensional mesh of these ranks.
        strategy: "contiguous", "zigzag", "zigzag by document", "balanced chunks", "contiguous with
            repair", "graph growing", or a list with the rank of each unit. "auto" takes, of the
            strategies with about the least predicted time, the first with about the least traffic.
        round_tokens: Largest number of tokens whose keys and values a rank receives at a time, at
            least one block; it receives further tokens in later rounds, and all of them once more
            in the backward pass. By default there is no limit. With split "in place" a round
            brings all tokens for some of the heads, and at most as many bytes as round_tokens
            tokens have for all heads. If that takes several rounds, calls with too few key heads
            for it, or with several batch elements, are computed by keys.
        split: With "rows", rows that attend fetched keys wait for them, one group of heads after
            another, and attend own and fetched keys in one kernel. With "keys", every row attends
            own keys during the exchange and fetched keys after it, and the results are merged.
            "in place" is like "rows" without copies: each row is written where it belongs, and
            keys are read where they lie or arrive. All heads must have one mask, with whole
            blocks. Calls with dropout, a score function, a bias, key lengths or a DynamicMask, and
            those that the backend "hopper" does not compute in blocks of 128, are computed by rows
            or by keys, whichever has less predicted time, or by keys if round_tokens is given.
            "auto" is the split with less predicted time; if round_tokens is given, "in place" if
            the mask allows it, else "keys".
        shared_rows: Block rows, ascending, that all ranks share: each rank computes their
            attention to its own keys, and the owner merges the results. By default rows that
            attend far more keys than others, such as those of global tokens, if this takes no
            more time and has less traffic. A DynamicMask cannot select from a plan with shared
            rows.
        fetch_cost: For "auto": the time to fetch one block of keys and values of all heads, over
            the time to compute one non-zero block of all heads, forward and backward. If a
            DynamicMask selects k of n blocks, computing takes k / n of the time: use 4 n / k. With
            fewer key heads than heads, use 4 kv_heads / heads.

    Returns:
        The plan.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it.
    """
    check_plan_mask(mask)
    ranks = ranks_of(ranks, -(-mask.grid.q_len // max(mask.block_size)))
    if not isinstance(fetch_cost, int | float) or not 0 < fetch_cost < math.inf:
        raise ValueError(f"fetch_cost must be a positive number, got {fetch_cost!r}")
    round_tokens = checked_rounds(round_tokens, split, mask)
    chosen = None if shared_rows is None else checked_rows(shared_rows, mask.grid.nq)
    named = strategy if isinstance(strategy, str) else tuple(check_integers("strategy", strategy))
    key = (ranks, named, round_tokens, split, chosen, float(fetch_cost))
    # Not in the cache of the mask, which one rank might empty before the others: with a new plan a
    # rank waits for the others to compare their arguments.
    if ("context plan", *key) not in mask.tables:
        mask.tables["context plan", *key] = _planned(mask.to("cpu"), *key)
    return mask.tables["context plan", *key]


def _planned(
    given: BlockMask | MaskBatch,
    ranks: int,
    strategy: str | tuple[int, ...],
    round_tokens: int | None,
    split: Split | Literal["auto"],
    shared_rows: tuple[int, ...] | None,
    fetch_cost: float,
) -> ContextPlan:
    """The plan for arguments that have been checked."""
    batch = given if isinstance(given, MaskBatch) and len(given) > 1 else None
    mask = given if isinstance(given, BlockMask) else union_of(given)
    workloads = [Workload.of(mask, torch.tensor(shared_rows or (), dtype=torch.int64))]
    if shared_rows is None and ranks > 1 and len(heavy := heavy_rows(mask)):
        workloads.append(Workload.of(mask, heavy))
    strategies = _strategies(strategy, mask, ranks)
    name, assignment = _fastest(workloads, strategies, ranks, fetch_cost)
    possible = batch is None and can_be_in_place(assignment.workload)
    if split == "in place" and not possible:
        raise ValueError(
            'split must be "auto", "rows" or "keys" if heads or batch elements have different '
            f'masks or a block is clipped, got "in place" for {given}'
        )
    chosen: tuple[Split, int] = ("keys", 1)
    otherwise: tuple[Split, int] = ("rows", 1)
    if round_tokens is None:
        any_possible = "auto" if possible else "not in place"
        chosen = choose_split(assignment, fetch_cost, any_possible if split == "auto" else split)
        if chosen[0] == "in place":
            otherwise = choose_split(assignment, fetch_cost, "not in place")
    elif split == "in place" or (split == "auto" and possible and assignment.costs.traffic.any()):
        chosen, otherwise = ("in place", 1), chosen
    assigned = (mask, ranks, name, assignment.owner, round_tokens)
    plan = ContextPlan(*assigned, *chosen, assignment.workload.shared, otherwise, batch)
    return plan.with_assignment(assignment)


def _strategies(
    strategy: str | tuple[int, ...], mask: BlockMask, ranks: int
) -> dict[str, Strategy]:
    """The strategies to choose from, by name."""
    if not isinstance(strategy, str):
        check_owner(strategy, Workload(mask).units, ranks)
        owner = torch.tensor(strategy)
        return {"own": lambda *_: owner}
    if strategy not in (*STRATEGIES, "auto"):
        raise ValueError(f"strategy must be auto or one of {[*STRATEGIES]}, got {strategy!r}")
    return {name: each for name, each in STRATEGIES.items() if strategy in (name, "auto")}


def _fastest(
    workloads: Sequence[Workload],
    strategies: Mapping[str, Strategy],
    ranks: int,
    fetch_cost: float,
) -> tuple[str, Assignment]:
    """Of choices with about the least predicted time, the first with about the least traffic."""
    candidates: list[tuple[str, Assignment]] = []
    for workload in workloads:
        for name, assign in strategies.items():
            owner = assign(workload, ranks)
            equal = (
                each
                for _, each in candidates
                if each.workload is workload and each.owner.equal(owner)
            )
            assigned = next(equal, None) or Assignment(workload, owner, ranks)
            candidates.append((name, assigned))
    # The time of the blocks is a lower bound, for which no traffic is counted.
    bounds = [float(each.blocks.max()) / each.workload.mask.num_heads for _, each in candidates]
    times, least = [math.inf] * len(candidates), math.inf
    for index in sorted(range(len(candidates)), key=bounds.__getitem__):
        if bounds[index] > ABOUT * least:
            break
        _, each = candidates[index]
        mask = each.workload.mask
        times[index] = each.costs.time(mask.num_heads, mask.grid.bk, fetch_cost)
        least = min(least, times[index])
    fast_enough = [
        (float(each.costs.moved[0].sum()), (name, each))
        for time, (name, each) in zip(times, candidates, strict=True)
        if time <= ABOUT * least
    ]
    least = min(traffic for traffic, _ in fast_enough)
    return next(choice for traffic, choice in fast_enough if traffic <= ABOUT * least)
