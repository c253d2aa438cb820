import pytest
import torch

from sparseflash.reference import standard_attention
from sparseflash.testing import (
    STRIDES,
    assert_close_to_reference,
    check_attention,
    make_inputs,
    poisoned_empty,
)


@pytest.mark.parametrize("strides", STRIDES)
def test_inputs_have_their_shapes(strides):
    query, key, value, grad_out = make_inputs(2, 4, 9, 7, 6, kv_heads=2, strides=strides)
    assert query.shape == grad_out.shape == (2, 4, 9, 6)
    assert key.shape == value.shape == (2, 2, 7, 6)
    assert query.is_contiguous() == (strides == "contiguous")
    assert (query.stride(-1) == 2) == (strides == "strided_last")
    assert (query.stride(0) == 0) == (strides == "expanded")


def test_inputs_follow_the_seed():
    first, second, other = (make_inputs(1, 1, 4, 4, 4, seed=s)[0] for s in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_unknown_strides():
    with pytest.raises(ValueError, match="strided_last"):
        make_inputs(1, 1, 4, 4, 4, strides="diagonal")


def test_poisoned_empty():
    like = torch.zeros(3)
    with poisoned_empty():
        floats = [torch.empty(3), torch.empty_like(like), torch.empty_strided((3,), (1,))]
        floats.append(like.new_empty(3))
        integers = torch.empty(3, dtype=torch.int32)
        flags = torch.empty(3, dtype=torch.bool)
    assert all(x.isnan().all() for x in floats)
    assert (integers == 2**31 - 1).all()
    assert flags.all()
    assert torch.empty.__name__ == "empty"
    assert "new_empty" not in vars(torch.Tensor)


def wrong(change):
    """Attention with its output changed."""

    def attention(query, key, value):
        out, lse = standard_attention(query, key, value, dtype=query.dtype)
        return change(out), lse

    return attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_check_accepts_eager_attention(dtype):
    query, key, value, grad_out = make_inputs(1, 2, 33, 40, 16, dtype=dtype)
    results = check_attention(wrong(lambda out: out), query, key, value, grad_out=grad_out)
    assert set(results) == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda out: out * (1 + 100 * torch.finfo(out.dtype).eps), "error"),
        (lambda out: torch.where(torch.arange(33).view(-1, 1) == 5, torch.nan, out), "NaN"),
        (lambda out: torch.where(torch.arange(33).view(-1, 1) == 5, torch.inf, out), "infinities"),
        (lambda out: out[:, :, :-1], "shape"),
    ],
    ids=["scaled", "nan", "inf", "cropped"],
)
def test_check_refuses(dtype, change, complaint):
    query, key, value, _ = make_inputs(1, 2, 33, 40, 16, dtype=dtype)
    with pytest.raises(AssertionError, match=f"out: .*{complaint}"):
        check_attention(wrong(change), query, key, value)


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_check_sees_a_wrong_gradient(name):
    def scaled(x):
        return x + 1e-4 * (x - x.detach())

    query, key, value, _ = make_inputs(1, 2, 33, 40, 16)

    def attention(*inputs):
        inputs = [scaled(x) if f"d{n}" == name else x for n, x in zip("qkv", inputs, strict=True)]
        return standard_attention(*inputs, dtype=torch.float32)

    with pytest.raises(AssertionError, match=f"{name}: .*error"):
        check_attention(attention, query, key, value)


def test_infinities_must_have_their_sign():
    infinite = torch.tensor([-torch.inf, 0.0]).double()
    with pytest.raises(AssertionError, match="infinities"):
        assert_close_to_reference(-infinite, infinite, infinite, dtype=torch.float32)
