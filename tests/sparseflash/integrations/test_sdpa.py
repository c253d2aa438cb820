"""torch's attention, replaced in a context."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import masks
import sparseflash

PATTERN = masks.local(9)


def tensors(q_len=40, k_len=40, kv_heads=4):
    shapes = [(4, q_len), (kv_heads, k_len), (kv_heads, k_len)]
    return [torch.randn(2, *shape, 8, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("make", [lambda p: p, lambda p: "local(9)", lambda p: p(40, 16)])
def test_calls_attend_by_the_mask_forward_and_backward(make, causal):
    own = PATTERN(40) & (masks.causal() if causal else masks.full())(40)
    inputs = tensors()
    with sparseflash.replace_sdpa(make(PATTERN)):
        out = sdpa(*inputs, is_causal=causal, scale=0.3)
    expected = sdpa(*inputs, own.to_dense(), scale=0.3)
    torch.testing.assert_close(out, expected)
    for result, wanted in zip(
        torch.autograd.grad(out.sum(), inputs),
        torch.autograd.grad(expected.sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(result, wanted)


def test_calls_of_other_lengths_and_calls_outside_run_as_they_are():
    inputs = tensors(k_len=30)
    allowed = torch.rand(40, 30) < 0.5
    allowed[:, 0] = True
    with sparseflash.replace_sdpa(PATTERN(50, 16)):
        square = tensors()
        assert torch.equal(sdpa(*square, is_causal=True), sdpa(*square, is_causal=True))
    with sparseflash.replace_sdpa(PATTERN):
        inside = sdpa(*inputs, allowed)
    assert torch.equal(inside, sdpa(*inputs, allowed))
    assert not torch.allclose(sdpa(*square), sdpa(*square, PATTERN(40).to_dense()))


def test_grouped_heads():
    query, key, value = tensors(kv_heads=2)
    with sparseflash.replace_sdpa(PATTERN):
        out = sdpa(query, key, value, enable_gqa=True)
    expected = sdpa(query, key, value, PATTERN(40).to_dense(), enable_gqa=True)
    torch.testing.assert_close(out, expected)


def test_an_attn_mask_is_refused():
    with (
        pytest.raises(ValueError, match=r"attn_mask must be None .*, got \(40, 40\)"),
        sparseflash.replace_sdpa(PATTERN),
    ):
        sdpa(*tensors(), torch.ones(40, 40).bool())
    with pytest.raises(TypeError, match="pattern must be a Pattern or its text"):
        sparseflash.replace_sdpa(torch.ones(4, 4))
