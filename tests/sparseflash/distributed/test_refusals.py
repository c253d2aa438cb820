"""What attention over a sequence that processes share refuses, and its failures."""

import re
import time

import pytest
import torch
from torch.distributed import GroupMember

import masks
import sparseflash
from sparseflash.distributed import context_parallel_attention, gather, make_plan
from tests.helpers import context_refusals as refusals
from tests.helpers.ranks import Ranks

EXACT = 1e-12


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("options", "options must be equal on all ranks, got "),
        ("key_lengths", "split, which bias, key_lengths and mask choose, must be equal on all "),
    ],
)
def test_calls_that_one_rank_cannot_compute_in_place_are_named(two_ranks, what, message):
    answers = two_ranks.run(refusals.refused_in_place, what)
    assert all(answer.startswith(message) for answer in answers), answers


def test_what_masks_of_a_batch_do_not_take_is_named():
    batch = masks.MaskBatch.from_masks([masks.causal()(96, 16), masks.full()(96, 16)])
    with pytest.raises(ValueError, match="if heads or batch elements have different masks"):
        make_plan(batch, 2, split="in place")
    plan = make_plan(batch, 1)
    tensors = torch.randn(3, 3, 2, 96, 8)
    with pytest.raises(ValueError, match="query must have the 2 batch elements of the masks of"):
        context_parallel_attention(*tensors, plan)
    selected = plan.mask_of(0).select_topk(torch.randn(6, 6), 2)
    with pytest.raises(ValueError, match="mask must be None if the plan has a mask for each"):
        context_parallel_attention(*tensors[:, :2], plan, mask=selected)
    one = make_plan(masks.MaskBatch(masks.causal()(96, 16), 1), 1)  # of any batch
    expected = sparseflash.attention(*tensors, masks.causal())
    torch.testing.assert_close(context_parallel_attention(*tensors, one), expected)


def test_what_shared_heads_do_not_take_is_named(four_ranks):
    for answers in four_ranks.run(refusals.refused_with_shared_heads):
        assert len(answers) == 14, answers
        assert "rank 1: query must have 56 tokens in dim 2" in answers[0]
        assert "key must have a multiple of 2 heads" in answers[1]
        assert "plan must be made for a mask of 1 or 2 or 4 heads, got 3" in answers[2]
        assert "mask must have 1 or 2 or 4 heads, got 3" in answers[3]
        assert "options must be equal on all ranks" in answers[4]
        assert "seed must be equal on all ranks, got 0 on rank 0 and 1 on rank 1" in answers[5]
        assert "score_tensors[0] must have at least 4 entries in dim 0" in answers[6]
        assert "bias must have shape (1, 419) or (4, 419)" in answers[7]
        assert "sinks must have shape (1,) or (4,)" in answers[8]
        assert "return_max_logits must be equal on all ranks, got False on rank 0" in answers[9]
        assert "rank 0: ValueError: key_lengths must" in answers[10]
        assert "batch, heads and head_dim of query must be equal on all ranks" in answers[11]
        assert "gradient of key must be equal on all ranks" in answers[12]
        assert "gradient of query must be equal on all ranks" in answers[13]


def test_options_that_are_given_by_default_are_equal_with_shared_heads(four_ranks):
    assert max(four_ranks.run(refusals.options_by_default_with_shared_heads)) < EXACT


def test_the_first_call_with_shared_heads_is_not_captured(four_ranks):
    for answers in four_ranks.run(refusals.captured_with_shared_heads):
        assert len(answers) == 4, answers
        assert all("cannot be captured in a CUDA graph" in each for each in answers[:2])
        assert all("key must have a multiple of 2 heads" in each for each in answers[2:])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("length", "ValueError: .*refused on\nrank 1: ValueError: query must have the 98 tokens"),
        ("mask", "ValueError: plan must be equal on all ranks, got ContextPlan"),
        ("dtype", "ValueError: dtype must be equal on all ranks, got torch.float64 on rank 0 and"),
        ("options", "ValueError: options must be equal on all ranks"),
        ("max logits", "ValueError: return_max_logits must be equal on all ranks, got False on"),
        ("seed", "ValueError: seed must be equal on all ranks, got 0 on rank 0 and 1 on rank 1"),
        (
            "gradient of query",
            "ValueError: gradient of query must be equal on all ranks, got True",
        ),
        ("gradient of key", "ValueError: gradient of key must be equal on all ranks, got True"),
        (
            "key lengths",
            r"ValueError: key_lengths must be equal on all ranks, got \[210, 100\] on",
        ),
        ("bias", "ValueError: whether there is a bias must be equal on all ranks, got False on"),
        ("sinks", "ValueError: whether there are sinks must be equal on all ranks, got False on"),
        ("selected blocks", "ValueError: whether there is a mask must be equal on all ranks"),
        (
            "no tensor",
            "ValueError: .*refused on\nrank 1: TypeError: query, key and value must be tensors",
        ),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_every_rank(two_ranks, what, message):
    for answer in two_ranks.run(refusals.refused, what):
        assert re.match(message, answer), answer


@pytest.mark.parametrize("check", [None, True], ids=["by default", "in full"])
@pytest.mark.parametrize("what", refusals.LATER)
def test_what_one_rank_changes_in_a_later_call_is_an_error_on_every_rank(two_ranks, what, check):
    """All ranks have made each of the two calls before."""
    name = what.split(" of ")[0].replace("sinks", "whether")
    for answer in two_ranks.run(refusals.of_a_later_call, what, check):
        assert answer.startswith(name), answer
        assert "equal on all ranks" in answer, answer


@pytest.mark.parametrize("others", [{}, {"softcap": 5.0}, {"check": True}], ids=repr)
def test_what_is_invalid_on_one_rank_in_a_later_call_is_an_error_on_every_rank(two_ranks, others):
    """Also if the others compare in full because their call is new, or because they ask for it."""
    answers = two_ranks.run(refusals.invalid_in_a_later_call, others)
    assert len(set(answers)) == 1
    assert "refused on\nrank 1: ValueError: query must have" in answers[0], answers


def test_one_rank_can_ask_all_to_compare_in_full(two_ranks):
    assert max(two_ranks.run(refusals.checked_in_full_on_one_rank)) < 1e-12


def test_a_rank_alone_can_need_a_gradient_that_is_not_exchanged(two_ranks):
    """Without a comparison in full, which ranks with GPUs would end in."""
    assert two_ranks.run(refusals.gradient_of_query_on_one_rank) == [True, True]


def test_ranks_with_other_masks_of_heads_agree(four_ranks):
    assert four_ranks.run(refusals.head_masks_in_a_later_call) == [True] * 4


@pytest.mark.parametrize("what", ["plan", "key_lengths", "invalid"])
def test_what_differs_in_a_later_call_with_shared_heads(four_ranks, what):
    answers = four_ranks.run(refusals.of_a_later_call_with_shared_heads, what)
    assert len(set(answers)) == 1, answers
    expected = "must have a multiple" if what == "invalid" else f"{what} must be equal"
    assert expected in answers[0], answers


def test_a_rank_that_has_emptied_its_caches_does_not_compare_arguments_alone(tmp_path):
    """The others would not answer. Caches are emptied when they are full, at any time."""
    started = Ranks(2, tmp_path / "meeting", timeout=5)
    answers = started.run(refusals.with_an_emptied_cache)
    started.close()
    assert answers == ["nothing"] * 2


def test_options_that_differ_in_a_later_call_are_an_error(tmp_path):
    """The rank with the new options has not compared them, and the others have."""
    started = Ranks(2, tmp_path / "meeting", timeout=5)
    answers = started.run(refusals.refused, "options of a later call")
    started.close()
    for answer in answers:
        assert answer.startswith("ValueError: options must be equal on all ranks"), answer


@pytest.mark.parametrize("when", [1, 2], ids=["before", "between passes"])
def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path, when):
    started = Ranks(3, tmp_path / "meeting", timeout=20)
    begin = time.monotonic()
    answers = started.run(refusals.after_another_died, when)
    assert time.monotonic() - begin < 60
    assert answers.pop(when) is None
    for answer in answers:
        assert "context_parallel_attention could not exchange" in answer
    started.close()


def test_shared_rows_of_one_rank_among_several_need_its_group(two_ranks):
    for answer in two_ranks.run(refusals.shared_rows_of_one_rank):
        refused, difference = answer
        assert "group must be a process group of one rank" in refused
        assert difference < EXACT


class Subclass(torch.Tensor):
    """A tensor of which kernels cannot know where its memory is."""


def test_wrong_arguments_are_named():
    plan, other = (make_plan(masks.causal()(100, 16), ranks, "contiguous") for ranks in (1, 2))
    tensors = torch.randn(3, 1, 2, 100, 8)
    with pytest.raises(TypeError, match="plan must be a ContextPlan, got BlockMask"):
        context_parallel_attention(*tensors, plan.mask)
    with pytest.raises(ValueError, match="group must have this rank among its ranks"):
        context_parallel_attention(*tensors, plan, group=GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(
        TypeError, match="group must be a ProcessGroup, a DeviceMesh or None, got 3"
    ):
        context_parallel_attention(*tensors, plan, group=3)
    with pytest.raises(TypeError, match="check must be a bool or None, got 'no'"):
        context_parallel_attention(*tensors, plan, check="no")
    with pytest.raises(TypeError, match="shard must be a tensor, got NoneType"):
        gather(None, plan, 2)
    with pytest.raises(TypeError, match="plan must be a ContextPlan, got BlockMask"):
        gather(tensors, plan.mask, 2)
    with pytest.raises(ValueError, match="dim must be at most 4, got 9"):
        gather(tensors, plan, 9)
    three = make_plan(masks.stack([masks.causal()] * 3)(100, 16), 1)
    with pytest.raises(ValueError, match="plan must be made for a mask of 1 or 2 heads, got 3"):
        context_parallel_attention(*tensors, three)
    with pytest.raises(TypeError, match="key must be an ordinary tensor, got a Subclass"):
        context_parallel_attention(tensors[0], tensors[1].as_subclass(Subclass), tensors[2], plan)
    with pytest.raises(
        ValueError, match=r"of the plan, got 1: torch\.distributed.init_process_group has not been"
    ):
        context_parallel_attention(*tensors, other)
    with pytest.raises(ValueError, match="query must have the 100 tokens of rank 0 in dim 2"):
        context_parallel_attention(*tensors[:, :, :, 1:], plan)
    with pytest.raises(ValueError, match="key_lengths must be 0 to 100, got"):
        context_parallel_attention(*tensors, plan, key_lengths=torch.tensor([101]))
    with pytest.raises(
        TypeError, match=r"mask must be a DynamicMask selected from plan.mask_of\(0\)"
    ):
        context_parallel_attention(*tensors, plan, mask=plan.mask)
    mask = masks.full()(100, 16).select_topk(torch.randn(7, 7), 2)
    shared = make_plan(masks.full()(100, 16), 1, shared_rows=[0])
    with pytest.raises(ValueError, match="mask must be None if the plan has shared rows"):
        context_parallel_attention(*tensors, shared, mask=mask)
    with pytest.raises(ValueError, match="group must be a process group of one rank"):
        context_parallel_attention(*tensors, shared)
    with pytest.raises(ValueError, match=r"mask must be selected from plan.mask_of\(0\)"):
        context_parallel_attention(*tensors, plan, mask=mask)
    with pytest.raises(ValueError, match="shard must not require a gradient"):
        gather(tensors.requires_grad_(), plan, 3)
