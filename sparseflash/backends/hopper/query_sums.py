"""The float32 sums of dQ, to which the programs of the kernel of all gradients add.

They lie tile after tile, (PART, width) elements each, in the order of the registers of a product:
four that one thread has are neighbours, and so are those of the threads of a warp. So they come
into shared memory as they are, 16 bytes of a thread at a time. A kernel of their own brings them
into the order of the gradient.
"""

import torch
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.backends.compiled import launch
from sparseflash.backends.hopper import device
from sparseflash.backends.hopper.device import PART
from sparseflash.backends.hopper.gluon_shim import (
    add_tile,
    fence_async_shared,
    gl,
    gluon,
    reinterpreted,
    store_tile,
    wait_for_stores,
)
from sparseflash.backends.hopper.launch import OPTIONS, PART_TILES, Pieces, width
from sparseflash.dispatch.spec import AttentionSpec

COLUMNS = gl.constexpr(256)  # of the matrix of all sums: what one side of a copy may have at most
# The most dims of which a group of warps has the registers to add all, of every other tile; there
# are none left for dropout.
WHOLE_DIMS = 64


def shares(spec: AttentionSpec) -> Pieces:
    """How the kernel of all gradients reads the sums: what a group adds at a time."""
    dims = width(spec.head_dim)
    if dims > WHOLE_DIMS or spec.dropout_p > 0:
        dims //= 2
    return Pieces(COLUMNS.value, PART.value * dims // COLUMNS.value)


@gluon.constexpr_function
def share(sum_buffers):
    """The dims of a tile that a group adds at a time, by the buffers that it adds from."""
    return sum_buffers.shape[1] * sum_buffers.shape[2] // PART


def zeros(query: Tensor, table: LookupTable) -> Tensor:
    """Room for the sums of all queries in blocks of the table, a matrix of COLUMNS columns."""
    batch, heads, _, head_dim = query.shape
    tokens = batch * heads * table.by_query.num_rows * table.block_size[0]
    shape = (tokens * width(head_dim) // COLUMNS.value, COLUMNS.value)
    return torch.zeros(shape, dtype=torch.float32, device=query.device)


def finish(sums: Tensor, scale: float, grad_query: Tensor) -> None:
    """Writes scale * sums."""
    batch, heads, _, head_dim = grad_query.shape
    tiles = sums.numel() // (PART.value * width(head_dim))
    arguments = (sums, PART_TILES.of(grad_query), scale, heads, tiles // (batch * heads))
    variant = (grad_query.device, grad_query.dtype, head_dim)
    launch(finish_kernel, (tiles, 1, 1), arguments, variant, OPTIONS)


@gluon.jit(do_not_specialize=["scale", "heads", "parts"])
def finish_kernel(sums, grad_queries, scale, heads, parts):
    """Programs take a tile each; parts: tiles of a head."""
    DIMS: gl.constexpr = grad_queries.block_type.shape[3]
    SIZE: gl.constexpr = PART * DIMS
    tile = gl.program_id(0)
    pair, part = tile // parts, tile % parts
    offsets = gl.arange(0, SIZE, layout=flat_layout(SIZE))
    dq = as_product(gl.load(sums + tile.to(gl.int64) * SIZE + offsets), DIMS) * scale
    shape: gl.constexpr = grad_queries.block_type.shape
    buffer = gl.allocate_shared_memory(grad_queries.dtype, shape, grad_queries.layout)
    device.as_matrix(buffer).store(dq.to(grad_queries.dtype))
    fence_async_shared()
    store_tile(grad_queries, [pair // heads, pair % heads, part * PART, 0], buffer)
    wait_for_stores(0)


@gluon.jit
def first_tile(pair, call):
    """The number of the first tile of a head."""
    return pair * (gl.cdiv(call.sizes.q_len, call.block) * (call.block // PART))


@gluon.jit
def fill(buffer, dq):
    """Brings what a group adds of a tile, a product in registers, into shared memory."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat = as_flat(dq)
    reinterpreted(buffer, gl.float32, flat.shape, FLAT).store(flat)


@gluon.jit
def added(tile, part, MEMBER: gl.constexpr, WHOLE: gl.constexpr):
    """The tile, or None if it is the other group that adds that part of a block."""
    if WHOLE and part != MEMBER:
        tile = None
    return tile


@gluon.jit
def add(sums, buffer, tile, MEMBER: gl.constexpr, WHOLE: gl.constexpr):
    """Adds what the buffer holds: a tile, or this group's half of its dims."""
    piece = tile
    if not WHOLE:
        piece = tile * 2 + MEMBER
    add_tile(sums, [piece * buffer.shape[0], 0], buffer)


@gluon.constexpr_function
def flat_layout(size):
    """Of the sums of a tile: which thread has which in a product."""
    rest = [[1 << i] for i in range(9, size.bit_length() - 1)]
    lanes = [[4], [8], [16], [32], [64]]
    return gl.DistributedLinearLayout([[1], [2], *rest], lanes, [[128], [256]], [], [size])


@gluon.jit
def as_flat(product):
    """A product of four warps in the order of its registers."""
    SIZE: gl.constexpr = product.shape[0] * product.shape[1]
    # four warps, two halves of eight rows; columns by eight, four threads and two registers
    parts = product.reshape([4, 2, 8, product.shape[1] // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return gl.convert_layout(parts.reshape([SIZE]), flat_layout(SIZE), assert_trivial=True)


@gluon.jit
def as_product(flat, COLUMNS: gl.constexpr):
    """The inverse of as_flat."""
    parts = flat.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(
        parts.reshape([PART, COLUMNS]), device.product_layout(COLUMNS), assert_trivial=True
    )
