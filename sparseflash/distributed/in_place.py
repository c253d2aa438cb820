"""Both passes of a rank that computes in place: see `passes`.

Heads are computed in one group, or in several if memory is limited. Then the keys and values of a
group are fetched while the group before is computed, and in the backward pass once more:

    forward     all ready rows, then for each group: its waiting rows
    backward    for each group: dQ, dK and dV of received keys, dK and dV of own keys; the
                gradients that other ranks send meanwhile are added to those of own keys

The keys and values of two groups are in memory at most. In the backward pass those of the next
group are fetched while dQ is computed, and gradients are sent while dK and dV of own keys are. If
both exchanges can run beside one kernel, these keys are fetched then, too: those of the group are
not read any more, so that less is in memory.

With many groups the host limits the speed. So what all groups have in common, views of their
heads, is made once for a pass.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from sparseflash.dispatch.call import Call, Saved, empty_out
from sparseflash.distributed.fetch import Fetch, Return
from sparseflash.distributed.part import Heads, Step, in_chunks, repeated
from sparseflash.distributed.prepare import InPlaceCalls, Prepared, write_results_of_no_key
from sparseflash.distributed.shared_rows import SharedForward

MaybeTensor = TypeVar("MaybeTensor", bound=Tensor | None)


def forward_in_place(
    prepared: Prepared,
    calls: InPlaceCalls,
    inputs: tuple[Tensor, Tensor, Tensor],
    shared: SharedForward | None,
) -> tuple[tuple[Tensor, ...], list[list[Tensor]]]:
    """(results, keys and values of each step if they are saved) of query, key and value."""
    (query, key, value), masks = inputs, prepared.part.in_place
    assert masks is not None, "the split is in place"
    steps, at_once = prepared.part.steps, not prepared.plan.fetches_again
    own = _of_steps(steps, *inputs)

    def fetch(number: int) -> Fetch:
        return Fetch(prepared, (own[number][1], own[number][2]), steps[number].round)

    fetches = deque(map(fetch, range(len(steps) if at_once else min(len(steps), 1))))
    results = prepared.empty_results(_unwritten(query, value))
    if masks.has_empty_rows:
        write_results_of_no_key(results)
    if calls.ready is not None:
        _write(calls.ready, inputs, results)
    if shared is not None:
        shared.attend(key, value)
    saved: list[list[Tensor]] = []
    for number, each in enumerate(_of_steps(steps, *results) if steps else ()):
        fetched = fetches.popleft().wait()
        if not at_once and number + 1 < len(steps):
            fetches.append(fetch(number + 1))
        if calls.waiting is not None:
            _write(calls.waiting, own[number], each, (fetched[0], fetched[1]))
        saved += [fetched] if at_once else []
        del fetched  # before those of the next group arrive
    return results, saved


def _write(
    call: Call,
    inputs: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    more: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes out, lse and, if there are any, maximum logits of query, key and value.

    more: as in Call
    """
    (query, key, value), (out, lse, *max_logits) = inputs, results
    call = call.with_memory(more, (out, lse), max_logits[0] if max_logits else None)
    call.forward(query, key, value)


@dataclass(frozen=True, eq=False)
class _Group:
    """The inputs and results of a group of heads, and the gradients of the results.

    Attributes:
        saved: query, key, value, out and lse.
        grad_out, grad_lse: None for zeros.
        shared: What the calls of the group have in common; see Call.
    """

    saved: Saved
    grad_out: Tensor | None
    grad_lse: Tensor | None
    shared: list[Tensor] = field(default_factory=list)

    def write_gradients(
        self,
        call: Call | None,
        memory: Sequence[Tensor | None],
        received: Sequence[Tensor] = (),
        more: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Writes gradients to memory.

        Args:
            call: The call whose gradients they are; None for zeros.
            memory: That of the gradients of query, key and value; None for those not needed.
            received: Key and value, if they are not those of the group.
            more: As in Call.
        """
        query, key, value = memory
        if call is None:
            for needed in (x for x in memory if x is not None):
                needed.zero_()
        elif any(x is not None for x in memory):
            inputs = (self.saved[0], *(received or self.saved[1:3]))
            needs = (*(x is not None for x in memory), False, False, False)
            call = call.with_memory(more, gradients=(query, key, value), shared=self.shared)
            call.backward(self.grad_out, self.grad_lse, (*inputs, *self.saved[3:]), needs)


class BackwardInPlace:
    """The backward pass of one call in place.

    Args:
        prepared, calls: The call.
        saved: query, key, value, out and lse.
        grads: The gradients of out and lse; None for zeros.
        needs: Whether the gradients of query, key and value are needed.
        fetched: The keys and values of each step; None if they are fetched again.
        widened: widened(i, x) is x, the gradient of input i, in the dtype in which it is summed.
    """

    def __init__(
        self,
        prepared: Prepared,
        calls: InPlaceCalls,
        saved: Saved,
        grads: tuple[Tensor | None, Tensor | None],
        needs: Sequence[bool],
        fetched: list[list[Tensor]] | None,
        widened: Callable[[int, Tensor], Tensor],
    ):
        self._prepared, self._fetched, self._of_keys = prepared, fetched, needs[1:]
        self._steps, self._widened = prepared.part.steps, widened
        self._calls = calls
        self._grads = [
            _unwritten(x, x) if needed else None for x, needed in zip(saved, needs, strict=False)
        ]
        self._own = _of_steps(self._steps, *saved)
        self._of_results = _of_steps(self._steps, *grads)
        self._of_inputs = _of_steps(self._steps, *self._grads)

    def run(self) -> tuple[list[Tensor | None], "deque[Return]"]:
        """The gradients of query, key and value, and those that have to be added to them.

        With limited memory none has to be: those of a group are added before the next group. A
        second pass over a graph fetches keys again too, but adds in the order of the first pass.
        """
        returning, limited = deque[Return](), self._prepared.plan.fetches_again
        if not self._steps:  # nothing is exchanged
            group = self._group(0)
            self._write_of_queries(group, self._grads, [])
            self._write_of_own_keys(group, self._grads)
            return self._grads, returning
        late = self._prepared.transport.several_at_once
        both = self._keys_of(0, self._fetch(0))
        for number, step in enumerate(self._steps):
            coming = None if late else self._fetch(number + 1)
            group = self._group(number)
            grads = self._of_inputs[number]
            self._write_of_queries(group, grads, both)
            # What is sent for the next group is freed before there are gradients to send.
            following = [] if late else self._keys_of(number + 1, coming)
            returned = self._returned(group, step, both) if any(self._of_keys) else None
            both.clear()  # before the keys of the next group arrive, if they are fetched late
            coming = self._fetch(number + 1) if late else None
            if returned is not None:
                returned.send()
            self._write_of_own_keys(group, grads)
            both = self._keys_of(number + 1, coming) if late else following
            del coming, following
            if returned is not None and limited:
                self._add(returned, grads)
            elif returned is not None:
                returning.append(returned)
        return self._grads, returning

    def _group(self, number: int) -> _Group:
        grad_out, grad_lse = self._of_results[number]
        return _Group(self._own[number], grad_out, grad_lse)

    def _fetch(self, number: int) -> Fetch | None:
        """Starts to fetch the keys and values of a step again, if they are and if there is one."""
        if self._fetched is not None or number == len(self._steps):
            return None
        _, key, value, *_ = self._own[number]
        return Fetch(self._prepared, (key, value), self._steps[number].round)

    def _keys_of(self, number: int, coming: Fetch | None) -> list[Tensor]:
        """The keys and values of a step; an empty list if there is none."""
        if coming is not None:
            return coming.wait()
        if self._fetched is None or number == len(self._steps):
            return []
        return self._fetched[number]

    def _write_of_queries(
        self, group: _Group, grads: Sequence[Tensor | None], both: Sequence[Tensor]
    ) -> None:
        more = None if self._calls.waiting is None else (both[0], both[1])
        group.write_gradients(self._calls.every, (grads[0], None, None), more=more)

    def _write_of_own_keys(self, group: _Group, grads: Sequence[Tensor | None]) -> None:
        group.write_gradients(self._calls.own, (None, *grads[1:]))

    def _returned(self, group: _Group, step: Step, both: Sequence[Tensor]) -> Return:
        """The gradients of received keys and values, to be sent."""
        _, key, value, *_ = group.saved
        returned = Return(self._prepared, (key, value), step)
        memory, heavy = returned.gradients, self._calls.heavy
        assert memory is not None, "received keys are attended in the order of their arrival"
        needed = [x if each else None for x, each in zip(memory, self._of_keys, strict=True)]
        for x, each in zip(memory, needed, strict=True):
            if each is None:  # sent all the same
                x.zero_()
        group.write_gradients(self._calls.received, (None, *needed), received=both)
        if heavy is not None:
            self._write_of_heavy_keys(heavy, group, both, needed)
        return returned

    def _write_of_heavy_keys(
        self,
        call: Call,
        group: _Group,
        both: Sequence[Tensor],
        memory: Sequence[Tensor | None],
    ) -> None:
        """Writes the gradients of heavy received keys and values.

        The queries are in chunks, each of which has gradients in the dtype of the keys. They are
        added in float32.
        """
        masks = self._prepared.part.in_place
        assert masks is not None, "the split is in place"
        assert masks.heavy is not None, "there are heavy keys"
        tokens, chunks = masks.heavy.tokens, masks.heavy.chunks
        query, _, _, out, lse = group.saved
        query, out, lse = (in_chunks(x, chunks) for x in (query, out, lse))
        grad_out, grad_lse = (
            None if x is None else in_chunks(x, chunks) for x in (group.grad_out, group.grad_lse)
        )
        heavy = [repeated(x[:, :, tokens], chunks) for x in both]
        needs = (False, *(x is not None for x in memory), False, False, False)
        found = call.backward(grad_out, grad_lse, (query, *heavy, out, lse.contiguous()), needs)
        for total, grad in zip(memory, found[1:3], strict=True):
            if total is not None and grad is not None:
                total[:, :, tokens] = grad.sum(0, keepdim=True, dtype=lse.dtype).to(total.dtype)

    def _add(self, returned: Return, grads: Sequence[Tensor | None]) -> None:
        """Adds the gradients that other ranks send to those of own keys of a group of heads."""
        totals = [None if x is None else self._widened(i, x) for i, x in enumerate(grads)]
        returned.add_to_heads(*totals[1:])
        for grad, total in zip(grads, totals, strict=True):
            if grad is not None and total is not None and total is not grad:
                grad.copy_(total)


def _unwritten(like: Tensor, dims_of: Tensor) -> Tensor:
    """Memory in the layout of an input, with the dims of another one.

    If the dims of a head are not contiguous in the input, kernels copy it, but they cannot write
    to such memory. Then the layout is contiguous.
    """
    if like.stride(3) != 1:
        return like.new_empty(*like.shape[:3], dims_of.shape[3])
    return empty_out(like, dims_of)


def _of_steps(steps: Sequence[Step], *tensors: MaybeTensor) -> list[tuple[MaybeTensor, ...]]:
    """The heads of each step of tensors (batch, heads, ...); all heads if there are no steps.

    There is a step for each group of heads.
    """
    groups = max(len(steps), 1)
    each = ((x,) * groups if x is None else Heads.of_each(x, groups) for x in tensors)
    return [*zip(*each, strict=True)]
