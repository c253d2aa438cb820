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


@pytest.mark.parametrize("shape", [(1, 4), (2, 1), (1, 1)])
def test_keys_are_broadcast_as_torch_does(shape):
    query, key, value = tensors()
    key, value = (x[: shape[0], : shape[1]] for x in (key, value))
    with sparseflash.replace_sdpa(PATTERN):
        out = sdpa(query, key, value)
    expected = sdpa(query, key, value, PATTERN(40).to_dense())
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), (key, value)),
        torch.autograd.grad(expected.sum(), (key, value)),
    )


@pytest.mark.parametrize(
    ("shapes", "grouped"),
    [
        ([(40, 8)] * 3, False),
        ([(4, 40, 8)] * 3, False),
        ([(3, 2, 4, 40, 8)] * 3, False),
        ([(3, 1, 4, 40, 8), (2, 1, 40, 8), (40, 8)], False),
        ([(4, 40, 8), (2, 40, 8), (2, 40, 8)], True),
        ([(3, 2, 4, 40, 8), (2, 2, 40, 8), (1, 2, 40, 5)], True),
    ],
)
def test_calls_of_any_number_of_dims(shapes, grouped):
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    with sparseflash.replace_sdpa(PATTERN):
        out = sdpa(*inputs, enable_gqa=grouped)
    expected = sdpa(*inputs, PATTERN(40).to_dense(), enable_gqa=grouped)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, r"enable_gqa must be True for query and key of \(4, 2\) heads"),
        ({"enable_gqa": True, "scale": 0.0}, "scale must be positive and finite, got 0.0"),
        ({"enable_gqa": True, "dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"value": torch.zeros(3, 4, 40, 8)}, r"query, key and value must broadcast, got \[\(2"),
        (
            {"value": torch.zeros(2, 2, 4, 40, 8)[..., 0]},
            r"query, key and value must broadcast, got",
        ),
    ],
)
def test_calls_that_are_not_replaced_are_named(changed, message):
    query, key, value = tensors(kv_heads=2)
    if "value" in changed:
        key = query
    with sparseflash.replace_sdpa(PATTERN), pytest.raises(ValueError, match=message):
        sdpa(query, key, **{"value": value} | changed)


def test_an_attn_mask_is_refused():
    with (
        pytest.raises(ValueError, match=r"attn_mask must be None .*, got \(40, 40\)"),
        sparseflash.replace_sdpa(PATTERN),
    ):
        sdpa(*tensors(), torch.ones(40, 40).bool())
    with pytest.raises(TypeError, match="mask must be a Pattern, its text or a BlockMask, got Te"):
        sparseflash.replace_sdpa(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*, got 'cuda'"):
        sparseflash.replace_sdpa(PATTERN, backend="cuda")
