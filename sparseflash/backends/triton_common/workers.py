"""The process that compiles kernels for this one: those of a call, and those of calls to come.

Threads would not do as well. To generate the IR of a kernel takes a third of the time of its
compilation and holds the global interpreter lock of Python, so that the kernels of a call would
wait for one another. A process writes to Triton's cache on disk. The call that needs the kernel
waits for it and then compiles as always: it finds the kernel in the cache, or compiles it and
raises what is wrong with it.

This module does not import Triton: the process is started before that, and both import it at the
same time.
"""

import atexit
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import NamedTuple

import torch

from sparseflash.backends.triton_common import compile_worker

VARIABLE = "SPARSEFLASH_COMPILE_WORKERS"
# The file is run by its path, because its package imports torch.
RUN_WORKER = "import runpy, sys; runpy.run_path(sys.argv[1])['main']()"
# Two masks that need other kernels in both passes have at most nine beside the three of a call.
MAX_WORKERS = 12
MIN_THREADS = 4
MAX_WAIT = 120  # seconds; a kernel takes 3 to 5 on a core that nothing else uses
# Added to the niceness of what compiles kernels of other calls: a call compiles its own first, and
# so do others that share the host.
NICE = 10

_logger = logging.getLogger("sparseflash")


class Description(NamedTuple):
    """What a process needs to compile a kernel.

    module, name: of the kernel
    data:   from which Triton's preload compiles it
    target: of the compiler, as arguments of Triton's GPUTarget
    key:    hexadecimal hash of all of it and of Triton's version and the source
    """

    module: str
    name: str
    data: str
    target: tuple[str, int, int]
    key: str


class Workers:
    """The process that this process has started, and the kernels that it was asked for.

    That process compiles each kernel in a process of its own: see compile_worker.py.
    """

    def __init__(self):
        self._lock, self._is_prepared = Lock(), False
        self._process: subprocess.Popen | None = None
        self._compilations: dict[str, _Compilation] = {}  # by the keys of their kernels

    def prepare(self, *packages: str) -> None:
        """Starts the process before the first request, and lets it import packages of kernels.

        Later calls do nothing: most need no kernel that is not compiled, and if one does, its
        request starts the process unless it runs.
        """
        if not self._is_prepared:
            self._is_prepared = True
            self._run(*packages)

    def _run(self, *packages: str) -> None:
        # If the system has no more processes, calls compile what they need.
        with self._lock, suppress(OSError):
            if self._process is not None or not number_of_workers():
                return
            process = _start(packages)
            self._process = process
            Thread(target=self._read_replies, args=(process,), daemon=True).start()

    def start(self, kernels: dict[str, Description], waits: bool = False) -> None:
        """Compiles kernels that are neither compiled nor being compiled.

        Args:
            kernels: Descriptions by key.
            waits: Whether a call waits for them. Those of other calls give way to these, and to
                all else on the host.
        """
        # Calls compile what they need, also if Triton's cache cannot be written or the process has
        # ended.
        with suppress(OSError):
            new = [x for x in kernels.values() if self._is_new(x.key, waits)]
            if new:
                self._run(new[0].module.rpartition(".")[0])
                self._ask_for(new, waits)

    def _ask_for(self, kernels: list[Description], waits: bool) -> None:
        request = {
            "kernels": [kernel._asdict() for kernel in kernels],
            "environment": {**os.environ},
            "nice": 0 if waits else NICE,
            "most": number_of_workers(),
        }
        with self._lock:
            if self._process is not None:
                for kernel in kernels:
                    self._compilations.setdefault(kernel.key, _Compilation(self._process))
                _write(self._process, request)

    def _is_new(self, key: str, waits: bool) -> bool:
        known = self._compilations.get(key)
        if known is not None:
            return waits and not known.ended.is_set()  # it may be in a queue
        return not compile_worker.is_marked(key)

    def wait(self, keys: set[str]) -> None:
        """Waits until these kernels are compiled.

        After MAX_WAIT seconds in all the call compiles them itself.
        """
        end = time.monotonic() + MAX_WAIT
        for key in keys & {*self._compilations}:
            compilation = self._compilations[key]
            compilation.ended.wait(max(0, end - time.monotonic()))
            if compilation.error:
                _logger.warning("a process could not compile a kernel:\n%s", compilation.error)

    def stop(self) -> None:
        """Ends the process, and those that it has started."""
        if self._process is not None:
            self._process.terminate()

    def forget(self) -> None:
        """Forgets the process, in a process that was forked from the one that has started it."""
        self._inherited = self._process  # Popen would warn that it runs
        self._lock, self._process, self._compilations = Lock(), None, {}

    def _read_replies(self, process: subprocess.Popen) -> None:
        """Reads what the process says until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            if not line.endswith(b"\n"):  # it was killed while it wrote
                break
            reply = json.loads(line)
            compilation = self._compilations[reply["key"]]
            compilation.error = reply["error"]
            compilation.ended.set()
        status = process.wait()  # until then it remains in the system
        with self._lock:
            if self._process is process:
                self._process = None
            for compilation in self._compilations.values():
                if compilation.process is process and not compilation.ended.is_set():
                    if status:
                        compilation.error = f"it ended with status {status}"
                    compilation.ended.set()
        assert process.stdin is not None
        process.stdout.close()
        with suppress(BrokenPipeError):  # something was written after its end
            process.stdin.close()


class _Compilation:
    """Of one kernel: the process that was asked for it, whether it has ended, and its error."""

    def __init__(self, process: subprocess.Popen):
        self.process, self.ended, self.error = process, Event(), ""


def _start(packages: Iterable[str]) -> subprocess.Popen:
    # Not the standard output, on which also modules such as sitecustomize print.
    reading, writing = os.pipe()
    replies = os.fdopen(reading, "rb")
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", RUN_WORKER, compile_worker.__file__, str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # replies have the errors
            pass_fds=[writing],
        )
    except OSError:
        replies.close()
        raise
    finally:
        os.close(writing)
    process.stdout = replies
    _write(process, {"path": [str(path) for path in sys.path], "packages": [*packages]})
    return process


def _write(process: subprocess.Popen, line: dict) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(line).encode() + b"\n")
    process.stdin.flush()


def number_of_workers() -> int:
    """The number of kernels that are compiled at a time, beside those for which a call waits.

    By default one for every two processor threads of this process, and at most MAX_WORKERS. None
    where there are less than four threads, or where `sys.executable` is not an interpreter: in a
    program that embeds or freezes Python. Then threads compile the kernels of a call.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        return 0
    asked = os.environ.get(VARIABLE)
    if asked is None:
        threads = _threads()
        return min(MAX_WORKERS, threads // 2) if threads >= MIN_THREADS else 0
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
os.register_at_fork(after_in_child=WORKERS.forget)
