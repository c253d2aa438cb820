"""Launches of Triton kernels that do not ask Triton each time which of its kernels to launch."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver


class Launched(NamedTuple):
    """A compiled kernel and all arguments, constants included, that it was launched with."""

    compiled: Any
    arguments: tuple
    grid: tuple[int, int, int]


def launch(
    kernel: triton.JITFunction,
    grid: tuple[int, int, int],
    arguments: tuple,
    variant: tuple,
    constants: dict,
) -> Launched | None:
    """Launches a kernel unless its grid is empty.

    variant: everything that Triton compiles this kernel anew for. Triton would find it out from
        the arguments at every launch, which takes longer than the launch itself.

    Returns what was launched, None if that is not a compiled kernel.
    """
    if 0 in grid:
        return None
    known = (kernel.__module__, kernel.__name__, variant)
    if known in _COMPILED:
        compiled, constant_arguments = _COMPILED[known]
        _start(compiled, grid, (*arguments, *constant_arguments))
        return Launched(compiled, (*arguments, *constant_arguments), grid)
    compiled = kernel[grid](*arguments, **constants)
    if not isinstance(kernel, triton.JITFunction):  # but interpreted
        return None
    names = kernel.arg_names[len(arguments) :]
    constant_arguments = tuple(constants[name] for name in names)
    _COMPILED[known] = compiled, constant_arguments
    return Launched(compiled, (*arguments, *constant_arguments), grid)


_COMPILED: dict[tuple, tuple] = {}


def _start(compiled, grid: tuple[int, int, int], arguments: tuple) -> None:
    """compiled[grid](*arguments), which tells who listens to launches; if nobody does, at once."""
    hooks = knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled[grid](*arguments)
        return
    active: Any = driver.active
    stream = active.get_current_stream(active.get_current_device())
    no_hooks = (None, None, None)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, *no_hooks, *arguments)


def on_device(device: torch.device):
    """Context in which kernels run on `device`."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    return nullcontext()
