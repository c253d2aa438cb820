"""Both passes of one rank.

split="rows": the ready rows attend own keys during the exchange. Then the waiting rows attend own
and fetched keys, one group of heads after another. Each row is computed once, so nothing is
merged. The own keys that waiting rows attend are copied.

split="in place" is like "rows" without copies: calls for ready and for waiting rows write into the
same O and LSE, and kernels read own keys where they are and received ones where they arrive. In
the backward pass there are three calls, each for all own rows: of dQ over all keys, then of dK and
dV of received keys, which are sent back while those of own keys are computed.

split="keys": all rows attend own keys during the exchange, then fetched keys round by round:

    O, LSE = merge of (own part, round 0, round 1, ...)

The maximum logits are the maximum over these parts.

Own keys are read where they are, and received ones where they arrive.

In the backward pass the parts are independent: with the final LSE and O, P = exp(S - LSE) and
dS = P * (dP - rowsum(dO * O)) need nothing from another part. The gradients of fetched keys and
values are sent to their owners, which add them in the order of rounds and ranks.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import disable_saved_tensors_hooks

from sparseflash.dispatch.autograd import plain
from sparseflash.dispatch.call import Call
from sparseflash.distributed.fetch import EVERY, Fetch, Return, of_heads
from sparseflash.distributed.in_place import BackwardInPlace, forward_in_place
from sparseflash.distributed.part import Heads, Step, Tokens, count
from sparseflash.distributed.prepare import InPlaceCalls, Prepared, write_results_of_no_key
from sparseflash.distributed.shared_rows import SharedBackward, SharedForward
from sparseflash.merge import add_in_place, copy_in_place, merge_in_place

# Parts of a result, or of a gradient, that are added in its own dtype. More parts are added in
# float32, which takes two more copies.
MAX_ROUNDED = 4


class ContextParallelAttention(torch.autograd.Function):
    """out, lse and, if they are asked for, the maximum logits of the queries of this rank."""

    @staticmethod
    def forward(
        ctx, query, key, value, bias, block_scores, prepared: Prepared, *score_tensors: Tensor
    ):
        prepared.transport.begin_pass()
        rows = prepared.part.shared
        shared = None if rows is None else SharedForward(prepared, rows, query)
        if prepared.in_place is None:
            results, calls, fetched = _forward(prepared, query, key, value, shared)
        else:
            inputs, calls = (query, key, value), []
            results, fetched = forward_in_place(prepared, prepared.in_place, inputs, shared)
        ctx.prepared, ctx.calls, ctx.shared_call = prepared.without_tensors(), calls, None
        # The first backward pass deletes what was fetched, so a later one fetches it again. All
        # ranks decide by this, and not by what they have: a rank may receive nothing.
        ctx.fetches, ctx.fetched, saved = prepared.plan.fetches_again, fetched, []
        if _hooks_are_active():
            # Checkpointing and offloading decide what is saved of the fetched keys, too.
            ctx.fetched, saved = [], [x for both in fetched for x in both]
        if shared is not None:
            shared.merge_into(results)
            ctx.shared_call, saved = shared.call, [*saved, shared.query]
        out, lse, *max_logits = results
        ctx.save_for_backward(query, key, value, bias, out, lse, *score_tensors, *saved)
        ctx.mark_non_differentiable(*max_logits)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_lse, *_):
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        *grads, reads = _Backward(ctx, grad_out, grad_lse).run()
        score_tensors = ctx.prepared.score_tensors
        of_scores = () if score_tensors is None else score_tensors.split_gradient(reads)
        return *grads, None, *of_scores


def _hooks_are_active() -> bool:
    """Whether hooks of the user get the tensors that autograd saves."""
    try:
        with disable_saved_tensors_hooks("hooks are active"):  # which raises this if there are any
            return False
    except RuntimeError:
        return True


Results = tuple[Tensor, ...]  # out, lse and, if they are asked for, the maximum logits


def _forward(
    prepared: Prepared, query: Tensor, key: Tensor, value: Tensor, shared: SharedForward | None
) -> tuple[Results, list[Call | None], list[list[Tensor]]]:
    """(results, call of each step or None, keys and values of each step if they are saved)"""
    steps, at_once = prepared.part.steps, not prepared.plan.fetches_again
    fetches = deque(_fetch(prepared, key, value, x) for x in (steps if at_once else steps[:1]))
    whole = _own_part(prepared, query, key, value)
    if shared is not None:
        shared.attend(key, value)
    merges = prepared.plan.split == "keys"
    if whole is not None and merges and len(steps) + 1 > MAX_ROUNDED:
        whole = whole[0].to(whole[1].dtype), *whole[1:]  # rounded once, not in every round
    calls, saved = [], []
    for number, step in enumerate(steps):
        fetched = fetches.popleft().wait()
        if not at_once and number + 1 < len(steps):
            fetches.append(_fetch(prepared, key, value, steps[number + 1]))
        call, result = _fetched_part(prepared, step, fetched, query)
        calls.append(call)
        saved += [fetched] if at_once else []
        if whole is None:
            whole = result
        elif result is not None:
            _put(whole, step, result, merges)
        del result  # not beside that of the next step
    assert whole is not None, "a row that nothing computes is in the own part"
    return (whole[0].to(query.dtype), *whole[1:]), calls, saved


def _fetch(prepared: Prepared, key: Tensor, value: Tensor, step: Step) -> Fetch:
    """Starts to fetch the keys and values of the heads of a step."""
    return Fetch(prepared, of_heads(key, value, step.heads), step.round)


def _own_part(prepared: Prepared, query: Tensor, key: Tensor, value: Tensor) -> Results | None:
    """The results of own queries and keys; None if those of the only step are the whole ones."""
    if prepared.own is not None:
        return prepared.forward(prepared.own, query, key, value)
    if prepared.every_row_waits and len(prepared.part.steps) == 1:
        return None
    results = prepared.empty_results(query.new_empty(*query.shape[:3], value.shape[3]))
    if not prepared.every_row_waits:  # else steps write every row
        write_results_of_no_key(results)
    return results


def _fetched_part(
    prepared: Prepared, step: Step, fetched: Sequence[Tensor], query: Tensor
) -> tuple[Call | None, Results | None]:
    """(backward call of a step, its results); both None if no pair of the step attends."""
    if step.round.mask is None:
        return None, None
    here, (key, value) = _queries_of(query, step), fetched
    forward, backward = (
        prepared.call_of(step, here, key, value, backward=each) for each in (False, True)
    )
    return backward, prepared.forward(forward, here, key, value)


def _put(whole: Results, step: Step, results: Results, merges: bool) -> None:
    """Writes the results of a step into those of all own queries, or merges them."""
    each = step.round
    out, lse, *max_logits = (x[:, step.heads.of(x.shape[1])] for x in whole)
    part_out, part_lse, *part_max_logits = results
    if not merges:
        copy_in_place(out, part_out, each.queries)
        lse[:, :, each.queries] = part_lse
        for total, part in zip(max_logits, part_max_logits, strict=True):
            total[:, :, each.queries] = part
        return
    merge_in_place(out, lse, part_out, part_lse, each.attending, each.attending_at)
    for total, part in zip(max_logits, part_max_logits, strict=True):
        larger = torch.maximum(total[:, :, each.attending], part[:, :, each.attending_at])
        total[:, :, each.attending] = larger


def _queries_of(tensor: Tensor, step: Step) -> Tensor:
    """The heads and tokens of a step out of a tensor (batch, heads, own tokens, ...)."""
    tensor, queries = tensor[:, step.heads.of(tensor.shape[1])], step.round.queries
    if isinstance(queries, slice) or tensor.dim() < 4:
        return tensor[:, :, queries]
    found = tensor.new_empty(*tensor.shape[:2], len(queries), tensor.shape[3])
    copy_in_place(found, tensor, slice(None), queries)
    return found


class _Held(NamedTuple):
    """A gradient of some heads and tokens that is added when the own part is done."""

    heads: Heads
    tokens: Tokens
    grad: Tensor
    at: Tokens  # the index of each token in the gradient


class _Backward:
    """The backward pass of one call."""

    def __init__(self, ctx, grad_out: Tensor | None, grad_lse: Tensor | None):
        self._prepared: Prepared = ctx.prepared
        self._calls = ctx.calls
        grads = plain("out", grad_out), plain("lse", grad_lse)
        self._grad_out, self._grad_lse = grads
        self._needs = (*ctx.needs_input_grad[:5], any(ctx.needs_input_grad[6:]))
        self._query, self._key, self._value, _, self._out, self._lse, *saved = ctx.saved_tensors
        saved = saved[len(ctx.needs_input_grad[6:]) :]
        self._steps = self._prepared.part.steps
        self._shared: SharedBackward | None = None
        if self._prepared.part.shared is not None:
            self._shared_query = saved.pop()
            of_rows = (self._out, self._lse)
            shared = SharedBackward(self._prepared, self._prepared.part.shared, of_rows, grads)
            self._shared, self._shared_call = shared, ctx.shared_call
        self._fetched: list[list[Tensor]] = ctx.fetched
        if saved:  # by hooks
            self._fetched = [saved[i : i + 2] for i in range(0, len(saved), 2)]
        self._fetches, ctx.fetches, ctx.fetched = ctx.fetches, True, []
        # Sums of many gradients are computed in float32, and rounded once.
        several = len(self._steps) > 1 or self._shared is not None
        many = self._prepared.part.gradients_per_key > MAX_ROUNDED
        by_keys = len(self._steps) + 1 > MAX_ROUNDED and self._prepared.plan.split == "keys"
        self._widens = (by_keys, many, many, several, several, several)
        self._grads: list[Tensor | None] = [None] * 6
        # Of query, key and value: whether the only step writes all of the gradient.
        self._of_step = [False] * 6
        # Of query, key and value; and the other gradients of each step.
        self._held: list[list[_Held]] = [[], [], []]
        self._extras: list[tuple[int, tuple[Tensor | None, ...]]] = []

    def run(self) -> list[Tensor | None]:
        """The gradients of query, key, value, bias, block scores and all score tensors."""
        self._prepared.transport.begin_pass()
        if self._prepared.in_place is None:
            returning = self._run_parts()
        else:
            returning = self._run_in_place(self._prepared.in_place)
        if self._shared is not None:
            self._add_shared(self._shared)
        while returning:
            returning.popleft().add_to(*self._grads[1:3])
        return [
            None if grad is None or like is None else grad.to(like.dtype)
            for grad, like in zip(self._grads, self._inputs, strict=True)
        ]

    def _run_in_place(self, calls: InPlaceCalls) -> "deque[Return]":
        """Computes all gradients but those that other ranks send and that are not added yet."""
        saved = (self._query, self._key, self._value, self._out, self._lse)
        grads, returning = BackwardInPlace(
            *(self._prepared, calls, saved, (self._grad_out, self._grad_lse)),
            needs=self._needs[:3],
            fetched=None if self._fetches else self._fetched,
            widened=self._widened,
        ).run()
        self._fetched = []
        complete = not returning and self._shared is None
        self._grads[:3] = [
            grad if grad is None or complete else self._widened(i, grad)
            for i, grad in enumerate(grads)
        ]
        return returning

    def _run_parts(self) -> "deque[Return]":
        """Computes all gradients but those that other ranks send and that are not added yet.

        All ranks start exchanges, and wait for them, in the same order, also one that has no own
        part. Copies rely on it.
        """
        limited = self._prepared.plan.fetches_again
        own_last = self._prepared.own is not None and not limited
        fetched, returning = self._fetched_of_steps(), deque[Return]()
        if not own_last:
            self._add_own()
        for number, both in enumerate(fetched):
            returned = self._return(number) if any(self._needs[1:3]) else None
            grads = self._grads_of_step(number, both, returned)
            both.clear()  # now, and not when the pass has ended
            if returned is not None:
                returned.send((None, None) if grads is None else grads[1:3])
                returning.append(returned)
            if own_last:  # gradients of all steps are sent while the own part is computed
                self._hold_step(number, grads)
            else:  # those of a step are sent while the next one is computed
                self._add_step(number, grads)
            if limited and len(returning) > 1:
                returning.popleft().add_to(*self._grads[1:3])
            del grads, both
        if own_last:
            self._add_own()
            self._add_held()
        return returning

    def _fetched_of_steps(self) -> Iterator[list[Tensor]]:
        """The keys and values of each step. If they are fetched, the next ones are on their way.

        They are fetched if they were not saved, or if this is not the first backward pass over the
        graph.
        """
        if not self._fetches:
            return iter(self._fetched)
        self._fetched = []
        return self._fetched_again(deque([self._fetch(0)])) if self._steps else iter(())

    def _fetched_again(self, fetches: "deque[Fetch]") -> Iterator[list[Tensor]]:
        for number in range(1, len(self._steps) + 1):
            both = fetches.popleft().wait()
            if number < len(self._steps):
                fetches.append(self._fetch(number))
            yield both

    @property
    def _inputs(self) -> tuple[Tensor | None, ...]:
        prepared, reads = self._prepared, None
        if prepared.score_tensors is not None and self._needs[5]:
            reads = prepared.score_tensors.zero_gradient()
        extras = (prepared.bias, prepared.block_scores, reads)
        return self._query, self._key, self._value, *extras

    def _fetch(self, number: int) -> Fetch:
        return _fetch(self._prepared, self._key, self._value, self._steps[number])

    def _return(self, number: int) -> Return:
        prepared, step = self._prepared, self._steps[number]
        return Return(prepared, of_heads(prepared.key, prepared.value, step.heads), step)

    def _add_own(self) -> None:
        prepared = self._prepared
        if prepared.own is None:
            keys = prepared.every_key_waits
            written = (prepared.every_row_waits, keys, keys, False, False, False)
            self._of_step = [all_ and len(self._steps) == 1 for all_ in written]
            self._grads = [
                None
                if like is None or not needed or of_step
                else _unwritten(like)
                if all_
                else _zeros(like)
                for like, needed, all_, of_step in zip(
                    self._inputs, self._needs, written, self._of_step, strict=True
                )
            ]
        else:
            saved = (self._query, self._key, self._value, self._out, self._lse)
            gradients = prepared.own.backward(self._grad_out, self._grad_lse, saved, self._needs)
            self._grads = [*gradients]
            del gradients  # each one is freed when a wider copy is made
            if (blocks := self._grads[4]) is not None:
                self._grads[4] = self._scattered(blocks, None, prepared.part.columns, Heads())
        for i, grad in enumerate(self._grads):
            self._grads[i] = None if grad is None else self._widened(i, grad)

    def _widened(self, i: int, grad: Tensor) -> Tensor:
        """A gradient in the dtype in which it is summed."""
        if not self._widens[i]:
            return grad
        return grad.to(torch.promote_types(grad.dtype, self._lse.dtype))

    def _add_shared(self, shared: SharedBackward) -> None:
        tensors = (self._shared_query, self._key, self._value)
        (bias, _, reads), own_query = shared.run(
            self._shared_call, tensors, self._needs, self._grads[1:3]
        )
        for number, grad in ((3, bias), (5, reads)):
            total = self._grads[number]
            if total is not None and grad is not None:
                total += grad
        query, total = own_query(), self._grads[0]
        if query is not None and total is not None:
            rows = self._prepared.part.shared
            assert rows is not None, "there are shared rows"
            total[:, :, rows.own] = query.to(total.dtype)

    def _grads_of_step(
        self, number: int, fetched: Sequence[Tensor], returned: Return | None
    ) -> tuple[Tensor | None, ...] | None:
        step, call = self._steps[number], self._calls[number]
        if call is None:
            return None
        if returned is not None:
            call = replace(call, gradients=(None, *(returned.gradients or (None, None))))

        def here(x: Tensor | None) -> Tensor | None:
            return None if x is None else _queries_of(x, step).contiguous()

        saved = (_queries_of(self._query, step), *fetched, here(self._out), here(self._lse))
        grads = here(self._grad_out), here(self._grad_lse)
        return call.backward(*grads, saved, self._needs)

    def _hold_step(self, number: int, grads: tuple[Tensor | None, ...] | None) -> None:
        """Holds the gradients of a step until the own part is done."""
        if grads is None:
            return
        each, heads = self._steps[number]
        self._hold(0, heads, each.attending, grads[0], each.attending_at)
        if count(each.own):
            for i in (1, 2):
                grad = grads[i]
                own = None if grad is None else _part_of(grad, each.own_at)
                self._hold(i, heads, each.own, own)
        self._extras.append((number, grads[3:]))

    def _hold(
        self, i: int, heads: Heads, tokens: Tokens, grad: Tensor | None, at: Tokens = EVERY
    ) -> None:
        """Holds a gradient; those of query that have all own tokens as one sum."""
        if grad is None:
            return
        held, length = self._held[i], self._query.shape[2]
        if i == 0 and grad.shape[2] == length:
            for number, each in enumerate(held):
                if each.heads == heads and each.grad.shape[2] == length:
                    total = self._widened(i, each.grad)
                    add_in_place(total, grad, tokens, at)
                    held[number] = _Held(heads, slice(0, length), total, EVERY)
                    return
        held.append(_Held(heads, tokens, grad, at))

    def _add_held(self) -> None:
        """Adds what was held to the gradients of the own part."""
        # By rows, one step computes all of the gradient of a row.
        first = self._prepared.plan.split == "rows"
        for i, held in enumerate(self._held):
            while held:
                heads, tokens, grad, at = held.pop()
                _add(self._grads[i], heads, tokens, grad, at, first=first and i == 0)
                del grad
        for number, grads in self._extras:
            self._add_extras(number, grads)

    def _add_step(self, number: int, grads: tuple[Tensor | None, ...] | None) -> None:
        """Adds the gradients of a step to those of all own tokens."""
        if grads is None:
            return
        (each, heads), prepared = self._steps[number], self._prepared
        for i, tokens in ((0, each.queries), (1, each.own_at), (2, each.own_at)):
            grad = grads[i]
            if self._of_step[i] and grad is not None:
                self._grads[i] = self._widened(i, grad if i == 0 else _part_of(grad, tokens))
        if not self._of_step[0]:
            first = prepared.plan.split == "rows"
            at = each.attending_at
            _add(self._grads[0], heads, each.attending, grads[0], at, first=first)
        if count(each.own) and not self._of_step[1]:
            for i in (1, 2):
                first = prepared.own is None
                _add(self._grads[i], heads, each.own, grads[i], each.own_at, first=first)
        self._add_extras(number, grads[3:])

    def _add_extras(self, number: int, grads: tuple[Tensor | None, ...]) -> None:
        """Adds the gradients of bias, block scores and score tensors of a step."""
        (each, heads), (bias, blocks, reads) = self._steps[number], grads
        if blocks is not None:
            blocks = self._scattered(blocks, each.rows, each.columns, heads)
        for i, grad in ((3, bias), (4, blocks), (5, reads)):
            total = self._grads[i]
            if total is not None and grad is not None:
                chosen = heads.of(len(total)) if i == 3 else slice(None)
                total[chosen] += grad

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


def _part_of(grad: Tensor, tokens: Tokens) -> Tensor:
    """Some tokens of a gradient, without a view that keeps more than twice its own memory."""
    if isinstance(tokens, slice) and 2 * count(tokens) >= grad.shape[2]:
        return grad[:, :, tokens]
    found = grad.new_empty(*grad.shape[:2], count(tokens), grad.shape[3])
    copy_in_place(found, grad, EVERY, tokens)
    return found


def _add(
    total: Tensor | None,
    heads: Heads,
    tokens: Tokens,
    grad: Tensor | None,
    at: Tokens = EVERY,
    *,
    first: bool,
) -> None:
    """Adds tokens `at` of a gradient to `tokens` of `total`, or writes them if they are first."""
    if total is None or grad is None:
        return
    total = total[:, heads.of(total.shape[1])]
    if first:
        copy_in_place(total, grad, tokens, at)
    else:
        add_in_place(total, grad, tokens, at)
