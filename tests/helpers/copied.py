"""Copies between ranks without GPUs: their buffers are files that all processes map."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from sparseflash.distributed import copies, prepare
from sparseflash.distributed.copies import Copies, Launched, SharedMemory
from sparseflash.distributed.exchange import Collectives, Transport

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


def with_copies(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What function(rank, *arguments) returns if calls exchange by copies.

    Raises:
        AssertionError: Nothing was copied.
    """
    made = []

    def transport_of(name: str, group: ProcessGroup | None, device: torch.device) -> Transport:
        if group is None:
            return Collectives(None)
        made.append(group)
        return Copies(group, device)

    with (
        mock.patch.object(prepare, "transport_of", transport_of),
        mock.patch.object(copies, "SharedMemory", FileMemory),
    ):
        found = function(rank, *arguments)
    assert made, "nothing was copied"
    return found
