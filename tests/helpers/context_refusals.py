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
    attention,
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
    errors = []
    for tensors, used, options in calls:
        try:
            context_parallel_attention(*tensors, used, group=mesh, check=True, **options)
        except ValueError as error:
            errors.append(str(error))
    return errors


def captured_with_shared_heads(rank: int) -> list[str]:
    """The errors of first calls while a CUDA graph is captured, in which nothing is exchanged."""
    mesh = init_device_mesh("cpu", (2, 2))
    plan = make_plan(mask_of("causal"), 2, "contiguous")
    own = [
        plan.shard(x, rank // 2, 2).tensor_split(2, 2)[rank % 2] for x in inputs(torch.float64)[:3]
    ]
    errors = []
    with (
        mock.patch.object(attention, "is_captured", return_value=True),
        mock.patch.object(capture, "is_captured", return_value=True),
        mock.patch.object(attention, "_check_agreement", side_effect=AssertionError),
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


def of_another_agreed_plan(rank: int) -> str:
    """The error of a checked call in which rank 1 has another of the plans that all have used."""
    plans = []
    for name in ("causal", "window and sink"):
        plan = make_plan(mask_of(name), dist.get_world_size(), "contiguous")
        context_parallel_attention(
            *(plan.shard(x, rank, 2) for x in inputs(torch.float64)[:3]), plan
        )
        plans.append(plan)
    plan = plans[rank == 1]
    own = [plan.shard(x, rank, 2) for x in inputs(torch.float64)[:3]]
    try:
        context_parallel_attention(*own, plan, check=True)
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
