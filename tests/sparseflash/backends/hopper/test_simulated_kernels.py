"""How the partitions of the Hopper kernels share buffers, run on the CPU by simulated_gluon."""

import math
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

import masks
from masks.registry import Cache
from sparseflash.backends import hopper
from sparseflash.backends.hopper import configs
from sparseflash.dispatch.autograd import run
from sparseflash.score import ScoreFunction
from sparseflash.testing import STRIDES, check_attention, make_inputs, poisoned_empty
from tests.helpers import simulated_gluon
from tests.helpers.calls import call_on, check_gradients_in_memory
from tests.helpers.max_logits import expected
from tests.helpers.simulated_hopper import check, simulated_score, simulation

FUSED = [(False, 96)] + [
    (drop, dim) for drop, dims in configs.FUSED_WIDTHS.items() for dim in dims
]
PATTERNS = {
    "full": masks.full(),
    "causal": masks.causal(align="top-left"),
    "blocks": masks.random(0.5),
    "long row": masks.pattern(lambda q, k: (q // 128 == 2) | (k < 100)),
    "nothing": masks.global_tokens(1) - masks.full(),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_simulated_kernels_are_right(name):
    with simulation():
        check(PATTERNS[name])


@pytest.mark.parametrize(
    ("order", "options"),
    [
        *((max, {"lengths": (700, 900), "kv_heads": 2}), (None, {"lengths": (193, 129)})),
        (min, {"key_lengths": [0, 130, 400]}),
    ],
)
@pytest.mark.parametrize("name", PATTERNS)
def test_simulated_forward_kernels_of_three_warpgroups(name, order, options, monkeypatch):
    monkeypatch.setattr(simulated_gluon, "ORDER", order)
    with simulation():
        check(PATTERNS[name], 40, forward_tile=(192, 128), **options)


def test_simulated_forward_kernels_of_three_warpgroups_with_masks_of_each_head():
    pattern = masks.stack([PATTERNS["causal"], PATTERNS["long row"]])
    with simulation():
        check(pattern, 64, lengths=(300, 260), kv_heads=1, forward_tile=(192, 128))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PATTERNS)
def test_simulated_kernels_on_blocks_of_64(name, dtype):
    with simulation():
        check(PATTERNS[name], lengths=(300, 260), block_size=64, dtype=dtype)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "forward_tile"),
    [(128, 128, None), (64, 128, (192, 128)), (64, 64, None)],
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_simulated_kernels_leave_rows_without_blocks_unwritten(
    head_dim, block_size, forward_tile, kv_heads
):
    """O, LSE and dQ; what is written has the bits of a call that writes all."""
    lengths = (900, 300)
    kinds = {"kv_heads": kv_heads, "dtype": torch.bfloat16}
    query, key, value, grad_out = make_inputs(2, 2, *lengths, head_dim, **kinds)
    mask = masks.pattern(lambda q, k: (q // 192 % 2 == 1) & (k < 140))(lengths, block_size)
    attends = mask.to_dense()[0].any(-1)
    needs, results = (True, True, True, False, False, False), []
    for skips in (False, True):
        facts = {"forward_tile": forward_tile, "skips_empty_rows": skips}
        call = call_on(hopper, query, key, mask, value, **facts)
        with simulation(), poisoned_empty():
            out, lse = call.forward(query, key, value)
            if skips:
                assert out[:, :, 384:512].isnan().all()
                assert lse[:, :, 384:512].isnan().all()
                out, lse = results[0]
            grads = call.backward(grad_out, None, (query, key, value, out, lse), needs)[:3]
        results += [(out, lse)] if not skips else []
        results.append(grads)
    (_, whole, some) = results
    assert some[0][:, :, 384:512].isnan().all()
    assert torch.equal(some[0][:, :, attends], whole[0][:, :, attends])
    assert torch.equal(some[1], whole[1])
    assert torch.equal(some[2], whole[2])


@pytest.mark.parametrize("skips", [False, True])
def test_results_of_the_caller_have_the_rows_of_other_calls_if_empty_rows_are_skipped(skips):
    query, key, value, _ = make_inputs(1, 1, 256, 256, 64, dtype=torch.bfloat16)
    mask = masks.full()((256, 256), 128).keep_rows(torch.tensor([1]))
    call = call_on(hopper, query, key, mask, value, skips_empty_rows=skips)
    out, lse = call.results = torch.full_like(query, 7), query.new_full((1, 1, 256), 7).float()
    with simulation():
        call.forward(query, key, value)
    first_row = out[:, :, :128], lse[:, :, :128]
    assert [set(x.flatten().tolist()) for x in first_row] == (
        [{7.0}, {7.0}] if skips else [{0.0}, {-torch.inf}]
    )
    assert not (out[:, :, 128:] == 7).any()
    assert not (lse[:, :, 128:] == 7).any()


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_simulated_kernels_read_keys_of_two_tensors_and_write_some_rows(head_dim, kv_heads):
    """The last key blocks lie in another tensor, and in another order; rows are of two calls."""
    lengths, own = (600, 640), 256
    kinds = {"kv_heads": kv_heads, "dtype": torch.bfloat16}
    query, key, value, grad_out = make_inputs(2, 2, *lengths, head_dim, **kinds)
    allowed = masks.random(0.7, seed=1) & masks.pattern(lambda q, k: k < 5 * 128 - q // 7)
    mask = allowed(lengths, 128)
    order = torch.tensor([3, 0, 4, 1, 2])  # where each block lies

    def laid_out(x):
        return x.unflatten(2, (5, 128))[:, :, order.argsort()].flatten(2, 3)

    tensors = [laid_out(x) for x in (key, value)]
    first = [x[:, :, :own].contiguous() for x in tensors]
    # As received: one token after another.
    more = [x[:, :, own:].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in tensors]

    def called(rows):
        call = call_on(hopper, query, key, mask.keep_rows(rows), skips_empty_rows=True)
        table = call.table.with_columns(order)
        call = replace(call, plan=replace(call.plan, table=table, cache=Cache()))
        call.more = (more[0], more[1])
        return call

    whole = call_on(hopper, query, key, mask)
    with simulation(), poisoned_empty():
        expected = whole.forward(query, key, value)
        saved = (query, key, value, *expected)
        needs = (True, False, False, False, False, False)
        (grad_query, *_) = whole.backward(grad_out, None, saved, needs)
        out, lse = (torch.empty_like(x) for x in expected)
        for rows in ([0, 2], [1, 3, 4]):
            call = called(torch.tensor(rows))
            call.results = (out, lse)
            call.forward(query, *first)
        some = torch.tensor([0, 1, 2, 3, 4])
        call = called(some)
        call.shared = []
        (found, *_) = call.backward(grad_out, None, (query, *first, out, lse), needs)
    torch.testing.assert_close(out, expected[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, expected[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, grad_query, atol=0.03, rtol=0.03)
    (lse_delta,) = call.shared
    assert not lse_delta.isnan().any()


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_simulated_kernels_on_blocks_of_64_with_all_that_is_optional(head_dim):
    pattern = masks.stack([PATTERNS["causal"], PATTERNS["long row"]])
    options = {"key_lengths": [0, 100, 192], "dropout_p": 0.3, "deterministic": False}
    with simulation():
        check(pattern, head_dim, lengths=(250, 200), block_size=64, **options)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True)])
def test_backward_kernels_refuse_blocks_that_are_not_square(needs):
    query = torch.zeros(1, 1, 256, 64, dtype=torch.float16)
    call = call_on(hopper, query, query, masks.full()(256, (128, 64)))
    saved = (query, query, query, query, torch.zeros(1, 1, 256))
    with simulation(), pytest.raises(ValueError, match="must be square"):
        hopper.backward(call, query, None, saved, (*needs, False, False, False))


@pytest.mark.parametrize(
    "options",
    [{}, {"deterministic": False}, {"planned_order": True}, {"key_lengths": torch.zeros(0).int()}],
    ids=["default", "any order", "planned order", "key lengths"],
)
def test_a_batch_without_elements(options):
    with simulation():
        given = make_inputs(0, 2, 300, 260, 64, kv_heads=1, dtype=torch.bfloat16)
        tensors = [x.detach().requires_grad_() for x in given[:3]]
        query, key, value = tensors
        call = call_on(hopper, query, key, PATTERNS["causal"]((300, 260), 128), value, **options)
        for _ in range(2):
            out, lse, *_ = run(call, *tensors)
            grads = torch.autograd.grad(out.sum(), tensors)  # the gradient of out is expanded
            assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
            assert [x.shape for x in grads] == [x.shape for x in tensors]


def test_a_warpgroup_alone_far_behind_what_is_loaded(monkeypatch):
    monkeypatch.setattr(simulated_gluon, "ORDER", max)
    with simulation():
        check(PATTERNS["causal"], 128, lengths=(300, 260), block_size=64)


@pytest.mark.parametrize("head_dim", [96, 128, 192])
def test_simulated_kernels_with_all_that_is_optional(head_dim):
    pattern = masks.stack([PATTERNS["causal"], PATTERNS["long row"]])
    with simulation():
        check(pattern, head_dim, lengths=(300, 260), key_lengths=[0, 130, 260], dropout_p=0.3)


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        *((8, {}), (40, {"deterministic": False}), (72, {"deterministic": False})),
        *((80, {"block_size": 64, "kv_heads": 2}), (136, {}), (248, {"strides": "bshd"})),
    ],
)
def test_simulated_kernels_of_tiles_that_are_wider_than_a_head(head_dim, options):
    with simulation():
        check(PATTERNS["causal"], head_dim, lengths=(200, 150), **options)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PATTERNS)
def test_the_simulated_fused_kernel(name, head_dim):
    with simulation():
        check(PATTERNS[name], head_dim, deterministic=False)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_warpgroup_far_ahead_of_the_other(head_dim, monkeypatch):
    monkeypatch.setattr(simulated_gluon, "ORDER", max)
    with simulation():
        check(PATTERNS["causal"], head_dim, deterministic=False)


@pytest.mark.parametrize(("dropout", "head_dim"), FUSED)
def test_the_simulated_fused_kernel_with_all_that_is_optional(dropout, head_dim):
    pattern = masks.stack([PATTERNS["causal"], PATTERNS["long row"]])
    options = {"key_lengths": [0, 130, 400], "dropout_p": 0.3 * dropout, "scale": 0.3}
    with simulation():
        check(pattern, head_dim, deterministic=False, **options)


@pytest.mark.parametrize("key_lengths", [None, [1, 130, 400]])
@pytest.mark.parametrize("deterministic", [True, False])
def test_no_key_past_the_end_has_weight_where_all_scores_are_far_below(deterministic, key_lengths):
    options = {"lengths": (200, 400), "key_lengths": key_lengths, "far_below_zero": True}
    with simulation():
        check(PATTERNS["full"], deterministic=deterministic, **options)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "options"),
    [
        *((64, 128, {}), (128, 128, {"dropout_p": 0.3}), (256, 128, {}), (64, 64, {})),
        *((40, 128, {"forward_tile": (192, 128)}), (128, 64, {"dropout_p": 0.3, "softcap": 0.7})),
        *((192, 128, {"value_dim": 128}), (64, 64, {"value_dim": 128, "strides": "bshd"})),
        *((64, 128, {"deterministic": False}), (128, 128, {"deterministic": False})),
        (64, 128, {"deterministic": False, "dropout_p": 0.3}),
    ],
)
def test_simulated_kernels_with_key_lengths_at_borders_of_blocks(head_dim, block_size, options):
    last = 3 * block_size - 30
    key_lengths = [0, 1, block_size - 1, block_size, block_size + 1, last - 1, last]
    options = options | {"block_size": block_size, "key_lengths": key_lengths}
    with simulation():
        check(PATTERNS["causal"], head_dim, lengths=(2 * block_size + 20, last), **options)


@pytest.mark.parametrize("strides", STRIDES)
def test_the_simulated_fused_kernel_with_other_strides(strides):
    with simulation():
        check(PATTERNS["causal"], 128, lengths=(300, 300), strides=strides, deterministic=False)


def bent(score, batch, head, query, key):
    slope = 1 / (1 + head)
    near = (query - key + batch) % 3 == 0
    f = torch.where(near, slope * score + 0.1 * score * score, score)
    return f, torch.where(near, slope + 0.2 * score, 1.0)


BENT = ScoreFunction("bent, in the simulation", bent, bent)
CHANGES = {
    "softcap": {"softcap": 0.7},
    "score": {"score": BENT},
    "bias": {"bias": lambda heads, distances: torch.randn(heads, distances)},
    "all": {
        **{"softcap": 2.0, "score": BENT, "key_lengths": [0, 130, 400], "dropout_p": 0.3},
        "bias": lambda heads, distances: torch.randn(1, distances),
    },
}


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 128), (128, 64), (136, 128)])
@pytest.mark.parametrize("name", CHANGES)
def test_simulated_kernels_that_change_scores(name, head_dim, block_size):
    with simulation():
        check(
            PATTERNS["causal"], head_dim, lengths=(200, 400), block_size=block_size,
            deterministic=name != "softcap", **CHANGES[name],
        )  # fmt: skip


def steeper(score, batch, head, query, key, slopes, table):
    near = query - key
    return score * torch.exp(slopes[head, batch]) + table[near + 40, head] - 0.05 * near.abs()


def in_documents(score, batch, head, query, key, of_query, of_key, weight):
    same = of_query[batch, query] == of_key[batch, key]
    return torch.where(same, score * weight[key], -torch.inf)


STEEPER = simulated_score(ScoreFunction.from_torch("steeper", steeper, (float, float)))
DOCUMENTS = simulated_score(
    ScoreFunction.from_torch("weighted documents", in_documents, (int, int, float))
)


@pytest.mark.parametrize(
    ("name", "head_dim", "block_size"),
    [("causal", 64, 128), ("blocks", 64, 128), ("causal", 80, 64), ("full", 136, 128)],
)
def test_simulated_kernels_with_score_tensors(name, head_dim, block_size):
    """Of a table, most distances are past either end."""
    read = [torch.randn(2, 1), torch.randn(80, 2)]
    options = {"block_size": block_size, "score": STEEPER, "score_tensors": read}
    with simulation():
        check(PATTERNS[name], head_dim, lengths=(150, 200), dtype=torch.float16, **options)


@pytest.mark.parametrize("key_lengths", [None, [300, 130]])
@pytest.mark.parametrize("block_size", [64, 128])
def test_simulated_kernels_with_pairs_that_score_tensors_mask(block_size, key_lengths):
    """Whole tiles too, before the first key of a query and after it, and all keys of some."""
    batch, lengths = 2, (256, 384)
    query, key, value, grad_out = make_inputs(batch, 2, *lengths, 64, dtype=torch.bfloat16)
    of_query, of_key = ((torch.arange(n) // 150).expand(batch, n).clone() for n in lengths)
    of_query[:, 200:220] = -1
    read = [of_query, of_key, torch.rand(384) + 0.5]
    mask = masks.full()(lengths, block_size)
    allowed = (of_query.unsqueeze(2) == of_key.unsqueeze(1)).unsqueeze(1)
    options = {"score": DOCUMENTS, "score_tensors": read, "softcap": 3.0}
    if key_lengths is not None:
        options["key_lengths"] = torch.tensor(key_lengths)
    attend = partial(run, call_on(hopper, query, key, mask, **options))
    with simulation(), poisoned_empty():
        results = check_attention(attend, query, key, value, allowed, grad_out=grad_out, **options)
    assert (results["out"][:, :, 200:220] == 0).all()
    assert results["lse"][:, :, 200:220].isneginf().all()


def test_score_functions_of_another_shape_are_refused():
    def of_query(score, batch, head, query, key):
        return 0.1 * query, 0.0

    function = ScoreFunction("of the query alone, in the simulation", bent, of_query)
    with (
        simulation(),
        pytest.raises(ValueError, match="f of a score function must have the shape"),
    ):
        check(PATTERNS["causal"], 64, score=function)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("deterministic", [True, False])
def test_simulated_kernels_with_masks_of_each_batch_element(deterministic, heads):
    def pattern(lengths, block_size):
        within = PATTERNS["causal"](lengths, block_size)
        chances = torch.rand(3, heads, within.grid.nq, within.grid.nk)
        return within.select(chances < 0.5)

    options = {"key_lengths": [400, 130, 300], "deterministic": deterministic}
    with simulation():
        check(pattern, 64, lengths=(300, 400), **options)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "block_size", "name"),
    [
        *((192, 128, 128, "causal"), (128, 64, 128, "blocks"), (64, 128, 128, "causal")),
        *((128, 64, 64, "full"), (40, 72, 64, "causal"), (256, 64, 128, "nothing")),
    ],
)
def test_simulated_kernels_of_values_of_other_dims(head_dim, value_dim, block_size, name):
    options = {"value_dim": value_dim, "block_size": block_size, "deterministic": False}
    with simulation():
        check(PATTERNS[name], head_dim, lengths=(300, 260), dtype=torch.float16, **options)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "block_size"), [(192, 128, 128), (64, 128, 128), (64, 128, 64)]
)
def test_simulated_kernels_of_values_of_other_dims_with_all_that_is_optional(
    head_dim, value_dim, block_size
):
    pattern = masks.stack([PATTERNS["causal"], PATTERNS["long row"]])
    options = {"value_dim": value_dim, "block_size": block_size, "strides": "bshd"}
    options |= {"key_lengths": [0, 130, 200], "dropout_p": 0.3, "softcap": 2.0}
    with simulation():
        check(pattern, head_dim, lengths=(250, 200), **options)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_simulated_kernels_of_values_of_other_dims_in_tiles_as_wide(deterministic):
    with simulation():
        check(PATTERNS["causal"], 96, value_dim=120, lengths=(300, 260),
              deterministic=deterministic)  # fmt: skip


def test_simulated_kernels_of_the_widest_tiles():
    with simulation():
        check(PATTERNS["blocks"], 256)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "block_size"),
    [
        *((64, 64, 128), (96, 96, 128), (256, 256, 128), (96, 96, 64)),
        *((64, 128, 128), (192, 64, 128), (64, 128, 64)),
    ],
)
@pytest.mark.parametrize("with_grad_lse", [False, True])
def test_the_kernel_of_dq_writes_the_lse_and_delta_that_their_own_kernel_writes(
    with_grad_lse, head_dim, value_dim, block_size
):
    kinds = {"kv_heads": 1, "dtype": torch.bfloat16, "strides": "bshd", "value_dim": value_dim}
    query, key, value, grad_out = make_inputs(2, 2, 300, 200, head_dim, **kinds)
    mask = masks.pattern(lambda q, k: q >= 140)((300, 200), block_size)
    call = call_on(hopper, query, key, mask, value)
    grad_lse = torch.randn(2, 300, 2).mT if with_grad_lse else None
    with simulation():
        out, lse = hopper.forward(call, query, key, value)
        saved = (query, key, value, out, lse)
        padded_len = -(-300 // block_size) * block_size
        written, by_their_own = (
            written_lse_delta(x, call, grad_out, grad_lse, saved) for x in (True, False)
        )
    lse_log2 = torch.where(lse == -torch.inf, torch.inf, lse * math.log2(math.e))
    delta = (grad_out.float() * out.float()).sum(-1) - (0 if grad_lse is None else grad_lse)
    expected = torch.zeros(2, 2, 2, padded_len)
    expected[..., :300] = torch.stack([lse_log2, -delta], dim=2)
    assert lse_log2.isinf().sum() == 2 * 2 * 140
    torch.testing.assert_close(written.view_as(expected), expected)
    assert torch.equal(by_their_own, written)


def written_lse_delta(needs_query, *call_and_gradients):
    """LSE and delta as the kernel of dK and dV reads them, of a pass with or without dQ."""
    needs = (needs_query, True, False, False, False, False)
    with (
        poisoned_empty(),
        patch(f"{hopper.__name__}.passes._dkdv", return_value=(None, None)) as dkdv,
    ):
        hopper.backward(*call_and_gradients, needs)
    return dkdv.call_args.args[-1]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        *((64, 128, torch.bfloat16), (136, 128, torch.float16)),
        *((64, 64, torch.float16), (96, 64, torch.bfloat16)),
    ],
)
@pytest.mark.parametrize("name", [*PATTERNS, "holes"])
def test_simulated_maximum_logits(name, head_dim, block_size, dtype):
    pattern = PATTERNS["blocks"] - masks.global_tokens(20) if name == "holes" else PATTERNS[name]
    lengths = (300, 260)
    tensors = make_inputs(2, 2, *lengths, head_dim, kv_heads=1, dtype=dtype)[:3]
    mask = pattern(lengths, block_size)
    found = maximum_logits(*tensors, mask)
    torch.testing.assert_close(found.double(), expected(*tensors, mask), rtol=1e-5, atol=1e-5)
    assert found[:, :, :20].isneginf().all() == (name in ("holes", "nothing"))


def maximum_logits(query, key, value, mask, **options):
    """Of a simulated call, whose other results are those of a call that does not ask for them."""
    results = []
    with simulation(), poisoned_empty():
        for max_logits in (True, False):
            call = call_on(hopper, query, key, mask, max_logits=max_logits, **options)
            results.append((*call.forward(query, key, value), call.max_logits))
    (out, lse, found), (same_out, same_lse, nothing) = results
    assert torch.equal(out, same_out)
    assert torch.equal(lse, same_lse)
    assert nothing is None
    return found


def test_simulated_maximum_logits_of_scores_that_are_changed():
    """Dropout and padded keys are not among what changes them."""
    query, key, value = make_inputs(3, 2, 200, 400, 64, kv_heads=1, dtype=torch.bfloat16)[:3]
    mask, lengths = PATTERNS["causal"]((200, 400), 128), torch.tensor([0, 130, 400])
    bias = torch.randn(2, 599)
    options = {"softcap": 2.0, "bias": bias, "dropout_p": 0.3, "seed": 3}
    found = maximum_logits(query, key, value, mask, key_lengths=lengths, **options)
    scores = 2 * torch.tanh(query.double() @ key.double().mT / 16)
    token = torch.arange(400)
    scores = scores + bias.double()[:, token - torch.arange(200)[:, None] + 199]
    allowed = mask.to_dense() & (token < lengths.view(3, 1, 1, 1))
    reference = scores.masked_fill(~allowed, -torch.inf).amax(-1)
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-5)
    assert found[0].isneginf().all()


@pytest.mark.parametrize("deterministic", [True, False], ids=["two kernels", "fused"])
@pytest.mark.parametrize("value_dim", [64, 40, 192])
def test_gradients_in_given_memory(value_dim, deterministic):
    dims, dtype = (192 if value_dim == 192 else 64), torch.bfloat16
    inputs = make_inputs(1, 2, 200, 300, dims, kv_heads=1, dtype=dtype, value_dim=value_dim)
    mask = PATTERNS["long row"]((200, 300), 128)
    with simulation(), poisoned_empty():
        check_gradients_in_memory(hopper, *inputs, mask, deterministic=deterministic)
