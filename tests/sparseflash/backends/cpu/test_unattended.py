"""Keys and values that no query attends change no bit."""

import pytest
import torch

from sparseflash.testing import make_inputs
from tests.helpers.cpu_calls import attention_with, dense_mask, mask_of, results_of

UNATTENDED = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("number", UNATTENDED)
@pytest.mark.parametrize("block_size", [16, 32, (64, 16), 128])
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "seed": 2}], ids=["plain", "dropout"])
def test_what_no_query_attends_may_be_anything(number, block_size, where, options):
    inputs = make_inputs(2, 4, 90, 100, 8, kv_heads=2)
    dense = dense_mask("scattered", 90, 100).clone()
    dense[:, [3, 40, 99]] = False
    attention = attention_with(mask_of(dense, block_size), **options)
    expected = results_of(attention, *inputs)
    _, key, value, _ = inputs
    for name, tensor in (("key", key), ("value", value)):
        if where in (name, "both"):
            tensor[0, 1, [3, 40], 2] = number
            tensor[1, :, 99] = number
    results = results_of(attention, *inputs)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("where", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("number", UNATTENDED)
@pytest.mark.parametrize("block_size", [16, 64])
def test_other_queries_are_those_of_clean_keys(where, number, block_size):
    inputs = make_inputs(1, 2, 100, 100, 8)
    attention = attention_with(mask_of(dense_mask("causal", 100, 100), block_size))
    expected = results_of(attention, *inputs)
    inputs[where][:, 1, 60] = number
    results = results_of(attention, *inputs)
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result[:, 0], other[:, 0])  # the other head
    for result, other in zip(results[:3], expected[:3], strict=True):
        assert torch.equal(result[:, 1, :60], other[:, 1, :60])
    assert not results[0][:, 1, 60:].isfinite().all()
