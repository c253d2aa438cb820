"""The kernels that merge and add rows, against merge_attention and index_add."""

import math
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from sparseflash import merge, merge_attention
from sparseflash.backends.triton import merge as merge_rows_of
from sparseflash.backends.triton.kernels.merge import Rows, tiles_of_rows
from sparseflash.backends.triton.merge import (
    add_rows,
    copy_rows,
    merge_rows,
    write_rows_of_both,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


MIXED = [
    *((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)),
    *((torch.float32, torch.bfloat16), (torch.float16, torch.float32)),
]


@pytest.mark.parametrize(("dtype", "part_dtype"), MIXED)
@pytest.mark.parametrize("dims", [24, 64])
@pytest.mark.parametrize("rows", ["all", "some", "some of both"])
def test_rows_are_merged(dtype, part_dtype, dims, rows):
    """Of strided heads and tokens; rows without a key in either part, and in both."""
    torch.manual_seed(0)
    tokens, q_len = 90, 90 if rows == "all" else 50
    index = None if rows == "all" else torch.randperm(tokens, device=DEVICE)[:q_len]
    whole = torch.randn(2, 110, 3, dims, device=DEVICE).to(dtype).transpose(1, 2)
    out, lse = whole[:, 1:, 20:], torch.randn(2, 3, 110, device=DEVICE)[:, 1:, 20:] * 30
    part_out = torch.randn(2, 2, q_len, dims, device=DEVICE).to(part_dtype)
    part_lse = torch.randn(2, 2, q_len, device=DEVICE) * 30
    at = torch.arange(tokens, device=DEVICE) if index is None else index
    lse[:, :, at[:20]], part_lse[:, :, 10:30] = -math.inf, -math.inf
    out[:, :, at[:20]], part_out[:, :, 10:30] = 0, 0
    expected, expected_lse = out.clone(), lse.clone()
    part_index, parts = None, (part_out, part_lse)
    if rows == "some of both":
        part_index, parts = scattered((part_out, part_lse), tokens)
    outs = [out[:, :, at].float(), part_out.float()]
    merged, expected_lse[:, :, at] = merge_attention(outs, [lse[:, :, at], part_lse])
    expected[:, :, at] = merged.to(dtype)
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


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("rows", ["all", "some", "some of both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_keys_and_values_are_written_together(dtype, rows, adds):
    """Side by side in one row for each token, whose keys and values have different dims."""
    torch.manual_seed(0)
    dims, tokens = (24, 40), 90
    memory = torch.randn(tokens, 2 * 3 * sum(dims), device=DEVICE).to(dtype)
    totals = [
        x.unflatten(1, (2, 3, -1)).permute(1, 2, 0, 3)
        for x in memory.split([6 * n for n in dims], 1)
    ]
    q_len = tokens if rows == "all" else 50
    index = None if rows == "all" else torch.randperm(tokens, device=DEVICE)[:q_len]
    parts = [torch.randn(2, 3, q_len, n, device=DEVICE).bfloat16() for n in dims]
    at = torch.arange(tokens, device=DEVICE) if index is None else index
    expected = [x.clone() for x in totals]
    for total, part in zip(expected, parts, strict=True):
        written = part.float() + adds * total[:, :, at].float()
        total[:, :, at] = written.to(dtype)
    part_index = None
    if rows == "some of both":
        part_index, parts = scattered(parts, 77)
    write_rows_of_both((totals[0], totals[1]), (parts[0], parts[1]), index, part_index, adds)
    for total, each in zip(totals, expected, strict=True):
        torch.testing.assert_close(total, each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_launch_writes_keys_and_values(dtype):
    totals = torch.randn(2, 1, 2, 20, 8, dtype=dtype).unbind()
    parts = torch.randn(2, 1, 2, 20, 8).unbind()
    with mock.patch.object(merge_rows_of, "write_rows_of_both") as by_kernel:
        for write in (merge.add_both_in_place, merge.copy_both_in_place):
            write(on_gpu(*totals), on_gpu(*parts), slice(None))
    launches = [arguments[-1] for arguments, _ in by_kernel.call_args_list]
    assert launches == ([True, False] if dtype != torch.float64 else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_kernel_merges_parts_of_another_dtype(dtype):
    """Sums of many parts are in float32, and parts in 16 bits. Kernels do not know float64."""
    out, part = torch.randn(1, 2, 20, 8, dtype=dtype), torch.randn(1, 2, 20, 8).bfloat16()
    lse, part_lse = torch.randn(2, 1, 2, 20).unbind()
    with mock.patch.object(merge_rows_of, "merge_rows") as by_kernel:
        merge.merge_in_place(*on_gpu(out, lse, part, part_lse))
    assert by_kernel.called == (dtype != torch.float64)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


def on_gpu(*tensors):
    return [x.as_subclass(OnGpu) for x in tensors]


def test_as_many_rows_of_a_part():
    total, part = torch.randn(1, 2, 20, 8, device=DEVICE), torch.randn(1, 2, 10, 8, device=DEVICE)
    lse, part_lse = total[..., 0].clone(), part[..., 0].clone()
    some, fewer = torch.arange(10, device=DEVICE), torch.arange(9, device=DEVICE)
    for rows, part_rows in ((fewer, None), (some, fewer), (None, None), (None, some)):
        message = "part_rows must be as many as rows, got"
        with pytest.raises(ValueError, match=message):
            merge_rows(total, lse, part, part_lse, rows, part_rows)
        for function in (add_rows, copy_rows):
            with pytest.raises(ValueError, match=message):
                function(total, part, rows, part_rows)


@triton.jit
def offsets_kernel(nothing, dim_stride, found, INDEX: tl.constexpr, DIMS: tl.constexpr):
    """Writes the addresses of row 0 of a tensor that begins at `nothing`."""
    zero = tl.zeros([1], tl.int64)
    these = Rows(zero, zero, zero == 0, tl.program_id(1), tl.program_id(2))
    strides = (dim_stride * 0, dim_stride * 0, dim_stride * 0, dim_stride)
    at = tiles_of_rows(nothing, strides, nothing, strides, these, DIMS, DIMS, 1, INDEX)
    begin = nothing.to(tl.int64)
    dims = tl.arange(0, DIMS)[None, :]
    tl.store(found + dims, at.total.to(tl.int64) - begin)
    tl.store(found + DIMS + dims, at.part.to(tl.int64) - begin)


def test_offsets_of_dims_may_need_64_bits():
    """The last dim of a wide tensor begins 2^31 elements behind the first, or further."""
    found = torch.zeros(2, 32, dtype=torch.int64, device=DEVICE)
    nothing = torch.zeros(1, dtype=torch.bfloat16, device=DEVICE)
    offsets_kernel[(1,)](nothing, 2**28, found, INDEX=tl.int64, DIMS=32)
    expected = torch.arange(32, device=DEVICE) * 2**28 * nothing.element_size()
    assert torch.equal(found, expected.expand(2, -1))
