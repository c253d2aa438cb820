"""Descriptions of kernels, from which another process can compile them."""

import hashlib
from threading import Lock, get_ident
from typing import Any

import triton
from triton import knobs

from sparseflash.backends.triton_common.relaunch import active_driver
from sparseflash.backends.triton_common.workers import Description

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
    target = _target()
    parts = (triton.__version__, kernel.cache_key, str(target), found[0])
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Description(kernel.__module__, kernel.__name__, found[0], target, key)


def _target() -> tuple:
    """The target of the compiler, as arguments of Triton's GPUTarget."""
    target = active_driver().get_current_target()
    return target.backend, target.arch, target.warp_size
