"""Runs without exchanges between ranks, and runs in which exchanged bytes are counted."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from experiments.long_context import baselines
from sparseflash.distributed import shared_rows
from sparseflash.distributed.copies import Copies
from sparseflash.distributed.exchange import Collectives, Exchange, Splits, Transport, exchanged

Run = Callable[[], Any]
Make = Callable[..., Exchange]  # makes an exchange; with the arguments of Transport.pulled


@contextmanager
def nothing_exchanged() -> Iterator[Callable[[Run], Run]]:
    """A context with a function that makes of a run the same without exchanges.

    Exchanges return random numbers, which are drawn once, and an all-gather copies of own keys.
    Zeros would take less power, and so less time.
    """
    drawn: dict[tuple, Tensor] = {}

    class Silent(Exchange):
        def __init__(self, rows: Tensor, received: int):
            self.rows, shape = rows, (received, *rows.shape[1:])
            key = (shape, rows.dtype, rows.device)
            if key not in drawn:
                drawn[key] = torch.randn(shape, dtype=rows.dtype, device=rows.device)
            self._received = drawn[key]

        def start(self) -> None:
            pass

        def wait(self) -> Tensor:
            return self._received

        def release(self) -> None:
            pass

    def silent(_: Make) -> Make:
        def make(self: Transport, splits: Splits, like: Tensor, elements: int, *_) -> Exchange:
            return Silent(like.new_empty(sum(splits.send), elements), sum(splits.receive))

        return make

    def of_shared_rows(group, rows: Tensor, send: list[int], receive: list[int], _) -> Exchange:
        return Silent(rows, sum(receive))

    def repeated(shard: Tensor, group: ProcessGroup) -> Tensor:
        return shard.repeat(group.size(), *[1] * (shard.dim() - 1))

    def own(tensor: Tensor, group: ProcessGroup) -> Tensor:
        return tensor[: len(tensor) // group.size()]

    def without(run: Run) -> Run:
        def without_exchanges() -> Any:
            with (
                _replaced(silent, of_shared_rows, all_gather=repeated, reduce_scatter=own),
                mock.patch.object(Copies, "begin_pass"),  # a barrier if a pass is captured
            ):
                return run()

        return without_exchanges

    yield without
    drawn.clear()


@contextmanager
def counted() -> Iterator[list[int]]:
    """A context with a list of the bytes received from other ranks in each exchange."""
    found: list[int] = []

    def counting(make: Make) -> Make:
        def made(self: Transport, splits: Splits, like: Tensor, elements: int, *rest) -> Exchange:
            others = sum(splits.receive) - splits.receive[splits.rank]
            found.append(others * elements * like.element_size())
            return make(self, splits, like, elements, *rest)

        return made

    def of_shared_rows(
        group, rows: Tensor, send: list[int], receive: list[int], *rest
    ) -> Exchange:
        others = sum(receive) - receive[group.rank()]
        found.append(others * rows.element_size() * rows.shape[1:].numel())
        return exchanged(group, rows, send, receive, *rest)

    gather = baselines.all_gather

    def counting_gather(shard: Tensor, group: ProcessGroup) -> Tensor:
        found.append(shard.nbytes * (group.size() - 1))
        return gather(shard, group)

    with _replaced(counting, of_shared_rows, all_gather=counting_gather):
        yield found


@contextmanager
def _replaced(
    changed: Callable[[Make], Make], of_shared_rows: Make, **of_baselines: Any
) -> Iterator[None]:
    """Replaces all exchanges: those of keys and of gradients, of shared rows and of baselines."""
    with ExitStack() as stack:
        for transport in (Collectives, Copies):
            for name in ("pulled", "pushed"):
                make = changed(vars(transport)[name])
                stack.enter_context(mock.patch.object(transport, name, make))
        stack.enter_context(mock.patch.object(shared_rows, "exchanged", of_shared_rows))
        for name, function in of_baselines.items():
            stack.enter_context(mock.patch.object(baselines, name, function))
        yield
