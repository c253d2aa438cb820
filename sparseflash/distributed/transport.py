"""The process group of a call, and `gather`."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from sparseflash.distributed.exchange import explain_errors
from sparseflash.distributed.plan import ContextPlan

Group = ProcessGroup | DeviceMesh | None


def process_group_of(group: Group, ranks: int) -> ProcessGroup | None:
    """The process group of a call.

    Without a group it is that of all processes if the plan has several ranks, or if the only
    process has initialised torch.distributed; else None.

    Raises:
        TypeError: `group` has another type.
        ValueError: `group` does not have `ranks` ranks.
    """
    alone = group is None and ranks == 1 and dist.is_initialized() and dist.get_world_size() > 1
    found = None if alone else group_or_world(group)
    size = 1 if found is None else found.size()
    if size != ranks:
        message = f"group must have the {ranks} ranks of the plan, got {size}"
        if group is None and not dist.is_initialized():
            message += ": torch.distributed.init_process_group has not been called"
        raise ValueError(message)
    return found


def group_or_world(group: Group) -> ProcessGroup | None:
    """The process group, that of a mesh of one dimension, or by default that of all processes.

    None if none is given and torch.distributed is not initialised.
    """
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:  # of new_group
        raise ValueError("group must have this rank among its ranks")
    if not isinstance(group, Group):
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, got {group!r}")
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ValueError(f"group must be a mesh of one dimension, got {group}")
    return group.get_group()


def gather(shard: Tensor, plan: ContextPlan, dim: int, group: Group = None) -> Tensor:
    """Gathers the shards of all ranks; every rank gets the whole sequence, without a gradient.

    Args:
        shard: The tokens of this rank along `dim`, as plan.shard returns them.
        plan: The plan by which the sequence is sharded.
        dim: The dimension of tokens.
        group: The ranks, as a process group or a mesh of one dimension; by default all processes.

    Returns:
        A tensor with all tokens of the sequence along `dim`.

    Raises:
        TypeError, ValueError: An argument is invalid, or the shard requires a gradient, which
            would be lost; the message names it. The other ranks wait until the time-out of the
            group.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
    if not isinstance(shard, Tensor):
        raise TypeError(f"shard must be a tensor, got {type(shard).__name__}")
    if shard.requires_grad and torch.is_grad_enabled():
        raise ValueError("shard must not require a gradient: detach it, or gather under no_grad")
    process_group = process_group_of(group, plan.ranks)
    rank = 0 if process_group is None else process_group.rank()
    plan.check_length("shard", shard, rank, dim)
    if process_group is None or plan.ranks == 1:
        return plan.unshard([shard], dim)
    lengths = [len(plan.positions(each)) for each in range(plan.ranks)]
    padded = shard.movedim(dim, 0).new_empty(max(lengths), *shard.movedim(dim, 0).shape[1:])
    padded[: lengths[rank]] = shard.movedim(dim, 0)
    shards = [torch.empty_like(padded) for _ in lengths]
    with explain_errors("shards"):
        dist.all_gather(shards, padded, group=process_group)
    parts = [part[:n].movedim(0, dim) for part, n in zip(shards, lengths, strict=True)]
    return plan.unshard(parts, dim)
