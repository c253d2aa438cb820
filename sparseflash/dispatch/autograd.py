"""The autograd function of eager calls, which runs both passes of the selected backend."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparseflash.arguments import are_plain
from sparseflash.dispatch.call import Call
from sparseflash.dispatch.compile import compile_before_first_call
from sparseflash.score import ScoreTensors


def run(
    call: Call, query: Tensor, key: Tensor, value: Tensor, block_scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call, differentiable.

    Args:
        call: The call.
        query, key, value: Checked tensors.
        block_scores: The scores of a DynamicMask, if they need a gradient.
    """
    score_tensors = () if call.score_tensors is None else call.score_tensors.tensors
    if not _is_differentiated(query, key, value, call.bias, block_scores, *score_tensors):
        return call.forward(query, key, value)  # autograd would double the host time
    if not call.plan.cache and call.plan.backend.compiles:
        differentiable = (query, key, value, call.bias, block_scores)
        needs = [x is not None and x.requires_grad for x in differentiable]
        needs.append(any(x.requires_grad for x in score_tensors))
        compile_before_first_call(call, (query, key, value), tuple(needs))
    return _apply(query, key, value, call.bias, block_scores, call, *score_tensors)


def _is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd, in backward or forward mode, has to record operations on the tensors."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


class _BlockSparseAttention(torch.autograd.Function):
    """(out, lse) of one call. It saves O(N) memory for the backward pass: the inputs, out and lse.

    Every tensor that the backward pass reads is saved, so that a change in place is an error.
    """

    @staticmethod
    def forward(ctx, query, key, value, bias, block_scores, call, *score_tensors):
        out, lse = call.forward(query, key, value)
        ctx.save_for_backward(query, key, value, out, lse, call.key_lengths, bias, *score_tensors)
        ctx.plan, ctx.seed = call.plan, call.seed
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        grad_out, grad_lse = plain("out", grad_out), plain("lse", grad_lse)
        tensors = ctx.saved_tensors
        saved, call = tensors[:5], Call(ctx.plan, tensors[5], ctx.seed, tensors[6])
        score_tensors = None
        if len(tensors) > 7:
            score_tensors = call.score_tensors = ScoreTensors(tensors[7:])
        needs = (*ctx.needs_input_grad[:5], any(ctx.needs_input_grad[6:]))
        if torch.is_grad_enabled():  # the gradients may be differentiated again
            grads = _Gradients.apply(call, needs, grad_out, grad_lse, *saved)
        else:
            grads = call.backward(grad_out, grad_lse, saved, needs)
        if score_tensors is None:
            return *grads[:5], None
        return *grads[:5], None, *score_tensors.split_gradient(grads[5])

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_tangents(ctx, *tangents)


def plain(name: str, grad: Tensor | None) -> Tensor | None:
    """The gradient in a form that kernels can read.

    It is a copy if the gradient is of a subclass, such as the result of a collective, or a negated
    view, such as the gradient of the imaginary part of a conjugate.
    """
    if grad is None:
        return None
    if not are_plain(grad):
        copy = grad.clone()
        if not are_plain(copy):
            raise TypeError(f"the gradient of {name} must be a plain tensor, got {type(grad)}")
        grad = copy
    try:
        grad.data_ptr()
    except RuntimeError as error:  # no public function says which tensors are batches
        raise NotImplementedError(
            f"the gradient of {name} must be one gradient, got a batch (is_grads_batched, "
            "vectorize of torch.autograd.functional, or torch.autograd.grad in a function that "
            "torch.func transforms); use torch.func.vjp with vmap, or jacrev"
        ) from error
    return grad


# Function.apply without its support of torch.func, whose calls take the operators: see
# operators.is_traced.
_apply = super(torch.autograd.Function, _BlockSparseAttention).apply  # pyright: ignore[reportAttributeAccessIssue]


class _Gradients(torch.autograd.Function):
    """The gradients of one call. They cannot be differentiated."""

    @staticmethod
    def forward(ctx, call, needs, grad_out, grad_lse, *saved):
        return call.backward(grad_out, grad_lse, saved, needs)

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative(ctx, *grads)


def refuse_second_derivative(ctx, *grads):
    """Raises the error for second derivatives."""
    raise NotImplementedError(
        "sparseflash.attention has no second derivative; use "
        "sparseflash.reference.standard_attention"
    )


def refuse_tangents(ctx, *tangents):
    """Raises the error for forward-mode derivatives (jvp) of either pass."""
    raise NotImplementedError(
        "sparseflash.attention has no forward-mode derivative, which torch.func.jvp, jacfwd, "
        "linearize and hessian need; use torch.func.grad, vjp and jacrev, or "
        "sparseflash.reference.standard_attention"
    )
