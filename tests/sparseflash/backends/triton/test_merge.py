"""The kernels that merge and add rows, against merge_attention and index_add."""

import math

import pytest
import torch

from sparseflash import merge_attention
from sparseflash.backends.triton.merge import add_rows, copy_rows, merge_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [24, 64])
@pytest.mark.parametrize("rows", ["all", "some", "some of both"])
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
    part_index, parts = None, (part_out, part_lse)
    if rows == "some of both":
        part_index, parts = scattered((part_out, part_lse), tokens)
    merged = merge_attention([out[:, :, at], part_out], [lse[:, :, at], part_lse])
    expected[:, :, at], expected_lse[:, :, at] = merged
    outside = whole[:, :1].clone()
    merge_rows(out, lse, *parts, index, part_index)
    within = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out, expected, atol=within, rtol=within)
    torch.testing.assert_close(lse, expected_lse)
    assert torch.equal(whole[:, :1], outside)


def scattered(tensors, tokens):
    """(indices, tensors of as many tokens that have those of `tensors` there, and else NaN)."""
    index = torch.randperm(tokens, device=DEVICE)[: tensors[0].shape[2]]
    found = [x.new_full((*x.shape[:2], tokens, *x.shape[3:]), math.nan) for x in tensors]
    for each, tensor in zip(found, tensors, strict=True):
        each[:, :, index] = tensor
    return index, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("both", [False, True])
def test_rows_are_added_and_copied(dtype, part_dtype, both):
    torch.manual_seed(0)
    whole = torch.randn(2, 110, 3, 24, device=DEVICE).to(dtype).transpose(1, 2)
    total, rows = whole[:, 1:, 20:], torch.randperm(90, device=DEVICE)[:50]
    part, part_rows = torch.randn(2, 2, 50, 24, device=DEVICE).to(part_dtype), None
    added, copied = total.clone(), total.clone()
    added[:, :, rows] = (total[:, :, rows].float() + part.float()).to(dtype)
    copied[:, :, rows] = part.to(dtype)
    outside = whole[:, :1].clone()
    if both:
        part_rows, (part,) = scattered((part,), 77)
    add_rows(total, part, rows, part_rows)
    torch.testing.assert_close(total, added)
    copy_rows(total, part, rows, part_rows)
    torch.testing.assert_close(total, copied)
    if both:
        copy_rows(total[:, :, :50], part, None, part_rows)
        torch.testing.assert_close(total[:, :, :50], copied[:, :, rows])
    assert torch.equal(whole[:, :1], outside)
