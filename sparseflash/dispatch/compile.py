"""Kernels of both passes compiled beside one another."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from masks.registry import Cache
from sparseflash.dispatch.call import Call

_compiled = Cache()


def compile_passes(
    calls: Iterable[tuple[Call, tuple[Tensor, Tensor, Tensor], tuple[bool, ...]]],
) -> None:
    """Compiles the kernels of some calls, of all passes at a time, and launches none.

    Args:
        calls: Of each call also query, key and value, and whether each of the gradients is wanted:
            see Backend.backward. Those of backends that compile nothing are passed over.
    """
    calls = [call for call in calls if call[0].plan.backend.compiles]
    if calls:
        from sparseflash.backends.triton_common.launcher import compile_only

        with torch.no_grad():
            compile_only(lambda: [_pass_through(*call) for call in calls])


def _pass_through(call: Call, tensors: tuple[Tensor, Tensor, Tensor], needs: tuple[bool, ...]):
    call = replace(call, plan=replace(call.plan, cache=Cache()))  # which repeats no launch
    out, lse = call.forward(*tensors)
    if any(needs):
        call.backward(out, None, (*tensors, out, lse), needs)


def compile_before_first_call(
    call: Call, tensors: tuple[Tensor, Tensor, Tensor], needs: tuple[bool, ...]
) -> None:
    """Compiles the kernels of a call that will be differentiated, if its spec is new."""
    variant = (call.spec, call.table.by_query.has_partial, needs)
    if variant in _compiled or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    _compiled[variant] = True
    compile_passes([(call, tensors, needs)])
