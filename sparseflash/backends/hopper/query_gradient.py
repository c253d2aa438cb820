"""The kernel of dQ: query rows, as in the forward pass, with three products for each block.

S = Q K^T and dP = dO V^T give dS = P * (dP - delta), which stays in registers as the left operand
of dQ += dS K. That product runs on while the next block's begin.

The row terms are computed on the way and written for the kernel of dK and dV. O comes through the
rings of keys and values ahead of the first block, so that it is there when dO is: the part of the
first group through that of keys, the part of the second, if there is one, through that of values.
"""

from sparseflash.backends.hopper import device, dropout, element_masks, row_terms
from sparseflash.backends.hopper.device import PART
from sparseflash.backends.hopper.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_tile,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit(**device.unspecialized("lse", "grad_lse", "terms", "key_lengths", "counter"))
def query_gradient_kernel(
    queries, grad_outs, outs, keys, values, grad_queries, lse, grad_lse, terms,
    bounds, full_index, partial_index, partial_tile, order, bank, head_layer, key_lengths, counter,
    heads, q_len, k_len, mask_heads, rows, tiles, together, scale2,
    seed_low, seed_high, threshold, keep_scale,
    GROUP: gl.constexpr, MASKED: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    table = device.Table(bounds, full_index, partial_index, partial_tile, order, bank, head_layer)
    sizes = device.Sizes(heads, q_len, k_len, mask_heads, rows, tiles, together)
    GROUPS: gl.constexpr = BLOCK // PART
    rings = (
        device.ring(queries, GROUPS, 1),
        device.ring(grad_outs, GROUPS, 1),
        device.group_ring(keys, 0, STAGES, GROUPS),
        device.group_ring(values, STAGES, STAGES, GROUPS),
    )
    announced = device.row_ring(GROUPS)
    drop = device.Dropout(seed_low, seed_high, threshold, keep_scale)
    vectors = row_terms.Vectors(lse, grad_lse, terms)
    fence_async_shared()
    specialize(
        queries, grad_outs, outs, keys, values, grad_queries, vectors, rings,
        device.Call(BLOCK, table, sizes, key_lengths, counter, announced, scale2, drop),
        GROUP, MASKED, STAGES,
    )  # fmt: skip


@gluon.jit
def specialize(queries, grad_outs, outs, keys, values, grad_queries, vectors, rings, call,
               GROUP: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Starts `consume` in each group of warps and `produce` in one warp."""
    if call.block == PART:
        gl.warp_specialize(
            [
                (consume, (grad_queries, vectors, rings, call, 0, MASKED, STAGES)),
                (produce, (queries, grad_outs, outs, keys, values, rings, call, GROUP, STAGES)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (grad_queries, vectors, rings, call, 0, MASKED, STAGES)),
                (consume, (grad_queries, vectors, rings, call, 1, MASKED, STAGES)),
                (produce, (queries, grad_outs, outs, keys, values, rings, call, GROUP, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


@gluon.jit
def produce(queries, grad_outs, outs, keys, values, rings, call, GROUP: gl.constexpr,
            STAGES: gl.constexpr):  # fmt: skip
    """Loads the tiles that `consume` reads, as far ahead as the rings allow."""
    GROUPS: gl.constexpr = call.block // PART
    query_ring, grad_out_ring, key_ring, value_ring = rings
    stage, phase = 0, 1
    query_phase = 1
    row_stage, row_phase = 0, 1
    tile = gl.program_id(0)
    while tile < call.sizes.tiles:
        following = device.next_tile(call, tile)
        batch, head, row = device.locate(call, tile, 1)
        walk = device.walk_keys(call, batch, head, row)
        row_stage, row_phase = device.announce(call, batch, head, row, walk, row_stage, row_phase)
        start = row * call.block
        device.refill(key_ring, outs, batch, head, start, stage)
        if GROUPS == 1:
            device.skip(value_ring, stage)
        else:
            device.refill(value_ring, outs, batch, head, start + PART, stage)
        stage, phase = device.advance(stage, phase, STAGES)
        # In the order in which the tile before lets go of its buffers.
        for part in gl.static_range(GROUPS):
            token = row * call.block + part * PART
            device.fill(grad_out_ring, grad_outs, batch, head, token, part, query_phase)
            device.fill(query_ring, queries, batch, head, token, part, query_phase)
        query_phase = query_phase ^ 1
        stage, phase = device.load_keys(
            keys, values, key_ring, value_ring, call, batch, head // GROUP, walk,
            stage, phase, STAGES,
        )  # fmt: skip
        tile = following
    device.announce_end(call, row_stage, row_phase)


@gluon.jit
def consume(grad_queries, vectors, rings, call, MEMBER: gl.constexpr, MASKED: gl.constexpr,
            STAGES: gl.constexpr):  # fmt: skip
    """Computes this group's rows of each tile. `stage` is that of the block last consumed, or of
    O.
    """
    query_ring, grad_out_ring, key_ring, value_ring = rings
    DIMS: gl.constexpr = grad_queries.block_type.shape[3]
    COLUMNS: gl.constexpr = key_ring.buffers.shape[3]
    PARTS: gl.constexpr = call.block // COLUMNS
    SCORES: gl.constexpr = device.product_layout(COLUMNS)
    GRAD: gl.constexpr = device.product_layout(DIMS)
    query = device.matrix(query_ring, MEMBER)
    grad_out = device.matrix(grad_out_ring, MEMBER)
    device.hand_over(key_ring)
    device.hand_over(value_ring)
    stage, phase = STAGES - 1, 1
    query_phase = 0
    row_stage, row_phase = 0, 0
    batch, head, row, walk, row_stage, row_phase = device.hear(call, row_stage, row_phase)
    while row >= 0:
        masked = (walk.partials + walk.cuts) * PARTS
        count = masked + walk.fulls * PARTS
        pair = batch * call.sizes.heads + head
        start = row * call.block + MEMBER * PART
        stage, phase = device.advance(stage, phase, STAGES)
        lse2, minus_delta = begin(
            grad_queries, vectors, rings, call, pair, start, stage, phase, query_phase,
            MEMBER, SCORES,
        )  # fmt: skip
        dq = gl.zeros([PART, DIMS], gl.float32, GRAD)
        mbarrier.wait(query_ring.filled.index(MEMBER), query_phase)
        if MASKED:
            for i in range(0, masked):
                dq, stage, phase = step(
                    dq, stage, phase, i, lse2, minus_delta, query, grad_out, key_ring, value_ring,
                    call, walk, pair, start, MEMBER, True, STAGES, SCORES, GRAD,
                )  # fmt: skip
        for i in range(masked, count):
            dq, stage, phase = step(
                dq, stage, phase, i, lse2, minus_delta, query, grad_out, key_ring, value_ring,
                call, walk, pair, start, MEMBER, False, STAGES, SCORES, GRAD,
            )  # fmt: skip
        device.release(grad_out_ring, MEMBER)
        # The last product that reads the queries is done: their buffer holds dQ on its way out.
        query.store((dq * (call.scale2 * device.LN2)).to(grad_queries.dtype))
        fence_async_shared()
        store_tile(grad_queries, [batch, head, start, 0], query_ring.buffers.index(MEMBER))
        wait_for_stores(0)
        device.release(query_ring, MEMBER)
        query_phase = query_phase ^ 1
        batch, head, row, walk, row_stage, row_phase = device.hear(call, row_stage, row_phase)


@gluon.jit
def begin(grad_queries, vectors, rings, call, pair, start, stage, phase, query_phase,
          MEMBER: gl.constexpr, SCORES: gl.constexpr):  # fmt: skip
    """The terms of this group's rows, which are written too. O lies in the buffers of keys and
    values at `stage`, in tiles like those of dQ.
    """
    _, grad_out_ring, key_ring, value_ring = rings
    ROWS: gl.constexpr = row_terms.layout(grad_queries.block_type.shape[3])
    OWN: gl.constexpr = gl.SliceLayout(1, SCORES)
    tokens = start + gl.arange(0, PART, layout=gl.SliceLayout(1, ROWS))
    lse2, grad_lse = row_terms.read_lse(vectors, pair, tokens, call.sizes.q_len)
    mbarrier.wait(key_ring.filled.index(stage), phase)
    mbarrier.wait(value_ring.filled.index(stage), phase)
    buffer = device.tile_buffer(key_ring if MEMBER == 0 else value_ring, stage, grad_queries)
    out = device.as_matrix(buffer).load(ROWS)
    mbarrier.wait(grad_out_ring.filled.index(MEMBER), query_phase)
    grad_out = device.matrix(grad_out_ring, MEMBER).load(ROWS)
    minus_delta = row_terms.minus_delta_of(out, grad_out, grad_lse)
    row_terms.write(vectors, lse2, minus_delta, pair, tokens, call.sizes.rows * call.block)
    # O was loaded by threads: those loads have to be done before the accelerator fills its buffer.
    fence_async_shared()
    device.leave(value_ring, stage)
    device.leave(key_ring, stage)
    lse2 = gl.convert_layout(lse2, OWN, assert_trivial=True)
    return lse2, gl.convert_layout(minus_delta, OWN, assert_trivial=True)


@gluon.jit
def step(dq, stage, phase, i, lse2, minus_delta, query, grad_out, key_ring, value_ring,
         call, walk, pair, start, MEMBER: gl.constexpr, PARTIAL: gl.constexpr,
         STAGES: gl.constexpr, SCORES: gl.constexpr, GRAD: gl.constexpr):  # fmt: skip
    """dQ + dS K of tile i. pair: of batch and head; start: the first query"""
    COLUMNS: gl.constexpr = key_ring.buffers.shape[3]
    stage, phase = device.advance(stage, phase, STAGES)
    if PARTIAL:
        words = element_masks.key_mask_words(call, walk, i, MEMBER * PART, COLUMNS, SCORES)
    key, value = device.matrix(key_ring, stage), device.matrix(value_ring, stage)
    zeros = gl.zeros([PART, COLUMNS], gl.float32, SCORES)
    mbarrier.wait(key_ring.filled.index(stage), phase)
    scores = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(value_ring.filled.index(stage), phase)
    dp = warpgroup_mma(grad_out, value.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if call.dropout.threshold is not None:
        token = device.listed_token(call, walk, i, COLUMNS)
        kept = dropout.kept_words(call.dropout, pair, start, token, COLUMNS, SCORES)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    p = gl.exp2(scores * call.scale2 - gl.expand_dims(lse2, 1))
    if PARTIAL:
        p = gl.where(element_masks.attended(words, COLUMNS, SCORES), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    device.leave(value_ring, stage)
    if call.dropout.threshold is not None:
        kept = element_masks.attended(kept, COLUMNS, SCORES)
        dp = gl.where(kept, dp * call.dropout.keep_scale, 0.0)
    ds = device.operand(p * (dp + gl.expand_dims(minus_delta, 1)), key.dtype, GRAD)
    dq = warpgroup_mma(ds, key, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    device.leave(key_ring, stage)
    return dq, stage, phase
