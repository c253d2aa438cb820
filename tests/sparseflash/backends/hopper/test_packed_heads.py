"""Two query heads in one CTA of the forward kernel, run on the CPU by simulated_gluon."""

import importlib
from functools import partial
from unittest.mock import patch

import pytest
import torch

import masks
from sparseflash.backends import hopper
from sparseflash.dispatch.autograd import run
from sparseflash.score import ScoreFunction
from sparseflash.testing import check_attention, make_inputs, poisoned_empty
from tests.helpers import simulated_gluon
from tests.helpers.calls import call_on
from tests.helpers.simulated_hopper import check, simulation

WIDTHS = (64, 128)
LENGTHS = (300, 260)
PATTERNS = {
    "full": masks.full(),
    "causal": masks.causal(align="top-left"),
    "blocks": masks.random(0.5),
    "partial": masks.local(40, align="top-left") | masks.pattern(lambda q, k: (q + k) % 7 == 0),
    "empty rows": masks.pattern(lambda q, k: (q // 64 % 2 == 1) & (q % 64 > 5) & (k < 100)),
    "nothing": masks.global_tokens(1) - masks.full(),
}
OPTIONS = {
    "none": {},
    "key lengths": {"key_lengths": [0, 1, 64, 130, 260]},
    "dropout": {"dropout_p": 0.3},
    "all": {"key_lengths": [0, 130, 260], "dropout_p": 0.3, "softcap": 2.0, "bias": True},
}


def forward(inputs, mask, packed_widths, ctas=2, **options):
    """(out, LSE, maximum logits, query heads of a work tile) of a simulated call."""
    query, key, value = inputs
    if "key_lengths" in options:
        options["key_lengths"] = torch.tensor(options["key_lengths"])
    if "bias" in options:
        generator = torch.Generator().manual_seed(2)
        options["bias"] = torch.randn(query.shape[1], sum(mask.seq_len) - 1, generator=generator)
    if "dropout_p" in options:
        options["seed"] = -(2**40) - 3
    with simulation(packed_widths=packed_widths, ctas=ctas), poisoned_empty():
        launch = importlib.import_module(f"{hopper.__name__}.launch")
        call = call_on(hopper, query, key, mask, value, max_logits=True, **options)
        with patch.object(launch, "launch_and_store", wraps=launch.launch_and_store) as launched:
            out, lse = call.forward(query, key, value)
    of_launches = [each.args[-1].constants for each in launched.call_args_list]
    (heads,) = [each["PACKED_HEADS"] for each in of_launches if "PACKED_HEADS" in each]
    return out, lse, call.max_logits, heads


def check_equal_bits(inputs, mask, packed=2, **options):
    """Checks that a call has the bits of one without packed heads; returns out."""
    alone = forward(inputs, mask, (), **options)
    found = forward(inputs, mask, WIDTHS, **options)
    assert (alone[-1], found[-1]) == (1, packed)
    for result, expected in zip(found[:3], alone[:3], strict=True):
        assert not expected.isnan().any()
        assert torch.equal(result, expected)
    return found[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, "none") for name in PATTERNS),
        *(("causal", "key lengths"), ("empty rows", "key lengths"), ("nothing", "key lengths")),
        *(("blocks", "dropout"), ("causal", "dropout")),
        *(("blocks", "all"), ("empty rows", "all")),
    ],
)
def test_packed_heads_have_the_bits_of_heads_alone(name, options):
    changes = OPTIONS[options]
    batch, dims = len(changes.get("key_lengths", [0])), 128 if options == "dropout" else 64
    inputs = make_inputs(batch, 4, *LENGTHS, dims, kv_heads=2, dtype=torch.bfloat16)[:3]
    check_equal_bits(inputs, PATTERNS[name](LENGTHS, 64), **changes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "packed"),
    [(2, 1, 2), (4, 1, 2), (8, 1, 2), (8, 2, 2), (6, 2, 1), (3, 1, 1), (2, 2, 1)],
)
@pytest.mark.parametrize("masks_of", ["all", "key heads"])
def test_heads_of_a_key_head_are_packed_in_pairs(heads, kv_heads, packed, masks_of):
    lengths = (200, 260)
    inputs = make_inputs(2, heads, *lengths, 64, kv_heads=kv_heads, dtype=torch.bfloat16)[:3]
    mask = PATTERNS["partial"](lengths, 64)
    if masks_of == "key heads":
        names = ["partial", "causal"][:kv_heads]
        mask = masks.stack([PATTERNS[name] for name in names])(lengths, 64)
    check_equal_bits(inputs, mask, packed)


def test_heads_with_masks_of_their_own_are_not_packed():
    inputs = make_inputs(1, 4, *LENGTHS, 64, kv_heads=2, dtype=torch.bfloat16)[:3]
    names = ["causal", "blocks", "full", "causal"]
    mask = masks.stack([PATTERNS[name] for name in names])(LENGTHS, 64)
    check_equal_bits(inputs, mask, packed=1)


@pytest.mark.parametrize("mask_heads", [1, 2])
def test_packed_heads_of_blocks_that_the_device_chooses(mask_heads):
    """With a row without blocks; each batch element has its own."""
    inputs = make_inputs(2, 4, *LENGTHS, 128, kv_heads=2, dtype=torch.float16)[:3]
    generator = torch.Generator().manual_seed(1)
    blocks = torch.rand(2, mask_heads, 5, 5, generator=generator) < 0.5
    blocks[:, :, 1] = False
    mask = masks.DynamicMask.from_blocks(blocks, 64, LENGTHS)
    out = check_equal_bits(inputs, mask, key_lengths=[260, 130])
    assert (out[:, :, 64:128] == 0).all()
    assert (out != 0).any(-1).sum() > 2 * 4 * 200


@pytest.mark.parametrize("ctas", [1, 3, 50])
def test_packed_heads_however_many_ctas_there_are(ctas):
    inputs = make_inputs(2, 4, 700, 260, 64, kv_heads=1, dtype=torch.bfloat16)[:3]
    check_equal_bits(inputs, PATTERNS["causal"]((700, 260), 64), ctas=ctas)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(40, 40), (96, 120), (64, 128), (128, 64)])
def test_packed_heads_of_other_dims(head_dim, value_dim):
    kinds = {"kv_heads": 2, "dtype": torch.float16, "value_dim": value_dim, "strides": "bshd"}
    inputs = make_inputs(1, 4, *LENGTHS, head_dim, **kinds)[:3]
    check_equal_bits(inputs, PATTERNS["causal"](LENGTHS, 64))


def by_head(score, batch, head, query, key):
    slope = 1 / (1 + head)
    return slope * score, slope


BY_HEAD = ScoreFunction("by head, in the simulation of packed heads", by_head, by_head)


@pytest.mark.parametrize(
    ("order", "name", "head_dim", "options"),
    [
        *((order, "causal", 64, {}) for order in (None, min, max)),
        *((order, "partial", 128, {}) for order in (min, max)),
        *((order, "empty rows", 64, {"heads": 8}) for order in (None, max)),
        (None, "blocks", 64, {"kv_heads": 2, "heads": 4, "dtype": torch.float16}),
        (min, "causal", 128, {"key_lengths": [0, 64, 130], "dropout_p": 0.3}),
        (max, "causal", 64, {"score": BY_HEAD, "bias": torch.randn, "heads": 4}),
    ],
)
def test_packed_heads_are_right(order, name, head_dim, options, monkeypatch):
    """Against float64, with both passes; a warpgroup far ahead of the other or far behind it."""
    monkeypatch.setattr(simulated_gluon, "ORDER", order)
    with simulation(packed_widths=WIDTHS):
        check(PATTERNS[name], head_dim, lengths=LENGTHS, block_size=64, **options)


def test_selected_blocks_of_packed_heads_are_right():
    query, key, value, grad_out = make_inputs(1, 4, *LENGTHS, 64, kv_heads=2, dtype=torch.bfloat16)
    blocks = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    chosen, mask = (
        kind.from_blocks(blocks, 64, LENGTHS) for kind in (masks.DynamicMask, masks.BlockMask)
    )
    with simulation(packed_widths=WIDTHS), poisoned_empty():
        attend = partial(run, call_on(hopper, query, key, chosen))
        dense = mask.to_dense().repeat_interleave(2, 0)
        check_attention(attend, query, key, value, dense, grad_out=grad_out)
