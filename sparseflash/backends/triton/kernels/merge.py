"""Merges attention over one more set of keys into some rows of a result.

    lse = log(exp(lse) + exp(part_lse)),    out = exp(lse_old - lse) out + exp(part_lse - lse) part

A program merges ROWS rows of a head. Each row is read and written once. Another kernel adds or
copies rows in the same way. `rows` and `part_rows` have the index of each of the q_len rows in the
result and in the part; None if it is that of the row itself.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from sparseflash.backends.triton.kernels import tensors
from sparseflash.backends.triton.kernels.signature import unspecialized


class Rows(NamedTuple):
    """The rows of a program.

    row, part_row: int64 (ROWS,), index among the rows of the result, and of the part
    valid: bool (ROWS,), whether there is such a row
    head, batch: of all of them
    """

    row: tl.tensor
    part_row: tl.tensor
    valid: tl.tensor
    head: tl.tensor
    batch: tl.tensor


class Tiles(NamedTuple):
    """Pointers (ROWS, VALUE_DIMS) to the rows of the result and of the part, and their mask."""

    total: tl.tensor
    part: tl.tensor
    inside: tl.tensor


@triton.jit
def rows_of_program(rows, part_rows, q_len, ROWS: tl.constexpr):
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = number < q_len
    row = number.to(tl.int64)
    part_row = number.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + number, mask=valid, other=0)
    if part_rows is not None:
        part_row = tl.load(part_rows + number, mask=valid, other=0)
    return Rows(row, part_row, valid, tl.program_id(1), tl.program_id(2))


@triton.jit
def tiles_of_rows(
    total, total_strides, part, part_strides, these,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, VALUE_DIMS)
    totals = tensors.one_head(total, total_strides, these.batch, these.head, ALIGN, INDEX)
    parts = tensors.one_head(part, part_strides, these.batch, these.head, ALIGN, INDEX)
    wide = dims.to(INDEX)
    of_total = (these.row * totals.token_stride)[:, None] + (wide * totals.dim_stride)[None, :]
    of_part = (these.part_row * parts.token_stride)[:, None] + (wide * parts.dim_stride)[None, :]
    inside = these.valid[:, None] & (dims < VALUE_DIM)[None, :]
    return Tiles(totals.start + of_total, parts.start + of_part, inside)


@triton.jit(**unspecialized("out", "part_out", without_dims=("lse", "part_lse")))
def merge_rows_kernel(
    out, out_batch, out_head, out_token, out_dim,
    part_out, part_out_batch, part_out_head, part_out_token, part_out_dim,
    lse, lse_batch, lse_head, lse_token,
    part_lse, part_lse_batch, part_lse_head, part_lse_token,
    rows, part_rows, q_len,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Strides of the LSE are in elements, not in units of ALIGN."""
    these = rows_of_program(rows, part_rows, q_len, ROWS)
    head, batch = these.head.to(tl.int64), these.batch.to(tl.int64)
    lse_pointers = lse + batch * lse_batch + head * lse_head + these.row * lse_token
    first = tl.load(lse_pointers, mask=these.valid, other=float("-inf"))
    of_part = batch * part_lse_batch + head * part_lse_head + these.part_row * part_lse_token
    second = tl.load(part_lse + of_part, mask=these.valid, other=float("-inf"))
    largest = tl.maximum(first, second)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp(first - shift)
    part_weight = tl.exp(second - shift)
    total = weight + part_weight
    empty = total == 0.0  # without a key in both sets; the weights are 0 then
    total = tl.where(empty, 1.0, total)
    merged_lse = tl.where(empty, float("-inf"), shift + tl.log(total))
    inverse = 1.0 / total

    out_strides = (out_batch, out_head, out_token, out_dim)
    part_strides = (part_out_batch, part_out_head, part_out_token, part_out_dim)
    at = tiles_of_rows(
        out, out_strides, part_out, part_strides, these, VALUE_DIM, VALUE_DIMS, ALIGN, INDEX
    )
    tile = tl.load(at.total, mask=at.inside, other=0.0).to(tl.float32)
    part = tl.load(at.part, mask=at.inside, other=0.0).to(tl.float32)
    merged = tile * (weight * inverse)[:, None] + part * (part_weight * inverse)[:, None]
    tl.store(at.total, merged.to(out.dtype.element_ty), mask=at.inside)
    tl.debug_barrier()  # several warps read the LSE of a row, and one writes it
    tl.store(lse_pointers, merged_lse, mask=these.valid)


@triton.jit
def write_rows(
    total, total_strides, part, part_strides, these,
    ADDS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr,
    ALIGN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    at = tiles_of_rows(
        total, total_strides, part, part_strides, these, VALUE_DIM, VALUE_DIMS, ALIGN, INDEX
    )
    if ADDS:
        tile = tl.load(at.total, mask=at.inside, other=0.0).to(tl.float32)
        tile += tl.load(at.part, mask=at.inside, other=0.0).to(tl.float32)
    else:
        tile = tl.load(at.part, mask=at.inside, other=0.0)
    tl.store(at.total, tile.to(total.dtype.element_ty), mask=at.inside)


@triton.jit(**unspecialized("total", "part"))
def write_rows_kernel(
    total, total_batch, total_head, total_token, total_dim,
    part, part_batch, part_head, part_token, part_dim,
    rows, part_rows, q_len,
    ADDS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Copies rows of a part to rows of a total, or adds them if ADDS."""
    these = rows_of_program(rows, part_rows, q_len, ROWS)
    total_strides = (total_batch, total_head, total_token, total_dim)
    part_strides = (part_batch, part_head, part_token, part_dim)
    write_rows(
        total, total_strides, part, part_strides, these, ADDS, VALUE_DIM, VALUE_DIMS, ALIGN, INDEX
    )


@triton.jit(**unspecialized("key", "key_part", "value", "value_part"))
def write_rows_of_both_kernel(
    key, key_batch, key_head, key_token, key_dim,
    key_part, key_part_batch, key_part_head, key_part_token, key_part_dim,
    value, value_batch, value_head, value_token, value_dim,
    value_part, value_part_batch, value_part_head, value_part_token, value_part_dim,
    rows, part_rows, q_len,
    ADDS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_DIMS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, ROWS: tl.constexpr,
    ALIGN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """As write_rows_kernel, for keys and values, or gradients of them. Programs with an even
    number along the last axis write keys, the others values.
    """
    found = rows_of_program(rows, part_rows, q_len, ROWS)
    number = tl.program_id(2)
    these = Rows(found.row, found.part_row, found.valid, found.head, number // 2)
    if number % 2 == 0:
        total_strides = (key_batch, key_head, key_token, key_dim)
        part_strides = (key_part_batch, key_part_head, key_part_token, key_part_dim)
        write_rows(
            key, total_strides, key_part, part_strides, these,
            ADDS, KEY_DIM, KEY_DIMS, ALIGN, INDEX,
        )  # fmt: skip
    else:
        total_strides = (value_batch, value_head, value_token, value_dim)
        part_strides = (value_part_batch, value_part_head, value_part_token, value_part_dim)
        write_rows(
            value, total_strides, value_part, part_strides, these,
            ADDS, VALUE_DIM, VALUE_DIMS, ALIGN, INDEX,
        )  # fmt: skip
