"""Named barriers of a CTA: their ids, ping-pong of warpgroups, synchronisation of one warp."""

from sparseflash.backends.hopper.device.gluon_compat import gl, gluon

# A CTA has sixteen. Triton uses ids 0 and 1, and one more for each further partition of several
# warps: at most ids 0 to 3.
PINGPONG_BARRIER = gl.constexpr(4)  # and 5: of the first two warpgroups
PRODUCER_WARP_BARRIER = gl.constexpr(6)
FIRST_PIPELINE_BARRIER = gl.constexpr(7)  # and the next ones: one for each stage
THIRD_PINGPONG_BARRIER = gl.constexpr(14)  # of the third, in kernels of at most three stages
LOAD_WAIT_WARP_BARRIER = gl.constexpr(15)


@gluon.jit
def pingpong_wait(WARPGROUP: gl.constexpr, LOAD_WAIT_WARPS: gl.constexpr):
    """Waits for the signals of the previous warpgroup and of the load-wait warp, if any."""
    _run_asm(_pingpong_asm("sync", WARPGROUP, LOAD_WAIT_WARPS))


@gluon.jit
def pingpong_signal(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr,
                    LOAD_WAIT_WARPS: gl.constexpr):  # fmt: skip
    """Lets the next warpgroup issue its products; does not wait."""
    _run_asm(_pingpong_asm("arrive", (WARPGROUP + 1) % WARPGROUPS, LOAD_WAIT_WARPS))


@gluon.jit
def signal_warpgroup(WARPGROUP: gl.constexpr, LOAD_WAIT_WARPS: gl.constexpr):
    """Signals a warpgroup from the load-wait warp, and waits until it has passed its barrier."""
    _run_asm(_pingpong_asm("sync", WARPGROUP, LOAD_WAIT_WARPS))


@gluon.constexpr_function
def _pingpong_asm(op, warpgroup, load_wait_warps):
    barrier = PINGPONG_BARRIER.value + warpgroup
    if warpgroup == 2:
        barrier = THIRD_PINGPONG_BARRIER.value
    return _barrier_asm(op, barrier, 2 * 128 + 32 * load_wait_warps)


@gluon.jit
def sync_warp(BARRIER: gl.constexpr):
    """Synchronises the threads of a partition of one warp at a named barrier of its own.

    Triton's own barrier of a warp leaves nothing in the machine code, since the threads run
    together anyway; racecheck of compute-sanitizer cannot know that.
    """
    _run_asm(_barrier_asm("sync", BARRIER, 32))


# The id is part of the assembly text, and so of Triton's cache key.
@gluon.constexpr_function
def _barrier_asm(op, barrier, threads):
    return f"bar.{op} {barrier}, {threads}; mov.b32 $0, $1;"


@gluon.jit
def _run_asm(ASM: gl.constexpr):
    number = gl.num_programs(0)  # any: inline assembly that is not pure needs an argument
    gl.inline_asm_elementwise(ASM, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_barrier_arrive(index, threads):
    """Arrives at a named barrier of a pipeline and does not wait.

    Every warp arrives on its own. Before it arrives at an mbarrier Triton synchronises the whole
    warpgroup.

    index:   number of the barrier, counted from FIRST_PIPELINE_BARRIER
    threads: all threads that arrive, and the 32 of the warp that waits
    """
    _barrier_of_stage("bar.arrive", index, threads)


@gluon.jit
def named_barrier_wait(index, threads):
    """Waits, in one warp, until all others have arrived once."""
    _barrier_of_stage("bar.sync", index, threads)


@gluon.jit
def _barrier_of_stage(OP: gl.constexpr, index, threads):
    ASM: gl.constexpr = OP + " $1, $2; mov.b32 $0, $1;"
    operands = [index + FIRST_PIPELINE_BARRIER, threads]
    gl.inline_asm_elementwise(ASM, "=r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)
