"""Processes that share a sequence, started once for many cases."""

import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

TIMEOUT = 60.0  # seconds; of a test that is about no failure


class Ranks:
    """Processes of one group, each of which runs what it is asked for.

    Args:
        count: How many.
        file: A path where they may meet.
        timeout: Seconds after which one that waits for another gives up.
        backend: "gloo", or "nccl" with a GPU for each process.
    """

    def __init__(self, count: int, file: Path, timeout: float = TIMEOUT, backend: str = "gloo"):
        # One process imports what all need, and is forked before it computes anything.
        context = multiprocessing.get_context("forkserver")
        needed = ["tests.helpers.context_parallel", "tests.helpers.context_gradients"]
        context.set_forkserver_preload(needed)
        self._pipes, self._processes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (rank, count, f"file://{file}", timeout, backend, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What function(rank, *arguments) returns on each rank.

        Exceptions are returned as text; None for a rank that died.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        while not pipe.poll(0.05):
            if not self._processes[rank].is_alive() and not pipe.poll():
                return None
        try:
            return pipe.recv()
        except EOFError:
            return None

    def close(self) -> None:
        """Ends all processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                with suppress(BrokenPipeError):  # it may end before the message is sent
                    pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, count: int, meeting: str, timeout: float, backend: str, pipe) -> None:
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        device_id=device,
        init_method=meeting,
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout),
    )
    while (asked := pipe.recv()) is not None:
        function, arguments = asked
        try:
            pipe.send(function(rank, *arguments))
        except Exception:
            pipe.send(traceback.format_exc())
    dist.barrier()
    dist.destroy_process_group()
