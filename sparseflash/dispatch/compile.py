"""Compiles the kernels of both passes at the same time."""

from collections.abc import Hashable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from masks.registry import Cache
from sparseflash.dispatch.call import Call, Plan

_compiled = Cache()


def compile_passes(
    calls: Iterable[tuple[Call, tuple[Tensor, Tensor, Tensor], tuple[bool, ...]]],
) -> None:
    """Compiles the kernels of some calls in parallel, without launching them.

    Args:
        calls: (call, (query, key, value), needs) of each call, with `needs` as in
            Backend.backward. Calls of backends that compile nothing are skipped.
    """
    calls = [call for call in calls if call[0].plan.backend.compiles]
    if calls:
        from sparseflash.backends.triton_common.launcher import compile_only

        with torch.no_grad():
            compile_only(lambda: [_pass_through(*call) for call in calls])


def _pass_through(call: Call, tensors: tuple[Tensor, Tensor, Tensor], needs: tuple[bool, ...]):
    forward = call.plan.forward and replace(call.plan.forward, cache=Cache())
    plan = replace(call.plan, cache=Cache(), forward=forward)  # empty caches: no relaunch
    call = replace(call, plan=plan)
    out, lse = call.forward(*tensors)
    if any(needs):
        call.backward(out, None, (*tensors, out, lse), needs)


def compile_before_first_call(
    call: Call, tensors: tuple[Tensor, Tensor, Tensor], needs: tuple[bool, ...]
) -> None:
    """Compiles the kernels of both passes of a call, unless one that needs the same ones did."""
    plans = (call.plan, call.plan.forward or call.plan)
    variant = (call.spec, needs, *(_compiled_for(plan) for plan in plans))
    if variant in _compiled or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    _compiled[variant] = True
    compile_passes([(call, tensors, needs)])


def _compiled_for(plan: Plan) -> tuple[Hashable, ...]:
    """What masks of calls with equal specs decide, and for which other kernels are compiled."""
    table = plan.table
    partial = (table.by_query.has_partial, table.by_key.has_partial)
    return (plan.backend.name, table.block_size, *partial)
