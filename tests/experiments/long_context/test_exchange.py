"""Runs in which nothing is exchanged, and the counting of what is, on two processes."""

import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import masks
from experiments.long_context import measurement
from experiments.long_context.baselines import all_gather_attention, ring_plan
from experiments.long_context.cases import Case, Kind, Way
from experiments.long_context.exchange import counted, nothing_exchanged
from sparseflash.distributed import Copies, context_parallel_attention, copies, make_plan
from sparseflash.distributed.simulation import Attention

TOKENS, BLOCK, LATE = 256, 16, 0.06
WAYS = ("rows", "rounds", "shared rows", "ring", "all-gather")
COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")


def prepared(rank: int, way: str):
    """A function of own tensors, these, and the plan."""
    mask = (masks.local(32) | masks.global_tokens(list(range(BLOCK))))(TOKENS, BLOCK)
    plans = {
        "rows": lambda: make_plan(mask, 2, "contiguous", split="rows", shared_rows=()),
        "rounds": lambda: make_plan(mask, 2, "contiguous", round_tokens=32, shared_rows=()),
        "shared rows": lambda: make_plan(mask, 2, "contiguous", shared_rows=[0]),
        "ring": lambda: ring_plan(mask, 2),
        "all-gather": lambda: make_plan(mask, 2, "contiguous"),
    }
    plan = plans[way]()
    whole = torch.randn(3, 1, 2, TOKENS, 8, generator=torch.Generator().manual_seed(0))
    own = [plan.shard(x, rank, 2).requires_grad_() for x in whole]
    if way == "all-gather":
        group = dist.group.WORLD
        return partial(all_gather_attention, mask=plan.mask_of(rank), group=group), own, plan
    return partial(context_parallel_attention, plan=plan, check=False), own, plan


def both_passes(attend, own):
    out = attend(*own)
    return [out.detach(), *torch.autograd.grad(out.sum(), own)]


def silent(rank: int, way: str) -> dict:
    attend, own, _ = prepared(rank, way)
    before = both_passes(attend, own)
    with (
        nothing_exchanged() as made,
        mock.patch.multiple(dist, **dict.fromkeys(COLLECTIVES)),
    ):
        silent = made(partial(both_passes, attend, own))
        without = silent()  # a collective would be a call of None
    after = both_passes(attend, own)
    return {
        "shapes": [x.shape == y.shape for x, y in zip(before, without, strict=True)],
        "differs": not torch.equal(before[0], without[0]),
        "as before": all(torch.equal(x, y) for x, y in zip(before, after, strict=True)),
    }


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_exchanged(two_ranks, way):
    answers = two_ranks.run(silent, way)
    for answer in answers:
        assert isinstance(answer, dict), answer
        assert all(answer["shapes"])
        assert answer["as before"]
    assert any(answer["differs"] for answer in answers)


def test_ranks_do_not_meet_at_the_beginning_of_a_captured_pass():
    transport = mock.Mock()
    with mock.patch.object(copies, "is_captured", return_value=True):
        with nothing_exchanged() as without:
            without(lambda: Copies.begin_pass(transport))()
        transport.memory.begin_captured_pass.assert_not_called()
        Copies.begin_pass(transport)
    transport.memory.begin_captured_pass.assert_called_once()


def bytes_counted(rank: int, way: str) -> tuple[int, int]:
    attend, own, plan = prepared(rank, way)
    with counted() as found, torch.no_grad():
        attend(*own)
    report = plan.report(2, 8, torch.float32)
    planned = report.gathered_bytes if way in ("ring", "all-gather") else report.receive_bytes
    return sum(found), planned[rank]


@pytest.mark.parametrize("way", WAYS)
def test_bytes_that_are_counted_are_those_of_the_plan(two_ranks, way):
    answers = two_ranks.run(bytes_counted, way)
    assert all(found == planned for found, planned in answers), answers
    assert max(found for found, _ in answers) > 0


def exposed(rank: int) -> dict:
    """Exposed milliseconds of the plan, where each all-to-all starts LATE seconds late."""
    mask = (masks.local(32) | masks.global_tokens(list(range(BLOCK))))(TOKENS, BLOCK)
    case = Case("local+global", mask, 2, None)
    case.plans[Way.PLAN] = make_plan(mask, 2, "contiguous", split="keys", shared_rows=[0])
    sizes = Attention(2, 2, 8, dtype=torch.float32)
    group = dist.group.WORLD
    setting = measurement.Setting(Kind.WEAK, sizes, group, rank, torch.device("cpu"))
    exchange = dist.all_to_all_single

    def late(*arguments, **keywords):
        time.sleep(LATE)
        return exchange(*arguments, **keywords)

    few = mock.patch.object(measurement, "MAX_RUNS", 3)
    with few, mock.patch.object(dist, "all_to_all_single", late):
        rows, _ = measurement.measure(setting, case)
    return {row.implementation: (row.exposed_forward_ms, row.exposed_total_ms) for row in rows}


def test_exposed_communication_is_what_exchanges_add_shared_rows_too(two_ranks):
    """Three all-to-alls forward: queries of shared rows, keys, results. Backward likewise."""
    for answer in two_ranks.run(exposed):
        assert isinstance(answer, dict), answer
        forward, total = answer[Way.PLAN]
        assert forward > 2.5 * LATE * 1e3
        assert total > 5.5 * LATE * 1e3
