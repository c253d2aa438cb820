"""The Hopper kernels against float64; they need a GPU that has them."""

import ctypes
import math

import pytest
import torch
import triton
import triton.language as tl

import masks
import sparseflash
from sparseflash.backends import hopper
from sparseflash.backends.hopper import configs
from sparseflash.backends.hopper.select import CAPABILITY
from sparseflash.backends.triton_common import launcher
from sparseflash.dispatch import call as dispatch_call
from sparseflash.testing import STRIDES, check_attention, make_inputs, poisoned_empty
from sparseflash.testing.error_budget import assert_close_to_reference
from sparseflash.testing.reference import standard_attention
from tests.helpers.calls import ALWAYS_FUSED, call_on
from tests.helpers.max_logits import expected

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_HOPPER, reason="needs compute capability 9.0"),
]
DEVICE = torch.device("cuda", 0)
HEAD_DIMS = (64, 96, 128, 192, 256)
SMALL_TILE_DIMS = (64, 96, 128)
SIZES = [(dim, 128) for dim in HEAD_DIMS] + [(dim, 64) for dim in SMALL_TILE_DIMS]

PATTERNS = {
    "full": masks.full(),
    "causal": masks.causal(align="bottom-right"),
    "local": masks.local((300, 70), align="top-left"),
    "dilated": masks.dilated(3, 250, align="top-left"),
    "butterfly": masks.butterfly(),
    "blocks": masks.random(0.4),
    "empty rows": masks.random(0.5) - masks.global_tokens(200),
    "one long row": masks.pattern(lambda q, k: (q // 128 == 3) | (k < 100)),
    "nothing": masks.global_tokens(1) - masks.full(),
    "custom": masks.pattern(lambda q, k: (q * k) % 5 == 1),
}


@pytest.fixture(autouse=True)
def read_blocks_of_64_however_full_tiles_are(monkeypatch):
    ratios = dict.fromkeys(configs.MIN_COVERAGE_RATIO_FOR_128, 2.0)
    monkeypatch.setattr(configs, "MIN_COVERAGE_RATIO_FOR_128", ratios)


def attend(query, key, value, mask, **options):
    options |= {"return_lse": True, "backend": "hopper"}
    return sparseflash.attention(query, key, value, mask, **options)


def check(
    pattern, lengths, head_dim, *, batch=2, heads=2, kv_heads=None, block_size=128, **options
):
    names = ("dtype", "strides", "value_dim")
    kinds = {name: options.pop(name) for name in names if name in options}
    kinds = {"dtype": torch.bfloat16, "device": DEVICE} | kinds
    inputs = make_inputs(batch, heads, *lengths, head_dim, kv_heads=kv_heads, **kinds)
    if options.pop("far_below_zero", False):
        inputs[0].abs_().mul_(6)
        inputs[1].abs_().mul_(-6)
    mask = pattern(lengths, block_size, device=DEVICE)
    deterministic = options.pop("deterministic", True)
    if "key_lengths" in options:
        options["key_lengths"] = torch.tensor(options["key_lengths"], device=DEVICE)

    def attention(query, key, value):
        return attend(query, key, value, mask, deterministic=deterministic, **options)

    with poisoned_empty():  # in the backward pass too
        return check_attention(attention, *inputs[:3], mask, grad_out=inputs[3], **options)


@pytest.mark.parametrize("head_dim", [40, 64])
@pytest.mark.parametrize("lengths", [(1024, 1024), (1000, 777), (193, 1500), (1, 1)])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_in_forward_tiles_of_192_queries(name, lengths, head_dim, monkeypatch):
    monkeypatch.setattr(configs, "MAX_TIME_RATIO_OF_192", math.inf)
    check(PATTERNS[name], lengths, head_dim)
    key_lengths = [lengths[1], lengths[1] // 2]
    check(PATTERNS[name], lengths, head_dim, dtype=torch.float16, key_lengths=key_lengths)


def test_masks_of_each_head_in_forward_tiles_of_192_queries(monkeypatch):
    monkeypatch.setattr(configs, "MAX_TIME_RATIO_OF_192", math.inf)
    pattern = masks.stack([PATTERNS[name] for name in ("causal", "blocks", "causal", "local")])
    check(pattern, (1000, 777), 64, heads=4, kv_heads=2)


@pytest.mark.parametrize(("head_dim", "block_size"), SIZES)
@pytest.mark.parametrize("lengths", [(1024, 1024), (1000, 777), (130, 1500), (1, 1)])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, lengths, head_dim, block_size):
    check(PATTERNS[name], lengths, head_dim, block_size=block_size)


VALUE_DIMS = [(192, 128, 128), (128, 64, 128), (64, 128, 128), (128, 64, 64), (64, 128, 64)]
VALUE_DIMS += [(40, 72, 64), (256, 64, 128), (96, 120, 128), (136, 256, 128)]


@pytest.mark.parametrize(("head_dim", "value_dim", "block_size"), VALUE_DIMS)
@pytest.mark.parametrize("lengths", [(1000, 777), (130, 900), (1, 1)])
@pytest.mark.parametrize("name", ["full", "causal", "blocks", "empty rows", "nothing"])
def test_values_of_other_dims(name, lengths, head_dim, value_dim, block_size):
    kinds = {"value_dim": value_dim, "block_size": block_size, "kv_heads": 1}
    results = check(PATTERNS[name], lengths, head_dim, **kinds)
    assert results["out"].shape == (2, 2, lengths[0], value_dim)


@pytest.mark.parametrize(("head_dim", "value_dim", "block_size"), VALUE_DIMS)
@pytest.mark.parametrize("strides", STRIDES)
def test_values_of_other_dims_with_all_that_is_optional(
    strides, head_dim, value_dim, block_size, monkeypatch
):
    monkeypatch.setattr(configs, "MIN_FUSED_BLOCKS", ALWAYS_FUSED)
    pattern = masks.stack([PATTERNS[name] for name in ("causal", "blocks", "causal", "local")])
    options = {"batch": 3, "heads": 4, "kv_heads": 2, "key_lengths": [0, 130, 600]}
    options |= {"dropout_p": 0.3, "seed": 5, "softcap": 3.0, "dtype": torch.float16}
    options |= {"value_dim": value_dim, "block_size": block_size, "strides": strides}
    check(pattern, (500, 660), head_dim, deterministic=False, **options)
    others = {name: options[name] for name in ("value_dim", "block_size", "strides")}
    check(PATTERNS["causal"], (1000, 1000), head_dim, deterministic=False, **others)


@pytest.mark.parametrize("min_ratio", [0.0, 2.0])  # whatever there is, or never
@pytest.mark.parametrize("block_size", [16, 32, 64, 512, (128, 64), (32, 256)])
@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_of_other_sizes(name, block_size, min_ratio, monkeypatch):
    monkeypatch.setitem(configs.MIN_COVERAGE_RATIO_FOR_128, 128, min_ratio)
    check(PATTERNS[name], (700, 460), 128, kv_heads=1, block_size=block_size)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("head_dim", [8, 32, 56, 72, 80, 120, 136, 160, 248])
def test_tiles_that_are_wider_than_a_head(head_dim, block_size, deterministic, monkeypatch):
    monkeypatch.setattr(configs, "MIN_FUSED_BLOCKS", ALWAYS_FUSED)
    options = {"block_size": block_size, "deterministic": deterministic, "kv_heads": 1}
    check(PATTERNS["causal"], (700, 460), head_dim, **options)
    check(PATTERNS["blocks"], (300, 460), head_dim, strides="bshd", **options)


@pytest.mark.parametrize(("head_dim", "block_size"), SIZES)
@pytest.mark.parametrize("name", ["full", "causal", "empty rows"])
def test_blocks_that_the_device_chooses(name, head_dim, block_size):
    generator = torch.Generator().manual_seed(0)

    def pattern(lengths, block_size, device):
        within = PATTERNS[name](lengths, block_size, device=device)
        chances = torch.rand(2, within.grid.nq, within.grid.nk, generator=generator)
        return within.select(chances.to(device) < 0.6)

    check(pattern, (700, 460), head_dim, block_size=block_size, key_lengths=[460, 130])


@pytest.mark.parametrize(("head_dim", "block_size"), SIZES)
def test_float16(head_dim, block_size):
    kinds = {"dtype": torch.float16, "block_size": block_size}
    check(PATTERNS["local"], (700, 900), head_dim, **kinds)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("kv_heads", "block_size"), [(1, 128), (2, 128), (1, 32), (1, 64), (2, 64)]
)
def test_grouped_heads_with_masks_of_their_own(kv_heads, block_size, head_dim):
    names = ["causal", "blocks", "causal", "empty rows"]
    pattern = masks.stack([PATTERNS[name] for name in names])
    check(pattern, (500, 660), head_dim, heads=4, kv_heads=kv_heads, block_size=block_size)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("name", ["full", "causal", "empty rows"])
def test_padded_keys(name, block_size, head_dim):
    options = {"batch": 5, "key_lengths": [0, 1, 384, 450, 700], "block_size": block_size}
    check(PATTERNS[name], (500, 700), head_dim, **options)


@pytest.mark.parametrize(("head_dim", "block_size"), SIZES)
@pytest.mark.parametrize("name", ["full", "local", "blocks", "empty rows"])
def test_dropout(name, head_dim, block_size):
    options = {"dropout_p": 0.3, "seed": -(2**40) - 3, "block_size": block_size}
    check(PATTERNS[name], (700, 460), head_dim, **options)


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dropout_with_all_that_is_optional(head_dim, block_size):
    pattern = masks.stack([PATTERNS[name] for name in ("causal", "blocks", "causal", "local")])
    options = {"batch": 3, "heads": 4, "kv_heads": 2, "key_lengths": [0, 130, 600]}
    options |= {"dropout_p": 0.5, "seed": 2**62 + 5, "dtype": torch.float16}
    options["block_size"] = block_size
    check(pattern, (500, 660), head_dim, **options)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_dropout_drops_the_pairs_that_the_triton_backend_drops(head_dim):
    inputs = make_inputs(1, 2, 300, 300, head_dim, dtype=torch.float16, device=DEVICE)
    ones = torch.ones_like(inputs[2])
    options = {"dropout_p": 0.4, "seed": 7}
    results = [
        sparseflash.attention(*inputs[:2], ones, masks.causal(), backend=name, **options)
        for name in ("hopper", "triton")
    ]
    torch.testing.assert_close(*results, rtol=2e-3, atol=2e-3)


@triton.jit
def bent_of_triton(score, batch, head, query, key):
    slope = 1.0 / (1.0 + head)
    near = (query - key + batch) % 3 == 0
    bent = score * slope + 0.1 * score * score
    return tl.where(near, bent, score), tl.where(near, slope + 0.2 * score, 1.0)


def bent(score, batch, head, query, key):
    slope = 1 / (1 + head)
    near = (query - key + batch) % 3 == 0
    f = torch.where(near, slope * score + 0.1 * score * score, score)
    return f, torch.where(near, slope + 0.2 * score, 1.0)


BENT = sparseflash.ScoreFunction("bent, on Hopper", bent, bent_of_triton)
CHANGES = {
    "softcap": {"softcap": 0.7},
    "score": {"score": BENT},
    "bias of each head": {"bias": 2},
    "all": {"softcap": 2.0, "score": BENT, "bias": 1, "dropout_p": 0.3, "seed": 1},
}


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 128), (128, 128), (256, 128), (96, 64)])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_scores(name, head_dim, block_size):
    options = {"block_size": block_size, "kv_heads": 1, "deterministic": False} | CHANGES[name]
    for pattern, lengths in (("causal", (700, 460)), ("empty rows", (300, 460))):
        if "bias" in options:
            heads = CHANGES[name]["bias"]
            options["bias"] = torch.randn(heads, sum(lengths) - 1, device=DEVICE)
        check(PATTERNS[pattern], lengths, head_dim, **options)


def steeper(score, batch, head, query, key, slopes, table):
    near = query - key
    return score * torch.exp(slopes[head, batch]) + table[near + 40, head] - 0.01 * near.abs()


def of_pairs(score, batch, head, query, key, pair, position):
    return torch.where(position[key] % 3 == 0, score + pair[batch, head, query, key], 0.5 * score)


def in_documents(score, batch, head, query, key, of_query, of_key, weight):
    same = of_query[batch, query] == of_key[batch, key]
    return torch.where(same, score * weight[key], -torch.inf)


from_torch = sparseflash.ScoreFunction.from_torch
STEEPER = from_torch("steeper, on Hopper", steeper, (float, float))
OF_PAIRS = from_torch("of pairs, on Hopper", of_pairs, (float, int))
DOCUMENTS = from_torch("weighted documents, on Hopper", in_documents, (int, int, float))


@pytest.mark.parametrize(("head_dim", "block_size"), [*SIZES, (80, 128), (72, 64)])
@pytest.mark.parametrize(
    ("score", "name", "dtype"),
    [
        (STEEPER, "full", torch.bfloat16),
        (STEEPER, "empty rows", torch.float16),
        (OF_PAIRS, "causal", torch.bfloat16),
    ],
)
def test_score_tensors(score, name, dtype, head_dim, block_size):
    lengths = (512, 640) if name == "full" else (700, 460)
    read = [0.3 * torch.randn(2, 2, device=DEVICE), torch.randn(80, 2, device=DEVICE)]
    if score is OF_PAIRS:
        position = torch.randperm(lengths[1], device=DEVICE)
        read = [torch.randn(2, 2, *reversed(lengths), device=DEVICE).mT, position]
    options = {"score": score, "score_tensors": read, "dtype": dtype, "block_size": block_size}
    check(PATTERNS[name], lengths, head_dim, kv_heads=1, **options)


@pytest.mark.parametrize(("head_dim", "block_size"), SIZES)
@pytest.mark.parametrize("name", ["full", "causal"])
def test_pairs_that_score_tensors_mask(name, head_dim, block_size):
    """Whole tiles too, before the first key of a query and after it, and all keys of some."""
    lengths = (512, 640)
    of_query, of_key = (
        (torch.arange(n, device=DEVICE) // 150).expand(2, n).clone() for n in lengths
    )
    of_query[:, 200:220] = -1
    read = [of_query, of_key, torch.rand(640, device=DEVICE) + 0.5]
    options = {"score": DOCUMENTS, "score_tensors": read, "softcap": 3.0}
    options["key_lengths"] = torch.tensor([640, 330], device=DEVICE)
    mask = PATTERNS[name](lengths, block_size, device=DEVICE)
    same = (of_query.unsqueeze(2) == of_key.unsqueeze(1)).unsqueeze(1)
    inputs = make_inputs(2, 2, *lengths, head_dim, dtype=torch.bfloat16, device=DEVICE)
    with poisoned_empty():
        results = check_attention(
            lambda *tensors: attend(*tensors, mask, **options),
            *inputs[:3],
            same & mask.to_dense(),
            grad_out=inputs[3],
            **options,
        )
    assert (results["out"][:, :, 200:220] == 0).all()
    assert results["lse"][:, :, 200:220].isneginf().all()


def test_score_tensors_of_a_repeated_call_may_change():
    """Packed launches get the addresses of the new ones."""
    query, key, value, _ = make_inputs(1, 2, 300, 300, 64, dtype=torch.bfloat16, device=DEVICE)
    mask = PATTERNS["causal"](300, 128, device=DEVICE)
    for _ in range(5):
        read = [torch.randn(2, 1, device=DEVICE), torch.randn(80, 2, device=DEVICE)]
        options = {"score": STEEPER, "score_tensors": read}
        out, _ = attend(query, key, value, mask, **options)
        exact, _ = standard_attention(query, key, value, mask, **options)
        torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("head_dim", "block_size"), [*SIZES, (80, 128), (72, 64)])
@pytest.mark.parametrize("name", ["full", "causal", "empty rows", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_maximum_logits(dtype, name, head_dim, block_size):
    lengths = (500, 777) if name == "full" else (700, 460)
    kinds = {"kv_heads": 1, "dtype": dtype, "device": DEVICE}
    tensors = make_inputs(2, 2, *lengths, head_dim, **kinds)[:3]
    mask = PATTERNS[name](lengths, block_size, device=DEVICE)
    options = {"key_lengths": torch.tensor([lengths[1], 130], device=DEVICE)}
    with poisoned_empty():
        out, lse, found = attend(*tensors, mask, return_max_logits=True, **options)
    for ours, without in zip((out, lse), attend(*tensors, mask, **options), strict=True):
        assert torch.equal(ours, without)
    reference = expected(*tensors, mask, **options)
    torch.testing.assert_close(found.double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size", [64, 128])
def test_maximum_logits_of_scores_that_are_changed(block_size):
    kinds = {"kv_heads": 1, "dtype": torch.bfloat16, "device": DEVICE}
    query, key, value = make_inputs(2, 2, 700, 460, 64, **kinds)[:3]
    mask = PATTERNS["empty rows"]((700, 460), block_size, device=DEVICE)
    bias = torch.randn(2, 1159, device=DEVICE)
    options = {"softcap": 2.0, "bias": bias, "dropout_p": 0.3, "seed": 3}
    _, _, found = attend(query, key, value, mask, return_max_logits=True, **options)
    scores = 2 * torch.tanh(query.double() @ key.double().mT / 16)
    distances = torch.arange(460) - torch.arange(700)[:, None] + 699
    scores = scores + bias.double()[:, distances.to(DEVICE)]
    reference = scores.masked_fill(~mask.to_dense(), -torch.inf).amax(-1)
    torch.testing.assert_close(found.double(), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("block_size", [64, 128])
def test_masks_of_each_batch_element(block_size, heads):
    def pattern(lengths, block_size, device):
        within = PATTERNS["causal"](lengths, block_size, device=device)
        chances = torch.rand(3, heads, within.grid.nq, within.grid.nk)
        return within.select(chances.to(device) < 0.5)

    options = {"batch": 3, "key_lengths": [460, 130, 0], "block_size": block_size}
    for deterministic in (True, False):
        check(pattern, (700, 460), 64, deterministic=deterministic, **options)


FUSED = [(False, 96)] + [
    (drop, dim) for drop, dims in configs.FUSED_WIDTHS.items() for dim in dims
]


@pytest.fixture
def always_fused(monkeypatch):
    monkeypatch.setattr(configs, "MIN_FUSED_BLOCKS", ALWAYS_FUSED)


@pytest.mark.usefixtures("always_fused")
@pytest.mark.parametrize("lengths", [(1024, 1024), (1000, 777), (130, 1500), (1, 1)])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("head_dim", SMALL_TILE_DIMS)
def test_gradients_in_no_fixed_order(head_dim, name, lengths):
    check(PATTERNS[name], lengths, head_dim, deterministic=False)


@pytest.mark.usefixtures("always_fused")
@pytest.mark.parametrize(("dropout", "head_dim"), FUSED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_no_fixed_order_with_all_that_is_optional(dtype, dropout, head_dim):
    pattern = masks.stack([PATTERNS[name] for name in ("causal", "blocks", "causal", "local")])
    options = {"batch": 3, "heads": 4, "kv_heads": 2, "key_lengths": [0, 130, 600]}
    options |= {"block_size": 32, "dtype": dtype, "scale": 0.3}
    options |= {"dropout_p": 0.5, "seed": 2**62 + 5} if dropout else {}
    check(pattern, (500, 660), head_dim, deterministic=False, **options)


@pytest.mark.usefixtures("always_fused")
@pytest.mark.parametrize(("head_dim", "block_size"), SIZES)
@pytest.mark.parametrize("strides", ["contiguous", "bshd"])
@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.3, "seed": 5}, {"softcap": 3.0}, {"deterministic": False}]
)
def test_padded_keys_may_hold_anything(options, strides, head_dim, block_size, monkeypatch):
    """Where sums have a fixed order they change no bit. Lengths end inside blocks and between
    them. The third and later calls repeat launches.
    """
    monkeypatch.setattr(configs, "MAX_TIME_RATIO_OF_192", math.inf)
    key_lengths = [0, 1, block_size - 1, block_size, block_size + 1, 499, 500]
    kinds = {"kv_heads": 1, "dtype": torch.bfloat16, "device": DEVICE, "strides": strides}
    query, key, value, grad = make_inputs(len(key_lengths), 2, 300, 500, head_dim, **kinds)
    lengths = torch.tensor(key_lengths, device=DEVICE)
    padding = (torch.arange(500, device=DEVICE) >= lengths[:, None])[:, None, :, None]
    mask = masks.causal(align="top-left")((300, 500), block_size, device=DEVICE)

    def run(*inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        with poisoned_empty():
            out, lse = attend(*leaves, mask, key_lengths=lengths, **options)
            return out, lse, *torch.autograd.grad(out, leaves, grad)

    results = run(query, key, value)
    for gradient in results[3:]:
        assert gradient[padding.expand_as(gradient)].count_nonzero() == 0
    tolerance = 0 if options.get("deterministic", True) else 0.02
    for anything in (torch.nan, torch.inf, -torch.inf, 3e38):
        found = run(query, *(x.masked_fill(padding, anything) for x in (key, value)))
        for result, same in zip(found, results, strict=True):
            torch.testing.assert_close(result, same, rtol=tolerance, atol=tolerance)


def test_key_lengths_take_no_memory_for_keys_and_values():
    key_lengths = torch.tensor([3000, 4096], device=DEVICE)
    mask = masks.local(64)(4096, 128, device=DEVICE)

    def peak(**options):
        kinds = {"dtype": torch.bfloat16, "device": DEVICE}
        *inputs, grad = make_inputs(2, 8, 4096, 4096, 64, **kinds)
        leaves = [x.requires_grad_() for x in inputs]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attend(*leaves, mask, **options)[0].backward(grad)
        return torch.cuda.max_memory_allocated() - before

    peak(key_lengths=key_lengths)  # tables are stored
    peak()
    of_two_blocks = 2 * 2 * 8 * 128 * 64 * 2  # bytes of a block of K and V of each head
    assert peak(key_lengths=key_lengths) - peak() <= of_two_blocks + 4096


@pytest.mark.usefixtures("always_fused")
@pytest.mark.parametrize("options", [{}, {"batch": 3, "key_lengths": [1, 130, 400]}])
@pytest.mark.parametrize("deterministic", [True, False])
def test_no_key_past_the_end_has_weight_where_all_scores_are_far_below(deterministic, options):
    options = options | {"deterministic": deterministic, "far_below_zero": True}
    check(masks.full(), (500, 400), 64, **options)


@pytest.mark.usefixtures("always_fused")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides, deterministic):
    check(PATTERNS["causal"], (500, 500), 128, strides=strides, deterministic=deterministic)


@pytest.mark.parametrize(("head_dim", "block_size"), SIZES)
@pytest.mark.parametrize("name", ["full", "causal", "blocks", "one long row"])
def test_many_work_tiles_for_each_cta(name, head_dim, block_size):
    sizes = {"batch": 4, "heads": 16, "kv_heads": 8, "block_size": block_size}
    check(PATTERNS[name], (1500, 1500), head_dim, **sizes)


@pytest.mark.parametrize("head_dim", SMALL_TILE_DIMS)
def test_ctas_on_blocks_of_64_share_a_multiprocessor(head_dim, monkeypatch):
    monkeypatch.setattr(launcher, "_COMPILED", {})
    check(PATTERNS["causal"], (300, 300), head_dim, block_size=64)
    kernels = [kernel for kernel, _ in launcher._COMPILED.values()]
    tables = (configs.FORWARD_CONFIGS, configs.DQ_CONFIGS, configs.DKDV_CONFIGS)
    wanted = [table[64][configs.tile_width(head_dim)].ctas_per_sm for table in tables]
    assert [occupancy(kernel) for kernel in kernels] == wanted


@pytest.mark.parametrize("head_dim", SMALL_TILE_DIMS)
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"key_lengths": [0, 130, 900]}, {"dropout_p": 0.3, "seed": 3}]
)
@pytest.mark.parametrize("name", ["full", "causal", "blocks", "empty rows", "custom", "selected"])
def test_packed_heads_have_the_bits_of_heads_alone(name, options, kv_heads, head_dim, monkeypatch):
    """And are right: out and LSE against float64."""
    monkeypatch.setattr(configs, "MIN_PACKED_WAVES", 0.0)
    batch, lengths = len(options.get("key_lengths", [0])), (1000, 900)
    inputs = make_inputs(
        batch, 8, *lengths, head_dim, kv_heads=kv_heads, dtype=torch.bfloat16, device=DEVICE
    )[:3]
    if "key_lengths" in options:
        lengths_of_keys = torch.tensor(options["key_lengths"], dtype=torch.int32, device=DEVICE)
        options = options | {"key_lengths": lengths_of_keys}
    if name == "selected":
        generator = torch.Generator().manual_seed(0)
        blocks = (torch.rand(kv_heads, 16, 15, generator=generator) < 0.4).to(DEVICE)
        mask, chosen = (
            kind.from_blocks(blocks, 64, lengths) for kind in (masks.BlockMask, masks.DynamicMask)
        )
    else:
        mask = chosen = PATTERNS[name](lengths, 64, device=DEVICE)
    results = []
    for widths in ((), (64, 128)):
        monkeypatch.setattr(configs, "PACKED_WIDTHS", widths)
        dispatch_call._prepare.cache_clear()
        call = call_on(hopper, *inputs[:2], chosen, inputs[2], max_logits=True, **options)
        with torch.no_grad(), poisoned_empty():
            results.append((*call.forward(*inputs), call.max_logits))
    dispatch_call._prepare.cache_clear()
    for alone, packed in zip(*results, strict=True):
        assert torch.equal(packed, alone)
    exact, eager = (
        standard_attention(*(x.to(dtype) for x in inputs), mask, dtype=dtype, **options)
        for dtype in (torch.float64, torch.bfloat16)
    )
    for found, reference, rough in zip(results[1][:2], exact, eager, strict=True):
        assert_close_to_reference(found, reference, rough, dtype=torch.bfloat16)


def occupancy(kernel) -> int:
    """How many CTAs of a kernel the driver lets share a multiprocessor."""
    found = ctypes.c_int()
    ask = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor
    ask.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    threads = 32 * kernel.metadata.num_warps
    assert ask(ctypes.byref(found), kernel.function, threads, kernel.metadata.shared) == 0
    return found.value


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "block_size"), [(dim, dim, n) for dim, n in SIZES] + VALUE_DIMS
)
@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_only_the_gradients_that_are_needed(needs, head_dim, value_dim, block_size):
    kinds = {"value_dim": value_dim, "dtype": torch.float16, "device": DEVICE}
    *inputs, grad = make_inputs(1, 2, 400, 560, head_dim, **kinds)

    mask = PATTERNS["local"]((400, 560), block_size, device=DEVICE)

    def gradients(needs):
        leaves = [x.detach().requires_grad_(n) for x, n in zip(inputs, needs, strict=True)]
        attend(*leaves, mask)[0].backward(grad)
        return [x.grad for x in leaves]

    for one, full, needed in zip(gradients(needs), gradients((True,) * 3), needs, strict=True):
        assert torch.equal(one, full) if needed else one is None


@pytest.mark.parametrize(("head_dim", "block_size"), SIZES)
@pytest.mark.parametrize("name", ["full", "causal", "blocks", "one long row"])
def test_repeated_runs_give_the_same_bits(name, head_dim, block_size):
    *inputs, grad = make_inputs(2, 16, 2048, 2048, head_dim, dtype=torch.bfloat16, device=DEVICE)
    mask = PATTERNS[name](2048, block_size, device=DEVICE)

    def run():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse = attend(*leaves, mask)
        return out, lse, *torch.autograd.grad(out, leaves, grad)

    first = run()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_large_scores_overflow_nothing():
    inputs = make_inputs(1, 2, 300, 300, 64, dtype=torch.bfloat16, device=DEVICE, scale=30.0)
    mask = PATTERNS["causal"]((300, 300), block_size=128, device=DEVICE)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    out, lse = attend(*leaves, mask)
    gradients = torch.autograd.grad(out, leaves, inputs[3])
    assert all(x.isfinite().all() for x in (out, lse, *gradients))
