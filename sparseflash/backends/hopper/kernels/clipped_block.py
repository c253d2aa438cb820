"""The key block of each batch element in which its key length ends, with zeros past that length.

The kernels of O, of dQ and of all gradients read this block from the copy (more_keys and
more_values), and no later block. P and dS of padded keys are 0, but such keys may hold NaN, and 0
times NaN is NaN. The kernel of dK and dV sums over queries, so it reads K and V themselves: what a
padded key holds reaches only its own gradients, which are set to 0.

    one warpgroup | TMA K, V | wait | zeros | shared memory | TMA store
"""

from sparseflash.backends.hopper.device.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    tma_store,
    tma_store_wait,
)
from sparseflash.backends.hopper.device.layouts import WARPGROUP_M
from sparseflash.backends.hopper.device.pipeline import (
    PipelineState,
    consumer_wait,
    make_pipeline,
    producer_load,
    stage_matrix,
)
from sparseflash.backends.hopper.kernels.lse_delta import delta_input_layout


@gluon.jit(do_not_specialize=["kv_heads"], do_not_specialize_on_alignment=["key_lengths"])
def clipped_block_kernel(keys, values, more_keys, more_values, key_lengths, kv_heads,
                         BLOCK: gl.constexpr):  # fmt: skip
    """Copies 64 tokens of K and V of a (batch, key head) per CTA; BLOCK is in tokens.

    If the length is a multiple of BLOCK, no block is clipped, and nothing reads the copy.
    """
    TILES_PER_BLOCK: gl.constexpr = BLOCK // WARPGROUP_M
    bh = gl.program_id(0) // TILES_PER_BLOCK
    first_row = gl.program_id(0) % TILES_PER_BLOCK * WARPGROUP_M
    batch, kv_head = bh // kv_heads, bh % kv_heads
    key_length = gl.load(key_lengths + batch)
    token = key_length // BLOCK * BLOCK + first_row
    key_pipeline, value_pipeline = make_pipeline(keys, 1, 1), make_pipeline(values, 1, 1)
    fence_async_shared()
    empty_state = PipelineState(0, 1)  # both stages are empty: producer_acquire does not wait
    producer_load(key_pipeline, keys, batch, kv_head, token, empty_state)
    producer_load(value_pipeline, values, batch, kv_head, token, empty_state)
    copy_rows(key_pipeline, more_keys, batch, kv_head, first_row, key_length - token)
    copy_rows(value_pipeline, more_values, batch, kv_head, first_row, key_length - token)
    tma_store_wait(0)


@gluon.jit
def copy_rows(pipeline, descriptor, batch, kv_head, first_row, count):
    """Stores the loaded tile, with zeros from row `count` on, through its stage."""
    consumer_wait(pipeline, PipelineState(0, 0))
    tile = stage_matrix(pipeline, 0)
    LAYOUT: gl.constexpr = delta_input_layout(tile.shape[1])
    rows = gl.arange(0, WARPGROUP_M, layout=gl.SliceLayout(1, LAYOUT))
    loaded = tile.load(LAYOUT)  # [64, D]
    inside = gl.expand_dims(rows < count, 1)
    tile.store(gl.where(inside, loaded, 0.0))
    fence_async_shared()
    tma_store(descriptor, [batch, kv_head, first_row, 0], pipeline.buffers.index(0))
