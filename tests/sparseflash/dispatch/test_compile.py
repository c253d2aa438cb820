"""Which first calls compile kernels."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import masks
from sparseflash.backends import hopper, triton
from sparseflash.backends.hopper import configs, launch, select
from sparseflash.backends.triton_common import workers
from sparseflash.dispatch import compile as compilation
from sparseflash.dispatch.call import Call
from sparseflash.dispatch.compile import compile_passes
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


def call_first(mask, of_sums=None):
    tensors = [torch.empty(1, 2, length, 64, dtype=torch.float16) for length in mask.seq_len]
    facts = {} if of_sums is None else {"bias": True, "differentiates_bias": True}
    spec = spec_of(*tensors, mask, **facts)
    call = Call(make_plan(spec, hopper, of_sums, mask))
    needs = NEEDS if of_sums is None else (*NEEDS[:3], True, *NEEDS[4:])
    compilation.compile_before_first_call(call, (*tensors, tensors[1]), needs)
    return call.plan


def test_calls_that_need_the_same_kernels_compile_them_once(compiled):
    for pattern in (masks.full(), OFF_DIAGONAL, masks.full()):
        call_first(pattern(384))
    assert len(compiled) == 1
    call_first(masks.causal()(384))
    assert len(compiled) == 2


def test_every_call_raises_until_the_number_of_processes_is_valid(compiled, monkeypatch):
    monkeypatch.setattr(compilation, "compile_passes", compile_passes)
    monkeypatch.setattr(workers, "WORKERS", workers.Workers())
    monkeypatch.setenv(workers.VARIABLE, "many")
    for _ in range(3):
        with pytest.raises(ValueError, match="COMPILE_WORKERS must be a number of processes"):
            call_first(masks.full()(384))
    monkeypatch.setattr(compilation, "compile_passes", lambda own, others: compiled.extend(own))
    for _ in range(2):
        call_first(masks.full()(384))
    assert len(compiled) == 1


def test_forward_kernels_of_a_table_of_their_own_are_compiled(compiled, monkeypatch):
    monkeypatch.setattr(configs, "MAX_TIME_RATIO_OF_192", math.inf)
    plans = [call_first(pattern(384)) for pattern in (masks.full(), OFF_DIAGONAL)]
    assert [plan.table.by_query.has_partial for plan in plans] == [False, False]
    assert [plan.forward.table.by_query.has_partial for plan in plans] == [False, True]
    assert len(compiled) == 2
    monkeypatch.setattr(configs, "MAX_TIME_RATIO_OF_192", 0.0)
    assert call_first(masks.full()(384)).forward is None
    assert len(compiled) == 3


def test_kernels_of_sums_of_another_backend_are_compiled(compiled):
    """Their table has the blocks of the mask, in which nothing is partial if it is of blocks."""
    of_blocks = masks.causal() & masks.block_pattern(lambda q, k: q > k)
    plans = [call_first(pattern(384, 16), triton) for pattern in (masks.causal(), of_blocks)]
    assert [plan.table.by_query.has_partial for plan in plans] == [True, True]
    assert [plan.sums.table.by_query.has_partial for plan in plans] == [True, False]
    assert len(compiled) == 2
    launched = []
    fields = vars(hopper) | {
        "forward": lambda call, query, key, value: (query, query[..., 0]),
        "backward": lambda *_: (None,) * 6,
    }
    of_sums = vars(triton) | {"backward": lambda call, *_: launched.append(call) or (None,) * 6}
    for call, tensors, needs in compiled:
        sums = replace(call.plan.sums, backend=SimpleNamespace(**of_sums))
        plan = replace(call.plan, backend=SimpleNamespace(**fields), forward=None, sums=sums)
        compilation._pass_through(replace(call, plan=plan), tensors, needs)
        assert launched[-1].plan.cache is not sums.cache  # a launch that only compiles is not kept


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
    call = Call(make_plan(spec, hopper, None, mask))
    found, first = set(), next(compilation._calls_of_other_masks(call)).plan.table.by_query
    assert (first.has_partial, first.max_blocks) == (not call.table.by_query.has_partial, None)
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
