"""Attention under torch.func and forward-mode AD, which do not differentiate custom operators.

The gradients are those of the operators. Derivatives that attention does not have are refused.
"""

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from sparseflash.dispatch import operators
from sparseflash.dispatch.autograd import refuse_second_derivative, refuse_tangents


def attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """operators.attention, which torch.func can differentiate."""
    if not torch.compiler.is_compiling():
        return _Attention.apply(*arguments)
    attend = _attention_outside_of_graphs if _is_differentiated() else operators.attention
    return attend(*arguments)


@torch.compiler.assume_constant_result
def _is_differentiated() -> bool:
    """Whether the compiler traces a function inside torch.func.grad, jvp or the like."""
    transforms = [transform.key() for transform in retrieve_all_functorch_interpreters()]
    return TransformType.Grad in transforms or TransformType.Jvp in transforms


@torch.compiler.disable(reason="torch.func differentiates sparseflash.attention outside of graphs")
def _attention_outside_of_graphs(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _Attention.apply(*arguments)


class _Attention(torch.autograd.Function):
    """operators.attention"""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return operators.attention(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        operators.save_for_backward(ctx, inputs, output)

    @staticmethod
    def backward(ctx, *grads):
        return operators.differentiate(ctx, *grads, backward=_Gradients.apply)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_tangents(ctx, *tangents)


class _Gradients(torch.autograd.Function):
    """operators.attention_backward"""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return tuple(operators.attention_backward(*arguments))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        refuse_second_derivative(ctx, *grads)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_tangents(ctx, *tangents)
