"""The two terms of each query row that the backward pass reads: log2(e) * LSE and -delta.

    delta = rowsum(dO * O) - dLSE

The first is inf for a row without keys, so that exp2(score - inf) is 0. The second is to be
added, and the kernel of dK and dV begins dO V^T with it where registers allow. They lie in one
float32 tensor (2 * batch * heads, q_len rounded up to whole blocks), two rows for each head.

The kernel of dQ writes them on its way; where it does not run, a kernel of their own does, with
the same bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparseflash.backends.compiled import launch
from sparseflash.backends.hopper import device
from sparseflash.backends.hopper.device import PART
from sparseflash.backends.hopper.gluon_shim import fence_async_shared, gl, gluon, mbarrier
from sparseflash.backends.hopper.launch import OPTIONS, PART_TILES


def empty(query: Tensor, block: int) -> Tensor:
    """Room for the terms of queries in blocks of `block` tokens."""
    batch, heads, q_len, _ = query.shape
    padded_len = -(-q_len // block) * block
    shape = (2 * batch * heads, padded_len)
    return torch.empty(shape, dtype=torch.float32, device=query.device)


def compute(
    grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None, terms: Tensor
) -> None:
    """Writes the terms of all rows; zeros past the sequence."""
    _, heads, q_len, head_dim = out.shape
    tiles = (PART_TILES.of(x) for x in (grad_out, out))
    arguments = (*tiles, lse, grad_lse, terms, heads, q_len, terms.shape[1])
    grid = (terms.numel() // (2 * PART.value), 1, 1)
    variant = (out.device, out.dtype, head_dim, grad_lse is None)
    launch(row_terms_kernel, grid, arguments, variant, OPTIONS)


@gluon.jit(
    do_not_specialize=["heads", "q_len", "padded_len"],
    do_not_specialize_on_alignment=["lse", "grad_lse", "terms"],
)
def row_terms_kernel(grad_outs, outs, lse, grad_lse, terms, heads, q_len, padded_len):
    """Programs take PART rows of a head each."""
    ROWS: gl.constexpr = layout(outs.block_type.shape[3])
    parts = padded_len // PART
    pair, start = gl.program_id(0) // parts, gl.program_id(0) % parts * PART
    grad_out_ring, out_ring = device.ring(grad_outs, 1, 1), device.ring(outs, 1, 1)
    fence_async_shared()
    device.fill(grad_out_ring, grad_outs, pair // heads, pair % heads, start, 0, 1)
    device.fill(out_ring, outs, pair // heads, pair % heads, start, 0, 1)
    vectors = Vectors(lse, grad_lse, terms)
    tokens = start + gl.arange(0, PART, layout=gl.SliceLayout(1, ROWS))
    lse2, dlse = read_lse(vectors, pair, tokens, q_len)
    mbarrier.wait(grad_out_ring.filled.index(0), 0)
    mbarrier.wait(out_ring.filled.index(0), 0)
    grad_out, out = device.matrix(grad_out_ring, 0), device.matrix(out_ring, 0)
    minus_delta = minus_delta_of(out.load(ROWS), grad_out.load(ROWS), dlse)
    write(vectors, lse2, minus_delta, pair, tokens, padded_len)


class Vectors(NamedTuple):
    """Tensors of one entry or two for each query of a head; grad_lse may be None."""

    lse: gl.tensor
    grad_lse: gl.tensor
    terms: gl.tensor


@gluon.constexpr_function
def layout(dims):
    """Of (PART, dims) elements, with each row in the four threads that have it in a product."""
    columns = [1, 2, 4, *(1 << i for i in range(5, dims.bit_length() - 1))]
    registers = [*([0, column] for column in columns), [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, dims])


@gluon.jit
def read_lse(vectors, pair, tokens, q_len):
    """(log2(e) * LSE, dLSE) of queries of a head; zeros past the sequence."""
    inside = tokens < q_len
    first = pair.to(gl.int64) * q_len
    lse2 = gl.load(vectors.lse + first + tokens, mask=inside, other=0.0) * device.LOG2E
    lse2 = gl.where(lse2 == device.NEG_INF, float("inf"), lse2)
    grad_lse = gl.zeros_like(lse2)
    if vectors.grad_lse is not None:
        grad_lse = gl.load(vectors.grad_lse + first + tokens, mask=inside, other=0.0)
    return lse2, grad_lse


@gluon.jit
def minus_delta_of(out, grad_out, grad_lse):
    """dLSE - rowsum(dO * O)"""
    return grad_lse - gl.sum(out.to(gl.float32) * grad_out.to(gl.float32), axis=1)


@gluon.jit
def write(vectors, lse2, minus_delta, pair, tokens, padded_len):
    """Writes both terms of queries of a head; those past the sequence too."""
    lse2_row = vectors.terms + pair.to(gl.int64) * 2 * padded_len
    gl.store(lse2_row + tokens, lse2)
    gl.store(lse2_row + padded_len + tokens, minus_delta)
