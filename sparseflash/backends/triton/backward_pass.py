"""The backward pass: dQ by query rows, then dK and dV by key columns.

    P  = exp2(scale * log2(e) * Q K^T - log2(e) * LSE)
    dS = P * (dropout(dO V^T) - delta)
    dQ = scale dS K,    dK = scale dS^T Q,    dV = dropout(P)^T dO

P is computed anew, tile by tile, by both kernels, and by a third where dS is to be summed over
distances or blocks. None adds to memory that another program writes, so the same inputs give the
same bits.
"""

import torch
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.backends.compiled import on_device
from sparseflash.backends.triton.configs import padded_dims
from sparseflash.backends.triton.ds_sums import ds_sums
from sparseflash.backends.triton.key_value_gradient import key_value_gradient_kernel
from sparseflash.backends.triton.launch import launch_pass, launch_with_layout
from sparseflash.backends.triton.lse_delta import lse_delta_kernel
from sparseflash.backends.triton.query_gradient import query_gradient_kernel
from sparseflash.dispatch.spec import AttentionSpec


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
    needs: tuple[bool, ...],
    bias: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradients of one call; see sparseflash.backends.Backend."""
    needs_query, needs_key, needs_value, needs_bias, needs_blocks = needs
    grad_query = grad_key = grad_value = grad_bias = grad_blocks = None
    padded_len = table.by_query.num_rows * spec.block_size[0]
    shape = (spec.batch, spec.heads, 2, padded_len)
    lse_delta = torch.empty(shape, dtype=torch.float32, device=query.device)
    lse_strides = (0, 0, 0) if grad_lse is None else grad_lse.stride()
    lse_arguments = (grad_lse, *lse_strides, lse, lse_delta)
    call = (table, key_lengths, seed, spec, bias)
    with on_device(query.device):
        if needs_query:
            grad_query = torch.empty_like(query)
            tensors = (query, key, value, out, grad_out, grad_query)
            launch_pass("dq", query_gradient_kernel, tensors, (1, 2), lse_arguments, *call)
        else:
            _launch_lse_delta(out, grad_out, lse_arguments, padded_len, spec)
        if needs_key or needs_value:
            grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
            tensors = (query, key, value, grad_out, grad_key, grad_value)
            launch_pass("dkdv", key_value_gradient_kernel, tensors, (0, 3), (lse_delta,), *call)
        if needs_bias or needs_blocks:
            tensors = (query, key, value, grad_out)
            grad_bias, grad_blocks = ds_sums(tensors, lse_delta, needs_bias, needs_blocks, *call)
    grad_key, grad_value = (grad_key if needs_key else None, grad_value if needs_value else None)
    return grad_query, grad_key, grad_value, grad_bias, grad_blocks


def _launch_lse_delta(out, grad_out, lse_arguments, padded_len, spec):
    """Writes LSE and delta where no kernel computes dQ."""
    block_q = spec.block_size[0]
    bm = min(block_q, 64)
    launch_with_layout(
        lse_delta_kernel,
        (padded_len // bm, spec.heads, spec.batch),
        (out, grad_out),
        (*lse_arguments, spec.heads, spec.q_len),
        {
            "HEAD_DIM": spec.head_dim,
            "DIMS": padded_dims(spec.head_dim),
            "BLOCK_Q": block_q,
            "BM": bm,
            "enable_fp_fusion": True,
        },
    )
