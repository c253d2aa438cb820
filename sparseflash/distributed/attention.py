"""Attention over a sequence that ranks share: the public function, and both passes of one rank.

Each rank attends its own keys while those that it lacks travel, then these, round after round:

    O, LSE = merge of (own part, round 0, round 1, ...)

The backward pass of every part is that of the whole softmax: with the LSE and the O of all parts,
P = exp(S - LSE) and dS = P * (dP - rowsum(dO * O)) need nothing of another part. The gradients of
fetched keys and values go back to their owners, which add them in the order of rounds and ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Unpack, cast, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from masks import BlockMask, DynamicMask
from sparseflash.arguments import (
    check_key_lengths,
    check_sinks,
    checked_bias,
    checked_block_scores,
    checked_seed,
    checked_tensors,
    is_plain,
    lengths_in_range,
    wants_gradient,
)
from sparseflash.dispatch.call import Call, Positions
from sparseflash.dispatch.plan import find_plan
from sparseflash.dispatch.spec import CallFacts
from sparseflash.distributed.heads import HeadSharing
from sparseflash.distributed.plan import ContextPlan, Part, Round
from sparseflash.distributed.transport import (
    Exchange,
    Group,
    check_agreement,
    disagreement,
    resolved,
)
from sparseflash.merge import merge_in_place, with_sinks
from sparseflash.options import AttentionOptions, OptionKeywords


@overload
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
    return_lse: Literal[False] = False,
    check: bool | None = None,
    **options: Unpack[OptionKeywords],
) -> Tensor: ...
@overload
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
    return_lse: Literal[True],
    check: bool | None = None,
    **options: Unpack[OptionKeywords],
) -> tuple[Tensor, Tensor]: ...
@torch.compiler.disable
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
    return_lse: bool = False,
    check: bool | None = None,
    **options: Unpack[OptionKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """sparseflash.attention over a sequence of which each rank has the shard that a plan gives it.

    What every rank gets is what one process would get for these queries, up to rounding: pairs,
    lengths, dropout, scores and biases are those of the whole sequence. All ranks of the group
    must call it, in the same order, and run the backward pass if one does.

    In one round the fetched keys and values are kept for the backward pass; in several they are
    fetched again, and no more than round_tokens of two rounds are alive at a time. The same inputs
    give the same bits.

    Args:
        query: (batch, heads, tokens of this rank, head_dim); the tokens of plan.positions(rank).
        key: (batch, kv_heads, tokens of this rank, head_dim).
        value: Like key.
        plan: Equal on all ranks.
        group: The ranks, as a group or a mesh of one dimension; by default all processes. Of a
            mesh of two dimensions, (sequence, heads), the plan is that of the first, and the ranks
            of the second share the heads of its shards: each passes its part of the tokens,
            plan.shard(...).tensor_split(ranks, dim), with all heads. Then heads must be multiples
            of these ranks, the mask that of all heads, and dropout_p 0.
        mask: Blocks that the device selects for this rank's queries, out of plan.mask_of(rank); by
            default all. What is fetched remains what the plan says.
        key_lengths: Integers (batch,), as in sparseflash.attention: of the whole sequence.
        bias: As in sparseflash.attention, of the whole sequence. Its gradient is the part of this
            rank's queries, as is that of sinks: the sum over ranks is the whole, as of any
            parameter that ranks share.
        sinks: As in sparseflash.attention.
        seed: Of dropout: the same seed drops the same pairs as in one process.
        return_lse: Also return the LSE of this rank's queries.
        check: Before anything is exchanged, ask all ranks whether their plans and arguments agree
            and none is refused. Where not, all raise. It waits for the device. None: in the first
            call with this plan and group.
        **options: Those of AttentionOptions.

    Returns:
        out like query, and with return_lse the LSE, (batch, heads, tokens of this rank).

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it. Where nothing is
            checked, ranks on which it is right wait for this one until the time-out of the group.
        BackendError: No backend can serve the call.
        RuntimeError: Another rank died or did not answer within the time-out of the group.

    Reference:
        Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers", 2023, moves all keys;
        Jiang et al., "DCP: dynamic context parallelism", 2025, plans what is moved.
    """
    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan must be a ContextPlan, got {type(plan).__name__}")
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        shared = (mask, key_lengths, bias, sinks, check, options)
        out, lse = _with_shared_heads(query, key, value, plan, group, *shared)
        return (out, lse) if return_lse else out
    found = resolved(group, plan.ranks)
    arguments = (mask, key_lengths, bias, sinks, seed, options)
    if check is None:
        check = ("agreed", found) not in plan.cache
    try:
        prepared = _prepare(query, key, value, plan, found, *arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        if found is not None and check:
            check_agreement(found, {}, f"{type(error).__name__}: {error}")
        raise
    if found is not None and check:
        check_agreement(found, prepared.facts(query, key), None)
        plan.cache["agreed", found] = True
    tensors = (prepared.query, prepared.key, prepared.value, prepared.bias)
    out, lse = cast(
        tuple[Tensor, Tensor],
        _ContextParallelAttention.apply(*tensors, prepared.block_scores, prepared),
    )
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _with_shared_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: ContextPlan,
    mesh: DeviceMesh,
    mask: DynamicMask | None,
    key_lengths: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    check: bool | None,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of own tokens and all heads, computed of more tokens and fewer heads."""
    group, heads_group = mesh.get_group(0), mesh.get_group(1)
    resolved(group, plan.ranks)
    shard = len(plan.positions(group.rank()))
    sharing = HeadSharing.of(heads_group, shard)
    if check is None:
        check = ("agreed", heads_group) not in plan.cache
    problem = _problem_of_shared_heads(sharing, (query, key, value), plan, mask, options)
    if check:
        # Along both dimensions of the mesh, so that what is wrong anywhere is known everywhere.
        problem = disagreement(heads_group, {"plan": plan.digest}, problem)
        check_agreement(group, {}, problem)
        plan.cache["agreed", heads_group] = True
    elif problem is not None:
        raise ValueError(problem)
    out, lse = context_parallel_attention(
        sharing.by_heads(query),
        sharing.by_heads(key),
        sharing.by_heads(value),
        plan,
        group=group,
        mask=mask,
        key_lengths=key_lengths,
        bias=sharing.of_own_heads(bias),
        sinks=sharing.of_own_heads(sinks),
        return_lse=True,
        check=check,
        **cast(OptionKeywords, options),
    )
    return sharing.by_tokens(out), sharing.by_tokens(lse.unsqueeze(-1)).squeeze(-1)


def _problem_of_shared_heads(
    sharing: HeadSharing,
    tensors: tuple[Tensor, Tensor, Tensor],
    plan: ContextPlan,
    mask: DynamicMask | None,
    options: Mapping[str, Any],
) -> str | None:
    """Why ranks cannot share the heads of a call."""
    try:
        query, key, value = tensors
        checked_tensors(query, key, value, None)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            sharing.check(name, tensor)
        if plan.mask.num_heads > 1 or (mask is not None and mask.num_heads > 1):
            return "plan must be of one mask for all heads where ranks share the heads"
        if AttentionOptions(**options).dropout_p > 0:
            return "dropout_p must be 0 where ranks share the heads"
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Everything about one call of one rank, checked."""

    query: Tensor
    key: Tensor
    value: Tensor
    plan: ContextPlan
    part: Part
    group: ProcessGroup | None
    mask: DynamicMask | None
    lengths: Tensor | None
    bias: Tensor | None
    seed: int
    options: Mapping[str, Any]
    differentiates_bias: bool
    block_scores: Tensor | None

    def facts(self, query: Tensor, key: Tensor) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return {
            "plan": self.plan.digest,
            "batch, heads and head_dim of query": (*query.shape[:2], query.shape[3]),
            "heads of key": key.shape[1],
            "dtype": str(query.dtype),
            "gradient of key or value": _differentiated(self.key, self.value),
            "options": repr(AttentionOptions(**self.options)),
        }

    @cached_property
    def own(self) -> Call:
        """The call of the own queries and keys."""
        return self._call(
            *(self.query, self.key, self.value),
            *(self.part.mask, self.part.rows, self.part.rows, self.part.columns),
        )

    def call_of(self, each: Round, query: Tensor, key: Tensor, value: Tensor) -> Call:
        """The call of the queries of a round and of the keys that it brought."""
        assert each.mask is not None, "a round that brings nothing has no call"
        rows = self.part.rows[each.rows]
        return self._call(query, key, value, each.mask, each.rows, rows, each.columns)

    def _call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: BlockMask,
        own_rows: Tensor,
        rows: Tensor,
        columns: Tensor,
    ) -> Call:
        g = mask.grid
        chosen: BlockMask | DynamicMask = mask
        if self.mask is not None:
            every = own_rows is rows
            blocks = self.mask.blocks if every else self.mask.blocks[:, :, own_rows]
            chosen = mask.select(blocks[..., columns])
        first = columns * g.bk
        lengths = self.lengths
        if lengths is not None:
            inside = (lengths.unsqueeze(1) - first).clamp(0, g.bk).sum(1)
            lengths = inside.to(key.device, torch.int32)
        has = (lengths is not None, self.bias is not None)
        wanted = (self.differentiates_bias, self.block_scores is not None)
        facts = CallFacts(*has, *wanted, positions=True)
        plan = find_plan(query, key, value, chosen, self.options, facts)
        positions = Positions(rows * g.bq, first, self.plan.seq_len)
        return Call(plan, lengths, self.seed, self.bias, positions)


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: ContextPlan,
    group: ProcessGroup | None,
    mask: DynamicMask | None,
    key_lengths: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    seed: int | None,
    options: Mapping[str, Any],
) -> _Prepared:
    """The call after all checks, but for those of the backend."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, Tensor) and not is_plain(tensor):
            raise TypeError(f"{name} must be an ordinary tensor, got a {type(tensor).__name__}")
    query, key, value = checked_tensors(query, key, value, key_lengths)
    rank = 0 if group is None else group.rank()
    plan.check_length("query", query, rank, 2)
    plan.check_length("key", key, rank, 2)
    checked = AttentionOptions(**options)
    if key_lengths is not None:
        check_key_lengths(key_lengths, query)
    if bias is not None:
        bias = checked_bias(bias, query, plan.seq_len, plan.seq_len)
    if sinks is not None:
        check_sinks(sinks, query)
    if mask is not None:
        _check_selected(mask, plan, rank)
    seed_tensor = checked_seed(seed, checked.dropout_p)
    prepared = _Prepared(
        *(query, key, value, plan, plan.part(rank, query.device), group, mask),
        lengths=lengths_in_range(key_lengths, plan.seq_len, query.device),
        bias=bias,
        seed=0 if seed_tensor is None else int(seed_tensor),
        options=options,
        differentiates_bias=wants_gradient(bias),
        block_scores=None if mask is None else checked_block_scores(mask),
    )
    _ = prepared.own  # what a backend refuses, it refuses before anything is exchanged
    return prepared


def _check_selected(mask: DynamicMask, plan: ContextPlan, rank: int) -> None:
    if not isinstance(mask, DynamicMask):
        raise TypeError(
            f"mask must be a DynamicMask out of plan.mask_of({rank}), got {type(mask).__name__}"
        )
    if not plan.is_support(mask.support, rank):
        raise ValueError(f"mask must be selected out of plan.mask_of({rank}), got {mask}")


def _differentiated(*tensors: Tensor | None) -> bool:
    return any(wants_gradient(tensor) for tensor in tensors)


def _pack(first: Tensor, second: Tensor, chosen: Sequence[Tensor | slice], total: int) -> Tensor:
    """(total, 2, batch, heads, dims): chosen tokens of two (batch, heads, seq, dims), one choice
    after another.
    """
    packed = first.new_empty(total, 2, first.shape[0], first.shape[1], first.shape[3])
    begin = 0
    for tokens in chosen:
        for i, tensor in enumerate((first, second)):
            here = tensor[:, :, tokens].permute(2, 0, 1, 3)
            packed[begin : begin + len(here), i] = here
        begin += len(here)
    return packed


def _unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of _pack, as views."""
    first, second = packed.unbind(1)
    return first.permute(1, 2, 0, 3), second.permute(1, 2, 0, 3)


class _Fetch:
    """Keys and values of one round, under way."""

    def __init__(self, prepared: _Prepared, key: Tensor, value: Tensor, each: Round):
        self._order = each.order
        splits = (each.send_splits, each.receive_splits)
        packed = _pack(key, value, each.send, sum(each.send_splits))
        self._exchange = Exchange(prepared.group, packed, *splits, "keys and values")

    def wait(self) -> Tensor:
        """Packed, in the order of the sequence."""
        packed = self._exchange.wait()
        return packed if self._order is None else packed.index_select(0, self._order)


class _Return:
    """Gradients of the keys and values of one round on their way to the owners."""

    def __init__(self, prepared: _Prepared, packed: Tensor, each: Round):
        self._round = each
        if each.order is not None:
            packed = torch.empty_like(packed).index_copy_(0, each.order, packed)
        splits = (each.receive_splits, each.send_splits)
        self._exchange = Exchange(prepared.group, packed, *splits, "gradients of keys and values")

    def add_to(self, *totals: Tensor | None) -> None:
        """Adds what came back, one rank after another: a token may have gone to several."""
        packed, splits = self._exchange.wait(), self._round.send_splits
        for part, tokens in zip(packed.split(splits), self._round.send, strict=True):
            for total, grad in zip(totals, _unpack(part), strict=True):
                if total is None:
                    continue
                if isinstance(tokens, slice):
                    total[:, :, tokens] += grad
                else:
                    total.index_add_(2, tokens, grad.to(total.dtype))


class _ContextParallelAttention(torch.autograd.Function):
    """(out, lse) of this rank's queries."""

    @staticmethod
    def forward(ctx, query, key, value, bias, block_scores, prepared: _Prepared):
        rounds = prepared.part.rounds
        fetch = _Fetch(prepared, key, value, rounds[0]) if rounds else None
        out, lse = prepared.own.forward(query, key, value)
        if len(rounds) > 1:
            out = out.to(lse.dtype)  # rounded once, not in every round
        calls, kept = [], None
        for number, each in enumerate(rounds):
            assert fetch is not None
            kept = fetch.wait()
            following = rounds[number + 1 : number + 2]
            fetch = _Fetch(prepared, key, value, following[0]) if following else None
            calls.append(_attend_round(prepared, each, kept, query, out, lse))
        out = out.to(query.dtype)
        ctx.prepared, ctx.calls = prepared, calls
        ctx.save_for_backward(
            *(query, key, value, bias, out, lse, kept if len(rounds) == 1 else None)
        )
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        if grads[0] is None and grads[1] is None:
            return (None,) * 6
        return *_Backward(ctx, *grads).run(), None


def _attend_round(
    prepared: _Prepared, each: Round, packed: Tensor, query: Tensor, out: Tensor, lse: Tensor
) -> Call | None:
    """Merges attention to the keys of a round into out and lse; the call, None without keys."""
    if each.mask is None:
        return None
    here = query[:, :, each.queries]
    key, value = _unpack(packed)
    call = prepared.call_of(each, here, key, value)
    merged = (out[:, :, each.queries], lse[:, :, each.queries])
    merge_in_place(*merged, *call.forward(here, key, value))
    if not isinstance(each.queries, slice):  # which gave views
        out[:, :, each.queries], lse[:, :, each.queries] = merged
    return call


class _Backward:
    """The backward pass of one call."""

    def __init__(self, ctx, grad_out: Tensor | None, grad_lse: Tensor | None):
        self._prepared: _Prepared = ctx.prepared
        self._calls = ctx.calls
        self._grad_out, self._grad_lse, self._needs = grad_out, grad_lse, ctx.needs_input_grad[:5]
        self._query, self._key, self._value, _, self._out, self._lse, self._kept = (
            ctx.saved_tensors
        )
        self._rounds = self._prepared.part.rounds
        self._grads: list[Tensor | None] = [None] * 5

    def run(self) -> list[Tensor | None]:
        """The gradients of query, key, value, bias and block scores."""
        returning: list[_Return] = []
        if len(self._rounds) == 1:
            # What was kept first, so that its gradients travel while the own part is computed.
            grads = self._grads_of_round(0, self._kept)
            returning += self._returned(0, grads)
            self._add_own()
            self._add_round(0, grads)
        else:
            fetch = self._fetch(0) if self._rounds else None
            self._add_own()
            for number in range(len(self._rounds)):
                assert fetch is not None
                packed = fetch.wait()
                fetch = self._fetch(number + 1) if number + 1 < len(self._rounds) else None
                grads = self._grads_of_round(number, packed)
                returning += self._returned(number, grads)
                self._add_round(number, grads)
        self._add_returned(returning)
        return [
            None if grad is None or like is None else grad.to(like.dtype)
            for grad, like in zip(self._grads, self._inputs, strict=True)
        ]

    @property
    def _inputs(self) -> tuple[Tensor | None, ...]:
        prepared = self._prepared
        others = (prepared.bias, prepared.block_scores)
        return self._query, self._key, self._value, *others

    def _fetch(self, number: int) -> _Fetch:
        return _Fetch(self._prepared, self._key, self._value, self._rounds[number])

    def _add_own(self) -> None:
        saved = (self._query, self._key, self._value, self._out, self._lse)
        grads = self._prepared.own.backward(self._grad_out, self._grad_lse, saved, self._needs)
        several, wide = len(self._rounds) > 1, self._lse.dtype
        sent = any(len(each.send) for each in self._rounds)
        # Rounded once where more than two parts are added up.
        widens: tuple[bool, ...] = (several, sent, sent, several, several)
        self._grads = [
            grad if grad is None or not widen else grad.to(wide)
            for grad, widen in zip(grads, widens, strict=True)
        ]
        if self._grads[4] is not None:
            self._grads[4] = self._scattered(self._grads[4], None, self._prepared.part.columns)

    def _grads_of_round(self, number: int, packed: Tensor) -> tuple[Tensor | None, ...] | None:
        each, call = self._rounds[number], self._calls[number]
        if call is None:
            return None

        def here(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, :, each.queries].contiguous()

        saved = (
            self._query[:, :, each.queries],
            *_unpack(packed),
            here(self._out),
            here(self._lse),
        )
        return call.backward(here(self._grad_out), here(self._grad_lse), saved, self._needs)

    def _returned(self, number: int, grads: tuple[Tensor | None, ...] | None) -> list[_Return]:
        """The gradients of what a round brought, sent back; nothing where none are wanted."""
        if not (self._needs[1] or self._needs[2]):
            return []
        each, like = self._rounds[number], self._key
        shape = (like.shape[0], like.shape[1], each.received, like.shape[3])
        both = (None, None) if grads is None else grads[1:3]
        key, value = (like.new_zeros(shape) if grad is None else grad for grad in both)
        return [_Return(self._prepared, _pack(key, value, [slice(None)], each.received), each)]

    def _add_round(self, number: int, grads: tuple[Tensor | None, ...] | None) -> None:
        if grads is None:
            return
        each, (query, _, _, bias, blocks) = self._rounds[number], grads
        if query is not None:
            total = self._grads[0]
            assert total is not None
            total[:, :, each.queries] += query.to(total.dtype)
        if bias is not None:
            self._grads[3] = bias if self._grads[3] is None else self._grads[3] + bias
        if blocks is not None:
            scattered = self._scattered(blocks, each.rows, each.columns)
            self._grads[4] = scattered if self._grads[4] is None else self._grads[4] + scattered

    def _scattered(self, blocks: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
        """The gradients of some blocks, in zeros for all of this rank."""
        scores = self._prepared.block_scores
        assert scores is not None
        total = blocks.new_zeros(scores.shape)
        if rows is None:
            rows = torch.arange(scores.shape[2], device=scores.device)
        total[:, :, rows.unsqueeze(1), columns] = blocks
        return total

    def _add_returned(self, returning: list[_Return]) -> None:
        for each in returning:
            each.add_to(*self._grads[1:3])
