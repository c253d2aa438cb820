"""Kernels compiled before the first call."""

import pytest
import torch

import masks
import sparseflash
from tests.helpers.compile_only import finish, start

SHAPE = {"heads": 4, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}


@pytest.mark.parametrize(
    ("mask", "changed", "message"),
    [
        (masks.causal(), {}, "seq_len must be given"),
        (None, {}, "seq_len must be given"),
        (torch.ones(4, 4), {}, "mask must be a Pattern"),
        (None, {"seq_len": 64, "kv_heads": 3}, "key heads must divide the 4 query heads"),
        (None, {"seq_len": 64, "backend": "none"}, "backend must be"),
        (None, {"seq_len": 64, "dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
        (None, {"seq_len": 64, "bias": torch.zeros(3, 9)}, "bias must be of shape"),
    ],
)
def test_what_no_call_could_have_is_refused(mask, changed, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sparseflash.warmup(mask, **(SHAPE | changed))


def test_a_call_finds_its_plan_in_the_mask():
    mask = masks.local(20)(100, block_size=16)
    sparseflash.warmup(mask, kv_heads=2, **SHAPE)
    (plan,) = mask.cache.values()
    assert (plan.spec.q_len, plan.spec.kv_heads, plan.backend.name) == (100, 2, "cpu")
    query, key = torch.randn(1, 4, 100, 16), torch.randn(1, 2, 100, 16)
    sparseflash.attention(query, key, key, mask)
    assert list(mask.cache.values()) == [plan]


@pytest.mark.slow
def test_a_backward_pass_finds_its_kernels_compiled():
    reports = finish(start("compile_triton", "warmup", 90))
    found = {x["call"]: (x["before"], x["forward"], x["later"]) for x in reports}
    assert found == {
        "plain": (3, 0, 0),
        "padded": (3, 0, 0),
        "biased": (4, 0, 0),
        "no gradients": (1, 0, 0),
        "first call": (0, 3, 0),
    }
