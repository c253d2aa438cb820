"""The forward and the backward pass of one call.

    P  = exp2(scale * log2(e) * Q K^T - log2(e) * LSE)
    dS = P * (dropout(dO V^T) - delta)
    dQ = scale dS K,    dK = scale dS^T Q,    dV = dropout(P)^T dO

The backward pass has a kernel for block rows of queries (dQ) and one for block rows of keys (dK
and dV). A third kernel runs if a bias, block scores or score tensors need a gradient. Each of them
recomputes P tile by tile. No program adds floating-point numbers to memory that another program
writes, so equal inputs give equal bits. Sums for score tensors are in fixed point, unless
deterministic is False.
"""

from typing import Any

import torch
from einops import reduce
from torch import Tensor

from sparseflash.backends.triton.configs import padded_dims
from sparseflash.backends.triton.kernels.dkdv import key_value_gradient_kernel
from sparseflash.backends.triton.kernels.dq import query_gradient_kernel
from sparseflash.backends.triton.kernels.ds_sums import ds_sums_kernel
from sparseflash.backends.triton.kernels.forward import forward_kernel
from sparseflash.backends.triton.kernels.lse_delta import lse_delta_kernel
from sparseflash.backends.triton.launch import launch_pass, launch_with_layout, prepare_pass
from sparseflash.dispatch.call import (
    NO_MEMORY,
    Call,
    Gradients,
    Needs,
    Saved,
    empty_like,
    empty_tensors,
    layouts_of,
    prepare_once,
    prepared_out_and_lse,
)
from sparseflash.dispatch.spec import AttentionSpec

# Largest number of programs of ds_sums for a bias: each has its own sums, as large as a row of it.
DS_SUMS_PROGRAMS = 512
LSE_DELTA_ROWS = 64  # largest number of queries of a program of the kernel of LSE and delta


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.base."""
    out, lse = prepared_out_and_lse(call.plan, query, value)
    tensors = {"query": query, "key": key, "value": value, "out": out}
    prepared = prepare_pass(call.plan, "forward", tensors)
    launch_pass(call, prepared, forward_kernel, tensors, (lse, call.max_logits))
    return out, lse


def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, needs: Needs
) -> Gradients:
    """The gradients of one call; see sparseflash.backends.base."""
    query, key, value, out, lse = saved
    needs_query, needs_key, needs_value, *needs_sums = needs
    sums: tuple[Tensor | None, ...] = (None, None, None)
    padded_len = call.table.by_query.num_rows * call.table.block_size[0]
    of_keys = needs_key or needs_value  # one kernel writes both
    new = (needs_query, of_keys, of_keys)
    if call.gradients is not NO_MEMORY:
        pairs = zip(new, call.gradients, strict=True)
        new = tuple([needed and memory is None for needed, memory in pairs])
    properties = (*new, padded_len)
    layouts = prepare_once(call.plan, _layouts_of_gradients, (query, key, value), *properties)
    *found, lse_delta = empty_tensors(layouts, call.plan.spec.device)
    if call.gradients is not NO_MEMORY:
        pairs = zip(found, call.gradients, strict=True)
        found = [memory if each is None else each for each, memory in pairs]
    grad_query, grad_key, grad_value = found
    lse_strides = (0, 0, 0) if grad_lse is None else grad_lse.stride()
    lse_arguments = (grad_lse, *lse_strides, lse, lse_delta)
    inputs = {"query": query, "key": key, "value": value}
    if needs_query:
        tensors = {**inputs, "out": out, "grad_out": grad_out, "grad_query": grad_query}
        prepared = prepare_pass(call.plan, "dq", tensors)
        launch_pass(call, prepared, query_gradient_kernel, tensors, lse_arguments)
    else:
        _launch_lse_delta(call, out, grad_out, lse_arguments)
    if needs_key or needs_value:
        outputs = {"grad_key": grad_key, "grad_value": grad_value}
        tensors = {**inputs, "grad_out": grad_out, **outputs}
        prepared = prepare_pass(call.plan, "dkdv", tensors)
        launch_pass(call, prepared, key_value_gradient_kernel, tensors, (lse_delta,))
    if any(needs_sums):
        sums = _ds_sums(call, {**inputs, "grad_out": grad_out}, lse_delta, *needs_sums)
    each = zip((grad_query, grad_key, grad_value), needs, strict=False)
    return *(grad if needed else None for grad, needed in each), *sums


def _layouts_of_gradients(spec: AttentionSpec, _block: int, *inputs_and_needs: Any) -> tuple:
    """Layouts of dQ, of dK and dV, and of LSE and delta."""
    query, key, value, new_query, new_key, new_value, padded_len = inputs_and_needs
    lse_delta = query.new_empty(*query.shape[:2], 2, padded_len, dtype=torch.float32)
    each = ((query, new_query), (key, new_key), (value, new_value))
    examples = [empty_like(x) if new else None for x, new in each]
    return layouts_of([*examples, lse_delta])


def _launch_lse_delta(call: Call, out: Tensor, grad_out: Tensor, lse_arguments: tuple) -> None:
    """Launches the kernel that writes LSE and delta, for calls that do not compute dQ."""
    spec, block_q = call.spec, call.table.block_size[0]
    rows = min(block_q, LSE_DELTA_ROWS)
    launch_with_layout(
        lse_delta_kernel,
        (call.table.by_query.num_rows * (block_q // rows), spec.heads, spec.batch),
        (out, grad_out),
        (*lse_arguments, spec.heads, spec.q_len),
        {
            "VALUE_DIM": spec.value_dim,
            "VALUE_DIMS": padded_dims(spec.value_dim),
            "BLOCK_Q": block_q,
            "BM": rows,
            "enable_fp_fusion": True,
        },
    )


def _ds_sums(
    call: Call,
    tensors: dict[str, Tensor],
    lse_delta: Tensor,
    needs_bias: bool,
    needs_blocks: bool,
    needs_reads: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of bias, block scores and score tensors; None for those not needed."""
    spec, table = call.spec, call.table
    prepared = prepare_pass(call.plan, "ds_sums", tensors)
    tiles = {"p": prepared.tiles_per_row, "r": table.block_size[1] // prepared.config.bn}
    row_tiles, key_tiles = table.by_query.num_rows * tiles["p"], table.by_key.num_rows * tiles["r"]
    programs = spec.batch * row_tiles
    by_distance = by_tile = None
    if needs_bias and call.bias is not None:
        programs = min(programs, -(-DS_SUMS_PROGRAMS // spec.heads))
        by_distance = lse_delta.new_zeros(spec.heads, programs, call.bias.shape[1])
    if needs_blocks:
        by_tile = lse_delta.new_zeros(spec.batch, spec.heads, row_tiles, key_tiles)

    def launch_sums(by_distance: Tensor | None, by_tile: Tensor | None, *reads: Tensor | None):
        others = (lse_delta, by_distance, by_tile, *reads, steps, spec.batch)
        launch_pass(call, prepared, ds_sums_kernel, tensors, others, (programs, spec.heads, 1))

    steps, any_order, largest, fixed = 0.0, None, None, None
    if needs_reads and call.score_tensors is not None:
        any_order = call.score_tensors.zero_gradient()
        if spec.deterministic:
            largest = torch.zeros_like(any_order, dtype=torch.int32)
            any_order, fixed = None, torch.zeros_like(any_order, dtype=torch.int64)
            # The number of units in the largest summand: a sum over all pairs fits into 63 bits.
            pairs = spec.batch * spec.heads * spec.q_len * spec.k_len
            steps = 2.0 ** (62 - pairs.bit_length())
            launch_sums(None, None, None, largest, None)
    launch_sums(by_distance, by_tile, any_order, largest, fixed)
    grad_bias = grad_blocks = None
    if by_distance is not None and call.bias is not None:
        grad_bias = by_distance.sum(1).sum_to_size(call.bias.shape)
    if by_tile is not None:
        grad_blocks = reduce(by_tile, "b h (i p) (j r) -> b h i j", "sum", **tiles)
    if largest is not None and fixed is not None:
        unit = largest.view(torch.float32).double() / steps
        any_order = (fixed * unit).float()
    return grad_bias, grad_blocks, any_order
