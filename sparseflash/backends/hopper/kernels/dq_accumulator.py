"""The float32 accumulator of dQ in global memory, to which the CTAs of the fused kernel add.

It consists of tiles [64, D]. Inside a tile the elements are in the order of the registers of an
accumulator: four elements of a thread are contiguous, and so are those of the threads of a warp.
So a thread writes 16 bytes at a time to shared memory, without an exchange between threads. A
second kernel converts the accumulator to the gradient:

    one warpgroup | read a tile | scale, convert | shared memory | TMA store
"""

from sparseflash.backends.hopper.device.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    reinterpret,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
)
from sparseflash.backends.hopper.device.layouts import WARPGROUP_M, accumulator_layout
from sparseflash.backends.hopper.device.pipeline import as_matrix


@gluon.jit(do_not_specialize=["scale", "heads", "tiles_per_head"])
def convert_dq_kernel(dq_accumulator, grad_queries, scale, heads, tiles_per_head):
    """dQ = scale * accumulator, one tile [64, D] per CTA."""
    DIMS: gl.constexpr = grad_queries.block_type.shape[3]
    SIZE: gl.constexpr = WARPGROUP_M * DIMS
    tile = gl.program_id(0)
    bh, tile_of_head = tile // tiles_per_head, tile % tiles_per_head
    offsets = gl.arange(0, SIZE, layout=flat_layout(SIZE))
    dq = as_accumulator(gl.load(dq_accumulator + tile.to(gl.int64) * SIZE + offsets), DIMS) * scale
    shape: gl.constexpr = grad_queries.block_type.shape
    buffer = gl.allocate_shared_memory(grad_queries.dtype, shape, grad_queries.layout)
    as_matrix(buffer).store(dq.to(grad_queries.dtype))
    fence_async_shared()
    tma_store(grad_queries, [bh // heads, bh % heads, tile_of_head * WARPGROUP_M, 0], buffer)
    tma_store_wait(0)


@gluon.constexpr_function
def added_dims(dq_buffers):
    """The dims of a tile that a warpgroup adds in one TMA reduction, by the size of its buffer."""
    return dq_buffers.shape[1] * dq_buffers.shape[2] // WARPGROUP_M


@gluon.jit
def first_tile_of_head(bh, params):
    """The index of the first tile of a (batch, head)."""
    blocks = gl.cdiv(params.sizes.q_len, params.column_tokens)
    return bh * (blocks * (params.column_tokens // WARPGROUP_M))


@gluon.jit
def store_to_shared(buffer, dq):
    """Stores dQ, an accumulator [64, added_dims], to the shared memory that TMA adds from."""
    UNSWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat = as_flat(dq)
    reinterpret(buffer, gl.float32, flat.shape, UNSWIZZLED).store(flat)


@gluon.jit
def reduce_add(dq_accumulator, buffer, box):
    """Adds a buffer to dQ by a TMA reduction.

    box: index of a tile, or of half of its dims; the size of a box is that of the buffer
    """
    tma_reduce_add(dq_accumulator, [box * buffer.shape[0], 0], buffer)


@gluon.constexpr_function
def flat_layout(size):
    """The layout of a flat tile: the thread and register of each element of an accumulator."""
    # Four elements of a thread (16 bytes), then the lanes, the warps, and further registers.
    rest = [[1 << i] for i in range(9, size.bit_length() - 1)]
    lanes = [[4], [8], [16], [32], [64]]
    return gl.DistributedLinearLayout([[1], [2], *rest], lanes, [[128], [256]], [], [size])


@gluon.jit
def as_flat(acc):
    """Flattens an accumulator of one warpgroup in the order of its registers."""
    SIZE: gl.constexpr = acc.shape[0] * acc.shape[1]
    # Rows: four warps, two halves, eight rows.
    # Columns: groups of eight, four threads, two elements.
    split = acc.reshape([4, 2, 8, acc.shape[1] // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return gl.convert_layout(split.reshape([SIZE]), flat_layout(SIZE), assert_trivial=True)


@gluon.jit
def as_accumulator(flat, COLUMNS: gl.constexpr):
    """The inverse of as_flat."""
    split = flat.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(
        split.reshape([WARPGROUP_M, COLUMNS]), accumulator_layout(COLUMNS), assert_trivial=True
    )
