"""Which threads a function starts."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import torch

TASKS = Path("/proc/self/task")  # of Linux: a folder for each thread of this process


def started_by(function: Callable[[], object]) -> int:
    """The number of threads that exist after a function and not before it.

    A thread of its own calls it, with two threads for operations of torch. Threads of OpenMP
    belong to the thread that starts them, so an operation that is split starts the second one
    here, whatever other tests did.
    """
    found: list[set[str]] = []

    def call() -> None:
        torch.set_num_threads(2)
        for step in (lambda: None, function):
            step()
            found.append({task.name for task in TASKS.iterdir()})

    before = torch.get_num_threads()
    thread = Thread(target=call)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    without, after = found
    return len(after - without)
