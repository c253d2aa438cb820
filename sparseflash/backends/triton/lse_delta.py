"""The two numbers of each query row that the backward pass reads: log2(e) * LSE and delta.

    delta = rowsum(dO * O) - dLSE

The first is inf for a row without keys, so that exp2(score - inf) is 0. They lie in one float32
tensor (batch * heads, 2, q_len rounded up to whole blocks): its rows are aligned and read without
bounds, whatever the length of the sequence.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton import tiles


@triton.jit(**tiles.unspecialized("out", "grad_out", "grad_lse"))
def lse_delta_kernel(
    out, out_batch, out_head, out_token, out_dim,
    grad_out, grad_out_batch, grad_out_head, grad_out_token, grad_out_dim,
    grad_lse, grad_lse_batch, grad_lse_head, grad_lse_token, lse, lse_delta, heads, q_len,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * BM
    head = tl.program_id(1)
    batch = tl.program_id(2)
    strides = (grad_out_batch, grad_out_head, grad_out_token, grad_out_dim)
    grad_outs = tiles.one_head(grad_out, strides, batch, head, ALIGN, INDEX)
    strides = (out_batch, out_head, out_token, out_dim)
    outs = tiles.one_head(out, strides, batch, head, ALIGN, INDEX)
    do = tiles.load_rows(grad_outs, start, q_len, BM, DIMS, HEAD_DIM, True)
    compute_lse_delta(
        do, outs, grad_lse, grad_lse_batch, grad_lse_head, grad_lse_token, lse, lse_delta,
        batch, head, heads, start, q_len, HEAD_DIM, DIMS, BLOCK_Q, BM,
    )  # fmt: skip


@triton.jit
def compute_lse_delta(
    do, outs, grad_lse, grad_lse_batch, grad_lse_head, grad_lse_token, lse, lse_delta,
    batch, head, heads, start, q_len,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_Q: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """LSE and delta of the rows from `start` on, stored and returned; those past the sequence have
    no keys.
    """
    tokens = start + tl.arange(0, BM)
    in_sequence = tokens < q_len
    bh = (batch * heads + head).to(tl.int64)
    found = tl.load(lse + bh * q_len + tokens, mask=in_sequence, other=float("-inf"))
    lse2 = found * tiles.LOG2E
    lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
    o = tiles.load_rows(outs, start, q_len, BM, DIMS, HEAD_DIM, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse is not None:
        row = grad_lse + batch.to(tl.int64) * grad_lse_batch + head.to(tl.int64) * grad_lse_head
        delta -= tl.load(row + tokens.to(tl.int64) * grad_lse_token, mask=in_sequence, other=0.0)
    lse2_row, delta_row = lse_delta_pointers(lse_delta, bh, q_len, BLOCK_Q)
    tl.store(lse2_row + tokens, lse2)
    tl.store(delta_row + tokens, delta)
    return lse2, delta


@triton.jit
def lse_delta_pointers(lse_delta, bh, q_len, BLOCK_Q: tl.constexpr):
    """Pointers to log2(e) * LSE and to delta of one head."""
    padded = tl.cdiv(q_len, BLOCK_Q) * BLOCK_Q
    lse2_row = lse_delta + bh.to(tl.int64) * 2 * padded
    return lse2_row, lse2_row + padded
