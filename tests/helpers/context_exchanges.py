"""What ranks that share a sequence exchange and copy, and the tables that they make."""

from unittest import mock

import torch
import torch.distributed as dist

import masks
from masks import BlockMask
from sparseflash.dispatch.call import Call
from sparseflash.distributed import context_parallel_attention, fetch, make_plan
from tests.helpers.context_calls import (
    BATCH,
    BLOCK,
    DIMS,
    HEADS,
    KV_HEADS,
    LENGTH,
    WHOLE,
    inputs,
    mask_of,
    masks_of,
    plan_in_groups,
    plan_of,
)
from tests.helpers.in_place import in_place_on_cpus


def bytes_moved(rank: int, mask_name: str, strategy: str, split: str) -> list[list[int]]:
    """Bytes that came and went in the forward pass and in the backward pass, and those of the
    plan.
    """
    moved = torch.zeros(2, dtype=torch.int64)
    exchange = dist.all_to_all_single

    def counted(output, source, receive_splits, send_splits, *arguments, **keywords):
        for i, (tensor, splits) in enumerate(((output, receive_splits), (source, send_splits))):
            row_bytes = tensor[:1].nbytes
            moved[i] += row_bytes * (sum(splits) - splits[rank])  # its own stay where they are
        return exchange(output, source, receive_splits, send_splits, *arguments, **keywords)

    plan = plan_of(masks_of(mask_name), dist.get_world_size(), strategy, split)
    value_dim = 2 * DIMS
    given = inputs(torch.float64, value_dim)[:3]
    own = [plan.shard(x, rank, 2).requires_grad_() for x in given]
    with mock.patch.object(dist, "all_to_all_single", counted):
        out = context_parallel_attention(*own, plan)
        forward = moved.tolist()
        out.sum().backward()
    backward = [both - first for both, first in zip(moved.tolist(), forward, strict=True)]
    report = plan.report(KV_HEADS, DIMS, torch.float64, BATCH, HEADS, value_dim)
    planned = [report.receive_bytes[rank], report.send_bytes[rank]]
    returned = [report.backward_receive_bytes[rank], report.backward_send_bytes[rank]]
    return [forward, backward, planned, returned]


def order_of_a_call(rank: int, split: str) -> list[list[str]]:
    """The exchanges and calls of attention of the forward and of the backward pass, in order."""
    events, forward, backward = [], Call.forward, Call.backward
    exchange = dist.all_to_all_single

    def noted(function, what):
        def noting(*arguments, **keywords):
            events.append(what)
            return function(*arguments, **keywords)

        return noting

    mask, ranks = masks.local(20)(WHOLE, BLOCK), dist.get_world_size()
    plan = make_plan(mask, ranks, "contiguous", split=split)
    own = [plan.shard(x, rank, 2).requires_grad_() for x in inputs(torch.float64, 16, WHOLE)[:3]]
    with (
        in_place_on_cpus(),
        mock.patch.object(dist, "all_to_all_single", noted(exchange, "exchange")),
        mock.patch.object(Call, "forward", noted(forward, "attention")),
        mock.patch.object(Call, "backward", noted(backward, "attention")),
    ):
        out = context_parallel_attention(*own, plan)
        in_forward = len(events)
        out.sum().backward()
    return [events[:in_forward], events[in_forward:]]


def bytes_copied(rank: int, mask_name: str, strategy: str, split: str) -> tuple[int, int, int]:
    """Bytes of keys and values that are copied in the forward pass, and those of the plan; and
    bytes of gradients that are packed in the backward pass.
    """
    copied, copy = [0], fetch.copy_both_in_place

    def counted(totals, parts, rows, part_rows=slice(None)):
        copied[0] += sum(total[:, :, rows].nbytes for total in totals)
        copy(totals, parts, rows, part_rows)

    length = 256 if mask_name == "whole butterfly" else LENGTH
    mask = masks.butterfly()(length, BLOCK) if length == 256 else mask_of(mask_name)
    plan = plan_of(mask, dist.get_world_size(), strategy, split)
    value_dim = 2 * DIMS
    given = inputs(torch.float64, value_dim, length)[:3]
    own = [plan.shard(x, rank, 2).requires_grad_() for x in given]
    with mock.patch.object(fetch, "copy_both_in_place", counted):
        out = context_parallel_attention(*own, plan)
        forward = copied[0]
        out.sum().backward()
    report = plan.report(KV_HEADS, DIMS, torch.float64, BATCH, HEADS, value_dim)
    return forward, report.copied_bytes[rank], copied[0] - forward


def rows_added(rank: int) -> tuple[list[int], list[int]]:
    """The numbers of tokens whose gradients are added in each launch, and those that each other
    rank receives from this one, for each group of heads.
    """
    found, add = [], fetch.add_both_in_place

    def noted(totals, parts, rows):
        found.append(parts[0].shape[2])
        add(totals, parts, rows)

    plan = plan_in_groups("butterfly", "contiguous", (), 2)
    given = [x[:1] for x in inputs(torch.float64, DIMS, WHOLE)[:3]]
    own = [plan.shard(x, rank, 2).requires_grad_() for x in given]
    with in_place_on_cpus(), mock.patch.object(fetch, "add_both_in_place", noted):
        context_parallel_attention(*own, plan).sum().backward()
    received = plan.traffic()[:, rank].tolist()
    return found, [n for n in received if n] * plan.head_groups(KV_HEADS)


def tables_made(rank: int, split: str) -> list[int]:
    """Tables of selected blocks that are made in three calls, the last with a new selection."""
    support = mask_of("causal")
    plan = plan_of(support, dist.get_world_size(), "zigzag", split)
    scores = torch.randn(support.grid.nq, support.grid.nk)[plan.part(rank).rows]
    own = [plan.shard(x, rank, 2) for x in inputs(torch.float64)[:3]]
    one, other = (plan.mask_of(rank).select_topk(scores, 3) for _ in range(2))
    select, made = BlockMask.select, [0]

    def counted(*arguments):
        made[-1] += 1
        return select(*arguments)

    with mock.patch.object(BlockMask, "select", counted):
        for mask in (one, one, other):
            context_parallel_attention(*own, plan, mask=mask)
            made.append(0)
    return made[:3]
