"""Compiles the kernels of both passes at the same time."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from masks._core.grid import is_captured
from masks.lookup_table import PREFETCH, BlockLists, LookupTable
from masks.registry import Cache
from sparseflash.dispatch.call import Call, Plan

_compiled = Cache()


Pass = tuple[Call, tuple[Tensor, Tensor, Tensor], tuple[bool, ...]]


def compile_passes(calls: Iterable[Pass], others: Iterable[Pass] = ()) -> None:
    """Compiles the kernels of some calls in parallel, without launching them.

    Args:
        calls: (call, (query, key, value), needs) of each call, with `needs` as in
            Backend.backward. Calls of backends that compile nothing are skipped.
        others: Calls whose kernels are compiled meanwhile; nothing waits for them.
    """
    calls = [call for call in calls if call[0].plan.backend.compiles]
    if calls:
        from sparseflash.backends.triton_common.workers import WORKERS

        # Before this process imports Triton, which the other one does at the same time.
        backends = {call.plan.backend.name for call, *_ in calls}
        WORKERS.prepare(*[f"sparseflash.backends.{name}.kernels" for name in sorted(backends)])
        from sparseflash.backends.triton_common.launcher import compile_only

        with torch.no_grad():
            compile_only(
                lambda: [_pass_through(*call) for call in calls],
                lambda: [_pass_through(*call) for call in others],
            )


def _pass_through(call: Call, tensors: tuple[Tensor, Tensor, Tensor], needs: tuple[bool, ...]):
    parts = {
        name: part and replace(part, cache=Cache()) for name, part in _parts(call.plan).items()
    }
    plan = replace(call.plan, cache=Cache(), **parts)  # empty caches: no relaunch
    call = replace(call, plan=plan)
    out, lse = call.forward(*tensors)
    if any(needs):
        call.backward(out, None, (*tensors, out, lse), needs)


def compile_before_first_call(
    call: Call, tensors: tuple[Tensor, Tensor, Tensor], needs: tuple[bool, ...]
) -> None:
    """Compiles the kernels of both passes of a call, unless one that needs the same ones did."""
    parts = (call.plan, *_parts(call.plan).values())
    variant = (call.spec, needs, *(part and _compiled_for(part) for part in parts))
    if variant in _compiled or is_captured(call.spec.device):
        return
    # A generator, because its tables are made only for processes.
    others = ((other, tensors, needs) for other in _calls_of_other_masks(call))
    compile_passes([(call, tensors, needs)], others)
    _compiled[variant] = True  # not before: a call after an error raises it again


def _calls_of_other_masks(call: Call) -> Iterator[Call]:
    """The call with tables for which other kernels may be compiled.

    A kernel is for masks with or without partial blocks, and for a static or a dynamic tile
    scheduler. Those that differ from the call in partial blocks are first, and of these those with
    rows of unequal lengths: there may be more kernels than processes.
    """
    plan = call.plan
    of_call = plan.table.by_query.has_partial
    for partial, balanced in product((not of_call, of_call), (False, True)):
        parts = {
            name: part and replace(part, table=_table_like(part.table, partial, balanced))
            for name, part in _parts(plan).items()
        }
        table = _table_like(plan.table, partial, balanced)
        yield replace(call, plan=replace(plan, table=table, **parts))


def _parts(plan: Plan) -> dict[str, Plan | None]:
    """The plans of parts of a call that have plans of their own."""
    return {"forward": plan.forward, "sums": plan.sums}


def _table_like(table: LookupTable, partial: bool, balanced: bool) -> LookupTable:
    """A table of the same sizes that kernels are compiled for, and that none can read."""

    def lists_like(lists: BlockLists) -> BlockLists:
        partial_index = lists.partial_index.new_empty(PREFETCH + partial)
        max_blocks = None
        if balanced:
            max_blocks = (lists.total_blocks or 0) // lists.schedule.numel()
        return replace(lists, partial_index=partial_index, max_blocks=max_blocks)

    by_query, by_key = lists_like(table.by_query), lists_like(table.by_key)
    return replace(table, by_query=by_query, by_key=by_key, bit_tiles=table.bit_tiles[:1])


def _compiled_for(plan: Plan) -> tuple[Hashable, ...]:
    """What masks of calls with equal specs decide, and for which other kernels are compiled."""
    of_table = plan.backend.compiled_for(plan.spec, plan.table)
    return (plan.backend.name, plan.table.block_size, *of_table)
