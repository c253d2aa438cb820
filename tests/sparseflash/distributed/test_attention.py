"""Attention over a sequence that processes share, against one process."""

from itertools import product
from unittest import mock

import pytest
import torch

import masks
import sparseflash
from sparseflash import AttentionOptions, backends
from sparseflash.dispatch.spec import AttentionSpec, CallFacts
from sparseflash.distributed import context_parallel_attention, gather, make_plan
from sparseflash.distributed.prepare import prepare
from tests.helpers import context_calls as calls
from tests.helpers import context_exchanges as exchanges
from tests.helpers import context_gradients as gradients
from tests.helpers import context_kernels as kernels
from tests.helpers import context_parallel as cases
from tests.helpers.ranks import Ranks

EXACT = 1e-12
MAX_LOGITS = {"return_max_logits": True}
MASKS = (
    *("causal", "window and sink", "random", "empty rows", "global tokens", "documents"),
    *("head masks", "key head masks", "butterfly", "dense", "nothing"),
)
BATCHES = (
    *("batch", "batch of documents", "batch with an empty mask", "batch of equal masks"),
    "batch of head masks",
)
IN_PLACE = (
    *("in place", "in place, shared rows"),
    *("in place, groups", "in place, groups, shared rows"),
)


def check_exact(answers, within=EXACT):
    for answer in answers:
        assert isinstance(answer, dict), answer
        assert max(answer.values()) < within, answer


def test_gradients_that_are_negated_views():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = make_plan(masks.causal()(40, 16), 1)
    query = torch.randn(1, 1, 40, 16, device=device, requires_grad=True)
    out = context_parallel_attention(query, query, query, plan, backend="triton")
    (expected,) = torch.autograd.grad(out.sum(), query, retain_graph=True)
    total = (torch.complex(torch.zeros_like(out), out).conj() * 1j).real.sum()
    torch.testing.assert_close(torch.autograd.grad(total, query)[0], expected)
    with pytest.raises(TypeError, match="query must be an ordinary tensor, got a negated view"):
        context_parallel_attention(torch.complex(query, query).conj().imag, out, out, plan)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("strategy", "split"),
    [
        *(("contiguous", "rows"), ("shuffled", "rows")),
        *(("contiguous", "keys"), ("shuffled", "keys")),
        *(("zigzag", "rounds"), ("zigzag", "shared rows")),
    ],
)
def test_same_as_one_process(ranks, mask, strategy, split):
    check_exact(ranks.run(cases.errors, mask, strategy, split, {}))


@pytest.mark.parametrize("split", ["rows", "keys", "rounds", "shared rows"])
def test_every_result_and_gradient_is_written(ranks, split):
    for mask in ("butterfly", "empty rows", "documents", "nothing"):
        for extras in ({}, MAX_LOGITS):
            check_exact(ranks.run(cases.errors_with_filled_memory, mask, split, extras))


@pytest.mark.parametrize("strategy", ["contiguous", "shuffled", "auto"])
@pytest.mark.parametrize("shared", [(), (0, 6, 12)], ids=["no shared rows", "shared rows"])
def test_rows_in_place(ranks, strategy, shared):
    for mask in MASKS:
        if mask in ("head masks", "key head masks"):
            continue
        answers = ranks.run(cases.errors_in_place, mask, strategy, shared, {})
        check_exact([errors for errors, _ in answers])
        assert all(computed == 1 for _, computed in answers)


@pytest.mark.parametrize("strategy", ["contiguous", "shuffled"])
@pytest.mark.parametrize("shared", [(), (0, 6, 12)], ids=["no shared rows", "shared rows"])
def test_rows_in_place_in_groups_of_heads(ranks, strategy, shared):
    """There are two key heads. The LSE of a group is contiguous if there is one batch element;
    calls with several that need groups are computed otherwise, whatever the mask.
    """
    needed = set()
    for mask in ("butterfly", "causal", "empty rows", "global tokens", "nothing"):
        of_two = mask in ("butterfly", "empty rows", "nothing")
        # What is computed otherwise is a call of another test.
        more = {"butterfly": [(3, 1), (2, 2)], "empty rows": [(2, 2)]}.get(mask, [])
        for groups, batch in ((2, 1), *more):
            extras = MAX_LOGITS if of_two else {}
            case = (mask, strategy, shared, groups, batch, extras)
            answers = ranks.run(cases.errors_in_groups, *case)
            check_exact([errors for errors, _, _ in answers])
            for _, computed, least in answers:
                assert computed == (least == 1 or (least == 2 and batch == 1))
                needed.add(least)
    assert needed == {1, 2, 3}


@pytest.mark.parametrize("name", ["alone", "with others", "different in each chunk"])
def test_gradients_of_keys_that_all_rows_attend_are_computed_in_chunks_of_queries(ranks, name):
    """All ranks but the first receive the first key block. Batch elements have work tiles of their
    own. Each of two groups of heads has a call.
    """
    for batch, dtype, within in (
        *((1, torch.float64, EXACT), (1, torch.bfloat16, 0.1)),
        (2, torch.float64, EXACT),
    ):
        answers = ranks.run(cases.errors_of_heavy_keys, name, batch, dtype)
        check_exact([errors for errors, _ in answers], within)
        assert [calls for _, calls in answers] == [0, *[int(batch == 1)] * (len(answers) - 1)]
    if name != "alone":  # else no rank receives more than one block
        answers = ranks.run(cases.errors_of_heavy_keys, name, 1, torch.float64, 2)
        check_exact([errors for errors, _ in answers])
        assert [calls for _, calls in answers] == [0, *[2] * (len(answers) - 1)]


@pytest.mark.parametrize("otherwise", [("rows", 1), ("rows", 4), ("keys", 1)])
def test_ranks_that_attend_nothing_decide_as_the_others_do(ranks, otherwise):
    """The backend of CPUs does not compute in place, so ranks exchange as `otherwise` says."""
    check_exact(ranks.run(cases.errors_of_a_rank_that_attends_nothing, "in place", otherwise))


EXTRAS_IN_PLACE = {
    "soft cap": {"softcap": 2.0, "scale": 0.7},
    "value dim": {"value_dim": 16},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]).double()},
    "maximum logits": MAX_LOGITS,
}
EXTRAS_BY_ROWS = {
    "dropout": {"dropout_p": 0.3, "seed": 2**40 + 5},
    "key lengths": {"key_lengths": torch.tensor([calls.WHOLE, 77])},
    "bias": {"bias": torch.linspace(-1, 1, 2 * calls.WHOLE - 1).double().expand(4, -1).clone()},
}


@pytest.mark.parametrize("extra", EXTRAS_IN_PLACE | EXTRAS_BY_ROWS)
def test_rows_in_place_or_by_rows_if_a_call_depends_on_positions(two_ranks, extra):
    extras = (EXTRAS_IN_PLACE | EXTRAS_BY_ROWS)[extra]
    for mask in ("butterfly", "empty rows"):
        answers = two_ranks.run(cases.errors_in_place, mask, "shuffled", (), extras)
        check_exact([errors for errors, _ in answers])
        assert all(computed == (extra in EXTRAS_IN_PLACE) for _, computed in answers)


SIMULATED = [
    *(("butterfly", "graph growing", "in place"), ("butterfly", "graph growing", "keys")),
    *(("causal", "zigzag", "in place"), ("empty rows", "contiguous", "in place")),
    ("global tokens", "contiguous", "in place"),
]


@pytest.mark.parametrize(("mask", "strategy", "split"), SIMULATED)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_simulated_kernels_of_two_ranks(two_ranks, mask, strategy, split, kv_heads):
    answers = two_ranks.run(kernels.errors_of_simulated_kernels, mask, strategy, split, kv_heads)
    check_exact(answers, within=0.015)


@pytest.mark.parametrize(("mask", "strategy", "split"), SIMULATED)
def test_simulated_kernels_of_four_ranks(four_ranks, mask, strategy, split):
    answers = four_ranks.run(kernels.errors_of_simulated_kernels, mask, strategy, split, 2)
    check_exact(answers, within=0.015)


def test_simulated_kernels_write_where_the_dims_of_a_head_are_contiguous(two_ranks):
    """Query, key and value have another layout, which kernels copy; there are groups of heads."""
    case = ("butterfly", "contiguous", "in place, strided", 2)
    check_exact(two_ranks.run(kernels.errors_of_simulated_kernels, *case), within=0.015)


@pytest.mark.parametrize("split", ["keys", "rounds", "rows"])
def test_rows_that_kernels_leave_unwritten_are_not_read(ranks, split):
    unwritten = 0
    for mask in ("butterfly", "random", "empty rows", "head masks", *BATCHES):
        answers = ranks.run(cases.errors_with_unwritten_rows, mask, split)
        check_exact([errors for errors, _ in answers])
        unwritten += sum(number for _, number in answers)
    assert (unwritten > 0) == (split != "rows")


def test_a_result_that_was_not_written_is_an_error():
    expected = torch.tensor([1.0, -torch.inf])
    assert calls.difference(torch.tensor([1.5, -torch.inf]), expected) == 0.5
    for found in ([torch.nan, -torch.inf], [1.0, torch.nan], [1.0, 0.0]):
        with pytest.raises(AssertionError):
            calls.difference(torch.tensor(found), expected)


@pytest.mark.parametrize("extras", [{}, MAX_LOGITS], ids=["plain", "maximum logits"])
@pytest.mark.parametrize("pattern", ["equal", "different"])
def test_keys_of_shared_rows_are_divided_into_chunks(ranks, pattern, extras):
    check_exact(ranks.run(cases.errors_of_chunks, pattern, extras))


EXTRAS = {
    "dropout": {"dropout_p": 0.3, "seed": 2**40 + 5},
    "key lengths": {"key_lengths": torch.tensor([calls.LENGTH, 77])},
    "no key": {"key_lengths": torch.tensor([0, 16])},
    "soft cap": {"softcap": 2.0, "scale": 0.7},
    "bias": {"bias": torch.linspace(-1, 1, 2 * calls.LENGTH - 1).double().expand(4, -1).clone()},
    "value dim": {"value_dim": 16, "bias": torch.ones(1, 2 * calls.LENGTH - 1).double()},
    "score tensors": {"reads": True},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]).double()},
    "maximum logits": MAX_LOGITS,
    "maximum logits of all": MAX_LOGITS
    | {
        "key_lengths": torch.tensor([calls.LENGTH, 37]),
        "softcap": 2.0,
        "bias": torch.linspace(-1, 1, 2 * calls.LENGTH - 1).double().view(1, -1),
        "sinks": torch.tensor([0.5, -1.0, 0.0, 20.0]).double(),
        "dropout_p": 0.3,
        "seed": 3,
    },
}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("split", ["rows", "keys", "rounds", "shared rows", "shared rounds"])
def test_every_semantic_of_attention_is_that_of_the_whole_sequence(two_ranks, extra, split):
    for mask in ("global tokens", "head masks"):
        check_exact(two_ranks.run(cases.errors, mask, "shuffled", split, extra))


@pytest.mark.parametrize("split", ["rows", "keys", "rounds", "shared rows"])
def test_maximum_logits_are_those_of_the_whole_sequence(ranks, split):
    for mask in MASKS:
        check_exact(ranks.run(cases.errors, mask, "shuffled", split, MAX_LOGITS))


def test_results_are_returned_as_in_one_process():
    mask = masks.causal()(100, 16)
    plan, tensors = make_plan(mask, 1), torch.randn(3, 1, 2, 100, 8).requires_grad_().unbind()
    for extras in ({}, {"return_lse": True}, MAX_LOGITS, {"return_lse": True, **MAX_LOGITS}):
        found = context_parallel_attention(*tensors, plan, **extras)
        expected = sparseflash.attention(*tensors, mask, **extras)
        assert isinstance(found, tuple) == isinstance(expected, tuple)
        if isinstance(found, torch.Tensor):
            found, expected = (found,), (expected,)
        assert len(found) == len(expected)
        for mine, one in zip(found, expected, strict=True):
            assert torch.equal(mine, one)
            assert (mine.dtype, mine.requires_grad) == (one.dtype, one.requires_grad)


@pytest.mark.parametrize("mask", BATCHES)
@pytest.mark.parametrize("split", ["rows", "keys", "rounds", "shared rows"])
def test_a_mask_for_each_batch_element(ranks, mask, split):
    for strategy in ("contiguous", "shuffled"):
        check_exact(ranks.run(cases.errors, mask, strategy, split, {}))
    check_exact(ranks.run(cases.errors_with_filled_memory, mask, split, MAX_LOGITS))


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_mask_for_each_batch_element_with_all_else(two_ranks, extra):
    for mask, split in (("batch", "shared rows"), ("batch of head masks", "rows")):
        check_exact(two_ranks.run(cases.errors, mask, "shuffled", split, EXTRAS[extra]))


def test_a_mask_for_each_batch_element_and_shared_heads(four_ranks):
    for mask in ("batch", "batch of head masks"):
        for split in ("rows", "shared rows"):
            for extra in ({}, EXTRAS["maximum logits of all"]):
                check_exact(four_ranks.run(cases.errors_with_shared_heads, mask, split, extra))


def test_single_precision_is_merged_within_rounding(two_ranks):
    extra = {"dtype": torch.float32}
    for split in ("rows", "rounds", "shared rows"):
        check_exact(two_ranks.run(cases.errors, "random", "zigzag", split, extra), within=2e-5)


def test_16_bits_are_merged_within_rounding(two_ranks):
    """With zigzag shards a rank owns shared rows that are not adjacent."""
    extra = {"dtype": torch.bfloat16}
    for split in ("rows", "rounds", "shared rows"):
        check_exact(two_ranks.run(cases.errors, "random", "zigzag", split, extra), within=0.1)
    for split in ("rows", "in place"):
        check_exact(two_ranks.run(cases.errors_of_sums_in_single_precision, split), within=0.1)


@pytest.mark.slow(10)
@pytest.mark.interpret
def test_kernels_of_parts_read_positions_in_the_whole_sequence(two_ranks):
    """Dropout drops the pairs that one process drops; scores and biases are those of the pairs."""
    bias = torch.linspace(-1, 1, 239).double().expand(2, -1).clone()
    extra = {"dropout_p": 0.3, "seed": 2**40 + 5, "bias": bias}
    check_exact(two_ranks.run(kernels.errors_of_kernels, extra), within=2e-5)


def test_blocks_that_each_rank_selects(two_ranks):
    check_exact(two_ranks.run(cases.selected))


@pytest.mark.parametrize("split", ["rows", "keys", "rounds"])
def test_tables_of_selected_blocks_are_made_once(two_ranks, split):
    for first, second, other in two_ranks.run(exchanges.tables_made, split):
        assert first == other > 0
        assert second == 0


@pytest.mark.parametrize(
    ("split", "extra"),
    [
        *product(("rows", "rounds", "shared rows"), (*EXTRAS, "plain")),
        *product(("rows", "rounds"), ("selected blocks",)),  # shared rows of these are refused
    ],
)
def test_heads_over_some_ranks_and_the_sequence_over_the_others(four_ranks, split, extra):
    """Dropout and score functions are those of the index of a head among all heads."""
    more = {"plain": {}, "selected blocks": {"selects": True}}
    divided = ["head masks", "window and sink", "key head masks"]
    if extra == "selected blocks":  # those of key heads are refused
        divided = divided[:2]
    elif extra not in ("plain", "maximum logits of all"):
        divided = divided[:1]  # what else an option may depend on are the heads of its tensors
    for mask in divided:
        arguments = {key: x for key, x in (EXTRAS | more)[extra].items() if key != "value_dim"}
        check_exact(four_ranks.run(cases.errors_with_shared_heads, mask, split, arguments))


@pytest.mark.parametrize("split", ["in place", "keys"])
def test_keys_and_values_are_one_exchange_before_any_attention(two_ranks, split):
    """And their gradients are one, before those of own keys are computed."""
    forward = ["exchange", "attention", "attention"]
    backward = ["attention", "exchange", "attention"]
    if split == "in place":  # the gradient of all queries is computed first
        backward = ["attention", *backward]
    for answer in two_ranks.run(exchanges.order_of_a_call, split):
        assert answer == [forward, backward]


@pytest.mark.parametrize("mask", ["causal", "random", "documents", "head masks", "batch"])
def test_bytes_moved_are_those_of_the_plan(ranks, mask):
    for split in ("rows", "keys", "rounds", "shared rows", "shared rounds"):
        for found in ranks.run(exchanges.bytes_moved, mask, "zigzag", split):
            forward, backward, planned, returned = found
            assert (forward, backward) == (planned, returned)
            if split == "shared rows":
                assert min(forward) > 0


@pytest.mark.parametrize("mask", ["whole butterfly", "causal", "random", "dense", "head masks"])
@pytest.mark.parametrize("strategy", ["contiguous", "zigzag"])
def test_bytes_copied_are_those_of_the_plan(ranks, mask, strategy):
    for split in ("rows", "keys"):
        for found, planned, _ in ranks.run(exchanges.bytes_copied, mask, strategy, split):
            assert found == planned


def test_gradients_are_sent_from_where_they_are_written(ranks):
    """If keys arrive in the order of the sequence; on four ranks each rank gets two shards."""
    answers = ranks.run(exchanges.bytes_copied, "whole butterfly", "contiguous", "keys")
    assert all(packed == 0 < sent for sent, _, packed in answers), answers


def test_gradients_are_added_of_ranks_that_return_any(ranks):
    """A rank returns none to itself, and each launch takes time of the host."""
    for found, expected in ranks.run(exchanges.rows_added):
        assert found == expected


@pytest.mark.slow(10)
def test_layers_around_it_are_compiled(two_ranks):
    """It breaks the graph: what stands before a call and after it is compiled, once."""
    for answer in two_ranks.run(gradients.compiled_errors):
        assert isinstance(answer, dict), answer
        assert answer.pop("graphs") == 2
        assert max(answer.values()) < EXACT
    reason = "reason: all ranks must exchange keys and gradients in the same order"
    for answer in two_ranks.run(gradients.refused_in_one_graph):
        assert reason in answer


@pytest.mark.slow(10)
def test_layers_around_it_are_compiled_sharded_and_recomputed(two_ranks):
    check_exact(two_ranks.run(gradients.sharded_errors))


@pytest.mark.parametrize("split", ["rows", "rounds", "shared rows"])
def test_the_same_inputs_give_the_same_bits(two_ranks, split):
    assert two_ranks.run(gradients.same_bits, split) == [True, True]


@pytest.mark.parametrize("split", ["rows", "keys", "rounds", "shared rows", *IN_PLACE])
@pytest.mark.parametrize("mask", ["random", "causal", "window and sink"])
def test_a_second_backward_pass_fetches_what_the_first_one_freed(ranks, split, mask):
    """Both give the same bits, also where some ranks receive nothing (causal)."""
    answers = ranks.run(gradients.second_backward_pass, mask, split)
    assert all(answer is True for answer in answers), answers


@pytest.mark.parametrize("hooks", ["numpy", "buffer", "checkpoint"])
def test_hooks_of_the_user_get_what_is_saved(two_ranks, hooks):
    """Nothing that they return is freed, and nothing else is saved."""
    for split in ("rows", "keys", "shared rows", *IN_PLACE):
        answers = two_ranks.run(gradients.gradients_with_hooks, hooks, split)
        assert answers == [[True] * 3] * 2


@pytest.mark.parametrize("split", ["rows", "keys", "rounds", "shared rows", *IN_PLACE])
def test_inputs_are_freed_if_hooks_of_the_user_compute_or_copy_them(two_ranks, split):
    """Activation checkpointing frees query, key and value of each layer after its forward pass."""
    assert two_ranks.run(gradients.freed_inputs, split) == [[True] * 4] * 2


def test_gradients_keep_little_more_than_their_own_memory(ranks):
    """All rows wait, so that the gradient of own keys is a part of what one kernel writes."""
    for shares in ranks.run(gradients.memory_of_gradients):
        assert max(shares) <= 2


def test_one_rank_needs_no_group():
    mask = masks.causal()(100, 16)
    plan = make_plan(mask, 1)
    query, key, value = torch.randn(3, 1, 2, 100, 8).requires_grad_().unbind()
    out = context_parallel_attention(query, key, value, plan)
    assert torch.equal(out, sparseflash.attention(query, key, value, mask))
    assert torch.equal(gather(out.detach(), plan, 2), out)


def test_the_only_process_is_the_group_of_shared_rows(tmp_path):
    """A plan of one rank may have shared rows: they are exchanged within that process."""
    started = Ranks(1, tmp_path / "meeting")
    check_exact(started.run(cases.errors, "global tokens", "contiguous", "shared rows", {}))
    started.close()


def test_which_kernels_know_the_positions_of_a_part():
    spec = AttentionSpec.from_call(
        *torch.zeros(3, 1, 1, 64, 8).unbind(),
        masks.full()(64, 64),
        AttentionOptions(dropout_p=0.1),
        CallFacts(positions=True),
    )
    knowing = [b.name for b in backends.BACKENDS if not spec.extras - b.extras]
    assert knowing == ["cpu", "triton"]


def test_kernels_run_beside_those_of_exchanges_if_there_are_several_ranks():
    tensors = torch.randn(3, 1, 2, 100, 8).unbind()
    for ranks in (1, 2):
        plan = make_plan(masks.causal()(100, 16), ranks, "contiguous")
        group = mock.Mock(rank=lambda: 0) if ranks > 1 else None
        own = [plan.shard(x, 0, 2) for x in tensors]
        prepared = prepare(*own, plan, group, None, None, None, None, None, (), {})
        assert prepared.own is not None
        assert prepared.own.spec.shares_device == (ranks > 1)
