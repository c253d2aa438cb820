"""The two terms of each query row that the backward pass reads: log2(e) * LSE and delta.

    delta = rowsum(dO * O) - dLSE

The first is inf for a row without keys, so that exp2(score - inf) is 0. They lie in one float32
tensor (2 * batch * heads, q_len rounded up to whole blocks), two rows for each head.
"""

import torch
from torch import Tensor

from sparseflash.backends.compiled import launch
from sparseflash.backends.hopper import device
from sparseflash.backends.hopper.device import BLOCK, PART
from sparseflash.backends.hopper.gluon_shim import gl, gluon
from sparseflash.backends.hopper.launch import OPTIONS, addressable_strides, width

VECTOR = gl.constexpr(8)  # elements that a thread loads at once


def row_terms(grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None) -> Tensor:
    """The terms of all rows; zeros past the sequence."""
    batch, heads, q_len, head_dim = out.shape
    padded_len = -(-q_len // BLOCK.value) * BLOCK.value
    shape = (2 * batch * heads, padded_len)
    terms = torch.empty(shape, dtype=torch.float32, device=out.device)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    strides = [_in_vectors(x) for x in (grad_out, out)]
    arguments = (grad_out, *strides[0], out, *strides[1], lse, grad_lse, terms, heads, q_len)
    grid = (batch * heads * padded_len // PART.value, 1, 1)
    wide = tuple(n >= 2**31 for n in (*strides[0], *strides[1]))
    variant = (out.device, out.dtype, head_dim, grad_lse is None, wide)
    dims = {"HEAD_DIM": head_dim, "DIMS": width(head_dim)}
    launch(row_terms_kernel, grid, arguments, variant, dims | OPTIONS)
    return terms


def _in_vectors(tensor: Tensor) -> tuple[int, ...]:
    """The strides of batch, heads and tokens in units of VECTOR elements."""
    strides = addressable_strides(tensor.shape, tensor.stride(), tensor.element_size())
    return tuple(n // VECTOR.value for n in strides[:3])


STRIDES = [
    f"{tensor}_{axis}" for tensor in ("grad_out", "out") for axis in ("batch", "head", "token")
]


@gluon.jit(
    do_not_specialize=[*STRIDES, "heads", "q_len"],
    do_not_specialize_on_alignment=["lse", "grad_lse"],
)
def row_terms_kernel(
    grad_out, grad_out_batch, grad_out_head, grad_out_token,
    out, out_batch, out_head, out_token,
    lse, grad_lse, terms, heads, q_len, HEAD_DIM: gl.constexpr, DIMS: gl.constexpr,
):  # fmt: skip
    """Programs take PART rows of a head each. Strides count VECTOR elements; that of dims is 1."""
    LANES: gl.constexpr = DIMS // VECTOR
    TILE: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    padded_len = gl.cdiv(q_len, BLOCK) * BLOCK
    parts = padded_len // PART
    pair = (gl.program_id(0) // parts).to(gl.int64)
    tokens = gl.program_id(0) % parts * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, TILE))
    inside = tokens < q_len
    dims = gl.expand_dims(gl.arange(0, DIMS, layout=gl.SliceLayout(0, TILE)), 0)
    batch, head = pair // heads, pair % heads
    rows = gl.expand_dims(tokens.to(gl.int64), 1)
    outs = out + (batch * out_batch + head * out_head + rows * out_token) * VECTOR + dims
    grad_outs = (
        grad_out
        + (batch * grad_out_batch + head * grad_out_head + rows * grad_out_token) * VECTOR
        + dims
    )
    bounds = gl.expand_dims(inside, 1) & (dims < HEAD_DIM)
    o = gl.load(outs, mask=bounds, other=0.0).to(gl.float32)
    do = gl.load(grad_outs, mask=bounds, other=0.0).to(gl.float32)
    delta = gl.sum(o * do, axis=1)
    if grad_lse is not None:
        delta -= gl.load(grad_lse + pair * q_len + tokens, mask=inside, other=0.0)
    lse2 = gl.load(lse + pair * q_len + tokens, mask=inside, other=0.0) * device.LOG2E
    lse2 = gl.where(lse2 == device.NEG_INF, float("inf"), lse2)
    lse2_row = terms + pair * 2 * padded_len
    gl.store(lse2_row + tokens, lse2)
    gl.store(lse2_row + padded_len + tokens, delta)
