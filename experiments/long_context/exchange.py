"""Runs without exchanges between ranks, and runs in which exchanged bytes are counted."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from experiments.long_context import baselines
from sparseflash.distributed import fetch, shared_rows, transport

Run = Callable[[], Any]


@contextmanager
def nothing_exchanged() -> Iterator[Callable[[Run], Run]]:
    """A context with a function that makes of a run the same without exchanges.

    Exchanges return random numbers, which are drawn once, and an all-gather copies of own keys.
    Zeros would take less power, and so less time.
    """
    drawn: dict[tuple, Tensor] = {}

    class Silent(transport.Exchange):
        def __init__(self, group, source, send_splits, receive_splits, what):
            shape = (sum(receive_splits), *source.shape[1:])
            key = (shape, source.dtype, source.device)
            if key not in drawn:
                drawn[key] = torch.randn(shape, dtype=source.dtype, device=source.device)
            self._received = drawn[key]

        def wait(self) -> Tensor:
            return self._received

    def repeated(shard: Tensor, group: ProcessGroup) -> Tensor:
        return shard.repeat(group.size(), *[1] * (shard.dim() - 1))

    def own(tensor: Tensor, group: ProcessGroup) -> Tensor:
        return tensor[: len(tensor) // group.size()]

    def without(run: Run) -> Run:
        def silent() -> Any:
            with _replaced(Silent, all_gather=repeated, reduce_scatter=own):
                return run()

        return silent

    yield without
    drawn.clear()


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
