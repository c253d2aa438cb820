"""Errors of calls over a sequence that ranks share, also after a rank has died."""

import os
from functools import cache
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import masks
import sparseflash
from sparseflash.distributed import (
    ContextPlan,
    agreement,
    capture,
    context_parallel_attention,
    make_plan,
)
from sparseflash.score import ScoreFunction
from tests.helpers.context_calls import DIMS, LENGTH, WHOLE, difference, inputs, mask_of
from tests.helpers.in_place import in_place_on_cpus


def shared_rows_of_one_rank(rank: int) -> tuple[str, float]:
    """The error of a call without a group, and the difference to attention with one."""
    mask = mask_of("global tokens")
    plan = make_plan(mask, 1, shared_rows=(0, 6, 13))
    tensors = inputs(torch.float64)[:3]
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    refused = ""
    try:
        context_parallel_attention(*tensors, plan)
    except ValueError as error:
        refused = str(error)
    out = context_parallel_attention(*tensors, plan, group=groups[rank])
    return refused, difference(out, sparseflash.attention(*tensors, mask))


@cache
def score_of_heads() -> ScoreFunction:
    return ScoreFunction.from_torch("of heads", lambda s, b, head, q, k, x: s + x[head], (float,))


def refused_with_shared_heads(rank: int) -> list[str]:
    """The errors of calls that heads x sequence does not take."""
    mesh = init_device_mesh("cpu", (2, 2))
    causal, wrong = mask_of("causal"), rank % 2 == 1
    plan = make_plan(causal, 2, "contiguous")
    of_heads = make_plan(masks.stack([causal] * 3), 2, "contiguous")
    own = [
        plan.shard(x, rank // 2, 2).tensor_split(2, 2)[rank % 2] for x in inputs(torch.float64)[:3]
    ]
    support = plan.mask_of(rank // 2)
    selected = support.select(torch.ones(3, support.grid.nq, support.grid.nk) > 0)
    calls: list[tuple[list[Tensor], ContextPlan, dict[str, Any]]]
    calls = [([x[:, :, 1:] for x in own] if rank == 1 else own, plan, {})]
    calls += [([own[0], own[1][:, :1], own[2][:, :1]], plan, {})]
    calls += [(own, of_heads, {}), (own, plan, {"mask": selected})]
    calls += [(own, plan, {"softcap": 5.0} if wrong else {})]
    calls += [(own, plan, {"dropout_p": 0.5, "seed": int(wrong)})]
    few = {"score": score_of_heads(), "score_tensors": [torch.zeros(2)]}  # as many as own heads
    calls += [(own, plan, few)]
    # As many rows as there are ranks that divide heads.
    calls += [(own, plan, {"bias": torch.ones(2, 2 * LENGTH - 1).double()})]
    calls += [(own, plan, {"sinks": torch.ones(2).double()})]
    # Errors that the ranks with the same heads do not have.
    calls += [(own, plan, {"return_max_logits": wrong})]
    calls += [(own, plan, {"key_lengths": torch.tensor([LENGTH] * (2 + (rank == 0)))})]
    calls += [([x[:1] for x in own] if wrong else own, plan, {})]
    calls += [([own[0], own[1].clone().requires_grad_(wrong), own[2]], plan, {})]
    calls += [([own[0].clone().requires_grad_(wrong), *own[1:]], plan, {})]
    errors = []
    for tensors, used, options in calls:
        try:
            context_parallel_attention(*tensors, used, group=mesh, check=True, **options)
        except ValueError as error:
            errors.append(str(error))
    return errors


def options_by_default_with_shared_heads(rank: int) -> float:
    """The difference to one process of calls in which one rank writes down what is the default."""
    mesh, mask = init_device_mesh("cpu", (2, 2)), mask_of("causal")
    plan = make_plan(mask, 2, "contiguous")
    tensors = inputs(torch.float64)[:3]

    def own(tensor: Tensor) -> Tensor:
        return plan.shard(tensor, rank // 2, 2).tensor_split(2, 2)[rank % 2]

    options: dict[str, Any] = {"softcap": None, "precision": "ieee"} if rank == 1 else {}
    expected = own(sparseflash.attention(*tensors, mask))
    differences = []
    for _ in range(2):
        out = context_parallel_attention(*map(own, tensors), plan, group=mesh, **options)
        differences.append(difference(out, expected))
    return max(differences)


def captured_with_shared_heads(rank: int) -> list[str]:
    """The errors of first calls while a CUDA graph is captured, in which nothing is exchanged."""
    mesh = init_device_mesh("cpu", (2, 2))
    plan = make_plan(mask_of("causal"), 2, "contiguous")
    own = [
        plan.shard(x, rank // 2, 2).tensor_split(2, 2)[rank % 2] for x in inputs(torch.float64)[:3]
    ]
    errors = []
    with (
        mock.patch.object(agreement, "is_captured", return_value=True),
        mock.patch.object(capture, "is_captured", return_value=True),
        mock.patch.object(agreement, "numbers_agree", side_effect=AssertionError),
    ):
        for tensors in (own, [own[0], own[1][:, :1], own[2][:, :1]]):
            for check in (None, True):
                try:
                    context_parallel_attention(*tensors, plan, group=mesh, check=check)
                except (RuntimeError, ValueError) as error:
                    errors.append(str(error))
    return errors


def refused(rank: int, what: str) -> str:
    """The error of a call of which something is wrong on rank 1."""
    wrong = rank == 1
    name = "window and sink" if what == "mask" and wrong else "causal"
    rows = (0,) if what == "gradient of query" else None
    plan = make_plan(mask_of(name), dist.get_world_size(), "contiguous", shared_rows=rows)
    dtype = torch.float32 if what == "dtype" and wrong else torch.float64
    own = [plan.shard(x, rank, 2) for x in inputs(dtype)[:3]]
    if what == "length" and wrong:
        own = [x[:, :, 1:] for x in own]
    own[0].requires_grad_(what == "gradient of query" and not wrong)
    if what == "no tensor" and wrong:
        own[0] = cast(Tensor, None)
    if what == "gradient of key":  # and rank 1 needs that of value
        own[1 + wrong].requires_grad_()
    softcap = 5.0 if "options" in what and wrong else None
    extras: dict[str, Any] = {"dropout_p": 0.5, "seed": rank} if what == "seed" else {}
    if what == "max logits":
        extras["return_max_logits"] = wrong
    if what == "key lengths":
        extras["key_lengths"] = torch.tensor([LENGTH, 100 + rank])
    if what == "bias" and wrong:
        extras["bias"] = torch.ones(1, 2 * LENGTH - 1).double()
    if what == "sinks" and wrong:
        extras["sinks"] = torch.ones(1).double()
    if what == "selected blocks" and wrong:
        support = plan.mask_of(rank)
        extras["mask"] = support.select(torch.ones(support.grid.nq, support.grid.nk) > 0)
    check = None if what == "options of a later call" else what != "unchecked"
    try:
        if check is None:
            context_parallel_attention(*own, plan)
        context_parallel_attention(*own, plan, softcap=softcap, check=check, **extras)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


LATER = ("plan", "plan of equal traffic", "options", "sinks", "seed", "seed of 64 bits")
LATER += ("key_lengths", "dtype")


def of_a_later_call(rank: int, what: str, check: bool | None) -> str:
    """The error of a call in which rank 1 passes what all ranks have passed in another one."""
    names = ("causal", "every other token" if what == "plan of equal traffic" else "window")
    plans = [
        make_plan(mask_of_later_call(each), dist.get_world_size(), "contiguous") for each in names
    ]
    calls: list[tuple[ContextPlan, torch.dtype, dict[str, Any]]]
    calls = [(plans[0], torch.float64, extras_of_later_call(what, False))] * 2
    if what.startswith("plan"):
        calls[1] = (plans[1], *calls[0][1:])
    elif what == "dtype":
        calls[1] = (plans[0], torch.float32, {})
    else:
        calls[1] = (*calls[0][:2], extras_of_later_call(what, True))
    for plan, dtype, extras in (*calls, *calls):
        context_parallel_attention(*_own(plan, rank, dtype), plan, **extras)
    plan, dtype, extras = calls[rank == 1]
    try:
        context_parallel_attention(*_own(plan, rank, dtype), plan, check=check, **extras)
    except ValueError as error:
        return str(error)
    return "nothing"


def _own(plan: ContextPlan, rank: int, dtype: torch.dtype) -> list[Tensor]:
    return [plan.shard(x, rank, 2) for x in inputs(dtype)[:3]]


def mask_of_later_call(name: str) -> masks.BlockMask:
    """Two masks of which ranks exchange equal numbers of rows, and one of other numbers."""
    if name == "every other token":
        every_other = masks.pattern(lambda q, k: (q >= k) & ((q + k) % 2 == 0))
        return every_other(LENGTH, 16)
    return masks.local((30, 0))(LENGTH, 16) if name == "window" else masks.causal()(LENGTH, 16)


def extras_of_later_call(what: str, second: bool) -> dict[str, Any]:
    if what == "options":
        return {"softcap": 5.0} if second else {}
    if what == "sinks":
        return {"sinks": torch.ones(4).double()} if second else {}
    if what == "seed":
        return {"dropout_p": 0.5, "seed": int(second)}
    if what == "seed of 64 bits":
        return {"dropout_p": 0.5, "seed": int(second) << 60}
    if what == "key_lengths":  # in the other order
        lengths = torch.tensor([LENGTH, 100])
        return {"key_lengths": lengths.flip(0) if second else lengths}
    return {}


def invalid_in_a_later_call(rank: int, others: dict[str, Any]) -> str:
    """The error of a second call, invalid on rank 1, to which the others give these arguments."""
    plan = make_plan(mask_of("causal"), dist.get_world_size(), "contiguous")
    own = _own(plan, rank, torch.float64)
    context_parallel_attention(*own, plan)
    try:
        if rank == 1:
            context_parallel_attention(*(x[:, :, 1:] for x in own), plan)
        else:
            context_parallel_attention(*own, plan, **others)
    except ValueError as error:
        return str(error)
    return "nothing"


def checked_in_full_on_one_rank(rank: int) -> float:
    """The difference to one process of a second call that only rank 1 asks to compare in full."""
    mask = mask_of("causal")
    plan = make_plan(mask, dist.get_world_size(), "contiguous")
    own = _own(plan, rank, torch.float64)
    context_parallel_attention(*own, plan)
    out = context_parallel_attention(*own, plan, check=True if rank == 1 else None)
    whole = sparseflash.attention(*inputs(torch.float64)[:3], mask)
    return difference(out, plan.shard(whole, rank, 2))


def head_masks_in_a_later_call(rank: int) -> bool:
    """Whether ranks that divide heads with different masks agree by number."""
    mesh = init_device_mesh("cpu", (2, 2))
    mask = masks.stack([masks.causal(), masks.local(30), masks.full(), masks.causal()])
    plan = make_plan(mask(LENGTH, 16), 2, "contiguous")
    own = [x.tensor_split(2, 2)[rank % 2] for x in _own(plan, rank // 2, torch.float64)]
    context_parallel_attention(*own, plan, group=mesh)
    with mock.patch.object(agreement, "_disagreement", side_effect=AssertionError):
        context_parallel_attention(*own, plan, group=mesh)
    return True


def gradient_of_query_on_one_rank(rank: int) -> bool:
    """Whether all ranks agree by number if one of them needs a gradient that is not exchanged."""
    plan = make_plan(mask_of("causal"), dist.get_world_size(), "contiguous", shared_rows=())

    def run(of_query: bool) -> None:
        query, *others = _own(plan, rank, torch.float64)
        others = [x.requires_grad_() for x in others]
        context_parallel_attention(query.requires_grad_(of_query), *others, plan).sum().backward()

    run(True)
    with mock.patch.object(agreement, "_disagreement", side_effect=AssertionError):
        run(rank == 0)
    return True


def of_a_later_call_with_shared_heads(rank: int, what: str) -> str:
    """The error of a call of heads x sequence in which one rank differs from the call before."""
    mesh = init_device_mesh("cpu", (2, 2))
    plans = [
        make_plan(mask_of_later_call(each), 2, "contiguous")
        for each in ("causal", "every other token")
    ]
    calls = []
    for plan in plans:
        tensors = inputs(torch.float64)[:3]
        own = [plan.shard(x, rank // 2, 2).tensor_split(2, 2)[rank % 2] for x in tensors]
        calls.append((own, plan, {}))
    if what == "key_lengths":
        calls = [(*calls[0][:2], extras_of_later_call(what, second)) for second in (False, True)]
    for own, plan, extras in (*calls, *calls):
        context_parallel_attention(*own, plan, group=mesh, **extras)
    own, plan, extras = calls[rank == 3]
    if what == "invalid" and rank == 3:
        own = [own[0], own[1][:, :1], own[2][:, :1]]
    try:
        context_parallel_attention(*own, plan, group=mesh, **extras)
    except ValueError as error:
        return str(error)
    return "nothing"


def with_an_emptied_cache(rank: int) -> str:
    """The error of a second call if the first rank has emptied the caches of mask and plan."""
    mask = masks.local(30)(LENGTH, 16)
    for call in range(2):
        plan = make_plan(mask, dist.get_world_size(), "zigzag")
        own = [plan.shard(x, rank, 2) for x in inputs(torch.float64)[:3]]
        try:
            context_parallel_attention(*own, plan)
        except RuntimeError as error:
            return f"{call}: {error}"
        if rank == 0:
            plan.cache.clear()
            mask.cache.clear()
    return "nothing"


def refused_in_place(rank: int, what: str) -> str:
    """The error of a call that only rank 1 cannot compute in place."""
    mask = mask_of("butterfly", WHOLE)
    plan = make_plan(mask, dist.get_world_size(), "contiguous", split="in place", shared_rows=())
    own = [plan.shard(x, rank, 2) for x in inputs(torch.float64, DIMS, WHOLE)[:3]]
    arguments: dict[str, Any] = {"key_lengths": torch.tensor([WHOLE, 77])}
    if what == "options":
        arguments = {"dropout_p": 0.5, "seed": 1}
    with in_place_on_cpus():
        try:
            context_parallel_attention(*own, plan, **(arguments if rank == 1 else {}))
        except ValueError as error:
            return str(error)
    return "nothing"


def after_another_died(rank: int, which: int) -> str:
    """The error of a call that one rank does not live to see, between two passes if it is 2."""
    plan = make_plan(mask_of("causal"), dist.get_world_size(), "zigzag")
    own = [plan.shard(x, rank, 2).requires_grad_() for x in inputs(torch.float64)[:3]]
    if rank == which == 1:
        os._exit(1)
    try:
        out = context_parallel_attention(*own, plan)
        if rank == which == 2:
            os._exit(1)
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"
