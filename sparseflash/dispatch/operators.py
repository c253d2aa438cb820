"""The operators `sparseflash::attention` and `sparseflash::attention_backward`.

torch.compile, torch.export, torch.func and dispatch modes see attention as these two; an eager
call skips them, because their dispatch would double its host time. A graph holds the handle of its
mask. A pattern is compiled when the graph runs, at the lengths it runs with, so a graph serves
every sequence length.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from masks import DynamicMask
from masks.handle import find
from sparseflash.arguments import AnyMask
from sparseflash.dispatch.autograd import refuse_second_derivative
from sparseflash.dispatch.call import Call, prepare


def mask_arguments(mask: AnyMask) -> tuple[Tensor | None, str]:
    """(blocks, mask) of the operators: which blocks of which mask, None for all of them."""
    if isinstance(mask, DynamicMask):
        return mask.blocks, mask.support.handle
    return None, mask.handle


_of_graphs: dict[str, AnyMask] = {}


def is_traced(tensor: Tensor) -> bool:
    """Whether somebody besides autograd watches a call with this tensor."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    )


@torch.library.custom_op("sparseflash::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    block_scores: Tensor | None,
    blocks: Tensor | None,
    mask: str,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float | None,
    softcap: float,
    score: str | None,
    dropout_p: float,
    precision: str,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked arguments.

    mask: the handle of a Pattern or BlockMask, of which `blocks` says what a DynamicMask keeps;
    block_scores: those that a DynamicMask has and that want its gradient; seed: int64 () on the
    CPU, None without dropout.
    """
    options = (scale, softcap, score, dropout_p, precision, deterministic, backend)
    call = _prepare(query, key, bias, (False, False), blocks, mask, key_lengths, seed, *options)
    out, lse = call.forward(query, key, value)
    return _laid_out_like(out, query), lse


@torch.library.custom_op("sparseflash::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    block_scores: Tensor | None,
    blocks: Tensor | None,
    mask: str,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float | None,
    softcap: float,
    score: str | None,
    dropout_p: float,
    precision: str,
    deterministic: bool,
    backend: str,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients of those of (query, key, value, bias, block_scores) that `needs` names."""
    options = (scale, softcap, score, dropout_p, precision, deterministic, backend)
    call = _prepare(query, key, bias, needs[3:], blocks, mask, key_lengths, seed, *options)
    grads = call.backward(grad_out, grad_lse, (query, key, value, out, lse), tuple(needs))
    inputs = (query, key, value, bias, block_scores)
    return [
        _laid_out_like(grad, x)
        for grad, x in zip(grads, inputs, strict=True)
        if grad is not None and x is not None
    ]


def _prepare(query, key, bias, needs, blocks, mask, key_lengths, seed, *options) -> Call:
    """needs: whether the gradients of bias and block_scores are wanted"""
    seed = 0 if seed is None else int(seed)
    needs_bias, needs_blocks = needs
    found = find(mask)
    return prepare(
        query,
        key,
        found if blocks is None else DynamicMask.of(found, blocks),
        key_lengths,
        seed,
        *options,
        bias=bias,
        differentiates_bias=needs_bias,
        differentiates_blocks=needs_blocks,
    )


def _laid_out_like(result: Tensor, like: Tensor) -> Tensor:
    """With the strides that a graph was promised."""
    promised = torch.empty_like(like, device="meta").stride()
    return result if result.stride() == promised else torch.empty_like(like).copy_(result)


@attention.register_fake
def _(query, key, value, bias, block_scores, blocks, mask, *options):
    _of_graphs[mask] = find(mask)  # a graph may run as long as the process does
    wide = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)


@attention_backward.register_fake
def _(grad_out, grad_lse, query, key, value, out, lse, bias, block_scores, *options):
    inputs = (query, key, value, bias, block_scores)
    return [torch.empty_like(x) for x, needed in zip(inputs, options[-1], strict=True) if needed]


def _save(ctx, inputs, output):
    query, key, value, bias, block_scores, blocks, mask, key_lengths, seed, *options = inputs
    tensors = (query, key, value, *output, bias, block_scores, blocks, key_lengths, seed)
    ctx.save_for_backward(*tensors)
    ctx.mask, ctx.options = mask, options
    ctx.kept = find(mask)  # it may have been made for this call alone
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_out, grad_lse):
    nothing = [None] * len(ctx.needs_input_grad)
    if grad_out is None and grad_lse is None:
        return tuple(nothing)
    *saved, key_lengths, seed = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    grads = iter(
        attention_backward(
            grad_out, grad_lse, *saved, ctx.mask, key_lengths, seed, *ctx.options, needs
        )
    )
    return *(next(grads) if needed else None for needed in needs), *nothing[5:]


attention.register_autograd(_differentiate, setup_context=_save)
attention_backward.register_autograd(refuse_second_derivative)


@attention.register_vmap
def _(info, in_dims, *arguments):
    return _folded(attention, 3, info, in_dims, arguments), (0, 0)


@attention_backward.register_vmap
def _(info, in_dims, *arguments):
    grads = _folded(attention_backward, 7, info, in_dims, arguments)
    return grads, [0] * len(grads)


def _folded(operator, bias, info, in_dims, arguments):
    """The results of an operator with the mapped dimension made part of the batch.

    bias: its place among the arguments, after which come block_scores, blocks, mask, key_lengths,
        seed and options.
    """
    dropout_p = arguments[bias + 9]
    if dropout_p > 0:
        raise NotImplementedError(f"dropout_p must be 0 under torch.func.vmap, got {dropout_p}")
    if in_dims[bias] is not None or (operator is attention_backward and arguments[-1][3]):
        raise NotImplementedError("bias must be neither mapped nor differentiated under vmap")
    if arguments[bias + 2] is not None:
        raise NotImplementedError("mask must not be a DynamicMask under vmap")
    folded = (
        _into_batch(x, dim, info.batch_size) if isinstance(x, Tensor) and i != bias else x
        for i, (x, dim) in enumerate(zip(arguments, in_dims, strict=True))
    )
    results = operator(*folded)
    return type(results)(x.unflatten(0, (info.batch_size, -1)) for x in results)


def _into_batch(x: Tensor, dim: int | None, size: int) -> Tensor:
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)
