"""Gluon for Hopper under one set of names: what differs of it between Triton 3.6 and 3.9 is here.

3.8 renamed the asynchronous copies and gave the one that adds a function.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
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
    "add_tile",
    "arrive",
    "await_arrivals",
    "await_turn",
    "copied",
    "fence_async_shared",
    "gather",
    "gather_lanes",
    "gl",
    "gluon",
    "let_in",
    "load_tile",
    "mbarrier",
    "opaque",
    "pass_turn",
    "reinterpreted",
    "store_tile",
    "wait_for_stores",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "widened",
]


load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
wait_for_stores = tma.store_wait
gather = getattr(gl, "barrier", None) or gl.thread_barrier  # lets a partition gather


@builtin
def _add_tile(descriptor, start, buffer, _semantic=None):
    start = _semantic._convert_to_ir_values(start, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, start, buffer.handle)


add_tile = getattr(tma, "async_atomic_add", None) or _add_tile


@builtin
def reinterpreted(buffer, dtype, shape, layout, _semantic=None):
    """The same shared memory as a buffer of another dtype, shape and layout."""
    dtype, layout = _unwrap_if_constexpr(dtype), _unwrap_if_constexpr(layout)
    shape = [_unwrap_if_constexpr(n) for n in shape]
    return _semantic.memdesc_reinterpret(buffer, dtype, shape, layout)


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


@gluon.jit
def widened(matrix):
    """A matrix of 16 bits in float32, by way of pairs that share a register.

    With a plain conversion LLVM would keep its elements in a register each from where they were
    made to where they are converted.
    """
    ASM: gl.constexpr = _widening(matrix.dtype)
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,r", [matrix], dtype=gl.float32, is_pure=False, pack=2
    )


@gluon.jit
def copied(matrix):
    """A matrix of 16 bits in registers of its own."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [matrix], dtype=matrix.dtype, is_pure=False, pack=2
    )


@gluon.constexpr_function
def _widening(dtype):
    if dtype == gl.bfloat16:
        return "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
        " cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    )


# Of a program's sixteen hardware barriers Triton takes up to four, from 0 on: two, and one for
# each further partition of several warps. A global number would be no part of the key by which it
# finds what it has compiled.
@gluon.constexpr_function
def _hardware_barrier(what, number, threads):
    return f"bar.{what} {4 + number}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def await_turn(MEMBER: gl.constexpr, RELAYS: gl.constexpr):
    """Waits until the other of two groups of four warps has passed its turn to this one, and each
    of RELAYS warps has let it in.
    """
    _run(_turn("sync", MEMBER, RELAYS))


@gluon.jit
def pass_turn(MEMBER: gl.constexpr, RELAYS: gl.constexpr):
    """Passes the turn to the other of two groups of four warps, and does not wait."""
    _run(_turn("arrive", 1 - MEMBER, RELAYS))


@gluon.jit
def let_in(MEMBER: gl.constexpr, RELAYS: gl.constexpr):
    """Lets a group take its next turn, and waits until it does."""
    _run(_turn("sync", MEMBER, RELAYS))


@gluon.constexpr_function
def _turn(what, member, relays):
    return _hardware_barrier(what, member, 2 * 128 + 32 * relays)


@gluon.jit
def gather_lanes(WARP: gl.constexpr):
    """Lets all threads of a partition of one warp do what comes before, and then what follows.

    WARP: 0 for the one that loads, 1 for one that relays

    Triton's own barrier of a warp leaves nothing in the machine code, since the threads are
    together anyway; racecheck of compute-sanitizer cannot know that.
    """
    _run(_hardware_barrier("sync", (2, 11)[WARP], 32))


@gluon.jit
def arrive(number, threads):
    """Tells the warp that awaits it that this group has got so far, and waits for nobody: at an
    mbarrier Triton would gather the group first.

    number: from 0 to 8; threads: of all that arrive, and of the warp
    """
    _numbered_barrier("bar.arrive", number, threads)


@gluon.jit
def await_arrivals(number, threads):
    """Lets one warp wait until all groups have arrived, once each."""
    _numbered_barrier("bar.sync", number, threads)


@gluon.jit
def _numbered_barrier(WHAT: gl.constexpr, number, threads):
    ASM: gl.constexpr = WHAT + " $1, $2; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(
        ASM, "=r,r,r", [number + 7, threads], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _run(ASM: gl.constexpr):
    number = gl.num_programs(0)  # of no meaning: what is no pure function has to have an argument
    gl.inline_asm_elementwise(ASM, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)
