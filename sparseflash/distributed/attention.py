"""Context-parallel attention: the public function."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, cast, overload
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from masks import DynamicMask
from masks._core.grid import is_captured
from sparseflash.arguments import check_sinks, checked_bias, checked_seed, checked_tensors
from sparseflash.distributed.agreement import NEW, Comparison, number_of, with_seed
from sparseflash.distributed.copies import Copies
from sparseflash.distributed.heads import HeadSharing
from sparseflash.distributed.part import Heads
from sparseflash.distributed.passes import ContextParallelAttention
from sparseflash.distributed.plan import ContextPlan
from sparseflash.distributed.prepare import check_heads, check_selected, prepare, sizes_of
from sparseflash.distributed.transport import Group, process_group_of
from sparseflash.merge import add_sinks
from sparseflash.options import AttentionOptions, CallKeywords, OptionKeywords


class _Keywords(CallKeywords, total=False):
    group: Group
    mask: DynamicMask | None
    key_lengths: Tensor | None
    score_tensors: Sequence[Tensor] | None
    transport: Copies | None
    check: bool | None


@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: ContextPlan, *,
    return_lse: Literal[False] = False, return_max_logits: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: ContextPlan, *,
    return_lse: Literal[True], return_max_logits: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: ContextPlan, *,
    return_lse: bool = False, return_max_logits: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[Tensor, ...]: ...  # fmt: skip
# A compiler may reorder, drop or recompute an operator, on one rank in another way than on others.
@torch.compiler.disable(reason="all ranks must exchange keys and gradients in the same order")
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: ContextPlan,
    *,
    group: Group = None,
    mask: DynamicMask | None = None,
    key_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: int | None = None,
    score_tensors: Sequence[Tensor] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    transport: Copies | None = None,
    check: bool | None = None,
    **options: Unpack[OptionKeywords],
) -> Tensor | tuple[Tensor, ...]:
    """sparseflash.attention over a sequence whose tokens are sharded over ranks by a plan.

    The result equals that of a single process up to rounding: the mask, key lengths, dropout,
    score functions and biases refer to positions in the whole sequence. On GPUs, calls with
    dropout, a score function or a bias run on the backend triton; hopper refuses them. All ranks
    of the group must call the function, in the same order, with equal options and
    return_max_logits, and with the same ones of bias, key_lengths, mask and sinks. All must need
    the same gradients of key and value, and that of query if the plan has shared rows or ranks
    divide the heads. All must run the backward pass if one of them does; if ranks divide the
    heads, from the same of out and LSE.

    The fetched keys and values are saved for the backward pass. If the plan has round_tokens and
    needs several rounds, they are fetched again, and at most the keys and values of two rounds are
    in memory. Equal inputs give equal bits.

    Args:
        query: (batch, heads, tokens of this rank, head_dim); the tokens of plan.positions(rank).
        key: (batch, kv_heads, tokens of this rank, head_dim).
        value: (batch, kv_heads, tokens of this rank, value_dim).
        plan: The plan, equal on all ranks.
        group: The ranks, as a process group or a mesh of one dimension; by default all processes.
            A plan of one rank needs none, unless it has shared rows and this is not the only
            process of an initialised torch.distributed.
            With a mesh of two dimensions, (sequence, heads), the plan is made for the first
            dimension, and the ranks of the second divide the heads of a shard among them. Each
            passes its part of the tokens, plan.shard(...).tensor_split(ranks, dim), with all
            heads. The numbers of heads must then be multiples of the ranks of the second
            dimension.
        mask: Selects blocks of plan.mask_of(rank) for the queries of this rank; by default all of
            them. It does not change which keys are fetched. With a mesh of two dimensions, rank is
            that of the first dimension, the queries are those of the whole shard, and the gradient
            of scores is the sum over the ranks of the second dimension.
        key_lengths: Integers (batch,), in tokens of the whole sequence, as in
            sparseflash.attention.
        bias: As in sparseflash.attention, for the whole sequence. Each rank computes a partial
            gradient of bias, sinks and score tensors. The gradient is the sum over ranks, as for
            any parameter that is replicated.
        sinks: As in sparseflash.attention.
        seed: Seed of dropout, equal on all ranks. The same pairs are dropped as in one process.
        score_tensors: As in sparseflash.attention, for the whole sequence.
        return_lse: Also return the LSE of the queries of this rank.
        return_max_logits: Also return, last, the maximum logits of the queries of this rank, over
            all keys of the sequence, without gradient, as in sparseflash.attention.
        transport: How keys, values and their gradients are exchanged. By default by all-to-alls of
            the process group. `Copies` are copies between the GPUs of one host, which run beside
            kernels without delaying them: one object for all calls of the group.
        check: Whether all ranks first compare their plans and arguments in full: options, sizes,
            key lengths, and which other arguments are given. If they differ, or a rank has an
            invalid argument, all ranks raise an error that says so. It waits for the device. By
            default it is done in the first call with this plan, group, options and sizes, and with
            these of the other arguments. Later calls compare one number, for which the host does
            not wait on a GPU: if ranks disagree there, or one has an invalid argument, they
            compare in full on a CPU, and on GPUs a device-side assertion ends all ranks. Calls in
            a CUDA graph, and all with `check=False`, compare nothing. Equal on all ranks.
        **options: Fields of AttentionOptions.

    Returns:
        out (batch, heads, tokens of this rank, value_dim), and with return_lse also the LSE
        (batch, heads, tokens of this rank). With return_max_logits also the maximum logits, with
        shape and dtype of the LSE.

    Raises:
        TypeError, ValueError: An argument is invalid; the message names it. With `check=False`, or
            if the plan is not one of as many ranks as the group has, the other ranks wait until
            the time-out of the group.
        BackendError: No backend can compute the call.
        RuntimeError: Another rank died or did not answer within the time-out of the group. A CUDA
            graph is being captured, and no call with this plan and options came before, or
            `Copies` have no buffers of a pass that ran before. On GPUs: ranks disagree in a later
            call.

    Reference:
        Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers", 2023, exchanges all
        keys; Jiang et al., "DCP: dynamic context parallelism", 2025, plans the exchange.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
    if not isinstance(check, bool | None):
        raise TypeError(f"check must be a bool or None, got {check!r}")
    arguments: dict[str, Any] = {
        "mask": mask,
        "key_lengths": key_lengths,
        "bias": bias,
        "sinks": sinks,
        "seed": seed,
        "score_tensors": score_tensors,
        "options": options,
        "transport": transport,
        "max_logits": return_max_logits,
    }
    tensors = (query, key, value)
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        results = _with_shared_heads(tensors, plan, group, check, arguments)
    else:
        process_group = process_group_of(group, plan.ranks)
        results = _attention(tensors, plan, process_group, check, arguments)
    out, _, *max_logits = results
    if return_lse:
        return results
    return (out, *max_logits) if max_logits else out


def _attention(
    tensors: tuple[Tensor, Tensor, Tensor],
    plan: ContextPlan,
    group: ProcessGroup | None,
    check: bool | None,
    arguments: Mapping[str, Any],
    heads_group: ProcessGroup | None = None,
    whole: ContextPlan | None = None,
) -> tuple[Tensor, ...]:
    """out, lse and, if asked for, the maximum logits.

    arguments: those of `prepare`
    heads_group: the ranks among which heads are divided, which must agree too
    whole: the plan of all heads if they are divided
    """
    agreed = ("agreed", *(None if x is None else ref(x) for x in (heads_group, group)))
    comparison = None if group is None else Comparison(group, heads_group, tensors, check)
    try:
        prepared = prepare(*tensors, plan, group, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        if comparison is not None and comparison.compare_numbers(
            plan.agreed.get(agreed), valid=False
        ):
            comparison.compare_in_full({}, f"{type(error).__name__}: {error}")
        raise
    if comparison is not None:
        has_sinks = arguments["sinks"] is not None
        like_this = (*agreed, has_sinks, *prepared.kind)
        known = plan.agreed.get(like_this)
        number = None if known is None else with_seed(known, prepared.seed)
        if comparison.compare_numbers(number, prepared.lengths):
            facts = prepared.facts()
            facts["whether there are sinks"] = has_sinks
            # The plan as it was given: bias, key_lengths and mask may choose another split.
            of_ranks = {"plan": f"{plan} of SHA-256 {plan.digest}"}
            of_ranks["transport"] = prepared.transport_name
            comparison.compare_in_full(facts, None, of_ranks)
            # Each call adds its seed and key lengths to the number.
            facts |= {"seed": None, "key_lengths": prepared.lengths is not None}
            # Ranks with other heads have other Copies.
            copied = prepared.copies is not None
            transport = prepared.transport_name if heads_group is None else copied
            of_mesh = {"plan": (whole or plan).digest, "transport": transport}
            plan.agreed.update({agreed: NEW, like_this: number_of(facts | of_mesh)})
    inputs = (prepared.query, prepared.key, prepared.value, prepared.bias)
    read = () if prepared.score_tensors is None else prepared.score_tensors.tensors
    out, lse, *max_logits = cast(
        tuple[Tensor, ...],
        ContextParallelAttention.apply(*inputs, prepared.block_scores, prepared, *read),
    )
    if arguments["sinks"] is not None:
        out, lse = add_sinks(out, lse, arguments["sinks"])
    return out, lse, *max_logits


def _with_shared_heads(
    tensors: tuple[Tensor, Tensor, Tensor],
    plan: ContextPlan,
    mesh: DeviceMesh,
    check: bool | None,
    arguments: Mapping[str, Any],
) -> tuple[Tensor, ...]:
    """`_attention` of own tokens and all heads; each rank computes all tokens and own heads."""
    group, heads_group = mesh.get_group(0), mesh.get_group(1)
    process_group_of(group, plan.ranks)
    sharing = HeadSharing.of(heads_group, len(plan.positions(group.rank())))
    error, facts, own = None, {"plan": plan.digest}, {}
    try:
        own = _of_own_heads(sharing, tensors, plan, group.rank(), arguments)
        facts |= {"options": repr(AttentionOptions(**own["options"])), "seed": own["seed"]}
        facts |= sizes_of(*tensors)
    except (TypeError, ValueError) as problem:
        error = problem
    agreed = ("agreed", ref(heads_group))  # a plan does not keep the memory of a group
    number = number_of(facts) if agreed in plan.agreed else None
    comparison = Comparison(group, heads_group, tensors, check)
    if comparison.compare_numbers(number, valid=error is None):
        comparison.compare_in_full(facts, None if error is None else str(error))
        plan.agreed[agreed] = NEW
    if error is not None:
        raise error
    query, key, value = map(sharing.by_heads, tensors)
    own_plan = plan.of_heads(sharing.heads)
    tensors = query, key, value
    out, *of_rows = _attention(tensors, own_plan, group, check, own, heads_group, plan)
    of_tokens = sharing.by_tokens(torch.stack(of_rows, -1))  # in one exchange
    lse, *max_logits = (of_tokens[..., i] for i in range(of_tokens.shape[-1]))
    return sharing.by_tokens(out), lse, *(x.detach() for x in max_logits)


def _of_own_heads(
    sharing: HeadSharing,
    tensors: tuple[Tensor, Tensor, Tensor],
    plan: ContextPlan,
    rank: int,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Checks what divides heads among ranks, and returns the arguments of own heads.

    rank: number of this rank in the plan
    """
    query, key, value = tensors
    checked_tensors(query, key, value, None)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        sharing.check(name, tensor)
    check_heads("plan must be made for a mask of", plan.mask, query, key)
    seed = checked_seed(arguments["seed"], AttentionOptions(**arguments["options"]).dropout_p)
    mask: DynamicMask | None = arguments["mask"]
    if mask is not None:
        check_selected(mask, plan, rank)
        check_heads("mask must have", mask, query, key)
        mask = _blocks_of_heads(mask, plan, rank, sharing.heads)
    bias = checked_bias(arguments["bias"], query, plan.seq_len, plan.seq_len)
    check_sinks(arguments["sinks"], query)
    by_head = {"bias": bias, "sinks": arguments["sinks"]}
    of_heads = {name: sharing.of_own_heads(tensor) for name, tensor in by_head.items()}
    seed = None if seed is None else int(seed)  # one for all heads
    return {**arguments, **of_heads, "mask": mask, "seed": seed, "heads": sharing.heads}


def _blocks_of_heads(mask: DynamicMask, plan: ContextPlan, rank: int, heads: Heads) -> DynamicMask:
    """What a mask selects for some heads, stored with it: layers share the tables of a mask."""
    if mask.num_heads == 1:
        return mask
    key = ("heads", heads, torch.is_grad_enabled())  # by which scores get a gradient
    if key not in mask.cache:
        of_heads = heads.of(mask.num_heads)
        scores = None if mask.scores is None else mask.scores[:, of_heads]
        support = plan.of_heads(heads).mask_of(rank).to(mask.device)
        found = support.select(mask.blocks[:, of_heads], scores)
        if is_captured(mask.blocks.device):
            return found  # its memory has its values only after a replay
        mask.cache[key] = found
    return mask.cache[key]
