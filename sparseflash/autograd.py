"""The one autograd boundary: forward and backward of whichever backend was selected."""

import torch
from torch.autograd.function import once_differentiable


class BlockSparseAttention(torch.autograd.Function):
    """(out, lse) of one call; what the backward needs is O(N): the inputs, out and lse."""

    @staticmethod
    def forward(ctx, query, key, value, table, key_lengths, seed, spec, backend):
        out, lse = backend.forward(query, key, value, table, key_lengths, seed, spec)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = (table, key_lengths, seed, spec)
        ctx.backend = backend
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse):
        saved = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return (None,) * 8
        if grad_out is None:
            grad_out = torch.zeros_like(saved[3])
        grads = ctx.backend.backward(
            grad_out, grad_lse, *saved, *ctx.call, ctx.needs_input_grad[:3]
        )
        return (*grads, None, None, None, None, None)
