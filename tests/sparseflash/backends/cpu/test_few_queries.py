"""Calls of a few queries that attend the same keys are one operation of torch."""

from functools import partial

import pytest
import torch

import sparseflash
from sparseflash.backends import cpu
from sparseflash.backends.cpu import few_queries
from sparseflash.reference import standard_attention
from sparseflash.testing import STRIDES, make_inputs
from sparseflash.testing.error_budget import assert_close_to_reference
from tests.helpers.calls import call_on
from tests.helpers.cpu_calls import (
    DTYPES,
    attention_with,
    check,
    dense_mask,
    mask_of,
    operations,
)


def same_keys(q_len, k_len, *runs):
    dense = torch.zeros(q_len, k_len, dtype=torch.bool)
    for begin, end in runs:
        dense[:, begin:end] = True
    return dense


def is_one_operation(inputs, mask, **options) -> bool:
    """Whether the forward pass is torch's own attention of the attended keys."""
    query, key, value, _ = inputs
    call = call_on(cpu, query, key, mask, value, **options)
    return few_queries.forward(call, query, key, value) is not None


def check_one_operation(dense, inputs, block_size=16, **options):
    """Checks the results of a call that needs no gradient, and one that does."""
    tensors, mask = inputs[:3], mask_of(dense, block_size)
    assert is_one_operation(inputs, mask, **options)
    actual = attention_with(mask, **options)(*tensors)
    exact, eager = (
        standard_attention(*(x.to(dtype) for x in tensors), dense, dtype=dtype, **options)
        for dtype in (torch.float64, tensors[0].dtype)
    )
    for name, *results in zip(("out", "lse"), actual, exact, eager, strict=True):
        assert_close_to_reference(*results, dtype=tensors[0].dtype, name=name)
    check(dense, inputs, block_size, **options)


@pytest.mark.parametrize("q_len", [1, 7, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("runs", [[(0, 150)], [(37, 38)], [(0, 33), (60, 61), (149, 150)]])
@pytest.mark.parametrize("strides", STRIDES)
def test_few_queries_of_the_same_keys(q_len, kv_heads, runs, strides):
    inputs = make_inputs(2, 4, q_len, 150, 8, kv_heads=kv_heads, strides=strides)
    dense = same_keys(q_len, 150, *runs)
    for options in ({}, {"key_lengths": torch.tensor([61, 61]), "scale": 0.7}):
        check_one_operation(dense, inputs, 32, **options)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 256])
@pytest.mark.parametrize("q_len", [1, 7, 16])
def test_few_queries_in_16_bits(dtype, head_dim, q_len):
    inputs = make_inputs(2, 4, q_len, 600, head_dim, dtype=dtype, kv_heads=2)
    dense = same_keys(q_len, 600, (0, 401), (490, 501))
    for options in ({}, {"key_lengths": torch.tensor([500, 500]), "scale": 2.0}):
        check_one_operation(dense, inputs, 32, **options)


@pytest.mark.parametrize("name", ["key", "value"])
def test_few_queries_of_keys_in_rows_that_overlap(name):
    inputs = list(make_inputs(1, 2, 1, 40, 8))
    inputs[("key", "value").index(name) + 1] = torch.randn(1, 2, 86).unfold(2, 8, 2)
    dense = same_keys(1, 40, (3, 30))
    check_one_operation(dense, inputs)


def test_few_queries_of_no_key_or_of_scores_of_minus_infinity():
    query, key, value, _ = inputs = make_inputs(1, 2, 1, 40, 8)
    mask = mask_of(same_keys(1, 40, (20, 40)))
    assert not is_one_operation(inputs, mask, key_lengths=torch.tensor([20]))
    query[0, 1] = 1.0
    key[0, 1, :, 3] = -torch.inf
    out, lse = attention_with(mask)(query, key, value)
    assert lse[0, 0].isfinite().all()
    assert (lse[0, 1] == -torch.inf).all()
    assert (out[0, 1] == 0).all()


def test_other_calls_of_few_queries_are_batched_products():
    halved = sparseflash.ScoreFunction("halved", lambda s, b, h, q, k: (s / 2, 0.5))
    inputs = make_inputs(2, 2, 3, 40, 8)
    mask = mask_of(same_keys(3, 40, (0, 40)))
    assert is_one_operation(inputs, mask)
    for options in (
        {"dropout_p": 0.5}, {"softcap": 2.0}, {"score": halved}, {"max_logits": True},
        {"bias": torch.zeros(1, 42)}, {"key_lengths": torch.tensor([40, 39])},
    ):  # fmt: skip
        assert not is_one_operation(inputs, mask, **options)
    assert not is_one_operation(inputs, mask_of(dense_mask("causal", 3, 40)))
    by_head = torch.stack([same_keys(3, 40, (0, 40)), same_keys(3, 40, (0, 20))])
    assert not is_one_operation(inputs, mask_of(by_head))
    every_second = same_keys(3, 40, *((i, i + 1) for i in range(0, 40, 2)))
    assert not is_one_operation(inputs, mask_of(every_second))
    assert not is_one_operation(make_inputs(2, 2, 3, 40, 8, value_dim=16), mask)
    inputs = make_inputs(2, 2, 17, 40, 8)
    assert not is_one_operation(inputs, mask_of(same_keys(17, 40, (0, 40))))


@pytest.mark.parametrize("name", range(3))
def test_few_queries_whose_gradients_are_needed_are_batched_products(name):
    inputs = make_inputs(1, 2, 1, 40, 8)
    mask = mask_of(same_keys(1, 40, (0, 40)))
    assert is_one_operation(inputs, mask)
    inputs[name].requires_grad_()
    assert not is_one_operation(inputs, mask)


def test_decoding_starts_few_operations_of_torch():
    """One query reads the keys of all heads where they are."""
    query, (key, value) = torch.randn(1, 4, 1, 64), torch.randn(2, 1, 4, 4096, 64)
    attend = partial(sparseflash.attention, query, key, value)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(attend(), expected)
    assert operations(attend) <= 35
    text = str(sparseflash.explain(query, key, value))
    assert "torch's attention of the keys that every query attends, if no gradient" in text
