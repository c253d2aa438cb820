"""Two numbers for each query that the backward pass reads: log2(e) * LSE and delta.

    delta = rowsum(dO * O) - dLSE

The first is inf for a query without keys, so that exp2(S - inf) is 0. They are stored in one
float32 tensor (batch * heads, 2, q_len rounded up to whole blocks), whose rows are aligned and are
read without bounds checks.

The kernel of dQ computes them for its queries. The kernel in this file is for calls without dQ. A
program has BM queries of one bh.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.kernels import block_lists, tensors
from sparseflash.backends.triton.kernels.signature import unspecialized
from sparseflash.backends.triton_common.constants import LOG2E


@triton.jit(**unspecialized("out", "grad_out", "grad_lse"))
def lse_delta_kernel(
    out, out_batch, out_head, out_token, out_dim,
    grad_out, grad_out_batch, grad_out_head, grad_out_token, grad_out_dim,
    grad_lse, grad_lse_batch, grad_lse_head, grad_lse_token, lse, lse_delta, heads, q_len,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    shape: tl.constexpr = block_lists.Shape(BM, BM, BLOCK_Q, BLOCK_Q, VALUE_DIM, VALUE_DIMS)
    start = tl.program_id(0) * BM
    head = tl.program_id(1)
    batch = tl.program_id(2)
    strides = (grad_out_batch, grad_out_head, grad_out_token, grad_out_dim)
    grad_outs = tensors.one_head(grad_out, strides, batch, head, ALIGN, INDEX)
    strides = (out_batch, out_head, out_token, out_dim)
    outs = tensors.one_head(out, strides, batch, head, ALIGN, INDEX)
    do = tensors.load_rows(grad_outs, start, q_len, shape, BM, True)  # (BM, VALUE_DIMS)
    strides = (grad_lse_batch, grad_lse_head, grad_lse_token)
    compute_lse_delta(
        do, outs, grad_lse, strides, lse, lse_delta, batch, head, heads, start, q_len, shape
    )


@triton.jit
def compute_lse_delta(
    do, outs, grad_lse, grad_lse_strides, lse, lse_delta, batch, head, heads, start, q_len, shape
):
    """Computes, stores and returns (log2(e) * LSE, delta), (BM) each, of the rows from `start` on.

    Rows past the end of the sequence have no keys.
    """
    tokens = start + tl.arange(0, shape.BM)
    in_sequence = tokens < q_len
    bh = (batch * heads + head).to(tl.int64)
    natural_lse = tl.load(lse + bh * q_len + tokens, mask=in_sequence, other=float("-inf"))
    lse_log2 = natural_lse * LOG2E
    lse_log2 = tl.where(lse_log2 == float("-inf"), float("inf"), lse_log2)
    o = tensors.load_rows(outs, start, q_len, shape, shape.BM, True)  # (BM, VALUE_DIMS)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse is not None:
        batch_stride, head_stride, token_stride = grad_lse_strides
        row = grad_lse + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
        delta -= tl.load(row + tokens.to(tl.int64) * token_stride, mask=in_sequence, other=0.0)
    lse_log2_row, delta_row = lse_delta_pointers(lse_delta, bh, q_len, shape.BLOCK_Q)
    tl.store(lse_log2_row + tokens, lse_log2)
    tl.store(delta_row + tokens, delta)
    return lse_log2, delta


@triton.jit
def lse_delta_pointers(lse_delta, bh, q_len, BLOCK_Q: tl.constexpr):
    """Pointers to log2(e) * LSE and to delta of one bh."""
    padded = tl.cdiv(q_len, BLOCK_Q) * BLOCK_Q
    lse_log2_row = lse_delta + bh.to(tl.int64) * 2 * padded
    return lse_log2_row, lse_log2_row + padded
