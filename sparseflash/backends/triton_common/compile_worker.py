"""The process that compiles kernels for another one, which then finds them in Triton's cache.

It imports Triton and the modules of the kernels once, and forks a process for each kernel: so no
compilation waits for the global interpreter lock of Python that another one holds. It does not
import torch, which takes as long to import as a kernel takes to compile.

Its standard input has one line of JSON for all kernels, and then one for each group of them:

    {"path", "packages"}                        import path, packages of kernels
    {"kernels", "environment", "nice", "most"}  of each a workers.Description; variables; what is
                                                added to the niceness, 0 if a call waits for them;
                                                the most processes, if no call does

For each kernel that was compiled, or that cannot be, it writes a line to the file descriptor that
is its argument:

    {"key", "error"}                            a traceback, "" without an error

It ends if its standard input does, or after IDLE seconds in which it compiles nothing.
"""

import gc
import json
import os
import select
import signal
import sys
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

IDLE = 20  # seconds


def main() -> None:
    """Compiles what the standard input asks for."""
    gc.disable()  # processes for one kernel each end before they need it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # A program that ignores the ends of its processes leaves this to those that it starts.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with _Server(0, int(sys.argv[2])) as server:
        server.prepare()
        server.run()


class _Server:
    """Reads lines from a file descriptor, and has processes for the kernels that they ask for.

    Args:
        requests, replies: File descriptors.
    """

    def __init__(self, requests: int, replies: int):
        self._requests, self._replies = requests, replies
        self._unread = b""
        self._waiting: deque[dict[str, Any]] = deque()
        self._running: dict[int, _Running] = {}  # by the end of a pipe that its process holds

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._running.values():
            with suppress(ProcessLookupError):
                os.kill(running.process, signal.SIGTERM)

    def prepare(self) -> None:
        """Imports what kernels need, and lets Triton hash its own files beside this."""
        while not (lines := self._read()):
            if lines is None:
                sys.exit()
        first, *requests = lines
        sys.path[:] = first["path"]
        _skip_packages(Path(__file__).parents[2])
        from triton.runtime.cache import triton_key

        hashing = Thread(target=triton_key)
        hashing.start()
        for package in first["packages"]:
            hash_package(package)
        hashing.join()  # a process with other threads cannot be forked safely
        for request in requests:
            self._accept(request)

    def run(self) -> None:
        """Starts processes, and replies when they end."""
        while True:
            while self._waiting and self._may_start(self._waiting[0]):
                self._start(self._waiting.popleft())
            idle = None if self._running else IDLE
            ready, _, _ = select.select([self._requests, *self._running], [], [], idle)
            if not ready:
                return
            for descriptor in ready:
                if descriptor != self._requests:
                    self._receive(descriptor)
                elif (requests := self._read()) is None:
                    return
                else:
                    for request in requests:
                        self._accept(request)

    def _read(self) -> list[dict[str, Any]] | None:
        """The lines that have come; None if there will be no others."""
        received = os.read(self._requests, 1 << 20)
        if not received:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def _accept(self, request: dict[str, Any]) -> None:
        """Puts kernels into the queue: those that a call waits for at its beginning."""
        running = {running.key for running in self._running.values()}
        jobs = [request | kernel for kernel in request["kernels"] if kernel["key"] not in running]
        keys = {job["key"] for job in jobs}
        others = [job for job in self._waiting if job["key"] not in keys]
        self._waiting = deque([*others, *jobs] if request["nice"] else [*jobs, *others])

    def _may_start(self, job: dict[str, Any]) -> bool:
        return not job["nice"] or len(self._running) < job["most"]

    def _start(self, job: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                _compile(job)
            except BaseException:
                os.write(writing, traceback.format_exc().encode())
            finally:
                os._exit(0)  # not what the forked process has to do at its end
        os.close(writing)
        self._running[reading] = _Running(process, job["key"])

    def _receive(self, descriptor: int) -> None:
        """Reads what a process says, and replies if it has ended."""
        running = self._running[descriptor]
        if said := os.read(descriptor, 1 << 16):
            running.said += said
            return
        os.close(descriptor)
        del self._running[descriptor]
        _, status = os.waitpid(running.process, 0)
        error = running.said.decode()
        if status:
            error += f"the process ended with status {os.waitstatus_to_exitcode(status)}"
        reply = json.dumps({"key": running.key, "error": error})
        os.write(self._replies, reply.encode() + b"\n")


class _Running:
    """A process that compiles a kernel, and what it has said about an error."""

    def __init__(self, process: int, key: str):
        self.process, self.key, self.said = process, key, b""


def _compile(job: dict[str, Any]) -> None:
    """Compiles one kernel into Triton's cache."""
    os.nice(job["nice"])
    os.environ.clear()
    os.environ.update(job["environment"])
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    active: Any = _CompilingDriver(GPUTarget(*job["target"]))
    driver.set_active(active)
    hash_sources(job["module"])
    function: Any = getattr(import_module(job["module"]), job["name"])
    with ThreadPoolExecutor(1) as pool:
        _build_launcher_beside(function, pool)
        function.preload(job["data"])
    mark(job["key"])


def _build_launcher_beside(function: Any, pool: ThreadPoolExecutor) -> None:
    """Lets the C compiler build what launches a kernel while it is compiled.

    Triton before 3.8 has a C function for each kernel. It depends on the types of the arguments,
    and on whether descriptors become tensor maps, which it knows later: for this GPU they do.
    """
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):
        return
    function.device_caches[0]  # makes function.compile
    compile_kernel = function.compile

    def compile_beside(source: Any, **options: Any) -> Any:
        descriptors = [x for x in source.signature.values() if str(x).startswith("tensordesc")]
        pool.submit(_build_launcher, source, [{}] * len(descriptors))
        return compile_kernel(source, **options)

    function.compile = compile_beside


def _build_launcher(source: Any, tensor_maps: list[dict]) -> None:
    from triton.backends.nvidia import driver

    # Triton stores it before it loads it, which only a process that uses the device can. That one
    # builds what is missing, and raises the error.
    with suppress(Exception):
        driver.CudaLauncher(source, SimpleNamespace(tensordesc_meta=tensor_maps))


class _CompilingDriver:
    """Triton's driver of a device that this process does not use."""

    def __init__(self, target: Any):
        self._target = target
        self.utils = SimpleNamespace()

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _skip_packages(root: Path) -> None:
    """Lets modules of the backends be imported without their packages, which import torch."""
    for package in ("backends", "backends.hopper", "backends.triton"):
        module = ModuleType(f"sparseflash.{package}")
        module.__path__ = [str(root.joinpath(*package.split(".")))]
        sys.modules[module.__name__] = module


def hash_sources(module: str) -> None:
    """Lets Triton hash all device functions of the package of a module."""
    hash_package(module.rpartition(".")[0])


@lru_cache(maxsize=64)
def hash_package(name: str) -> None:
    """Lets Triton hash all device functions of a package, in a fixed order.

    With Triton 3.6 the hash of a function depends on which others were hashed before. So
    processes that compile kernels in different orders would not find one another's in the cache.
    """
    from triton import JITFunction

    package = import_module(name)
    for found in sorted(iter_modules(package.__path__)):
        functions = vars(import_module(f"{package.__name__}.{found.name}"))
        for function in functions.values():
            if isinstance(function, JITFunction):
                function.cache_key  # noqa: B018


def mark(key: str) -> None:
    """Marks a kernel as compiled, in the folder in which Triton stores it.

    Triton reads kernels from a folder that it cannot write, in which nothing is marked.
    """
    from triton.runtime.cache import get_cache_manager

    with suppress(OSError):
        get_cache_manager(key).put("", "compiled", binary=False)


def is_marked(key: str) -> bool:
    """Whether a kernel is marked as compiled."""
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(key).get_file("compiled") is not None
