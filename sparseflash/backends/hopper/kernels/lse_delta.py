"""Two numbers that the backward pass reads for each query: log2(e) * LSE and -delta.

    delta = rowsum(dO * O) - dLSE

The first is inf for a query without keys, so that exp2(S - inf) is 0. The second is the initial
accumulator of dP = dO V^T where registers allow. Both are in one float32 tensor (2 * batch *
heads, q_len rounded up to whole blocks), with two rows for each (batch, head).

The kernel of dQ writes them in its prologue. If that kernel does not run, the kernel of this file
writes them, with the same bits:

    one warpgroup | TMA dO, O | read LSE, dLSE | wait | rowsum(dO * O) | write both
"""

from typing import NamedTuple

from sparseflash.backends.hopper.device.gluon_compat import fence_async_shared, gl, gluon
from sparseflash.backends.hopper.device.layouts import WARPGROUP_M
from sparseflash.backends.hopper.device.params import LOG2E, NEG_INF
from sparseflash.backends.hopper.device.pipeline import (
    PipelineState,
    consumer_wait,
    make_pipeline,
    producer_load,
    stage_matrix,
)


class LseTensors(NamedTuple):
    """Pointers to LSE, its gradient (or None), and the result of this module, all float32.

    lse, grad_lse: (batch * heads, q_len)
    lse_delta:     (2 * batch * heads, q_len rounded up to whole blocks)
    """

    lse: gl.tensor
    grad_lse: gl.tensor
    lse_delta: gl.tensor


@gluon.jit(
    do_not_specialize=["heads", "q_len", "padded_len"],
    do_not_specialize_on_alignment=["lse", "grad_lse", "lse_delta"],
)
def lse_delta_kernel(grad_outs, outs, lse, grad_lse, lse_delta, heads, q_len, padded_len):
    """Writes LSE and delta of 64 queries of a (batch, head) per CTA."""
    LAYOUT: gl.constexpr = delta_input_layout(outs.block_type.shape[3])
    tiles_per_head = padded_len // WARPGROUP_M
    bh = gl.program_id(0) // tiles_per_head
    query_start = gl.program_id(0) % tiles_per_head * WARPGROUP_M
    grad_out_pipeline, out_pipeline = make_pipeline(grad_outs, 1, 1), make_pipeline(outs, 1, 1)
    fence_async_shared()
    empty_state = PipelineState(0, 1)  # both stages are empty: producer_acquire does not wait
    producer_load(grad_out_pipeline, grad_outs, bh // heads, bh % heads, query_start, empty_state)
    producer_load(out_pipeline, outs, bh // heads, bh % heads, query_start, empty_state)
    tensors = LseTensors(lse, grad_lse, lse_delta)
    tokens = query_start + gl.arange(0, WARPGROUP_M, layout=gl.SliceLayout(1, LAYOUT))
    lse_log2, dlse = read_lse(tensors, bh, tokens, q_len)
    consumer_wait(grad_out_pipeline, PipelineState(0, 0))
    consumer_wait(out_pipeline, PipelineState(0, 0))
    grad_out, out = stage_matrix(grad_out_pipeline, 0), stage_matrix(out_pipeline, 0)
    minus_delta = compute_minus_delta(out.load(LAYOUT), grad_out.load(LAYOUT), dlse)
    write_lse_delta(tensors, lse_log2, minus_delta, bh, tokens, padded_len)


@gluon.constexpr_function
def delta_input_layout(dims):
    """The layout of [64, dims] in which a row is in the threads that hold it in an accumulator."""
    # A thread has eight neighbouring columns: 16 bytes, the widest load from shared memory.
    columns = [1, 2, 4, *(1 << i for i in range(5, dims.bit_length() - 1))]
    registers = [*([0, column] for column in columns), [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, dims])


@gluon.jit
def read_lse(tensors, bh, tokens, q_len):
    """(log2(e) * LSE, dLSE), each [64], of queries of a (batch, head); zeros past the sequence."""
    inside = tokens < q_len
    head_start = bh.to(gl.int64) * q_len
    lse_log2 = gl.load(tensors.lse + head_start + tokens, mask=inside, other=0.0) * LOG2E
    lse_log2 = gl.where(lse_log2 == NEG_INF, float("inf"), lse_log2)
    grad_lse = gl.zeros_like(lse_log2)
    if tensors.grad_lse is not None:
        grad_lse = gl.load(tensors.grad_lse + head_start + tokens, mask=inside, other=0.0)
    return lse_log2, grad_lse


@gluon.jit
def compute_minus_delta(out, grad_out, grad_lse):
    """dLSE - rowsum(dO * O): [64, D] -> [64]"""
    return grad_lse - gl.sum(out.to(gl.float32) * grad_out.to(gl.float32), axis=1)


@gluon.jit
def write_lse_delta(tensors, lse_log2, minus_delta, bh, tokens, padded_len):
    """Writes log2(e) * LSE and -delta of queries of a (batch, head), past the sequence too."""
    # TMA of the kernel of dK and dV reads whole tiles, so none may be uninitialised.
    lse_row_ptr = tensors.lse_delta + bh.to(gl.int64) * 2 * padded_len
    gl.store(lse_row_ptr + tokens, lse_log2)
    gl.store(lse_row_ptr + padded_len + tokens, minus_delta)
