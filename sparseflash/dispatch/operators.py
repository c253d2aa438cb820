"""The operators `sparseflash::attention` and `sparseflash::attention_backward`.

torch.compile, torch.export, torch.func and dispatch modes trace attention as these two operators.
An eager call does not use them, because their dispatch would double its host time. A graph refers
to its mask by a handle. A pattern is compiled when the graph runs, at the lengths of that run, so
one graph is valid for every sequence length.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from masks import DynamicMask, MaskBatch
from masks.registry import find
from sparseflash.arguments import AnyMask, are_plain, lengths_in_range
from sparseflash.dispatch import flops
from sparseflash.dispatch.autograd import refuse_second_derivative
from sparseflash.dispatch.call import Call, empty_max_logits, empty_out
from sparseflash.dispatch.plan import find_plan
from sparseflash.dispatch.spec import CallFacts
from sparseflash.options import OPTION_NAMES, AttentionOptions
from sparseflash.score import (
    ScoreFunction,
    ScoreTensors,
    any_requires_grad,
    find_score_function,
)

_TYPES = {
    float: "float",
    float | None: "float?",
    bool: "bool",
    str: "str",
    ScoreFunction | str | None: "str?",
}
# The arguments that both operators share. bias: float (1 or heads, distances). block_scores:
# scores of a DynamicMask, if they need a gradient. blocks: the blocks of `mask` that a DynamicMask
# selects. mask: handle of a Pattern or BlockMask. seed: int64 () on the CPU, None without dropout.
# max_logits: whether the third result is the maximum logits; otherwise it is empty.
_SHARED = "Tensor? bias, Tensor? block_scores, Tensor? blocks, str mask, Tensor? key_lengths, " + (
    "Tensor? seed, bool max_logits, Tensor[] score_tensors, "
    + ", ".join(f"{_TYPES[f.type]} {f.name}" for f in fields(AttentionOptions))
)
_SCHEMA = f"(Tensor query, Tensor key, Tensor value, {_SHARED}) -> (Tensor, Tensor, Tensor)"
_BACKWARD_SCHEMA = (
    "(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor lse, {_SHARED}, bool[] needs) -> Tensor[]"
)
_DIFFERENTIABLE = ("query", "key", "value", "bias", "block_scores")

_masks_of_graphs: dict[str, AnyMask] = {}


def is_traced(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a call with these tensors must use the operators.

    That is the case if anything besides autograd traces it, or if a tensor is of a subclass. Such
    a tensor may have no memory, for example while a collective is still sending it. Its class then
    dispatches the operator.
    """
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or not are_plain(query, key, value)
    )


def traced_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask,
    bias: Tensor | None,
    block_scores: Tensor | None,
    key_lengths: Tensor | None,
    seed: Tensor | None,
    max_logits: bool,
    score_tensors: ScoreTensors | None,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, maximum logits) of checked arguments through the operator
    `sparseflash::attention`.

    Args:
        query, key, value: Checked tensors.
        mask: The mask of the call. A graph refers to it by its handle.
        bias: In the form that backends read: see arguments.checked_bias.
        block_scores: The scores of a DynamicMask, if they get a gradient.
        key_lengths: Checked key lengths.
        seed: int64 () on the CPU, None without dropout.
        max_logits: Whether the maximum logits are computed. Otherwise the third result is empty.
        score_tensors: Checked score tensors.
        options: The options of the call.
    """
    blocks = mask.blocks if isinstance(mask, DynamicMask) else None
    handle = (mask.support if isinstance(mask, DynamicMask) else mask).handle
    arguments = (bias, block_scores, blocks, handle, key_lengths, seed, max_logits)
    tensors = [] if score_tensors is None else [*score_tensors.tensors]
    arguments = (*arguments, tensors, *options.as_dict().values())
    if not torch.compiler.is_dynamo_compiling():
        flops.register(_FLOPS)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        from sparseflash.dispatch import transforms  # imports torch's compiler

        if any_requires_grad(tensors):
            raise NotImplementedError(
                "torch.func cannot differentiate by score_tensors; use torch.autograd"
            )
        return transforms.attention(query, key, value, *arguments)
    return attention(query, key, value, *arguments)


@torch.library.custom_op("sparseflash::attention", mutates_args=(), schema=_SCHEMA)
def attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, maximum logits) of checked arguments."""
    bound = _bind(attention, arguments)
    query, key, value = (bound[name] for name in ("query", "key", "value"))
    call, max_logits = _call(bound), query.new_empty(0)
    if bound["max_logits"]:
        max_logits = call.max_logits = empty_max_logits(query)
    out, lse = call.forward(query, key, value)
    return _with_strides(out, empty_out(query.to("meta"), value)), lse, max_logits


@torch.library.custom_op(
    "sparseflash::attention_backward", mutates_args=(), schema=_BACKWARD_SCHEMA
)
def attention_backward(*arguments: Any) -> list[Tensor]:
    """The gradients that `needs` selects: of _DIFFERENTIABLE and of score tensors.

    That of the score tensors is one tensor for all; see ScoreTensors.zero_gradient.
    """
    bound = _bind(attention_backward, arguments)
    needs = bound["needs"]
    saved = tuple([bound[name] for name in ("query", "key", "value", "out", "lse")])
    *grads, grad_score_tensors = _call(bound, needs[3:]).backward(
        bound["grad_out"], bound["grad_lse"], saved, tuple(needs)
    )
    results = [
        _with_strides(grad, torch.empty_like(bound[name], device="meta"))
        for grad, name in zip(grads, _DIFFERENTIABLE, strict=True)
        if grad is not None
    ]
    return results if grad_score_tensors is None else [*results, grad_score_tensors]


def _bind(operator, arguments: tuple) -> dict[str, Any]:
    """The arguments of an operator by name."""
    return dict(zip(_ARGUMENTS[operator], arguments, strict=True))


# The names of the arguments of an operator. They are stored here, because torch.compile does not
# trace code that reads a schema.
_ARGUMENTS = {
    operator: [argument.name for argument in operator._opoverload._schema.arguments]
    for operator in (attention, attention_backward)
}


def _formula(operator, count: Callable[[Mapping[str, Any]], int]) -> Callable[..., int]:
    """FLOPs of an operator, with its result, as torch.utils.flop_counter counts them."""

    def formula(*arguments: Any, out_val: Any = None, **named: Any) -> int:
        return count(dict(zip(_ARGUMENTS[operator], arguments, strict=False)) | named)

    return formula


_FLOPS = {
    torch.ops.sparseflash.attention: _formula(attention, flops.of_forward),
    torch.ops.sparseflash.attention_backward: _formula(attention_backward, flops.of_backward),
}
flops.register(_FLOPS)  # for graphs, which call the operators


def _call(bound: dict[str, Any], needs: Sequence[bool] = (False, False, False)) -> Call:
    """The call with the arguments of an operator; needs: of bias, block_scores, score_tensors."""
    query, key, value = (bound[name] for name in ("query", "key", "value"))
    mask, blocks, seed = find(bound["mask"]), bound["blocks"], bound["seed"]
    differentiates_bias, differentiates_blocks, differentiates_score_tensors = needs
    facts = CallFacts(
        has_key_lengths=bound["key_lengths"] is not None,
        bias=bound["bias"] is not None,
        differentiates_bias=differentiates_bias,
        differentiates_blocks=differentiates_blocks,
        max_logits=bound["max_logits"],
        differentiates_score_tensors=differentiates_score_tensors,
    )
    options = {name: bound[name] for name in OPTION_NAMES}
    mask = mask if blocks is None else mask.select(blocks)
    plan = find_plan(query, key, value, mask, options, facts)
    lengths = lengths_in_range(bound["key_lengths"], key.shape[2], key.device)
    call = Call(plan, lengths, 0 if seed is None else int(seed), bound["bias"])
    if bound["score_tensors"]:
        call.score_tensors = ScoreTensors(bound["score_tensors"])
    return call


def _with_strides(result: Tensor, promised: Tensor) -> Tensor:
    """The result with the strides that the fake operator promised to the graph."""
    if result.stride() == promised.stride():
        return result
    return torch.empty_like(promised, dtype=result.dtype, device=result.device).copy_(result)


@attention.register_fake
def _(*arguments):
    bound = _bind(attention, arguments)
    query, mask = bound["query"], bound["mask"]
    _masks_of_graphs[mask] = find(mask)  # a graph may run as long as the process does
    max_logits = empty_max_logits(query) if bound["max_logits"] else query.new_empty(0)
    return empty_out(query, bound["value"]), empty_max_logits(query), max_logits


@attention_backward.register_fake
def _(*arguments):
    bound = _bind(attention_backward, arguments)
    *needs, needs_tensors = bound["needs"]
    named = zip(_DIFFERENTIABLE, needs, strict=True)
    found = [torch.empty_like(bound[name]) for name, needed in named if needed]
    return (
        [*found, ScoreTensors(bound["score_tensors"]).zero_gradient()] if needs_tensors else found
    )


def save_for_backward(ctx, inputs, output):
    """Saves the arguments and results of operators.attention by name."""
    bound = _bind(attention, inputs)
    bound["out"], bound["lse"], max_logits = output
    ctx.mark_non_differentiable(max_logits)
    ctx.tensors = [name for name, x in bound.items() if isinstance(x, Tensor)]
    ctx.save_for_backward(*(bound.pop(name) for name in ctx.tensors))
    ctx.others = bound
    ctx.mask = find(bound["mask"])  # this may be the only reference to the mask
    ctx.set_materialize_grads(False)


def differentiate(ctx, grad_out, grad_lse, _, backward: Callable = attention_backward):
    """The gradient of each argument of operators.attention, or None."""
    needs = ctx.needs_input_grad
    gradients: list[Any] = [[None] * len(x) if isinstance(x, list) else None for x in needs]
    if grad_out is None and grad_lse is None:
        return tuple(gradients)
    index = _ARGUMENTS[attention].index("score_tensors")
    needs_tensors = isinstance(needs[index], list) and any(needs[index])
    bound = dict(zip(ctx.tensors, ctx.saved_tensors, strict=True)) | ctx.others
    bound |= {"grad_out": grad_out, "grad_lse": grad_lse, "needs": [*needs[:5], needs_tensors]}
    grads = iter(backward(*(bound[name] for name in _ARGUMENTS[attention_backward])))
    gradients[:5] = [next(grads) if needed else None for needed in needs[:5]]
    if needs_tensors:
        gradients[index] = ScoreTensors(bound["score_tensors"]).split_gradient(next(grads))
    return tuple(gradients)


attention.register_autograd(differentiate, setup_context=save_for_backward)
attention_backward.register_autograd(refuse_second_derivative)


@attention.register_vmap
def _(info, in_dims, *arguments):
    return _fold_into_batch(attention, info, in_dims, arguments), (0, 0, 0)


@attention_backward.register_vmap
def _(info, in_dims, *arguments):
    grads = _fold_into_batch(attention_backward, info, in_dims, arguments)
    return grads, [0] * len(grads)


def _fold_into_batch(operator, info, in_dims, arguments):
    """Runs an operator under vmap, with the mapped dim as part of the batch."""
    bound, dims = _bind(operator, arguments), _bind(operator, in_dims)
    if bound["dropout_p"] > 0:
        raise NotImplementedError(
            f"dropout_p must be 0 under torch.func.vmap, got {bound['dropout_p']}"
        )
    if dims["bias"] is not None or (operator is attention_backward and bound["needs"][3]):
        raise NotImplementedError("bias must be neither mapped nor differentiated under vmap")
    if bound["score"] is not None and find_score_function(bound["score"]).of_batch:
        raise NotImplementedError(
            "score must not depend on the batch element under vmap; one written by hand "
            "says that it does not by of_batch=False"
        )
    if bound["blocks"] is not None:
        raise NotImplementedError("mask must not be a DynamicMask under vmap")
    if isinstance(find(bound["mask"]), MaskBatch):
        raise NotImplementedError("mask must not be a MaskBatch under vmap")
    if bound["score_tensors"]:
        raise NotImplementedError("score_tensors must be None under vmap")
    folded = (
        _mapped_into_batch(x, dims[name], info.batch_size)
        if isinstance(x, Tensor) and name != "bias"
        else x
        for name, x in bound.items()
    )
    results = operator(*folded)
    return type(results)(x.unflatten(0, (info.batch_size, -1)) for x in results)


def _mapped_into_batch(x: Tensor, dim: int | None, size: int) -> Tensor:
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)
