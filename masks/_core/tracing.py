"""Masks that are made while torch traces or transforms a function."""

import sys
from contextlib import ExitStack

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def untraced() -> ExitStack:
    """A context in which torch.func, tracers and FakeTensorMode do not see operations.

    A mask that is made inside a function is a constant to transforms and tracers of the function,
    such as torch.func.grad and linearize. Its tensors have values, also where others have none.
    """
    stack = ExitStack()
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None:
        stack.enter_context(fake.unset_fake_temporarily())
    if torch._C._are_functorch_transforms_active():
        stack.enter_context(temporarily_clear_interpreter_stack())
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if tracing is not None and tracing.get_proxy_mode() is not None:
        stack.enter_context(tracing.disable_proxy_modes_tracing())
    return stack
