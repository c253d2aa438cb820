"""Kernels compiled before the first call."""

import pytest
import torch
from triton import knobs

import masks
import sparseflash
from sparseflash.dispatch.call import Plan

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
        (None, {"seq_len": 64, "bias": torch.zeros(3, 9)}, "bias must have shape"),
        (None, {"seq_len": 64, "heads": 0}, "heads must be at least 1, got 0"),
        (None, {"seq_len": 64, "kv_heads": 0}, "kv_heads must be at least 1, got 0"),
        (None, {"seq_len": 64, "value_dim": 0}, "value_dim must be at least 1, got 0"),
        (None, {"seq_len": "64"}, "seq_len must be an integer, got '64'"),
        (None, {"seq_len": -1}, "seq_len must be at least 1 token, got -1"),
        (None, {"seq_len": (1, 2, 3)}, r"seq_len must be an integer or a \(q, k\) pair"),
        (None, {"seq_len": 64, "key_lengths": torch.ones(1)}, "key_lengths must be a bool, got t"),
        (None, {"seq_len": 64, "backward": "no"}, "backward must be a bool, got 'no'"),
        (None, {"seq_len": 64, "max_logits": 1}, "max_logits must be a bool, got 1"),
        (None, {"seq_len": 64, "dtype": "bfloat16"}, "dtype must be a floating-point torch.dtype"),
    ],
)
def test_what_no_call_could_have_is_refused(mask, changed, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sparseflash.warmup(mask, **(SHAPE | changed))


def test_a_machine_without_the_device_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device 'cuda' needs CUDA"):
        sparseflash.warmup(heads=1, head_dim=8, seq_len=8)


def plans_of(mask: masks.BlockMask) -> list[Plan]:
    return [stored for stored in mask.cache.values() if isinstance(stored, Plan)]


def test_what_calls_ask_for_besides():
    function = sparseflash.ScoreFunction.from_torch(
        "warm", lambda s, *rest: s * rest[4][0], (float,)
    )
    options = {"score": function, "score_tensors": [torch.ones(1)], "max_logits": True}
    mask = masks.local(20)(100, block_size=16)
    sparseflash.warmup(mask, value_dim=24, **options, **SHAPE)
    (plan,) = plans_of(mask)
    assert plan.spec.value_dim == 24
    assert plan.spec.extras == {"score function", "score tensors", "maximum logits"}


def test_a_call_finds_its_plan_in_the_mask():
    mask = masks.local(20)(100, block_size=16)
    sparseflash.warmup(mask, kv_heads=2, **SHAPE)
    (plan,) = plans_of(mask)
    assert (plan.spec.q_len, plan.spec.kv_heads, plan.backend.name) == (100, 2, "cpu")
    query, key = torch.randn(1, 4, 100, 16), torch.randn(1, 2, 100, 16)
    sparseflash.attention(query, key, key, mask)
    assert plans_of(mask) == [plan]


@pytest.mark.slow
def test_a_backward_pass_finds_its_kernels_compiled(compiler):
    reports = compiler.reports("triton", "warmup", 90)
    found = {x["call"]: (x["before"], x["forward"], x["later"]) for x in reports}
    assert found == {
        "plain": (3, 0, 0),
        "padded": (3, 0, 0),
        "biased": (4, 0, 0),
        "no gradients": (1, 0, 0),
        "first call": (0, 3, 0),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_calls_after_a_warmup_compile_nothing(backend, monkeypatch):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("hopper cannot serve it")
    compiled = []
    hook = lambda **facts: compiled.append(facts["repr"])  # noqa: E731
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    options = {"backend": backend, "dropout_p": 0.1}
    mask = masks.local(70)(300, block_size=128, device="cuda")
    sparseflash.warmup(mask, heads=2, head_dim=72, dtype=torch.float16, **options)
    assert len(compiled) >= 3 or backend == "hopper"  # whose tiles are those of 128 dims
    compiled.clear()
    facts = {"dtype": torch.float16, "device": "cuda", "requires_grad": True}
    query, key, value = (torch.randn(1, 2, 300, 72, **facts) for _ in range(3))
    out = sparseflash.attention(query, key, value, mask, **options)
    out.backward(torch.ones_like(out))
    assert compiled == []
