"""Kernels compiled for a GPU that need not be there, and what the compiler made of them.

For a process with TRITON_INTERPRET unset, as that of a `Compiler`: `compile_hopper` and
`compile_triton` report of kernels after `compile_instead_of_launching`.
"""

import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from sparseflash.backends.triton_common import launcher, relaunch

SHARED_MEMORY = {80: 166912, 90: 232448}


class CompileOnlyDriver:
    """The driver of a device that compiles and never launches."""

    def __init__(self, architecture: int):
        memory = {"max_shared_mem": SHARED_MEMORY[architecture]}
        self.target = GPUTarget("cuda", architecture, 32)
        self.utils = SimpleNamespace(get_device_properties=lambda device: memory)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Variants(dict):
    """The kernels that were compiled for each variant, in place of the one to be launched."""

    def __contains__(self, variant):
        return False

    def __setitem__(self, variant, compiled):
        kernel, _ = compiled
        super().__setitem__(variant, self.get(variant, set()) | {kernel})

    def report(self) -> dict[str, int]:
        return {"variants": len(self), "kernels of one variant": max(map(len, self.values()))}


def compile_instead_of_launching(architecture: int) -> Variants:
    """Lets every launch compile its kernel for the architecture, and do no more.

    Returns what will have been compiled.
    """
    driver.set_active(CompileOnlyDriver(architecture))
    launcher._COMPILED = Variants()
    relaunch.pack_launch = lambda launched, names: None

    def compile_only(kernel, grid):
        return lambda *arguments, **constants: kernel.run(
            *arguments, grid=grid, warmup=True, **constants
        )

    JITFunction.__getitem__ = compile_only  # pyright: ignore[reportAttributeAccessIssue]
    return launcher._COMPILED


def count_instead_of_compiling() -> None:
    """Lets what Triton would compile be an object each, where only their numbers matter."""

    def count(kernel, key, signature, device, *_):
        cache, *_ = kernel.device_caches[device]
        cache[key] = object()
        return cache[key]

    JITFunction._do_compile = count  # pyright: ignore[reportAttributeAccessIssue]


def compiled(kernel: JITFunction) -> list:
    """What was compiled of a kernel so far."""
    cache, *_ = kernel.device_caches[0]
    return list(cache.values())


def stack_bytes(cubin: bytes) -> int:
    """Bytes of stack per thread: what the compiler could not keep in registers."""
    return _usage(cubin, "STACK")


def registers_per_thread(cubin: bytes) -> int:
    """Those of each thread when the kernel starts."""
    return _usage(cubin, "REG")


def _usage(cubin: bytes, what: str) -> int:
    usage = _inspect("cuobjdump", "--dump-resource-usage", cubin)
    return int(re.search(rf"{what}:(\d+)", usage)[1])


def machine_code(cubin: bytes) -> str:
    return _inspect("nvdisasm", "-c", cubin)


@lru_cache(maxsize=1)
def _inspect(tool: str, option: str, cubin: bytes) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(program), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
