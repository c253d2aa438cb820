"""The kernels that merge and add rows, against merge_attention and index_add."""

import math

import pytest
import torch

from sparseflash import merge_attention
from sparseflash.backends.triton.merge import add_rows, merge_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [24, 64])
@pytest.mark.parametrize("rows", ["all", "some"])
def test_rows_are_merged(dtype, dims, rows):
    """Of strided heads and tokens; rows without a key in either part, and in both."""
    torch.manual_seed(0)
    tokens, q_len = 90, 90 if rows == "all" else 50
    index = None if rows == "all" else torch.randperm(tokens, device=DEVICE)[:q_len]
    whole = torch.randn(2, 110, 3, dims, device=DEVICE).to(dtype).transpose(1, 2)
    out, lse = whole[:, 1:, 20:], torch.randn(2, 3, 110, device=DEVICE)[:, 1:, 20:] * 30
    part_out = torch.randn(2, 2, q_len, dims, device=DEVICE).to(dtype)
    part_lse = torch.randn(2, 2, q_len, device=DEVICE) * 30
    at = torch.arange(tokens, device=DEVICE) if index is None else index
    lse[:, :, at[:20]], part_lse[:, :, 10:30] = -math.inf, -math.inf
    out[:, :, at[:20]], part_out[:, :, 10:30] = 0, 0
    expected, expected_lse = out.clone(), lse.clone()
    merged = merge_attention([out[:, :, at], part_out], [lse[:, :, at], part_lse])
    expected[:, :, at], expected_lse[:, :, at] = merged
    outside = whole[:, :1].clone()
    merge_rows(out, lse, part_out, part_lse, index)
    within = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, expected, atol=within, rtol=within)
    torch.testing.assert_close(lse, expected_lse)
    assert torch.equal(whole[:, :1], outside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added(dtype):
    torch.manual_seed(0)
    whole = torch.randn(2, 110, 3, 24, device=DEVICE).to(dtype).transpose(1, 2)
    total, rows = whole[:, 1:, 20:], torch.randperm(90, device=DEVICE)[:50]
    part = torch.randn(2, 2, 50, 24, device=DEVICE).to(dtype)
    expected, outside = total.index_add(2, rows, part), whole[:, :1].clone()
    add_rows(total, part, rows)
    torch.testing.assert_close(total, expected)
    assert torch.equal(whole[:, :1], outside)
