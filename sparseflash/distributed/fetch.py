"""The exchanges of keys and values, and those of their gradients.

Keys and values are sent side by side in one exchange: the row of a token has its keys of all
heads, and behind them its values of all heads. So one exchange is started before any attention is
computed. A second one could start only when no attention is computed: the CTAs of a kernel of
attention stay on all multiprocessors until it ends.
"""

from collections.abc import Sequence

from torch import Tensor

from sparseflash.distributed.part import Heads, Round, Step, count
from sparseflash.distributed.prepare import Prepared
from sparseflash.merge import add_both_in_place, add_in_place, copy_both_in_place, copy_in_place

EVERY = slice(None)  # all tokens of a tensor
Both = tuple[Tensor, Tensor]  # keys and values (batch, heads, tokens, dims), or their gradients


class Fetch:
    """The keys and values that a step attends; the constructor starts the exchange.

    Args:
        prepared: The call.
        own: Own keys and values of the heads of the step.
        each: The round of the step.
    """

    def __init__(self, prepared: Prepared, own: Both, each: Round):
        self._round, self._own = each, own
        elements = _elements_of_a_row(own)
        like, what = own[0], "keys and values"
        self._exchange = prepared.transport.pulled(each.splits, like, elements, what)
        copy_both_in_place(_views(self._exchange.rows, own), own, EVERY, each.packed)
        self._exchange.start()

    def wait(self) -> list[Tensor]:
        """The keys and the values, (batch, heads, tokens, dims), in the order of the sequence."""
        each, own = self._round, self._own
        if each.arrives_in_order:
            return [*_views(self._exchange.wait(), own)]
        if count(each.own):  # most keys are own ones, which keep the layout of a shard
            attended = [x.new_empty(*x.shape[:2], each.attended, x.shape[3]) for x in own]
            copy_both_in_place(attended, own, each.own_at, each.own)
        else:
            attended = [*_views(_empty_rows(own, each.attended), own)]
        copy_both_in_place(attended, _views(self._exchange.wait(), own), each.received_at)
        return attended


class Return:
    """The gradients of the keys and values that a step received, on their way to the owners.

    Args:
        prepared: The call.
        own: Keys and values like those of the step: of its heads, with any number of tokens.
        step: The step.

    Attributes:
        gradients: The memory from which they are sent, to which a call writes them; None if they
            must be packed.
    """

    def __init__(self, prepared: Prepared, own: Both, step: Step):
        self._step, self._likes = step, own
        like, elements = own[0], _elements_of_a_row(own)
        splits, what = step.round.splits.back, "gradients of keys and values"
        self._exchange = prepared.transport.pushed(splits, like, elements, what)
        self._sent = _views(self._exchange.rows, own)
        self.gradients = self._sent if step.round.arrives_in_order else None

    def send(self, grads: Sequence[Tensor | None] | None = None) -> None:
        """Sends the gradients of the attended keys and values.

        Args:
            grads: One for each, None for zeros. By default they are those in `gradients`.
        """
        each, sent = self._step.round, self._sent
        key, value = grads = sent if grads is None else grads
        if self.gradients is None and key is not None and value is not None:
            copy_both_in_place(sent, (key, value), EVERY, each.received_at)
        else:
            for grad, memory in zip(grads, sent, strict=True):
                if grad is None:
                    memory.zero_()
                elif self.gradients is None:
                    copy_in_place(memory, grad, EVERY, each.received_at)
        self._exchange.start()
        del self.gradients, self._sent  # the memory is freed when it has been sent

    def add_to(self, *totals: Tensor | None) -> None:
        """Adds the received gradients to those of own keys and values, which have all heads."""
        heads = self._step.heads
        self.add_to_heads(*(None if x is None else x[:, heads.of(x.shape[1])] for x in totals))

    def add_to_heads(self, *of_heads: Tensor | None) -> None:
        """Adds the received gradients to those of own keys and values of the heads of the step.

        It adds rank by rank: a token may have been sent to several.
        """
        each, some = self._step.round, [x for x in of_heads if x is not None]
        parts = self._exchange.wait().split(each.splits.send)
        for rows, tokens, number in zip(parts, each.send, each.splits.send, strict=True):
            if not number:  # as of this rank itself
                continue
            both = _views(rows, self._likes)
            if len(some) == 2:
                add_both_in_place(some, both, tokens)
                continue
            for total, part in zip(of_heads, both, strict=True):
                if total is not None:
                    add_in_place(total, part, tokens)
        self._exchange.release()


def of_heads(key: Tensor, value: Tensor, heads: Heads) -> Both:
    """Some heads of keys and values."""
    chosen = heads.of(key.shape[1])
    return key[:, chosen], value[:, chosen]


def _empty_rows(likes: Both, tokens: int) -> Tensor:
    """Uninitialised rows for as many tokens, with batch, heads and dims of `likes`."""
    return likes[0].new_empty(tokens, _elements_of_a_row(likes))


def _elements_of_a_row(likes: Both) -> int:
    """The number of elements of the row of a token."""
    return sum(x.shape[0] * x.shape[1] * x.shape[3] for x in likes)


def _views(rows: Tensor, likes: Both) -> Both:
    """The keys and the values of such rows: views (batch, heads, tokens, dims)."""
    views, first, (tokens, elements) = [], rows.storage_offset(), rows.shape
    for x in likes:
        batch, heads, _, dims = x.shape
        # One call of torch: with many groups of heads the host limits the speed.
        strides = (heads * dims, dims, elements, 1)
        views.append(rows.as_strided((batch, heads, tokens, dims), strides, first))
        first += batch * heads * dims
    key, value = views
    return key, value
