"""Ordered sums of dQ: the plan on the host, and the simulated kernel that adds in its order."""

from dataclasses import replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import masks
from sparseflash.backends import hopper
from sparseflash.backends.hopper import configs, launch, select
from sparseflash.backends.hopper.order import plan_order
from sparseflash.backends.hopper.select import uses_fused_backward, why_not_planned
from sparseflash.dispatch.call import Call as AttentionCall
from sparseflash.dispatch.call import Plan
from sparseflash.options import AttentionOptions
from sparseflash.testing import make_inputs
from tests.helpers import simulated_gluon
from tests.helpers.calls import call_on, spec_of
from tests.helpers.planted_bugs import Argument, Call, Drop, Replace
from tests.helpers.simulated_hopper import check, simulation

FUSED = "kernels.backward_fused"
ROOT = Path(__file__).parents[4]
PATTERNS = {
    "full": masks.full(),
    "causal": masks.causal(align="top-left"),
    "blocks": masks.random(0.5),
    "long row": masks.pattern(lambda q, k: (q // 128 == 2) | (k < 100)),
    "nothing": masks.global_tokens(1) - masks.full(),
}
CTAS = 3
NEEDS = (True, True, True, False, False, False)


def planned(pattern, lengths, heads, kv_heads, batch=1, ctas=CTAS):
    """(spec, table, order, heads in a group)"""
    query, key, _, _ = make_inputs(batch, heads, *lengths, 64, kv_heads=kv_heads)
    mask = pattern(lengths, 128)
    spec = spec_of(query, key, mask)
    table = mask.table("cpu").for_groups(spec.mask_group)
    num_bh = batch * kv_heads
    group = launch.heads_per_group_of(spec, table.by_key, num_bh, ctas, 4, by_key=True)
    return spec, table, plan_order(table, spec, ctas, group), group


def steps_of_ctas(spec, table, order, group, ctas):
    """For each CTA the ((query head, column of queries), ordinal) of its blocks in order."""
    lists, heads_of_key = table.by_key, spec.heads // spec.kv_heads
    num_rows, num_bh = lists.num_rows, spec.batch * spec.kv_heads
    works = [
        (kv_bh, index)
        for first in range(0, num_bh, group)
        for index in range(num_rows)
        for kv_bh in range(first, min(first + group, num_bh))
    ]
    found = []
    for cta in range(min(ctas, len(works))):
        steps, work = [], cta
        while work < len(works):
            kv_bh, index = works[work]
            batch, kv_head = divmod(kv_bh, spec.kv_heads)
            of_heads = table.head_to_mask[batch % len(table.head_to_mask)]
            mask = int(of_heads[kv_head * heads_of_key % len(of_heads)])
            row = int(lists.schedule[mask, index])
            for head in range(kv_head * heads_of_key, (kv_head + 1) * heads_of_key):
                mask, bh = int(of_heads[head % len(of_heads)]), batch * spec.heads + head
                full, n_full, partial, n_partial = lists.row_ptr[mask, row].tolist()
                columns = [*lists.partial_index[partial : partial + n_partial].tolist()]
                columns += lists.full_index[full : full + n_full].tolist()
                first = int(order.first_ordinals[bh, row])
                ordinals = order.ordinals[first : first + len(columns)].tolist()
                steps += zip([(bh, column) for column in columns], ordinals, strict=True)
            work = int(order.next_of_work[work])
        found.append(steps)
    return found


PLANS = {
    **{name: (pattern, (500, 900), 2, 2, 1) for name, pattern in PATTERNS.items()},
    "a group": (masks.random(0.3), (2000, 1500), 6, 2, 2),
    "masks of heads": (masks.stack([masks.causal(), masks.random(0.4)]), (1300, 1300), 4, 2, 2),
    "butterfly": (masks.butterfly(), (4096, 4096), 2, 2, 2),
}


@pytest.mark.parametrize("ctas", [1, 3, 20])
@pytest.mark.parametrize("name", PLANS)
def test_every_block_has_an_ordinal_and_no_cta_waits_for_ever(name, ctas):
    queues = steps_of_ctas(*planned(*PLANS[name], ctas=ctas), ctas)
    ordinals = {}
    for queries, ordinal in chain(*queues):
        ordinals.setdefault(queries, []).append(ordinal)
    assert all(sorted(of_queries) == [*range(len(of_queries))] for of_queries in ordinals.values())
    counts, progress = dict.fromkeys(ordinals, 0), True
    while progress:
        progress = False
        for queue in queues:
            while queue and counts[queue[0][0]] == queue[0][1]:
                counts[queue.pop(0)[0]] += 1
                progress = True
    assert not any(queues)


def test_the_plan_depends_on_what_ctas_reach_first():
    """Rows of a full mask begin together; the last of them, of another wave, is added last."""
    _, _, order, _ = planned(masks.full(), (512, 512), 1, 1, ctas=3)
    assert order.next_of_work.tolist() == [3, 4, 4, 4]
    assert order.ordinals.view(4, 4)[:, 0].tolist() == [0, 1, 2, 3]
    _, _, order, _ = planned(masks.full(), (512, 512), 1, 1, ctas=1)
    assert order.next_of_work.tolist() == [1, 2, 3, 4]


def planned_spec(**change):
    query = torch.empty(1, 2, 4096, 64, dtype=torch.bfloat16)
    spec = spec_of(query, query, masks.full()(4096), planned_order=True)
    return replace(spec, **change)


def test_which_calls_have_a_planned_order(monkeypatch):
    table, spec = masks.full()(4096).table(), planned_spec()
    assert why_not_planned(table, spec) is None
    assert uses_fused_backward(table, spec)
    assert not uses_fused_backward(table, replace(spec, planned_order=False))
    assert uses_fused_backward(masks.causal()(4096).table(), spec)  # 16.5 blocks
    # As without the option: a kernel of any order, from fewer blocks on.
    few = masks.full()(128 * 11).table()
    assert not uses_fused_backward(few, spec)
    assert uses_fused_backward(few, replace(spec, deterministic=False))
    monkeypatch.setattr(select, "_gpu", lambda device: "H100")
    assert why_not_planned(table, spec) == "it is not measured on an H100"
    assert not uses_fused_backward(table, spec)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_key_lengths": True}, "there are key lengths"),
        ({"shares_device": True}, "other kernels run at the same time"),
        ({"head_dim": 128, "value_dim": 128}, "head_dim is 128, needs at most 64"),
        ({"head_dim": 256, "value_dim": 256}, "head_dim is 256, needs at most 128"),
        ({"value_dim": 128}, "value_dim is 128, needs tiles of 64 dims as head_dim does"),
        ({"softcap": 5.0}, "there is a soft cap, a score function or a bias"),
        ({"bias": True}, "there is a soft cap, a score function or a bias"),
        ({"batch": 513}, "all heads have 1050624 blocks, needs at most 1048576"),
        ({"deterministic": False}, "deterministic is False"),
    ],
)
def test_the_report_says_why_an_order_is_not_planned(change, reason):
    spec, mask = planned_spec(**change), masks.full()(4096)
    call = AttentionCall(Plan(spec, hopper, mask.table()))
    notes = hopper.describe(call, mask, *[torch.empty(0)] * 3)
    assert notes["planned order"] == f"not used: {reason}"
    assert uses_fused_backward(mask.table(), spec) == (not spec.deterministic)


def test_masks_without_an_order():
    found = [
        why_not_planned(table, planned_spec())
        for table in (
            masks.full()(128 * 11).table(),
            masks.full()(4096, block_size=64).table(),
            masks.full()(4096).select(torch.ones(1, 2, 32, 32, dtype=torch.bool)).table(),
        )
    ]
    assert found == [
        "a block row of keys has 11 blocks on average, it is faster from 12 on",
        "tiles are (64, 64), needs (128, 128)",
        "the device selects the blocks of the mask",
    ]


def test_the_report_says_which_kernels_run():
    mask = masks.full()(4096)
    for planned_order in (True, False):
        call = AttentionCall(Plan(planned_spec(planned_order=planned_order), hopper, mask.table()))
        notes = hopper.describe(call, mask, *[torch.empty(0)] * 3)
        assert ("backward" in notes, notes.get("planned order")) == (
            planned_order,
            "used" if planned_order else None,
        )
    call = AttentionCall(Plan(planned_spec(), hopper, mask.table()))
    described = hopper.describe(call, mask, *[torch.empty(0)] * 3)["backward"]
    assert described.endswith("in a planned order")


def test_the_documents_name_the_least_blocks():
    least = configs.MIN_PLANNED_BLOCKS["H200"]
    for text in (AttentionOptions.__doc__, (ROOT / "docs/design/dispatch.md").read_text()):
        assert f"at least {least:g} blocks" in " ".join(text.split())


def test_a_graph_does_not_capture_the_planning():
    """What was planned before may be captured."""
    tensors, mask = inputs((500, 900)), PATTERNS["full"]((500, 900), 128)
    with simulation(ctas=CTAS):
        passes = import_module("sparseflash.backends.hopper.passes")
        call = call_on(hopper, *tensors[:2], mask, tensors[2], planned_order=True)
        saved = (*tensors[:3], *call.forward(*tensors[:3]))
        with patch.object(passes, "is_captured", lambda device: True):
            with pytest.raises(RuntimeError, match=r"planned_order.* run both passes once before"):
                call.backward(tensors[3], None, saved, NEEDS)
            with patch.object(passes, "is_captured", lambda device: False):
                first = call.backward(tensors[3], None, saved, NEEDS)[:3]
            assert all(map(torch.equal, first, call.backward(tensors[3], None, saved, NEEDS)))


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(64, {}), (64, {"lengths": (193, 700), "dropout_p": 0.3}), (40, {"kv_heads": 2})],
)
@pytest.mark.parametrize("name", PATTERNS)
def test_ordered_sums_are_right(name, head_dim, options):
    with simulation(ctas=CTAS):
        check(PATTERNS[name], head_dim, planned_order=True, **options)


def gradients(order, mask, pattern_inputs, bugs=None):
    """(the gradients, the CTAs that add to each box of dQ, in their order)"""
    query, key, value, grad_out = pattern_inputs
    added, reduce = {}, simulated_gluon.tma_reduce_add

    def recorded(descriptor, start, buffer):
        added.setdefault(int(start[0]), []).append(simulated_gluon._partition.program.number)
        reduce(descriptor, start, buffer)

    with (
        patch.object(simulated_gluon, "ORDER", order),
        patch.object(simulated_gluon, "tma_reduce_add", recorded),
        simulation(bugs, ctas=CTAS),
    ):
        call = call_on(hopper, query, key, mask, value, planned_order=True)
        out, lse = call.forward(query, key, value)
        found = call.backward(grad_out, None, (query, key, value, out, lse), NEEDS)[:3]
    return found, added


def inputs(lengths):
    return make_inputs(1, 4, *lengths, 64, kv_heads=2, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["full", "causal", "blocks"])
def test_ctas_add_in_the_planned_order_whatever_runs_first(name):
    lengths = (300, 700)
    tensors, mask = inputs(lengths), PATTERNS[name](lengths, 128)
    runs = [gradients(order, mask, tensors) for order in (None, min, max)]
    (expected, added), *others = runs
    for found, others_added in others:
        assert all(map(torch.equal, expected, found))
        assert added == others_added
    spec = spec_of(*tensors[:2], mask)
    table = mask.table("cpu").for_groups(spec.mask_group)
    group = launch.heads_per_group_of(spec, table.by_key, 2, CTAS, 4, by_key=True)
    order = plan_order(table, spec, CTAS, group)
    ctas = {}
    for cta, steps in enumerate(steps_of_ctas(spec, table, order, group, CTAS)):
        for queries, ordinal in steps:
            ctas.setdefault(queries, {})[ordinal] = cta
    rows = 64 * 64 // 256  # of the accumulator as a matrix, of each of the two tiles of a block
    columns = table.by_query.num_rows
    for start, by in added.items():
        queries = divmod(start // rows // 2, columns)
        assert by == [ctas[queries][ordinal] for ordinal in range(len(by))]
    assert len(added) == len(ctas) * 2


def test_without_ordinals_the_bits_depend_on_what_runs_first():
    tensors, mask = inputs((500, 900)), PATTERNS["full"]((500, 900), 128)
    bugs = {FUSED: [Drop(Call("dq_adder", "wait_for_count"))]}
    (first, _), (last, _) = (gradients(order, mask, tensors, bugs) for order in (min, max))
    assert not torch.equal(first[0], last[0])


DEADLOCK = "deadlock"
ANY = "deadlock|NaN|largest absolute error|more arrivals"  # also which phases barriers are in
BUGS = {
    "the dQ adder is not signalled": (
        DEADLOCK,
        Drop(Call("add_one_tile", "arrive", "full_barriers")),
    ),
    "an ordinal is not counted": (DEADLOCK, Drop(Call("dq_adder", "count_completed_stores"))),
    "buffers of dQ are not released": (DEADLOCK, Drop(Call("dq_adder", "arrive"))),
    "a buffer of dQ is added before it is full": (
        ANY,
        Drop(Call("dq_adder", "wait", "full_barriers")),
    ),
    "a buffer of dQ is overwritten before it is read": (
        ANY,
        Drop(Call("add_one_tile", "wait", "dq_empty")),
    ),
    "the ordinal of the next block": (
        DEADLOCK,
        Argument(Call("dq_adder", "wait_for_count"), 1, "ordinal + 1"),
    ),
    "the ordinal of the first block": (  # of rows whose ordinals differ
        DEADLOCK,
        Replace("dq_adder", "ordinals + following", "ordinals"),
    ),
    "the other tile of a block": (
        ANY,
        Replace(
            "dq_adder",
            "first_tile_of_head(bh, params) + NUMBER",
            "first_tile_of_head(bh, params) + 1 - NUMBER",
        ),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_bugs_of_the_dq_adder_are_found(name):
    found, *bugs = BUGS[name]
    pattern = PATTERNS["blocks" if "first block" in name else "full"]
    with (
        # The dQ adders run first, or last.
        patch.object(simulated_gluon, "ORDER", max if "before it is full" in name else min),
        simulation({FUSED: bugs}, ctas=CTAS),
        pytest.raises((simulated_gluon.Failure, AssertionError), match=found),
    ):
        check(pattern, lengths=(500, 900), planned_order=True)
