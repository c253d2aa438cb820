"""What ranks compute and exchange, against dense masks; plans against recorded ones."""

import hashlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import masks
from sparseflash.distributed import ContextPlan, make_plan, traffic
from sparseflash.distributed.assign import NO_ROWS, STRATEGIES, Workload, heavy_rows
from sparseflash.distributed.model import FETCH_COST, copied_tokens
from sparseflash.distributed.planning import ABOUT
from sparseflash.distributed.simulation import Attention, Machine, predict
from sparseflash.distributed.traffic import Assignment

WINDOW = masks.local((511, 0))
# SHA-256 of plans that were made when every block column of every rank was counted.
PATTERNS = {
    "window": (WINDOW, "b5fcf24a6dd826dc"),
    "window and global tokens": (WINDOW | masks.global_tokens([0, 9000]), "89f4bd994ccd85ca"),
    "causal": (masks.causal(), "3b32c648a295871c"),
    "butterfly": (masks.butterfly(), "c79766bd22b7c202"),
    "random": (masks.random(1 / 16, seed=3), "115030351886a84e"),
    "documents": (masks.documents([9000, 200, 5000, 2100]) & masks.causal(), "4b98e53d41509b8f"),
    "heads": (masks.stack([WINDOW, masks.butterfly(), WINDOW]), "101c6310ec3a7257"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_plans_are_the_recorded_ones(name):
    pattern, recorded = PATTERNS[name]
    digest = hashlib.sha256()
    for length, block_size in ((16300, 128), (16300, (64, 128)), (16384, 128)):
        if name == "documents" and length != 16300:
            continue
        mask = pattern(length, block_size)
        for ranks in (2, 7, 32):
            for strategy in ("auto", *STRATEGIES):
                digest.update(_text(make_plan(mask, ranks, strategy)).encode())
    assert digest.hexdigest()[:16] == recorded


def _text(plan: ContextPlan) -> str:
    chosen = (plan.strategy, plan.split, plan.groups, plan.otherwise, plan.num_rounds)
    counted = (plan.owner, plan.shared, plan.traffic(), plan.copied())
    return repr((*chosen, *(each.tolist() for each in counted)))


@pytest.mark.parametrize("pieces", [1, 40, traffic.CHUNK])
@pytest.mark.parametrize("name", PATTERNS)
def test_counts_are_those_of_the_dense_mask(name, pieces, monkeypatch):
    monkeypatch.setattr(traffic, "CHUNK", pieces)
    mask = PATTERNS[name][0](16300, (64, 128))
    shared, ranks = torch.tensor([3, 40]), 5
    grid, generator = mask.grid, torch.Generator().manual_seed(1)
    workload = Workload(mask, shared)
    scattered = torch.randint(ranks, (workload.units,), generator=generator)
    scattered[:ranks] = torch.arange(ranks)
    for owner in (scattered, STRATEGIES["zigzag"](workload, ranks)):
        found = Assignment(workload, owner, ranks)
        blocks = mask.to_blocks().view(-1, grid.nq, grid.nk)
        of_row, of_column = owner[workload.rows], owner[workload.columns]
        columns = (16300 - torch.arange(grid.nk) * 128).clamp(max=128)
        of_shared = blocks[:, shared].sum((0, 1))
        blocks[:, shared] = False
        waits = (blocks & (of_row.unsqueeze(1) != of_column)).any(2).any(0)
        mixed, attended = [], []
        for rank in range(ranks):
            own_rows, own = of_row == rank, of_column == rank
            needed = blocks[:, own_rows].any(1).any(0)
            senders = of_column[needed & ~own]
            received = torch.bincount(senders, columns[needed & ~own], ranks)
            assert found.costs.traffic[rank].tolist() == received.tolist()
            assert found.fetched()[rank].equal(needed & ~own)
            computed = blocks[:, own_rows].sum() + of_shared[own].sum()
            assert found.blocks[rank] == computed
            assert found.shared_blocks[rank] == of_shared[own].sum()
            assert found.tokens[rank] == columns[own].sum()
            mixed.append(bool((senders.diff() < 0).any()))
            attended.append(int(columns[blocks[:, own_rows & waits].any(1).any(0)].sum()))
        assert found.arrives_mixed.tolist() == mixed
        assert found.tokens_of_waiting.tolist() == attended
        by_rows = found.costs.traffic.sum(0) + torch.tensor(attended)
        assert copied_tokens(found, "rows").equal(by_rows)
        assert found.waits.equal(waits)
        of_masks = blocks[[mask.head_to_mask.index(m) for m in range(max(mask.head_to_mask) + 1)]]
        others = of_masks & (of_row.unsqueeze(1) != of_column)
        assert found.blocks_of_rows.equal(torch.stack([of_masks.sum(2), others.sum(2)]))


@pytest.mark.parametrize("fetch_cost", [0.01, FETCH_COST, 1e4])
@pytest.mark.parametrize("name", PATTERNS)
def test_no_strategy_is_left_out_that_may_be_the_best(name, fetch_cost):
    """Auto, which counts no traffic where work takes too long, against all assignments."""
    mask = PATTERNS[name][0](16300, 128)
    for ranks in (3, 32):
        workloads = [Workload(mask, rows) for rows in (NO_ROWS, heavy_rows(mask))]
        choices = [
            (strategy, Assignment(each, assign(each, ranks), ranks))
            for each in workloads[: 1 + bool(len(workloads[1].shared))]
            for strategy, assign in STRATEGIES.items()
        ]
        sizes = mask.num_heads, 128, fetch_cost
        times = [each.costs.time(*sizes) for _, each in choices]
        traffics = [float(each.costs.moved[0].sum()) for _, each in choices]
        fast = [time <= ABOUT * min(times) for time in times]
        least = min(x if is_fast else math.inf for x, is_fast in zip(traffics, fast, strict=True))
        expected = next(
            choice
            for choice, x, is_fast in zip(choices, traffics, fast, strict=True)
            if is_fast and x <= ABOUT * least
        )
        plan = make_plan(mask, ranks, fetch_cost=fetch_cost)
        assert (plan.strategy, plan.owner.tolist()) == (expected[0], expected[1].owner.tolist())
        assert plan.shared.tolist() == expected[1].workload.shared.tolist()


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "graph growing"])
def test_no_tensor_has_all_columns_of_all_ranks(strategy):
    """A window on many ranks is planned and predicted in memory of its runs and of the traffic."""
    mask = masks.local((255, 0))(2**18, 32)
    ranks = 2**9
    with _Largest() as largest:
        predict(make_plan(mask, ranks, strategy), Machine(), Attention())
    assert largest.elements <= ranks**2 < ranks * mask.grid.nk / 10
