"""Attention over a sequence that two GPUs share through NCCL, against one GPU, in bfloat16."""

import time

import pytest
import torch

from tests.helpers import context_gpus as cases
from tests.helpers.ranks import Ranks

WITHIN = 0.02  # of the largest value: bfloat16 has 8 bits, and results of parts are rounded to it
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    started = Ranks(2, tmp_path_factory.mktemp("ranks") / "meeting", 240, "nccl")
    yield started
    started.close()


def check(answers, within=WITHIN):
    for answer in answers:
        assert isinstance(answer, dict), answer
        assert max(answer.values()) < within, answer


@pytest.mark.parametrize("split", ["rows", "keys", "auto"])
@pytest.mark.parametrize("mask", ["window", "butterfly", "causal"])
def test_same_as_one_gpu(two_gpus, mask, split):
    check(two_gpus.run(cases.errors, mask, {"split": split}, {}))


@pytest.mark.parametrize("strategy", ["contiguous", "zigzag", "graph growing"])
@pytest.mark.parametrize(
    "mask", ["window", "butterfly", "causal", "global tokens", "documents", "nothing"]
)
def test_rows_in_place(two_gpus, mask, strategy):
    options = {"split": "in place", "strategy": strategy}
    check(two_gpus.run(cases.errors, mask, options, {}, None, cases.WHOLE))


@pytest.mark.parametrize("mask", ["butterfly", "causal", "global tokens"])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_in_place_in_groups_of_heads(two_gpus, mask, batch):
    """A rank receives at most half of the keys of the other one at a time. With a batch it is
    computed by keys.
    """
    options = {"split": "in place", "strategy": "contiguous", "round_tokens": cases.WHOLE // 4}
    options |= {"shared_rows": ()}
    check(two_gpus.run(cases.errors, mask, options, {}, None, cases.WHOLE, batch))


def test_gradients_of_keys_that_all_rows_attend(two_gpus):
    check(two_gpus.run(cases.errors_of_heavy_keys))


@pytest.mark.parametrize("extra", [{"dropout_p": 0.2, "seed": 7}, {"softcap": 5.0}])
def test_calls_of_a_plan_in_place(two_gpus, extra):
    """Those with dropout are not computed so, and drop the same pairs as one GPU."""
    options = {"split": "in place"}
    if "seed" in extra:
        extra = extra | {"backend": "triton"}
    check(two_gpus.run(cases.errors, "butterfly", options, extra, None, cases.WHOLE))


@pytest.mark.parametrize("mask", ["global tokens", "documents", "head masks", "nothing"])
def test_masks_with_shared_rows_or_little_exchange(two_gpus, mask):
    check(two_gpus.run(cases.errors, mask, {"strategy": "contiguous"}, {}))


@pytest.mark.parametrize("split", ["in place", "keys", "rows"])
def test_all_to_alls(two_gpus, split):
    """All other tests exchange by copies."""
    options, sizes = {"split": split}, (cases.WHOLE, 2, False)
    check(two_gpus.run(cases.errors, "butterfly", options, {}, None, *sizes))


def test_buffers_are_used_again_and_freed(two_gpus):
    """Both passes of layers of several lengths give what all-to-alls give, bit by bit."""
    for equal, freed in two_gpus.run(cases.layers):
        assert equal
        assert freed


@pytest.mark.parametrize("groups", [1, 2])
def test_both_passes_with_copies_as_a_cuda_graph(two_gpus, groups):
    check(two_gpus.run(cases.errors_of_captured_copies, groups), 1e-9)


def test_rounds(two_gpus):
    check(two_gpus.run(cases.errors, "causal", {"round_tokens": 512}, {}))


@pytest.mark.parametrize("split", ["rows", "keys"])
def test_key_lengths(two_gpus, split):
    lengths = torch.tensor([cases.LENGTH, 777])
    check(two_gpus.run(cases.errors, "window", {"split": split}, {"key_lengths": lengths}))


@pytest.mark.parametrize("split", ["rows", "keys"])
def test_blocks_that_each_rank_selects(two_gpus, split):
    check(two_gpus.run(cases.errors, "causal", {"split": split}, {}, 4))


def test_dropout_drops_the_same_pairs(two_gpus):
    extras = {"dropout_p": 0.2, "seed": 7, "backend": "triton"}
    check(two_gpus.run(cases.errors, "causal", {"strategy": "zigzag"}, extras))


@pytest.mark.parametrize("extra", [{"dropout_p": 0.2, "seed": 7}, {"near": True}, {}])
@pytest.mark.parametrize("options", [{"split": "rows"}, {"round_tokens": 512}], ids=str)
def test_a_mask_for_each_batch_element(two_gpus, options, extra):
    extras = extra | ({"backend": "triton"} if extra else {})
    check(two_gpus.run(cases.errors, "batch", options, extras))


@pytest.mark.parametrize("options", [{"split": "rows"}, {"split": "keys"}], ids=str)
def test_score_functions_read_positions_in_the_whole_sequence(two_gpus, options):
    extras = {"near": True, "backend": "triton", "dropout_p": 0.1, "seed": 3}
    check(two_gpus.run(cases.errors, "head masks", options, extras))


@pytest.mark.parametrize("length", [cases.LENGTH, cases.WHOLE, cases.WHOLE - 1])
@pytest.mark.parametrize("mask", ["butterfly", "global tokens"])
@pytest.mark.parametrize(
    "options", [{"split": "rows"}, {"split": "keys"}, {"round_tokens": 512}], ids=str
)
def test_maximum_logits(two_gpus, options, mask, length):
    extras = {"return_max_logits": True}
    check(two_gpus.run(cases.errors, mask, options, extras, None, length))


@pytest.mark.parametrize("groups", [1, 2])
def test_maximum_logits_in_place(two_gpus, groups):
    options = {"split": "in place", "strategy": "contiguous", "shared_rows": ()}
    options |= {} if groups == 1 else {"round_tokens": cases.WHOLE // 4}
    extras = {"return_max_logits": True}
    check(two_gpus.run(cases.errors, "butterfly", options, extras, None, cases.WHOLE, 1))


@pytest.mark.parametrize("extras", [{}, {"dropout_p": 0.2, "seed": 7, "backend": "triton"}])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_heads_over_a_dimension_of_a_mesh(two_gpus, shape, extras):
    check(two_gpus.run(cases.errors_with_shared_heads, shape, extras))


@pytest.mark.parametrize("check", [None, False, True])
def test_the_first_call_of_a_plan_is_not_captured(two_gpus, check):
    for message in two_gpus.run(cases.refused_first_call_in_a_graph, check):
        assert "cannot be captured in a CUDA graph" in message


@pytest.mark.parametrize("warm", [True, False])
def test_a_captured_call_with_dropout(two_gpus, warm):
    check(two_gpus.run(cases.errors_of_a_replay, warm))


@pytest.mark.parametrize("length", [cases.LENGTH, cases.WHOLE])
@pytest.mark.parametrize("mask", ["butterfly", "global tokens"])
def test_the_same_inputs_give_the_same_bits(two_gpus, mask, length):
    assert two_gpus.run(cases.same_bits, mask, length) == [True, True]


@pytest.mark.parametrize("copied", [True, False], ids=["copies", "all-to-alls"])
@pytest.mark.parametrize("second", ["equal traffic", "other traffic"])
def test_a_plan_that_differs_in_a_later_call_ends_all_ranks(tmp_path, second, copied):
    """Within seconds, and not after the time-out of the group; the processes are useless then."""
    begin = time.monotonic()
    started = Ranks(2, tmp_path / "meeting", 240, "nccl")
    answers = started.run(cases.in_a_later_call, second, copied)
    assert time.monotonic() - begin < 120
    started.close()
    for answer in answers:  # None if NCCL has ended the process
        assert answer is None or "device-side assert" in answer, answer
