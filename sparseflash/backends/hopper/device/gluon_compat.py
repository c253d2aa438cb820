"""Gluon for Hopper under one set of names for Triton 3.6 to 3.9.

Triton 3.8 renamed the TMA copies and added a function for the TMA reduction.
"""

from math import prod

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["TensorDescriptor", "gl", "gluon", "mbarrier"]

fence_async_shared = hopper.fence_async_shared
warpgroup_mma = hopper.warpgroup_mma
warpgroup_mma_wait = hopper.warpgroup_mma_wait
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
sync_partition = getattr(gl, "barrier", None) or gl.thread_barrier


@builtin
def _tma_reduce_add(descriptor, start, buffer, _semantic=None):
    start = _semantic._convert_to_ir_values(start, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, start, buffer.handle)


tma_reduce_add = getattr(tma, "async_atomic_add", None) or _tma_reduce_add


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """The beginning of a shared-memory buffer as a buffer of another dtype, shape and layout."""
    dtype, layout = _unwrap_if_constexpr(dtype), _unwrap_if_constexpr(layout)
    shape = [_unwrap_if_constexpr(n) for n in shape]
    bits = prod(buffer.shape) * buffer.dtype.primitive_bitwidth
    parts = bits // (prod(shape) * dtype.primitive_bitwidth)
    if parts == 1:
        return _semantic.memdesc_reinterpret(buffer, dtype, shape, layout)
    whole = _semantic.memdesc_reinterpret(buffer, dtype, [parts, *shape], layout)
    return whole.index(0, _semantic=_semantic)


@gluon.jit
def opaque(number):
    """The same number, equal in all threads, as a value about which the compiler knows nothing.

    Without it ptxas of CUDA 12.8 computes an address that two branches need in the first of them
    alone.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def to_float32(matrix):
    """Converts a matrix of 16-bit elements to float32, from registers that hold two elements.

    A plain conversion makes LLVM keep every element in a register of its own, from its definition
    to the conversion.
    """
    ASM: gl.constexpr = _widening(matrix.dtype)
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,r", [matrix], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def copy_registers(matrix):
    """A copy of a matrix of 16-bit elements in other registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [matrix], dtype=matrix.dtype, is_pure=False, pack=2
    )


@gluon.jit
def where_bit(word, bit, matrix):
    """`matrix`, of float32, where a word has the bit, else 0.

    A comparison and gl.where make LLVM round before it selects, or pack the results of all
    comparisons into words of its own.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred has; .reg .b32 masked; and.b32 masked, $1, $2;"
        " setp.ne.u32 has, masked, 0; selp.f32 $0, $3, 0f00000000, has; }",
        "=f,r,r,f",
        [word, bit, matrix],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def wait_for_count(counter, count):
    """Waits, in one warp, until a counter in global memory is at least `count`.

    TMA reductions that the warp issues afterwards come after all that CTAs had completed when they
    counted.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred below; poll: ld.acquire.gpu.global.b32 $0, [$1];"
        " setp.lt.s32 below, $0, $2; @below bra poll; fence.proxy.async; }",
        "=r,l,r",
        [counter.to(gl.int64, bitcast=True), count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def count_completed_stores(counter):
    """Waits until all TMA stores and reductions of a warp are complete, and adds 1 to a counter.

    tma_store_wait waits only until they have read shared memory.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane; cp.async.bulk.wait_group 0; fence.proxy.async;"
        " bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
        " @first red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, lane; }",
        "=r,l",
        [counter.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _widening(dtype):
    if dtype == gl.bfloat16:
        return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
        " cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    )
