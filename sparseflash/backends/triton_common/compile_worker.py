"""A process that compiles kernels for another process, which then finds them in Triton's cache.

It reads one line of JSON from its standard input: the import path of the other process; the target
of the compiler; and for each kernel its module, its name, the data from which Triton's `preload`
compiles it, and the key under which it is marked as compiled. See workers.py.

It imports Triton and the modules of the kernels, but not torch, which takes as long to import as a
kernel takes to compile.
"""

import json
import os
import sys
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType, SimpleNamespace
from typing import Any

# Added to the niceness of the process: a call compiles its own kernels first, and so do others
# that share the host.
NICE = 10


def main() -> None:
    """Compiles what the standard input asks for."""
    os.nice(NICE)
    job = json.loads(sys.stdin.readline())
    sys.path[:] = job["path"]
    _skip_packages(Path(__file__).parents[2])
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    active: Any = _CompilingDriver(GPUTarget(*job["target"]))
    driver.set_active(active)
    for kernel in job["kernels"]:
        hash_sources(kernel["module"])
        function: Any = getattr(import_module(kernel["module"]), kernel["name"])
        compiled = function.preload(kernel["data"])
        mark(kernel["key"])
        # The process that launches the kernel builds what is missing, and raises the error.
        with suppress(Exception):
            _build_launcher(compiled)


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


def _build_launcher(compiled: Any) -> None:
    """Lets the C compiler build the function that launches a kernel, with Triton before 3.8."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(compiled.src, compiled.metadata)


def _skip_packages(root: Path) -> None:
    """Lets modules of the backends be imported without their packages, which import torch."""
    for package in ("backends", "backends.hopper", "backends.triton"):
        module = ModuleType(f"sparseflash.{package}")
        module.__path__ = [str(root.joinpath(*package.split(".")))]
        sys.modules[module.__name__] = module


@lru_cache(maxsize=64)
def hash_sources(module: str) -> None:
    """Lets Triton hash all device functions of the package of a module, in a fixed order.

    With Triton 3.6 the hash of a function depends on which others were hashed before. So
    processes that compile kernels in different orders would not find one another's in the cache.
    """
    from triton import JITFunction

    package = import_module(module.rpartition(".")[0])
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
