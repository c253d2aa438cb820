"""Both passes of one rank.

split="rows": the ready rows attend own keys during the exchange. Then the waiting rows attend own
and fetched keys, one group of heads after another. Each row is computed once, so nothing is
merged.

split="keys": all rows attend own keys during the exchange, then fetched keys round by round:

    O, LSE = merge of (own part, round 0, round 1, ...)

In the backward pass the parts are independent: with the final LSE and O, P = exp(S - LSE) and
dS = P * (dP - rowsum(dO * O)) need nothing from another part. The gradients of fetched keys and
values are sent to their owners, which add them in the order of rounds and ranks.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparseflash.dispatch.autograd import plain
from sparseflash.dispatch.call import Call
from sparseflash.distributed.part import Heads, Step, Tokens, count
from sparseflash.distributed.prepare import Prepared
from sparseflash.distributed.shared_rows import SharedBackward, SharedForward
from sparseflash.distributed.transport import Exchange
from sparseflash.merge import merge_in_place


class ContextParallelAttention(torch.autograd.Function):
    """(out, lse) of the queries of this rank."""

    @staticmethod
    def forward(
        ctx, query, key, value, bias, block_scores, prepared: Prepared, *score_tensors: Tensor
    ):
        by_rows = prepared.plan.split == "rows"
        attend = _forward_by_rows if by_rows else _forward_by_keys
        rows = prepared.part.shared
        shared = None if rows is None else SharedForward(prepared, rows, query)
        out, lse, calls, saved = attend(prepared, query, key, value, shared)
        ctx.prepared, ctx.calls, ctx.shared_call = prepared, calls, None
        if shared is not None:
            shared.merge_into(out, lse)
            ctx.shared_call, saved = shared.call, [*saved, shared.query]
        ctx.save_for_backward(query, key, value, bias, out, lse, *score_tensors, *saved)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        if grads[0] is None and grads[1] is None:
            return (None,) * len(ctx.needs_input_grad)
        *grads, reads = _Backward(ctx, *grads).run()
        score_tensors = ctx.prepared.score_tensors
        of_scores = () if score_tensors is None else score_tensors.split_gradient(reads)
        return *grads, None, *of_scores


Result = tuple[Tensor, Tensor, list[Call | None], list[Tensor]]


def _forward_by_rows(
    prepared: Prepared, query: Tensor, key: Tensor, value: Tensor, shared: SharedForward | None
) -> Result:
    """(out, lse, call of each step or None, keys and values of each step)"""
    fetches = [_Fetch(prepared, key, value, step) for step in prepared.part.steps]
    out, lse = _own_part(prepared, query, key, value, shared)
    calls, saved = [], []
    for step, fetch in zip(prepared.part.steps, fetches, strict=True):
        saved.append(fetch.wait())
        call, result = _fetched_part(prepared, step, saved[-1], query)
        calls.append(call)
        if result is not None:
            for whole, waiting in zip((out, lse), result, strict=True):
                whole[:, step.heads.of(whole.shape[1])][:, :, step.round.queries] = waiting
    return out, lse, calls, saved


def _forward_by_keys(
    prepared: Prepared, query: Tensor, key: Tensor, value: Tensor, shared: SharedForward | None
) -> Result:
    """Like _forward_by_rows, but with several rounds the keys and values are not saved."""
    steps = prepared.part.steps
    fetch = _Fetch(prepared, key, value, steps[0]) if steps else None
    out, lse = _own_part(prepared, query, key, value, shared)
    if len(steps) > 1:
        out = out.to(lse.dtype)  # rounded once, not in every round
    calls, packed = [], None
    for number, step in enumerate(steps):
        assert fetch is not None
        packed = fetch.wait()
        following = steps[number + 1 : number + 2]
        fetch = _Fetch(prepared, key, value, following[0]) if following else None
        call, result = _fetched_part(prepared, step, packed, query)
        calls.append(call)
        if result is not None:
            queries = step.round.queries
            merged = (out[:, :, queries], lse[:, :, queries])
            merge_in_place(*merged, *result)
            if not isinstance(queries, slice):  # a slice gives views, which merge_in_place changes
                out[:, :, queries], lse[:, :, queries] = merged
    saved = [packed] if packed is not None and len(steps) == 1 else []
    return out.to(query.dtype), lse, calls, saved


def _own_part(
    prepared: Prepared, query: Tensor, key: Tensor, value: Tensor, shared: SharedForward | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of own queries and keys. Then computes shared rows and sends the results."""
    if prepared.own is not None:
        out, lse = prepared.own.forward(query, key, value)
    else:
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = (*query.shape[:3], value.shape[3])
        if prepared.every_row_waits:  # steps write every row
            out, lse = query.new_empty(shape), query.new_empty(shape[:3], dtype=wide)
        else:
            out = query.new_zeros(shape)
            lse = query.new_full(query.shape[:3], -math.inf, dtype=wide)
    if shared is not None:
        shared.attend(key, value)
    return out, lse


def _fetched_part(
    prepared: Prepared, step: Step, packed: Tensor, query: Tensor
) -> tuple[Call | None, tuple[Tensor, Tensor] | None]:
    """(call of a step, (out, lse) of it); both None if no pair of the step attends."""
    if step.round.mask is None:
        return None, None
    here, (key, value) = _queries_of(query, step), _Packing.of(prepared, step).views(packed)
    call = prepared.call_of(step, here, key, value)
    return call, call.forward(here, key, value)


def _queries_of(tensor: Tensor, step: Step) -> Tensor:
    """The heads and tokens of a step out of a tensor (batch, heads, own tokens, ...)."""
    return tensor[:, step.heads.of(tensor.shape[1])][:, :, step.round.queries]


class _Backward:
    """The backward pass of one call."""

    def __init__(self, ctx, grad_out: Tensor | None, grad_lse: Tensor | None):
        self._prepared: Prepared = ctx.prepared
        self._calls = ctx.calls
        grads = plain("out", grad_out), plain("lse", grad_lse)
        self._grad_out, self._grad_lse = grads
        self._needs = (*ctx.needs_input_grad[:5], any(ctx.needs_input_grad[6:]))
        self._query, self._key, self._value, _, self._out, self._lse, *saved = ctx.saved_tensors
        self._saved = saved[len(ctx.needs_input_grad[6:]) :]
        self._steps = self._prepared.part.steps
        self._shared: SharedBackward | None = None
        if self._prepared.part.shared is not None:
            self._shared_query = self._saved.pop()
            saved = (self._out, self._lse)
            self._shared = SharedBackward(self._prepared, self._prepared.part.shared, saved, grads)
            self._shared_call = ctx.shared_call
        self._grads: list[Tensor | None] = [None] * 6

    def run(self) -> list[Tensor | None]:
        """The gradients of query, key, value, bias, block scores and all score tensors."""
        returning: list[_Return] = []
        if len(self._saved) == len(self._steps) and self._prepared.own is None:
            # Nothing is left to compute after the steps: the gradients of each one are added and
            # freed while the next one is computed.
            self._add_own()
            for number, packed in enumerate(self._saved):
                grads = self._grads_of_step(number, packed)
                arriving, returning = returning, self._returned(number, grads)
                self._add_step(number, grads)
                del grads
                for each in arriving:
                    each.add_to(*self._grads[1:3])
        elif len(self._saved) == len(self._steps):
            # Saved steps first, so that their gradients are sent while the own part is computed.
            grads_of_steps = []
            for number, packed in enumerate(self._saved):
                grads_of_steps.append(self._grads_of_step(number, packed))
                returning += self._returned(number, grads_of_steps[-1])
            self._add_own()
            for number, grads in enumerate(grads_of_steps):
                self._add_step(number, grads)
        else:
            fetch = self._fetch(0)
            self._add_own()
            for number in range(len(self._steps)):
                packed = fetch.wait()
                fetch = self._fetch(number + 1) if number + 1 < len(self._steps) else fetch
                grads = self._grads_of_step(number, packed)
                returning += self._returned(number, grads)
                self._add_step(number, grads)
        if self._shared is not None:
            self._add_shared(self._shared)
        for each in returning:
            each.add_to(*self._grads[1:3])
        return [
            None if grad is None or like is None else grad.to(like.dtype)
            for grad, like in zip(self._grads, self._inputs, strict=True)
        ]

    @property
    def _inputs(self) -> tuple[Tensor | None, ...]:
        prepared, reads = self._prepared, None
        if prepared.score_tensors is not None and self._needs[5]:
            reads = prepared.score_tensors.zero_gradient()
        extras = (prepared.bias, prepared.block_scores, reads)
        return self._query, self._key, self._value, *extras

    def _fetch(self, number: int) -> "_Fetch":
        return _Fetch(self._prepared, self._key, self._value, self._steps[number])

    def _add_own(self) -> None:
        prepared, wide = self._prepared, self._lse.dtype
        if prepared.own is None:
            keys = prepared.every_key_waits
            written = (prepared.every_row_waits, keys, keys, False, False, False)
            self._grads = [
                None if like is None or not needed else _unwritten(like) if all_ else _zeros(like)
                for like, needed, all_ in zip(self._inputs, self._needs, written, strict=True)
            ]
        else:
            saved = (self._query, self._key, self._value, self._out, self._lse)
            grads = prepared.own.backward(self._grad_out, self._grad_lse, saved, self._needs)
            self._grads = [*grads]
            if grads[4] is not None:
                self._grads[4] = self._scattered(grads[4], None, prepared.part.columns, Heads())
        # Sums of more than two gradients are computed in float32, and rounded once.
        several = len(self._steps) > 1 or self._shared is not None
        many = prepared.part.summands > 2
        by_keys = len(self._steps) > 1 and prepared.plan.split == "keys"
        widens = (by_keys, many, many, several, several, several)
        self._grads = [
            grad if grad is None or not widen else grad.to(torch.promote_types(grad.dtype, wide))
            for grad, widen in zip(self._grads, widens, strict=True)
        ]

    def _add_shared(self, shared: SharedBackward) -> None:
        tensors = (self._shared_query, self._key, self._value)
        grads, own_query = shared.run(self._shared_call, *tensors, self._needs)
        for number in (1, 2, 3, 5):
            total, grad = self._grads[number], grads[number]
            if total is not None and grad is not None:
                total += grad.to(total.dtype)
        query, total = own_query(), self._grads[0]
        if query is not None and total is not None:
            rows = self._prepared.part.shared
            assert rows is not None, "there are shared rows"
            total[:, :, rows.own] = query.to(total.dtype)

    def _grads_of_step(self, number: int, packed: Tensor) -> tuple[Tensor | None, ...] | None:
        step, call = self._steps[number], self._calls[number]
        if call is None:
            return None

        def here(x: Tensor | None) -> Tensor | None:
            return None if x is None else _queries_of(x, step).contiguous()

        saved = (
            _queries_of(self._query, step),
            *_Packing.of(self._prepared, step).views(packed),
            here(self._out),
            here(self._lse),
        )
        grads = here(self._grad_out), here(self._grad_lse)
        return call.backward(*grads, saved, self._needs)

    def _returned(self, number: int, grads: tuple[Tensor | None, ...] | None) -> "list[_Return]":
        """Sends the gradients of received keys and values, if they are needed."""
        if not (self._needs[1] or self._needs[2]):
            return []
        step = self._steps[number]
        both = (None, None) if grads is None else grads[1:3]
        packing = _Packing.of(self._prepared, step)
        packed = packing.pack(self._key, both, [step.round.received_at])
        return [_Return(self._prepared, packed, step)]

    def _add_step(self, number: int, grads: tuple[Tensor | None, ...] | None) -> None:
        if grads is None:
            return
        step, (query, key, value, bias, blocks, reads) = self._steps[number], grads
        each, prepared = step.round, self._prepared
        first = prepared.plan.split == "rows"
        _add(self._grads[0], step, each.queries, query, first=first)
        if count(each.own):
            for total, grad in zip(self._grads[1:3], (key, value), strict=True):
                grad = None if grad is None else grad[:, :, each.own_at]
                _add(total, step, each.own, grad, first=prepared.own is None)
        if blocks is not None:
            blocks = self._scattered(blocks, each.rows, each.columns, step.heads)
        for number, grad in ((3, bias), (4, blocks), (5, reads)):
            total = self._grads[number]
            if total is not None and grad is not None:
                heads = step.heads.of(len(total)) if number == 3 else slice(None)
                total[heads] += grad

    def _scattered(
        self, blocks: Tensor, rows: Tensor | None, columns: Tensor, heads: Heads
    ) -> Tensor:
        """The gradients of all block scores of this rank: those of given blocks, and zeros."""
        scores = self._prepared.block_scores
        assert scores is not None
        total = blocks.new_zeros(scores.shape)
        if rows is None:
            rows = torch.arange(scores.shape[2], device=scores.device)
        total[:, heads.of(scores.shape[1])][:, :, rows.unsqueeze(1), columns] = blocks
        return total


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format)


def _unwritten(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _add(
    total: Tensor | None, step: Step, tokens: Tokens, grad: Tensor | None, *, first: bool
) -> None:
    """Adds the gradients of some tokens to `total`, or writes them if they are the first."""
    if total is None or grad is None:
        return
    total = total[:, step.heads.of(total.shape[1])]
    if first:
        total[:, :, tokens] = grad.to(total.dtype)
    elif isinstance(tokens, slice):
        total[:, :, tokens] += grad
    else:
        total.index_add_(2, tokens, grad.to(total.dtype))


class _Packing(NamedTuple):
    """The layout of keys and values, or their gradients, in one tensor for an exchange.

    It has a row for each token: the key (batch, heads, head_dim), then the value (batch, heads,
    value_dim).
    """

    batch: int
    heads: int
    dims: tuple[int, int]

    @staticmethod
    def of(prepared: Prepared, step: Step) -> "_Packing":
        """The layout for the heads of a step."""
        batch, kv_heads, _, head_dim = prepared.key.shape
        heads = len(range(kv_heads)[step.heads.of(kv_heads)])
        return _Packing(batch, heads, (head_dim, prepared.value.shape[3]))

    def empty(self, like: Tensor, tokens: int) -> Tensor:
        """An uninitialised packed tensor."""
        return like.new_empty(tokens, self.batch * self.heads * sum(self.dims))

    def views(self, packed: Tensor) -> list[Tensor]:
        """Views of the keys and the values of a packed tensor, (batch, heads, tokens, dims)."""
        of_token = [self.batch * self.heads * dims for dims in self.dims]
        return [
            part.unflatten(1, (self.batch, self.heads, dims)).permute(1, 2, 0, 3)
            for part, dims in zip(packed.split(of_token, 1), self.dims, strict=True)
        ]

    def put(
        self, packed: Tensor, at: Tokens, both: Sequence[Tensor | None], tokens: Tokens
    ) -> None:
        """Writes some tokens of keys and values into a packed tensor; None gives zeros."""
        for view, tensor in zip(self.views(packed), both, strict=True):
            view[:, :, at] = 0 if tensor is None else tensor[:, :, tokens]

    def pack(
        self, like: Tensor, both: Sequence[Tensor | None], chosen: Sequence[Tokens]
    ) -> Tensor:
        """Packs the chosen tokens of keys and values, one choice after another."""
        packed, begin = self.empty(like, sum(map(count, chosen))), 0
        for tokens in chosen:
            end = begin + count(tokens)
            self.put(packed, slice(begin, end), both, tokens)
            begin = end
        return packed


class _Fetch:
    """The keys and values that a step attends; the constructor starts the exchange."""

    def __init__(self, prepared: Prepared, key: Tensor, value: Tensor, step: Step):
        each = self._round = step.round
        packing = _Packing.of(prepared, step)
        both = [x[:, step.heads.of(x.shape[1])] for x in (key, value)]
        sent = packing.pack(key, both, each.send)
        self._packed = packing.empty(key, each.attended)
        arrives_in_place = isinstance(each.received_at, slice)
        self._exchange = Exchange(
            *(prepared.group, sent, each.send_splits, each.receive_splits, "keys and values"),
            received=self._packed[each.received_at] if arrives_in_place else None,
        )
        packing.put(self._packed, each.own_at, both, each.own)

    def wait(self) -> Tensor:
        """The packed keys and values, in the order of the sequence."""
        received = self._exchange.wait()
        if isinstance(self._round.received_at, Tensor):
            self._packed[self._round.received_at] = received
        return self._packed


class _Return:
    """Sends the gradients of the keys and values that a step received to their owners."""

    def __init__(self, prepared: Prepared, packed: Tensor, step: Step):
        self._step, each = step, step.round
        self._packing = _Packing.of(prepared, step)
        splits = (each.receive_splits, each.send_splits)
        self._exchange = Exchange(prepared.group, packed, *splits, "gradients of keys and values")

    def add_to(self, *totals: Tensor | None) -> None:
        """Adds the received gradients, rank by rank: a token may have been sent to several."""
        each = self._step.round
        parts = self._exchange.wait().split(each.send_splits)
        for part, tokens in zip(parts, each.send, strict=True):
            for total, grad in zip(totals, self._packing.views(part), strict=True):
                _add(total, self._step, tokens, grad, first=False)
