"""Both passes of a rank that computes in place: see `passes`.

Heads are computed in one group, or in several if memory is limited. Then the keys and values of a
group are fetched while the group before is computed, and in the backward pass once more, so that
those of two groups are in memory at most:

    forward     all ready rows, then for each group: its waiting rows
    backward    for each group: dQ, dK and dV of received keys, dK and dV of own keys; the
                gradients that other ranks send meanwhile are added to those of own keys
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from sparseflash.dispatch.call import Call, Saved, empty_out
from sparseflash.distributed.fetch import Fetch, Return
from sparseflash.distributed.part import Heads, Step, in_chunks, repeated
from sparseflash.distributed.prepare import InPlaceCalls, Prepared, write_results_of_no_key
from sparseflash.distributed.shared_rows import SharedForward


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
    fetches = deque(Fetch(prepared, key, value, x) for x in (steps if at_once else steps[:1]))
    results = prepared.empty_results(_unwritten(query, value))
    if masks.has_empty_rows:
        write_results_of_no_key(results)
    if calls.ready is not None:
        _writing_to(results, calls.ready).forward(query, key, value)
    if shared is not None:
        shared.attend(key, value)
    saved: list[list[Tensor]] = []
    for number, step in enumerate(steps):
        fetched = fetches.popleft().wait()
        if not at_once and number + 1 < len(steps):
            fetches.append(Fetch(prepared, key, value, steps[number + 1]))
        if calls.waiting is not None:
            _write_waiting_rows(calls.waiting, step.heads, inputs, fetched, results)
        saved += [fetched] if at_once else []
        del fetched  # before those of the next group arrive
    return results, saved


def _write_waiting_rows(
    call: Call,
    heads: Heads,
    inputs: tuple[Tensor, Tensor, Tensor],
    fetched: Sequence[Tensor],
    results: tuple[Tensor, ...],
) -> None:
    """Writes the results of the waiting rows of a group of heads."""
    call = replace(_writing_to(_of_heads(heads, *results), call), more=(fetched[0], fetched[1]))
    call.forward(*_of_heads(heads, *inputs))


def _writing_to(results: tuple[Tensor, ...], call: Call) -> Call:
    """The call that writes to out, lse and, if there are any, maximum logits."""
    out, lse, *max_logits = results
    return replace(call, results=(out, lse), max_logits=max_logits[0] if max_logits else None)


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

    def of(self, heads: Heads) -> "_Group":
        """Some of the heads."""
        grad_out, grad_lse = (
            None if x is None else _of_heads(heads, x)[0] for x in (self.grad_out, self.grad_lse)
        )
        return _Group(_of_heads(heads, *self.saved), grad_out, grad_lse)

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
            call = replace(call, more=more, shared=self.shared, gradients=(query, key, value))
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
        self._prepared, self._calls, self._fetched = prepared, calls, fetched
        self._steps, self._widened = prepared.part.steps, widened
        self._all_heads, self._of_keys = _Group(saved, *grads), needs[1:]
        self._grads = [
            _unwritten(x, x) if needed else None for x, needed in zip(saved, needs, strict=False)
        ]

    def run(self) -> tuple[list[Tensor | None], "deque[Return]"]:
        """The gradients of query, key and value, and those that have to be added to them.

        With limited memory none has to be: those of a group are added before the next group. A
        second pass over a graph fetches keys again too, but adds in the order of the first pass.
        """
        returning, limited = deque[Return](), self._prepared.plan.fetches_again
        if not self._steps:  # nothing is exchanged
            self._write_of_queries(self._all_heads, self._grads, [])
            self._write_of_own_keys(self._all_heads, self._grads)
            return self._grads, returning
        both = self._keys_of(0, self._fetch(0))
        for number, step in enumerate(self._steps):
            coming = self._fetch(number + 1)
            group = self._all_heads.of(step.heads)
            grads = [None if x is None else _of_heads(step.heads, x)[0] for x in self._grads]
            self._write_of_queries(group, grads, both)
            # What is sent for the next group is freed before there are gradients to send.
            following = self._keys_of(number + 1, coming)
            del coming
            returned = self._returned(group, step, both) if any(self._of_keys) else None
            both.clear()  # now, and not when the pass has ended
            both = following
            if returned is not None:
                returned.send()
            self._write_of_own_keys(group, grads)
            if returned is not None and limited:
                self._add(returned, grads)
            elif returned is not None:
                returning.append(returned)
        return self._grads, returning

    def _fetch(self, number: int) -> Fetch | None:
        """Starts to fetch the keys and values of a step again, if they are and if there is one."""
        if self._fetched is not None or number == len(self._steps):
            return None
        _, key, value, *_ = self._all_heads.saved
        return Fetch(self._prepared, key, value, self._steps[number])

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
        returned = Return(self._prepared, step)
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


def _of_heads(heads: Heads, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Some heads of tensors (batch, heads, ...), each of which has its own number of them."""
    return tuple(x[:, heads.of(x.shape[1])] for x in tensors)
