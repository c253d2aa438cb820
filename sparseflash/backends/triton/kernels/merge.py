"""Merges attention over one more set of keys into some rows of a result.

    lse = log(exp(lse) + exp(part_lse)),    out = exp(lse_old - lse) out + exp(part_lse - lse) part

A program merges ROWS rows of a head. Each row is read and written once. Another kernel adds rows
in the same way.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.kernels import tensors
from sparseflash.backends.triton.kernels.signature import unspecialized


@triton.jit(**unspecialized("out", "part_out", "lse", "part_lse"))
def merge_rows_kernel(
    out, out_batch, out_head, out_token, out_dim,
    part_out, part_out_batch, part_out_head, part_out_token, part_out_dim,
    lse, lse_batch, lse_head, lse_token, lse_dim,
    part_lse, part_lse_batch, part_lse_head, part_lse_token, part_lse_dim,
    rows, q_len,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """`rows` has the row of `out` for each of the q_len rows of the part; None if all in order."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    valid = token < q_len
    row = token.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + token, mask=valid, other=0)
    strides = (lse_batch, lse_head, lse_token, lse_dim)
    lses = tensors.one_head(lse, strides, batch, head, ALIGN, INDEX)
    strides = (part_lse_batch, part_lse_head, part_lse_token, part_lse_dim)
    part_lses = tensors.one_head(part_lse, strides, batch, head, ALIGN, INDEX)
    lse_pointers = lses.start + row * lses.token_stride
    first = tl.load(lse_pointers, mask=valid, other=float("-inf"))
    part_pointers = part_lses.start + token.to(tl.int64) * part_lses.token_stride
    second = tl.load(part_pointers, mask=valid, other=float("-inf"))
    largest = tl.maximum(first, second)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp(first - shift)
    part_weight = tl.exp(second - shift)
    total = weight + part_weight
    empty = total == 0.0  # without a key in both sets; the weights are 0 then
    total = tl.where(empty, 1.0, total)
    merged_lse = tl.where(empty, float("-inf"), shift + tl.log(total))
    inverse = 1.0 / total

    dims = tl.arange(0, VALUE_DIMS)
    inside = valid[:, None] & (dims < VALUE_DIM)[None, :]
    strides = (out_batch, out_head, out_token, out_dim)
    outs = tensors.one_head(out, strides, batch, head, ALIGN, INDEX)
    strides = (part_out_batch, part_out_head, part_out_token, part_out_dim)
    parts = tensors.one_head(part_out, strides, batch, head, ALIGN, INDEX)
    pointers = outs.start + (row * outs.token_stride)[:, None] + (dims * outs.dim_stride)[None, :]
    rows_of_part = (token.to(tl.int64) * parts.token_stride)[:, None]
    part_pointers = parts.start + rows_of_part + (dims * parts.dim_stride)[None, :]
    tile = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    part = tl.load(part_pointers, mask=inside, other=0.0).to(tl.float32)
    merged = tile * (weight * inverse)[:, None] + part * (part_weight * inverse)[:, None]
    tl.store(pointers, merged.to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # several warps read the LSE of a row, and one writes it
    tl.store(lse_pointers, merged_lse, mask=valid)


@triton.jit(**unspecialized("total", "part"))
def add_rows_kernel(
    total, total_batch, total_head, total_token, total_dim,
    part, part_batch, part_head, part_token, part_dim,
    rows, q_len,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """`rows` has the row of `total` for each of the q_len rows of the part."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    valid = token < q_len
    row = tl.load(rows + token, mask=valid, other=0)
    dims = tl.arange(0, VALUE_DIMS)
    inside = valid[:, None] & (dims < VALUE_DIM)[None, :]
    strides = (total_batch, total_head, total_token, total_dim)
    totals = tensors.one_head(total, strides, batch, head, ALIGN, INDEX)
    strides = (part_batch, part_head, part_token, part_dim)
    parts = tensors.one_head(part, strides, batch, head, ALIGN, INDEX)
    to_row = (row * totals.token_stride)[:, None]
    pointers = totals.start + to_row + (dims * totals.dim_stride)[None, :]
    to_row = (token.to(tl.int64) * parts.token_stride)[:, None]
    part_pointers = parts.start + to_row + (dims * parts.dim_stride)[None, :]
    tile = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    more = tl.load(part_pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, (tile + more).to(total.dtype.element_ty), mask=inside)
