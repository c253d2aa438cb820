"""Which first calls compile kernels."""

import math

import pytest
import torch

import masks
from sparseflash.backends import hopper
from sparseflash.backends.hopper import configs, launch, select
from sparseflash.dispatch import compile as compilation
from sparseflash.dispatch.call import Call
from sparseflash.dispatch.plan import make_plan
from tests.helpers.calls import spec_of

NEEDS = (True, True, True, False, False, False)
OFF_DIAGONAL = masks.full() - masks.block_pattern(lambda q, k: q == k)


@pytest.fixture
def compiled(monkeypatch):
    """The calls whose kernels are compiled."""
    calls = []
    monkeypatch.setattr(compilation, "_compiled", {})
    monkeypatch.setattr(compilation, "compile_passes", lambda own, others: calls.extend(own))
    return calls


def call_first(mask):
    tensors = [torch.empty(1, 2, length, 64, dtype=torch.float16) for length in mask.seq_len]
    spec = spec_of(*tensors, mask)
    call = Call(make_plan(spec, hopper, hopper, mask))
    compilation.compile_before_first_call(call, (*tensors, tensors[1]), NEEDS)
    return call.plan


def test_calls_that_need_the_same_kernels_compile_them_once(compiled):
    for pattern in (masks.full(), OFF_DIAGONAL, masks.full()):
        call_first(pattern(384))
    assert len(compiled) == 1
    call_first(masks.causal()(384))
    assert len(compiled) == 2


def test_forward_kernels_of_a_table_of_their_own_are_compiled(compiled, monkeypatch):
    monkeypatch.setattr(configs, "MAX_TIME_RATIO_OF_192", math.inf)
    plans = [call_first(pattern(384)) for pattern in (masks.full(), OFF_DIAGONAL)]
    assert [plan.table.by_query.has_partial for plan in plans] == [False, False]
    assert [plan.forward.table.by_query.has_partial for plan in plans] == [False, True]
    assert len(compiled) == 2
    monkeypatch.setattr(configs, "MAX_TIME_RATIO_OF_192", 0.0)
    assert call_first(masks.full()(384)).forward is None
    assert len(compiled) == 3


def test_kernels_of_dk_and_dv_are_compiled_where_queries_are_clipped(compiled, monkeypatch):
    monkeypatch.setattr(configs, "MIN_DYNAMIC_IMBALANCE", math.inf)
    first_rows = masks.full() - masks.block_pattern(lambda q, k: q == 2)
    plans = [
        call_first(pattern((q_len, 384)))
        for q_len in (384, 300)
        for pattern in (masks.full(), first_rows)
    ]
    assert [plan.table.by_query.has_partial for plan in plans] == [False] * 4
    assert [plan.table.by_key.has_partial for plan in plans] == [False, False, True, False]
    assert len(compiled) == 3


@pytest.mark.parametrize("pattern", [masks.full(), masks.causal(), masks.local(300)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_calls_of_other_masks_need_every_kernel_that_a_mask_decides(pattern, deterministic):
    """Each combination of partial blocks and tile schedulers, in both directions of the table."""
    mask = pattern(4096, 128)
    query = torch.empty(1, 2, 4096, 64, dtype=torch.float16)
    spec = spec_of(query, query, mask, deterministic=deterministic)
    call = Call(make_plan(spec, hopper, hopper, mask))
    found = set()
    for other in compilation._calls_of_other_masks(call):
        table = other.table
        directions = table.by_query, table.by_key
        found.add(tuple(x.has_partial for x in directions))
        counters = [launch.make_work_counter(rows, spec) for rows in directions]
        found.add(tuple(x is None for x in counters))
        assert select.uses_fused_backward(table, spec) == select.uses_fused_backward(
            call.table, spec
        )
        assert [x.num_rows for x in directions] == [32, 32]
    assert found == {(True, True), (False, False)}
    others = [compilation._compiled_for(x.plan) for x in compilation._calls_of_other_masks(call)]
    assert len({*others}) == 4
    assert compilation._compiled_for(call.plan) in others


def test_kernels_of_the_other_tile_scheduler_are_compiled(compiled):
    for pattern in (masks.local(300), masks.causal(), masks.local(300), masks.causal()):
        call_first(pattern(4096))
    assert len(compiled) == 2
