"""Processes that compile kernels which later calls may need, while a call compiles its own.

Threads would not do: to generate the IR of a kernel takes a third of the time of its compilation,
holds the global interpreter lock of Python, and so would delay the call. A process writes to
Triton's cache on disk. The call that needs the kernel waits for the process and then compiles as
always: it finds the kernel in the cache, or compiles it and raises what is wrong with it.
"""

import atexit
import hashlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from threading import Lock, Thread, get_ident
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from sparseflash.backends.triton_common import compile_worker
from sparseflash.backends.triton_common.relaunch import active_driver

VARIABLE = "SPARSEFLASH_COMPILE_WORKERS"
# The file is run by its path, because its package imports torch.
RUN_WORKER = "import runpy, sys; runpy.run_path(sys.argv[1])['main']()"
MAX_WORKERS = 6  # with as many, a second mask waited for a second on a host of 16 threads
MAX_WAIT = 30  # seconds; a kernel takes 3 to 5 on a core that nothing else uses


class Description(NamedTuple):
    """What a process needs to compile a kernel.

    module, name: of the kernel
    data: from which Triton's preload compiles it
    key:  hexadecimal hash of all of it and of Triton's version and the source
    """

    module: str
    name: str
    data: str
    key: str


_hook_lock = Lock()


def describe(kernel: Any, *arguments: Any, **constants: Any) -> Description | None:
    """The description of a kernel; None if this process has compiled it, or no other one can.

    Args:
        kernel, arguments, constants: The kernel, and the arguments of its method `warmup`.
    """
    if any(isinstance(x, triton.JITFunction) for x in constants.values()):
        return None  # a score function, of a module that this one does not know
    found, thread, hooks = [], get_ident(), knobs.runtime
    with _hook_lock:
        before = hooks.jit_cache_hook

        def hook(**of_kernel: Any) -> bool | None:
            if get_ident() != thread:
                return before(**of_kernel) if before is not None else None
            found.append(of_kernel["compile"]["specialization_data"])
            return True  # so that Triton does not compile it

        hooks.jit_cache_hook = hook
        try:
            kernel.warmup(*arguments, **constants)
        finally:
            hooks.jit_cache_hook = before
    if not found:
        return None
    parts = (triton.__version__, kernel.cache_key, str(_target()), found[0])
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Description(kernel.__module__, kernel.__name__, found[0], key)


def _target() -> tuple:
    """The target of the compiler, as arguments of Triton's GPUTarget."""
    target = active_driver().get_current_target()
    return target.backend, target.arch, target.warp_size


class Workers:
    """The processes that this process has started."""

    def __init__(self):
        self._processes: dict[str, subprocess.Popen] = {}  # by the keys of their kernels
        self._lock = Lock()

    def start(self, kernels: dict[str, Description]) -> None:
        """Starts processes for kernels that are neither compiled nor being compiled."""
        most = number_of_workers()
        # If the system has no more processes, or the cache cannot be written, calls compile what
        # they need.
        with self._lock, suppress(OSError):
            new = [
                kernel
                for key, kernel in kernels.items()
                if key not in self._processes and not compile_worker.is_marked(key)
            ]
            for i in range(min(most, len(new))):
                share = new[i::most]
                process = _start(share)
                self._processes |= dict.fromkeys([kernel.key for kernel in share], process)
                # A process that has ended remains in the system until it is waited for.
                Thread(target=process.wait, daemon=True).start()

    def wait(self, keys: set[str]) -> None:
        """Waits until the processes that compile these kernels have ended.

        After MAX_WAIT seconds in all the call compiles them itself.
        """
        end = time.monotonic() + MAX_WAIT
        for key in keys & {*self._processes}:
            with suppress(subprocess.TimeoutExpired):
                self._processes[key].wait(max(0, end - time.monotonic()))

    def stop(self) -> None:
        """Ends all processes."""
        for process in [*self._processes.values()]:
            process.terminate()


def _start(kernels: list[Description]) -> subprocess.Popen:
    job = {
        "path": [str(path) for path in sys.path],
        "target": _target(),
        "kernels": [x._asdict() for x in kernels],
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", RUN_WORKER, compile_worker.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a call that needs such a kernel raises the error itself
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.close()
    return process


def number_of_workers() -> int:
    """The number of processes that a call may start.

    By default one for every four processor threads of this process, and at most MAX_WORKERS. None
    where `sys.executable` is not an interpreter: in a program that embeds or freezes Python.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        return 0
    asked = os.environ.get(VARIABLE)
    if asked is None:
        return min(MAX_WORKERS, _threads() // 4)
    if not asked.isdecimal():
        raise ValueError(f"{VARIABLE} must be a number of processes, got {asked!r}")
    return int(asked)


def _threads() -> int:
    """The processor threads of this process, where the ranks of a host share its threads."""
    threads = len(os.sched_getaffinity(0))
    if ranks := _number("LOCAL_WORLD_SIZE"):  # of torchrun
        return threads // ranks
    # srun can bind each task to threads of its own, which must not be divided again.
    of_host = max(threads, _number("SLURM_CPUS_ON_NODE"))
    return min(threads, of_host // _ranks_of_host())


def _ranks_of_host() -> int:
    """The number of ranks on this host, as far as srun or Lightning say it; 1 without them.

    srun says the number if it was started with --ntasks-per-node. Otherwise only the rank on the
    host and the number of ranks on all hosts are known: then there is one rank for each GPU.
    """
    ranks = max(_number("SLURM_NTASKS_PER_NODE"), 1)
    if {"LOCAL_RANK", "SLURM_LOCALID"} & os.environ.keys():
        rank = max(_number("LOCAL_RANK"), _number("SLURM_LOCALID"))
        on_all_hosts = max(_number("WORLD_SIZE"), _number("SLURM_NTASKS"))
        ranks = max(ranks, rank + 1, min(on_all_hosts, torch.cuda.device_count()))
    return ranks


def _number(variable: str) -> int:
    """The number in a variable of the environment; 0 if it has none."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


WORKERS = Workers()
atexit.register(WORKERS.stop)
