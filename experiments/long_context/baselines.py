"""Baselines of context plans with the same kernels: an all-gather and a ring."""

from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import sparseflash
from masks import BlockMask, DynamicMask
from sparseflash.distributed import ContextPlan, make_plan


class RingPlan(ContextPlan):
    """Every rank receives the whole shard of one other rank in each of ranks - 1 rounds.

    It is made from a contiguous plan. With equal shards, the first round brings the shard of the
    next rank, the second one that of the rank after it, as in ring attention.
    """

    @cached_property
    def _fetched(self) -> Tensor:
        own = self.owner[self.workload.columns] == torch.arange(self.ranks).unsqueeze(1)
        return ~own


def ring_plan(mask: BlockMask, ranks: int) -> RingPlan:
    """The ring for a mask whose length is divided into equal shards of whole units."""
    owner = make_plan(mask, ranks, "contiguous").owner
    return RingPlan(mask.to("cpu"), ranks, "ring", owner, mask.grid.k_len // ranks)


def all_gather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask | DynamicMask,
    group: ProcessGroup | None,
) -> Tensor:
    """Own queries against the keys and values of all ranks, gathered before they are read.

    The shards are contiguous and of one length. The backward pass reduces and scatters the
    gradients of all keys and values.

    Args:
        query: (batch, heads, own tokens, head_dim).
        key: (batch, kv_heads, own tokens, head_dim).
        value: Like key.
        mask: Own queries against all keys.
        group: The group of all ranks; None for a single rank.
    """
    if group is not None:
        packed = torch.stack([key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)], dim=1)
        gathered = cast(Tensor, _Gathered.apply(packed, group))
        key, value = (x.permute(1, 2, 0, 3) for x in gathered.unbind(1))
    return sparseflash.attention(query, key, value, mask)


class _Gathered(torch.autograd.Function):
    """Gathers the shards of all ranks. Its backward pass sums own rows over ranks."""

    @staticmethod
    def forward(ctx, shard: Tensor, group: ProcessGroup):
        ctx.group = group
        return all_gather(shard, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad.contiguous(), ctx.group), None


def all_gather(shard: Tensor, group: ProcessGroup) -> Tensor:
    """The shards of all ranks, one after another along the first dimension."""
    gathered = shard.new_empty(group.size() * len(shard), *shard.shape[1:])
    dist.all_gather_into_tensor(gathered, shard, group=group)
    return gathered


def reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The own rows of the sum over ranks."""
    own = tensor.new_empty(len(tensor) // group.size(), *tensor.shape[1:])
    dist.reduce_scatter_tensor(own, tensor, group=group)
    return own
