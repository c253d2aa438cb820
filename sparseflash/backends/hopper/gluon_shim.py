"""Gluon for Hopper under one set of names: all that differs between Triton 3.6 and 3.9 is here.

3.8 renamed the asynchronous copies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "opaque",
    "store_tile",
    "wait_for_stores",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
wait_for_stores = tma.store_wait


@gluon.jit
def opaque(number):
    """The number, which is the same in all threads, as one that the compiler knows nothing about.

    ptxas of CUDA 12.8 computes an address once for two branches, but only in the first of them.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
