"""All-to-alls of rows between ranks: what an exchange is, and those of torch.distributed."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Splits:
    """How many rows each rank sends to each other one in an all-to-all.

    Attributes:
        rank: Number of this rank.
        counts: counts[a][b] rows go from rank a to rank b. What a rank sends lies in the order of
            the receivers, what it receives in the order of the senders.
    """

    rank: int
    counts: list[list[int]]

    @cached_property
    def send(self) -> list[int]:
        """The number of rows that this rank sends to each rank."""
        return self.counts[self.rank]

    @cached_property
    def receive(self) -> list[int]:
        """The number of rows that this rank receives from each rank."""
        return [of_sender[self.rank] for of_sender in self.counts]

    @cached_property
    def most_sent(self) -> int:
        """The number of rows that the rank sends that sends most."""
        return max(map(sum, self.counts))

    @cached_property
    def back(self) -> "Splits":
        """Those of an all-to-all that returns every row to its sender."""
        return Splits(self.rank, [list(each) for each in zip(*self.counts, strict=True)])


class Exchange(ABC):
    """An asynchronous all-to-all of rows.

    Attributes:
        rows: Memory for the rows that this rank sends, which the caller writes before `start`.
    """

    rows: Tensor

    @abstractmethod
    def start(self) -> None:
        """Sends the rows, which must not be read or written any more."""

    @abstractmethod
    def wait(self) -> Tensor:
        """The received rows. On a GPU the current stream waits for them, on a CPU the caller."""

    @abstractmethod
    def release(self) -> None:
        """Says that what `wait` returned of a pushed exchange is not read any more."""


class Transport(ABC):
    """Moves rows between ranks. All ranks must make equal calls in the same order.

    Attributes:
        several_at_once: Whether several exchanges run beside one kernel of attention. If not, the
            second one begins when the kernel has ended.
    """

    several_at_once: bool

    @abstractmethod
    def begin_pass(self) -> None:
        """Says that a forward or backward pass begins, whose exchanges follow."""

    @abstractmethod
    def pulled(self, splits: Splits, like: Tensor, elements: int, what: str) -> Exchange:
        """An exchange whose received rows remain.

        Args:
            splits: Numbers of rows.
            like: A tensor with the dtype and device of the rows.
            elements: Number of elements of a row.
            what: Name of the rows in errors.
        """

    @abstractmethod
    def pushed(self, splits: Splits, like: Tensor, elements: int, what: str) -> Exchange:
        """The same for received rows that the caller reads soon, before it calls `release`."""


class Collective(Exchange):
    """One all-to-all of torch.distributed."""

    def __init__(
        self,
        group: ProcessGroup | None,
        rows: Tensor,
        send_splits: list[int],
        receive_splits: list[int],
        what: str,
    ):
        self.rows, self._group, self._what = rows, group, what
        self._send, self._receive = send_splits, receive_splits

    def start(self) -> None:
        self._received = self.rows.new_empty(sum(self._receive), *self.rows.shape[1:])
        with explain_errors(self._what):
            self._work = dist.all_to_all_single(
                *(self._received, self.rows, self._receive, self._send, self._group),
                async_op=True,
            )

    def wait(self) -> Tensor:
        with explain_errors(self._what):
            cast(dist.Work, self._work).wait()
        received = self._received
        # They are freed when the caller is done with them. The work of NCCL refers to them, too.
        # What was sent must not be freed before it has been sent.
        del self.rows, self._received, self._work
        return received

    def release(self) -> None:
        pass  # the received rows are freed as any tensor


class Collectives(Transport):
    """All-to-alls of a process group."""

    several_at_once = False  # their kernels need multiprocessors, and attention has all of them

    def __init__(self, group: ProcessGroup | None):
        self._group = group

    def begin_pass(self) -> None:
        pass  # each exchange has memory of its own

    def pulled(self, splits: Splits, like: Tensor, elements: int, what: str) -> Exchange:
        rows = like.new_empty(sum(splits.send), elements)
        return Collective(self._group, rows, splits.send, splits.receive, what)

    pushed = pulled


def exchanged(
    group: ProcessGroup | None,
    rows: Tensor,
    send_splits: list[int],
    receive_splits: list[int],
    what: str,
) -> Exchange:
    """A started all-to-all of rows that are already written."""
    exchange = Collective(group, rows, send_splits, receive_splits, what)
    exchange.start()
    return exchange


@contextmanager
def explain_errors(data: str) -> Iterator[None]:
    """Says of an error of torch.distributed which exchange failed."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"context_parallel_attention could not exchange {data}: another rank failed, timed "
            "out or made a different call; with check=True every rank reports which one"
        ) from error
