"""Copies between ranks without GPUs: their buffers are files that all processes map."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sparseflash.distributed import Copies, attention, copies
from sparseflash.distributed.copies import Launched, SharedMemory
from sparseflash.distributed.prepare import Prepared

ONE_RANK = mock.Mock(rank=lambda: 0, size=lambda: 1)
LATE = 0.01  # seconds by which the copies of every second rank begin later


class FileMemory(SharedMemory):
    """Memory of files. Free buffers are filled with NaN, and some ranks are late."""

    def barrier(self, group: ProcessGroup) -> None:
        super().barrier(group)
        for each in self._buffers:
            if each.released is not None and each.released < self._barriers:
                each.of_ranks[self.rank].fill_(255)
        dist.barrier(group)  # a rank that is ahead must not have written to them

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Launched:
        time.sleep(LATE * (self.rank % 2))
        return super().copy(pairs)

    def _allocated(self, group: ProcessGroup, nbytes: int) -> list[Tensor]:
        folder: list[Any] = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder, group=group, group_src=0)
        path = Path(folder[0], "rank")
        own = torch.from_file(f"{path}{self.rank}", True, nbytes, dtype=torch.uint8)
        own.fill_(255)
        dist.barrier(group)
        others = [
            torch.from_file(f"{path}{rank}", True, nbytes, dtype=torch.uint8)
            for rank in range(group.size())
        ]
        dist.barrier(group)
        return others


@contextmanager
def copies_of_files() -> Iterator[None]:
    """A context in which ranks on CPUs can copy."""
    with (
        mock.patch.object(copies, "refusal", return_value=None),
        mock.patch.object(copies, "SharedMemory", FileMemory),
    ):
        yield


def copies_of(group: ProcessGroup, device: torch.device) -> Copies:
    """Copies of ranks that are not asked."""
    with (
        mock.patch.object(copies, "group_or_world", return_value=group),
        mock.patch.object(copies, "refusal", return_value=None),
        mock.patch.object(copies, "_of_all_ranks", return_value=["0"]),
    ):
        return Copies(group, device)


@contextmanager
def captured() -> Iterator[None]:
    """A context in which passes are captured in a CUDA graph, as far as copies know."""
    with mock.patch.object(copies, "is_captured", return_value=True):
        yield


def with_copies(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What function(rank, *arguments) returns if its calls exchange by copies.

    Raises:
        AssertionError: Nothing was copied.
    """
    of_groups: dict[ProcessGroup, Copies] = {}
    prepare = attention.prepare

    def prepare_copies(
        query: Tensor, key: Tensor, value: Tensor, plan: Any, group: Any, **keywords: Any
    ) -> Prepared:
        if group is not None:
            if group not in of_groups:
                of_groups[group] = Copies(group, query.device)
            keywords["transport"] = of_groups[group]
        return prepare(query, key, value, plan, group, **keywords)

    with copies_of_files(), mock.patch.object(attention, "prepare", prepare_copies):
        found = function(rank, *arguments)
    assert any(each.nbytes > 0 for each in of_groups.values()), "nothing was copied"
    return found
