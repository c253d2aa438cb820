"""Runs without exchanges between ranks, and runs in which exchanged bytes are counted."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed import ProcessGroup

from experiments.long_context import baselines
from sparseflash.distributed import fetch, shared_rows, transport


@contextmanager
def nothing_exchanged() -> Iterator[None]:
    """A context in which exchanges return zeros, and an all-gather returns copies of own keys."""

    class Silent(transport.Exchange):
        def __init__(self, group, source, send_splits, receive_splits, what):
            self._received = source.new_zeros(sum(receive_splits), *source.shape[1:])

        def wait(self) -> Tensor:
            return self._received

    def repeated(shard: Tensor, group: ProcessGroup) -> Tensor:
        return shard.repeat(group.size(), *[1] * (shard.dim() - 1))

    def own(tensor: Tensor, group: ProcessGroup) -> Tensor:
        return tensor[: len(tensor) // group.size()]

    with _replaced(Silent, all_gather=repeated, reduce_scatter=own):
        yield


@contextmanager
def counted() -> Iterator[list[int]]:
    """A context with a list of the bytes received from other ranks in each exchange."""
    found: list[int] = []

    class Counting(transport.Exchange):
        def __init__(self, group, source, send_splits, receive_splits, *rest):
            others = sum(receive_splits) - receive_splits[group.rank()]
            found.append(others * source.element_size() * source.shape[1:].numel())
            super().__init__(group, source, send_splits, receive_splits, *rest)

    gather = baselines.all_gather

    def counting_gather(shard: Tensor, group: ProcessGroup) -> Tensor:
        found.append(shard.nbytes * (group.size() - 1))
        return gather(shard, group)

    with _replaced(Counting, all_gather=counting_gather):
        yield found


@contextmanager
def _replaced(exchange: type[transport.Exchange], **of_baselines: Any) -> Iterator[None]:
    """Replaces the exchanges of all modules."""
    with ExitStack() as stack:
        for module in (fetch, shared_rows):
            stack.enter_context(mock.patch.object(module, "Exchange", exchange))
        for name, function in of_baselines.items():
            stack.enter_context(mock.patch.object(baselines, name, function))
        yield
