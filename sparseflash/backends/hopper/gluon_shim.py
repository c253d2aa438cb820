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
    "store_tile",
    "wait_for_stores",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
wait_for_stores = tma.store_wait
