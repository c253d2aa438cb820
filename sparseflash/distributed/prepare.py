"""One call of context_parallel_attention on one rank: its checks, and the calls of its parts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from masks import BlockMask, DynamicMask, MaskBatch, full
from masks._core.grid import is_captured
from masks.registry import Cache
from sparseflash import arguments
from sparseflash.dispatch.call import Call, Plan, Positions, empty_max_logits
from sparseflash.dispatch.plan import find_plan, fixed_block_sizes
from sparseflash.dispatch.spec import CallFacts
from sparseflash.distributed.copies import Copies
from sparseflash.distributed.exchange import Collectives, Transport
from sparseflash.distributed.part import (
    Heads,
    HeavyKeys,
    InPlace,
    Part,
    Step,
    count,
    in_chunks,
)
from sparseflash.distributed.plan import ContextPlan
from sparseflash.options import AttentionOptions
from sparseflash.score import ScoreTensors, checked_score_tensors

ALL_HEADS = Heads()


class InPlaceCalls(NamedTuple):
    """The calls of a rank that computes in place, None where no pair attends; see part.InPlace.

    ready, waiting: the forward passes of ready and of waiting rows
    every: the gradient of query
    own, received: the gradients of own and of received keys and values
    heavy: those of heavy received ones, which `received` does not compute; see HeavyKeys
    """

    ready: Call | None
    waiting: Call | None
    every: Call | None
    own: Call | None
    received: Call | None
    heavy: Call | None


@dataclass(frozen=True, eq=False)
class Prepared:
    """The checked arguments of one call on one rank.

    `heads` are those that it has of all: all of them, unless ranks divide the heads among them.
    """

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
    call_facts: CallFacts
    block_scores: Tensor | None
    score_tensors: ScoreTensors | None
    copies: Copies | None
    heads: Heads

    @cached_property
    def transport(self) -> Transport:
        """How rows are moved between ranks."""
        return Collectives(self.group) if self.copies is None else self.copies

    def without_tensors(self) -> "Prepared":
        """The same call for the backward pass, which gets query, key and value from autograd.

        It has tensors of the same shapes, dtype and device with the memory of one number. So hooks
        for saved tensors, as those of checkpointing, decide whether inputs remain in memory.
        """
        one = self.query.new_empty(())
        query, key, value = (one.expand(x.shape) for x in (self.query, self.key, self.value))
        found = replace(self, query=query, key=key, value=value)
        names = ("own", "in_place")
        calls = {name: vars(self)[name] for name in names if name in vars(self)}
        vars(found).update(calls)  # they are cached properties, which depend on the strides too
        return found

    @property
    def kind(self) -> tuple[Any, ...]:
        """Changes if one of `facts` does but seed and key lengths, and is found in less time."""
        tensors = (self.query, self.key, self.value)
        sizes = tuple((*x.shape[:2], x.shape[3], x.dtype) for x in tensors)
        chosen = (self.plan.split, self.transport_name, self.call_facts.max_logits)
        given = tuple(x is None for x in (self.lengths, self.bias, self.mask))
        return *chosen, *given, *self._gradients.values(), sizes, *self.options.items()

    def facts(self) -> dict[str, Any]:
        """Properties of the call that must be equal on all ranks, by name."""
        return {
            "options": repr(AttentionOptions(**self.options)),
            "seed": self.seed,
            # A plan in place is another one for calls with these arguments.
            "split, which bias, key_lengths and mask choose,": self.plan.split,
            "return_max_logits": self.call_facts.max_logits,
            **sizes_of(self.query, self.key, self.value),
            # By which ranks compute other results, and which they do not exchange.
            "key_lengths": None if self.lengths is None else self.lengths.tolist(),
            "whether there is a bias": self.bias is not None,
            "whether there is a mask": self.mask is not None,
            **self._gradients,
        }

    @property
    def _gradients(self) -> dict[str, bool]:
        """Which gradients a rank needs, of those that ranks exchange."""
        # That of shared rows is summed over all ranks; that of other rows is exchanged by ranks
        # that divide heads.
        of_query = len(self.plan.shared) > 0 or self.heads.groups > 1
        return {
            "gradient of query": of_query and arguments.requires_gradient(self.query),
            "gradient of key": arguments.requires_gradient(self.key),
            "gradient of value": arguments.requires_gradient(self.value),
        }

    @property
    def transport_name(self) -> str:
        """The transport as all ranks name it; it does not keep the buffers of copies."""
        return "None" if self.copies is None else f"Copies({self.copies.number})"

    def forward(self, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """out, lse and, if they are asked for, the maximum logits of query, key and value."""
        if not self.call_facts.max_logits:
            return call.forward(*tensors)
        max_logits = empty_max_logits(tensors[0])
        return *replace(call, max_logits=max_logits).forward(*tensors), max_logits

    def empty_results(self, out: Tensor) -> tuple[Tensor, ...]:
        """Memory of the results of own queries: `out`, and what `forward` returns after it."""
        return out, *(empty_max_logits(self.query) for _ in range(1 + self.call_facts.max_logits))

    def check_backend(self) -> None:
        """Raises BackendError if no backend can compute the call, before anything is exchanged."""
        waiting = [step for step in self.part.steps if step.round.mask is not None]
        if self.part.in_place is None and self.own is None and waiting:
            each, heads = waiting[0]
            sizes = (count(each.queries), each.attended, each.attended)
            tensors = (self.query, self.key, self.value)
            examples = [
                x[:, heads.of(x.shape[1]), :1].expand(-1, -1, n, -1)
                for x, n in zip(tensors, sizes, strict=True)
            ]
            self.call_of(waiting[0], *examples, backward=True)

    @cached_property
    def own(self) -> Call | None:
        """The call for own queries and own keys; None if no pair of them attends."""
        part = self.part
        if part.mask is None:
            return None
        tensors = (self.query, self.key, self.value)
        return self._call(*tensors, part.mask, part.positions, None, part.columns, Heads())

    @cached_property
    def in_place(self) -> InPlaceCalls | None:
        """The calls of split "in place"; None with another split, and for calls that depend on
        positions in the sequence, that the backend cannot compute so, or that cannot be divided
        into enough groups of heads. The LSE of a group is contiguous only without a batch.
        """
        options, extras = AttentionOptions(**self.options), (self.mask, self.lengths, self.bias)
        whole = options.dropout_p == 0 and options.score is None and extras == (None,) * 3
        enough = self._groups >= self.plan.least_head_groups
        if self.part.in_place is None or not (whole and enough):
            return None
        if self._groups > 1 and len(self.query) > 1:
            return None
        tensors, facts = (self.query, self.key, self.value), self.call_facts
        properties = tuple((x.shape, x.dtype, x.device) for x in tensors)
        deterministic = torch.are_deterministic_algorithms_enabled()
        rank = 0 if self.group is None else self.group.rank()
        key = ("in place", rank, properties, facts, deterministic, *self.options.items())
        if key not in self.plan.cache:  # to find so many plans takes longer than a launch
            self.plan.cache[key] = self._in_place_calls(self.part.in_place)
        return self.plan.cache[key]

    @property
    def _groups(self) -> int:
        """The number of groups of heads that are exchanged one after another."""
        return max((step.heads.groups for step in self.part.steps), default=1)

    def _in_place_calls(self, masks: InPlace) -> InPlaceCalls | None:
        """The call of ready rows for all heads, and the others for the heads of a group."""
        part, groups = self.part, self._groups
        every = self._in_place_call(masks.every, masks.order, groups)
        # A rank whose rows attend nothing must decide as the others do.
        decisive = every or self._in_place_call(self._dense_mask(), None, groups)
        if not (decisive and decisive.plan.backend.computes_in_place(decisive.spec)):
            return None
        received, heavy = part.rounds[0].mask if part.rounds else None, None
        if masks.heavy is not None and len(self.query) == 1:
            received, heavy = masks.light, self._heavy_call(masks.heavy)
        return InPlaceCalls(
            ready=self._in_place_call(masks.ready, None, 1, skips_empty_rows=True),
            waiting=self._in_place_call(masks.waiting, masks.order, groups, skips_empty_rows=True),
            every=every,
            own=self._in_place_call(part.mask, None, groups),
            received=self._in_place_call(received, masks.received_order, groups),
            heavy=heavy,
        )

    def _heavy_call(self, heavy: HeavyKeys) -> Call:
        """The call of heavy keys, in which each chunk of queries is a batch element."""
        size = (heavy.chunks, -1, count(heavy.tokens), -1)
        query, key, value = self._first_group(self._groups)
        key, value = (x[:, :, :1].expand(*size) for x in (key, value))
        query = in_chunks(query, heavy.chunks)
        return Call(find_plan(query, key, value, heavy.mask, self.options, self.call_facts))

    def _dense_mask(self) -> BlockMask:
        """A mask of own queries and one block of keys, which they attend."""
        block_size = self.plan.mask.block_size
        lengths = (self.query.shape[2], block_size[1])
        return full()(lengths, block_size, device=self.query.device)

    def _first_group(self, groups: int) -> tuple[Tensor, ...]:
        """query, key and value of the first of equal groups of heads."""
        first = Heads(0, groups)
        return tuple(x[:, first.of(x.shape[1])] for x in (self.query, self.key, self.value))

    def _in_place_call(
        self,
        mask: BlockMask | MaskBatch | None,
        order: Tensor | None,
        groups: int,
        skips_empty_rows: bool = False,
    ) -> Call | None:
        """The call of one of equal groups of heads, in tables of the blocks of the mask.

        Its key blocks lie in this order.
        """
        if mask is None:
            return None
        facts = self.call_facts._replace(skips_empty_rows=skips_empty_rows)
        query, key, value = self._first_group(groups)
        key, value = (x[:, :, :1].expand(-1, -1, mask.grid.k_len, -1) for x in (key, value))
        with fixed_block_sizes(mask.block_size, mask.block_size):
            plan = find_plan(query, key, value, mask, self.options, facts)
        return Call(plan if order is None else _with_columns(plan, order))

    @property
    def every_row_waits(self) -> bool:
        """Whether the steps compute the result of each own query for each head, and once."""
        waiting = [count(step.round.queries) for step in self.part.steps]
        return self._once(waiting, self.query.shape[2])

    @property
    def every_key_waits(self) -> bool:
        """Whether each own key is attended in one step for each head."""
        return self._once([count(step.round.own) for step in self.part.steps], self.key.shape[2])

    def _once(self, tokens: Sequence[int], own: int) -> bool:
        steps = self.part.steps
        if self.plan.split != "rows" or not steps or len(steps) != steps[0].heads.groups:
            return False
        return all(each == own for each in tokens)

    def call_of(
        self, step: Step, query: Tensor, key: Tensor, value: Tensor, backward: bool
    ) -> Call:
        """The call for the queries and keys of a step, in the forward or the backward pass."""
        each, heads = step
        assert each.mask is not None, "a round without attended keys has no call"
        # By keys only rows that attend received keys are read of a result. Gradients of queries
        # are read whole if those of several steps are added up.
        skips = self.plan.split == "keys" and not (backward and len(self.part.steps) > 1)
        blocks = (each.positions, each.rows, each.columns)
        return self._call(query, key, value, each.mask, *blocks, heads, skips)

    def call_of_shared(self, query: Tensor, key: Tensor, value: Tensor) -> Call:
        """The call for shared rows and own keys; each of `chunks` is a batch element."""
        shared, part = self.part.shared, self.part
        assert shared is not None, "the plan has no shared rows"
        blocks = (shared.positions, None, part.columns)
        mask = shared.mask if self.chunks == 1 else shared.mask_of_chunks
        return self._call(query, key, value, mask, *blocks, Heads())

    @property
    def chunks(self) -> int:
        """The number of chunks of own keys for shared rows, which are batch elements of a call.

        1 if the call has a batch, or depends on the position of a token.
        """
        options, shared = AttentionOptions(**self.options), self.part.shared
        by_position = options.dropout_p > 0 or options.score is not None
        extras = (self.lengths, self.bias, self.score_tensors)
        if shared is None or len(self.query) > 1 or by_position or extras != (None,) * 3:
            return 1
        return shared.chunks

    def _call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: BlockMask | MaskBatch,
        positions: Positions,
        rows: Tensor | None,
        columns: Tensor,
        heads: Heads,
        skips_empty_rows: bool = False,
    ) -> Call:
        chosen: BlockMask | MaskBatch | DynamicMask = mask
        if self.mask is not None and isinstance(mask, BlockMask):
            chosen = self._selected(self.mask, mask, rows, columns, heads)
        lengths, bias = self.lengths, self.bias
        if lengths is not None:
            inside = (lengths.unsqueeze(1) - positions.key).clamp(0, mask.grid.bk).sum(1)
            lengths = inside.to(key.device, torch.int32)
        if bias is not None:
            bias = bias[heads.of(len(bias))]
        facts = self.call_facts._replace(skips_empty_rows=skips_empty_rows)
        plan = find_plan(query, key, value, chosen, self.options, facts)
        call = Call(plan, lengths, self.seed, bias)
        call.score_tensors = self.score_tensors
        if plan.spec.positions:
            own = self.query.shape[1]
            first = self.heads.number * own + heads.number * query.shape[1]
            call.positions = positions.with_heads(self.heads.groups * own, first)
        return call

    def _selected(
        self,
        selecting: DynamicMask,
        mask: BlockMask,
        rows: Tensor | None,
        columns: Tensor,
        heads: Heads,
    ) -> DynamicMask:
        """The selected blocks of the mask of a part.

        They are stored with the selection, so that calls of all layers and both passes that use
        the same object make their lookup tables once.
        """
        key = ("context part", mask.handle, heads)
        if key in selecting.cache:
            return selecting.cache[key]
        blocks = selecting.blocks[:, heads.of(selecting.num_heads)]
        blocks = blocks if rows is None else blocks[:, :, rows]
        found = mask.select(blocks[..., columns])
        # The memory of a table that is made in a CUDA graph has its values only after a replay.
        if not is_captured(blocks.device):
            selecting.cache[key] = found
        return found


def sizes_of(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """Sizes of tensors that must be equal on all ranks, and their dtype, by name."""
    return {
        "batch, heads and head_dim of query": (*query.shape[:2], query.shape[3]),
        "heads of key": key.shape[1],
        "value_dim": value.shape[3],
        "dtype": str(query.dtype),
    }


def write_results_of_no_key(results: Sequence[Tensor]) -> None:
    """Writes out, lse and maximum logits of queries that attend no key."""
    results[0].zero_()
    for x in results[1:]:
        x.fill_(-math.inf)


def _with_columns(plan: Plan, order: Tensor) -> Plan:
    """The plan for key blocks that lie in another order."""
    return replace(plan, table=plan.table.with_columns(order), cache=Cache())


def prepare(
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
    score_tensors: Sequence[Tensor] | None,
    options: Mapping[str, Any],
    transport: Copies | None = None,
    max_logits: bool = False,
    heads: Heads = ALL_HEADS,
) -> Prepared:
    """Checks all arguments of a call with some of all heads.

    Raises:
        TypeError, ValueError: An argument is invalid.
        BackendError: No backend can compute the call.
    """
    if not isinstance(transport, Copies | None):
        raise TypeError(f"transport must be Copies or None, got {transport!r}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, Tensor) and not arguments.are_plain(tensor):
            kind = "negated view" if tensor.is_neg() else type(tensor).__name__
            raise TypeError(f"{name} must be an ordinary tensor, got a {kind}")
    query, key, value = arguments.checked_tensors(query, key, value, key_lengths)
    rank = 0 if group is None else group.rank()
    if transport is not None:
        transport.check(group, query.device)
    plan.check_length("query", query, rank, 2)
    plan.check_length("key", key, rank, 2)
    checked = AttentionOptions(**options)
    read = checked_score_tensors(
        *(checked.score, score_tensors, query, (plan.seq_len, plan.seq_len)),
        padded=key_lengths is not None,
        heads=heads.groups * query.shape[1],  # by whose index score tensors are read
    )
    bias = arguments.checked_bias(bias, query, plan.seq_len, plan.seq_len)
    arguments.check_sinks(sinks, query)
    if mask is not None:
        check_selected(mask, plan, rank)
    if group is None and len(plan.shared):
        raise ValueError(
            "group must be a process group of one rank if a plan of one rank has shared rows, got "
            "None: init_process_group(..., world_size=1) or new_group([rank]) makes one, and "
            "make_plan(..., shared_rows=()) a plan without shared rows"
        )
    seed_tensor = arguments.checked_seed(seed, checked.dropout_p)
    check_heads("plan must be made for a mask of", plan.mask, query, key)
    if plan.batch is not None and len(plan.batch) != len(query):
        raise ValueError(
            f"query must have the {len(plan.batch)} batch elements of the masks of the plan, got "
            f"{tuple(query.shape)}"
        )
    groups = plan.head_groups(key.shape[1])
    own_mask = plan.mask if mask is None else mask
    facts = CallFacts.of(own_mask, key_lengths is not None, bias, max_logits, score_tensors)
    prepared = Prepared(
        *(query, key, value, plan, plan.part(rank, query.device, groups), group, mask),
        lengths=arguments.lengths_in_range(key_lengths, plan.seq_len, query.device),
        bias=bias,
        seed=0 if seed_tensor is None else int(seed_tensor),
        options=options,
        call_facts=facts._replace(positions=True, shares_device=plan.ranks > 1),
        block_scores=None if mask is None else arguments.checked_block_scores(mask),
        score_tensors=read,
        copies=transport,
        heads=heads,
    )
    if plan.split == "in place" and prepared.in_place is None:
        plan = plan.not_in_place
        groups = plan.head_groups(key.shape[1])
        prepared = replace(prepared, plan=plan, part=plan.part(rank, query.device, groups))
    prepared.check_backend()
    return prepared


def check_heads(what: str, mask: BlockMask | DynamicMask, query: Tensor, key: Tensor) -> None:
    """Raises ValueError, which begins with `what`, if a mask has a wrong number of heads."""
    allowed = sorted({1, key.shape[1], query.shape[1]})
    if mask.num_heads not in allowed:
        names = " or ".join(map(str, allowed))
        raise ValueError(f"{what} {names} heads, got {mask.num_heads}")


def check_selected(mask: DynamicMask, plan: ContextPlan, rank: int) -> None:
    if not isinstance(mask, DynamicMask):
        raise TypeError(
            f"mask must be a DynamicMask selected from plan.mask_of({rank}), got "
            f"{type(mask).__name__}"
        )
    if plan.batch is not None:
        raise ValueError(
            "mask must be None if the plan has a mask for each batch element, from which a "
            "DynamicMask cannot select"
        )
    if len(plan.shared):
        raise ValueError(
            "mask must be None if the plan has shared rows, because only the owner of a row knows "
            "which blocks it selects: make_plan(..., shared_rows=()) makes a plan without them"
        )
    if not plan.is_support(mask.support, rank):
        raise ValueError(f"mask must be selected from plan.mask_of({rank}), got {mask}")
