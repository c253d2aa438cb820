"""The backend "hopper": Gluon kernels for GPUs of compute capability 9.0.

    select.py         which calls it can compute, in which tiles   (imports no Triton)
    configs.py        stages, occupancy and thresholds             (imports no Triton)
    launch.py         descriptors of tensors, arguments, grids
    passes.py         the host side of both passes
    kernels/          device code, one kernel a module
    device/           device functions that the kernels share

The module is a sparseflash.backends.base.Backend. Triton is imported by the first call that needs
it, so this package can be imported where Triton is not installed.
"""

from functools import lru_cache

from torch import Tensor

from sparseflash.backends.hopper.select import (
    auto_skip,
    block_size_for,
    compiled_for,
    computes_in_place,
    describe,
    forward_block_size_for,
    why_not,
)
from sparseflash.dispatch.call import Call, Gradients, Needs, Saved

__all__ = [
    "auto_skip",
    "backward",
    "block_size_for",
    "compiled_for",
    "computes_in_place",
    "describe",
    "forward",
    "forward_block_size_for",
    "why_not",
]

name = "hopper"
extras = frozenset(
    {
        *("softcap", "score function", "score tensors", "bias"),
        *("mask of each batch element", "maximum logits"),
    }
)
compiles = True


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse); see sparseflash.backends.base."""
    return _passes().forward(call, query, key, value)


def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, needs: Needs
) -> Gradients:
    """The gradients; see sparseflash.backends.base."""
    return _passes().backward(call, grad_out, grad_lse, saved, needs)


@lru_cache(maxsize=1)
def _passes():
    """The module that imports Triton. An import statement in every call takes 0.4 microseconds."""
    from sparseflash.backends.hopper import passes

    return passes
