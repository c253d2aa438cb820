"""The kernel of dK and dV: key rows; a program sums over the query heads of its key head.

S^T = K Q^T and dP^T = V dO^T give P^T and dS^T, which stay in registers as the left operands of
dV += P^T dO and dK += dS^T Q. Tiles of 64 queries leave registers for both sums, up to 128 dims;
for more the kernel runs once for each of them, with None for the other.
"""

from sparseflash.backends.hopper import device, dropout, element_masks
from sparseflash.backends.hopper.device import PART
from sparseflash.backends.hopper.gluon_shim import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit(**device.unspecialized("key_lengths", "counter"))
def key_value_gradient_kernel(
    queries, grad_outs, terms, keys, values, grad_keys, grad_values,
    bounds, full_index, partial_index, partial_tile, order, bank, head_layer, key_lengths, counter,
    heads, q_len, k_len, mask_heads, rows, tiles, together, scale2,
    seed_low, seed_high, threshold, keep_scale,
    GROUP: gl.constexpr, MASKED: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
):  # fmt: skip
    table = device.Table(bounds, full_index, partial_index, partial_tile, order, bank, head_layer)
    sizes = device.Sizes(heads, q_len, k_len, mask_heads, rows, tiles, together)
    GROUPS: gl.constexpr = BLOCK // PART
    query_ring = device.group_ring(queries, 0, STAGES, GROUPS)
    grad_out_ring = device.group_ring(grad_outs, STAGES, STAGES, GROUPS)
    key_ring = device.ring(keys, GROUPS * KEY_STAGES, 1)
    value_ring = key_ring  # dV alone needs no values, and leaves by the buffers of keys
    if grad_keys is not None:
        value_ring = device.ring(values, GROUPS * KEY_STAGES, 1)
    term_buffers = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, PART], terms.layout)
    announced = device.row_ring(GROUPS)
    drop = device.Dropout(seed_low, seed_high, threshold, keep_scale)
    fence_async_shared()
    specialize(
        queries, grad_outs, terms, keys, values, grad_keys, grad_values,
        (query_ring, grad_out_ring, key_ring, value_ring, term_buffers),
        device.Call(BLOCK, table, sizes, key_lengths, counter, announced, scale2, drop),
        GROUP, MASKED, STAGES, KEY_STAGES,
    )  # fmt: skip


@gluon.jit
def specialize(queries, grad_outs, terms, keys, values, grad_keys, grad_values, rings, call,
               GROUP: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
               KEY_STAGES: gl.constexpr):  # fmt: skip
    """Starts `consume` in each group of warps and `produce` in one warp."""
    if call.block == PART:
        gl.warp_specialize(
            [
                (consume, (grad_keys, grad_values, rings, call, 0, GROUP, MASKED,
                           STAGES, KEY_STAGES)),
                (produce, (queries, grad_outs, terms, keys, values, grad_keys, rings, call,
                           GROUP, STAGES, KEY_STAGES)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (grad_keys, grad_values, rings, call, 0, GROUP, MASKED,
                           STAGES, KEY_STAGES)),
                (consume, (grad_keys, grad_values, rings, call, 1, GROUP, MASKED,
                           STAGES, KEY_STAGES)),
                (produce, (queries, grad_outs, terms, keys, values, grad_keys, rings, call,
                           GROUP, STAGES, KEY_STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


@gluon.jit
def produce(queries, grad_outs, terms, keys, values, grad_keys, rings, call,
            GROUP: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr):  # fmt: skip
    """Loads the tiles that `consume` reads, as far ahead as the rings allow."""
    query_ring, grad_out_ring, key_ring, value_ring, term_buffers = rings
    stage, phase = 0, 1
    key_stage, key_phase = 0, 1
    row_stage, row_phase = 0, 1
    tile = gl.program_id(0)
    while tile < call.sizes.tiles:
        following = device.next_tile(call, tile)
        batch, kv_head, row = device.locate(call, tile, GROUP)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            walk = device.walk_queries(call, batch, head, row)
            row_stage, row_phase = device.announce(
                call, batch, kv_head, row, walk, row_stage, row_phase
            )
            if member == 0:
                load_own_keys(
                    keys, values, key_ring, value_ring, grad_keys is not None, call,
                    batch, kv_head, row, key_stage, key_phase,
                )  # fmt: skip
                key_stage, key_phase = device.advance(key_stage, key_phase, KEY_STAGES)
            stage, phase = load_queries(
                queries, grad_outs, terms, query_ring, grad_out_ring, term_buffers, call,
                batch, head, call.table.partial_index, walk.partial_start, walk.partials,
                stage, phase, STAGES,
            )  # fmt: skip
            stage, phase = load_queries(
                queries, grad_outs, terms, query_ring, grad_out_ring, term_buffers, call,
                batch, head, call.table.full_index, walk.full_start, walk.fulls,
                stage, phase, STAGES,
            )  # fmt: skip
        tile = following
    device.announce_end(call, row_stage, row_phase)


@gluon.jit
def load_own_keys(keys, values, key_ring, value_ring, WITH_VALUES: gl.constexpr, call,
                  batch, kv_head, row, stage, phase):  # fmt: skip
    """Loads the keys of a row and, if wanted, their values."""
    GROUPS: gl.constexpr = call.block // PART
    for part in gl.static_range(GROUPS):
        token = row * call.block + part * PART
        buffer = stage * GROUPS + part
        device.fill(key_ring, keys, batch, kv_head, token, buffer, phase)
        if WITH_VALUES:
            device.fill(value_ring, values, batch, kv_head, token, buffer, phase)


@gluon.jit
def load_queries(queries, grad_outs, terms, query_ring, grad_out_ring, term_buffers, call,
                 batch, head, index, start, count, stage, phase,
                 STAGES: gl.constexpr):  # fmt: skip
    """Loads all tiles of listed blocks: queries, row terms and dO."""
    terms_row = (batch * call.sizes.heads + head) * 2
    block = gl.load(index + start)
    for i in range(start, start + count):
        ahead = gl.load(index + i + 1)
        for part in gl.static_range(call.block // PART):
            token = block * call.block + part * PART
            filled = query_ring.filled.index(stage)
            device.await_empty(query_ring, stage)
            mbarrier.expect(filled, queries.block_type.nbytes + 2 * terms.block_type.nbytes)
            load_tile(queries, [batch, head, token, 0], filled, query_ring.buffers.index(stage))
            load_tile(terms, [terms_row, token], filled, term_buffers.index(2 * stage))
            load_tile(terms, [terms_row + 1, token], filled, term_buffers.index(2 * stage + 1))
            device.refill(grad_out_ring, grad_outs, batch, head, token, stage)
            stage, phase = device.advance(stage, phase, STAGES)
        block = ahead
    return stage, phase


@gluon.jit
def consume(grad_keys, grad_values, rings, call, MEMBER: gl.constexpr, GROUP: gl.constexpr,
            MASKED: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr):  # fmt: skip
    """Computes this group's rows of each tile. `stage` is that of the next tile of queries."""
    GROUPS: gl.constexpr = call.block // PART
    query_ring, grad_out_ring, key_ring, value_ring, term_buffers = rings
    PARTS: gl.constexpr = call.block // PART  # tiles of queries in a block
    DIMS: gl.constexpr = key_ring.buffers.shape[4]
    DTYPE: gl.constexpr = key_ring.buffers.dtype
    WITH_KEYS: gl.constexpr = grad_keys is not None
    WITH_VALUES: gl.constexpr = grad_values is not None
    SCORES: gl.constexpr = device.product_layout(PART)
    GRAD: gl.constexpr = device.product_layout(DIMS)
    offsets = gl.arange(0, PART, layout=gl.SliceLayout(1, GRAD))
    device.hand_over(query_ring)
    device.hand_over(grad_out_ring)
    stage, phase = 0, 0
    key_stage, key_phase = 0, 0
    row_stage, row_phase = 0, 0
    batch, kv_head, row, walk, row_stage, row_phase = device.hear(call, row_stage, row_phase)
    while row >= 0:
        start = row * call.block + MEMBER * PART
        # The others are those of the next row before dK and dV of this one leave.
        own_batch, own_head, length = batch, kv_head, walk.length
        buffer = key_stage * GROUPS + MEMBER
        key, value = device.matrix(key_ring, buffer), device.matrix(value_ring, buffer)
        dk = gl.zeros([PART, DIMS], gl.float32, GRAD)
        dv = gl.zeros([PART, DIMS], gl.float32, GRAD)
        mbarrier.wait(key_ring.filled.index(buffer), key_phase)
        if WITH_KEYS:
            mbarrier.wait(value_ring.filled.index(buffer), key_phase)
        for member in range(GROUP):
            pair = own_batch * call.sizes.heads + own_head * GROUP + member
            # With a loop for each kind of block, ptxas of CUDA 12.8 sets the descriptor of the
            # keys only in front of the first, which a row without partial blocks jumps over.
            for i in range(0, PARTS * (walk.partials + walk.fulls)):
                if MASKED and i < PARTS * walk.partials:
                    dk, dv = step(
                        dk, dv, i, key, value, query_ring, grad_out_ring, term_buffers,
                        stage, phase, call, walk, pair, start, MEMBER, True,
                        WITH_KEYS, WITH_VALUES, SCORES, GRAD,
                    )  # fmt: skip
                else:
                    dk, dv = step(
                        dk, dv, i, key, value, query_ring, grad_out_ring, term_buffers,
                        stage, phase, call, walk, pair, start, MEMBER, False,
                        WITH_KEYS, WITH_VALUES, SCORES, GRAD,
                    )  # fmt: skip
                stage, phase = device.advance(stage, phase, STAGES)
            batch, kv_head, row, walk, row_stage, row_phase = device.hear(
                call, row_stage, row_phase
            )
        dk = dk * (call.scale2 * device.LN2)
        if call.dropout.threshold is not None:
            dv = dv * call.dropout.keep_scale
        if call.key_lengths is not None:
            inside = gl.expand_dims(start + offsets < length, 1)
            dk, dv = gl.where(inside, dk, 0.0), gl.where(inside, dv, 0.0)
        # All products are done: the buffers of keys and values hold dK and dV on their way out.
        if WITH_KEYS:
            key.store(dk.to(DTYPE))
        if WITH_VALUES:
            value.store(dv.to(DTYPE))
        fence_async_shared()
        if WITH_KEYS:
            store_tile(grad_keys, [own_batch, own_head, start, 0], key_ring.buffers.index(buffer))
        if WITH_VALUES:
            store_tile(
                grad_values, [own_batch, own_head, start, 0], value_ring.buffers.index(buffer)
            )
        wait_for_stores(0)
        device.release(key_ring, buffer)
        if WITH_KEYS:
            device.release(value_ring, buffer)
        key_stage, key_phase = device.advance(key_stage, key_phase, KEY_STAGES)


@gluon.jit
def step(dk, dv, i, key, value, query_ring, grad_out_ring, term_buffers, stage, phase,
         call, walk, pair, start, MEMBER: gl.constexpr, PARTIAL: gl.constexpr,
         WITH_KEYS: gl.constexpr, WITH_VALUES: gl.constexpr,
         SCORES: gl.constexpr, GRAD: gl.constexpr):  # fmt: skip
    """(dK + dS^T Q, dV + P^T dO) of the i-th tile of the listed blocks.

    pair: of batch and head; start: the first key
    """
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    PARTS: gl.constexpr = call.block // PART
    TOGETHER: gl.constexpr = WITH_KEYS and WITH_VALUES
    if PARTIAL:
        entry = walk.partial_start + i // PARTS
        words = element_masks.mask_words(call, entry, MEMBER * PART, i % PARTS * 2, PART, SCORES)
    query, grad_out = device.matrix(query_ring, stage), device.matrix(grad_out_ring, stage)
    zeros = gl.zeros([PART, PART], gl.float32, SCORES)
    dp = zeros
    mbarrier.wait(query_ring.filled.index(stage), phase)
    lse2 = term_buffers.index(2 * stage).reshape([PART])
    minus_delta = term_buffers.index(2 * stage + 1).reshape([PART])
    if TOGETHER:
        # Once products are begun a load from shared memory waits behind all that they read there.
        lse2 = lse2.load(COLUMNS)
        mbarrier.wait(grad_out_ring.filled.index(stage), phase)
        if call.dropout.threshold is None:
            dp = gl.expand_dims(minus_delta.load(COLUMNS), 0).broadcast_to([PART, PART])
        # First, for the compiler lets no product run while it sets what another is added to.
        dp = warpgroup_mma(value, grad_out.permute((1, 0)), dp, is_async=True)
        scores = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        # Wide tiles leave no registers that could hold the terms while products run.
        scores = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(grad_out_ring.filled.index(stage), phase)
        if WITH_KEYS:
            dp = warpgroup_mma(value, grad_out.permute((1, 0)), dp, use_acc=False, is_async=True)
        lse2 = lse2.load(COLUMNS)
    if call.dropout.threshold is not None:
        token = device.listed_token(call, walk, i, PART)
        kept = dropout.kept_words(call.dropout, pair, token, start, PART, SCORES)
        kept = dropout.transposed(kept, SCORES)
    scores = warpgroup_mma_wait(0 if WITH_VALUES else 1, deps=(scores,))
    p = gl.exp2(scores * call.scale2 - gl.expand_dims(lse2, 0))
    if PARTIAL:
        p = gl.where(element_masks.attended(words, PART, SCORES), p, 0.0)
    if WITH_VALUES:
        weights = p
        if call.dropout.threshold is not None:
            weights = gl.where(kept, p, 0.0)
        weights = device.operand(weights, query.dtype, GRAD)
        dv = warpgroup_mma(weights, grad_out, dv, is_async=True)
    if WITH_KEYS:
        dp = warpgroup_mma_wait(1 if WITH_VALUES else 0, deps=(dp,))
        if call.dropout.threshold is not None:
            dp = gl.where(kept, dp * call.dropout.keep_scale, 0.0)
        if not TOGETHER or call.dropout.threshold is not None:
            dp = dp + gl.expand_dims(minus_delta.load(COLUMNS), 0)
        ds = device.operand(p * dp, query.dtype, GRAD)
        dk = warpgroup_mma(ds, query, dk, is_async=True)
    if WITH_VALUES:
        dv = warpgroup_mma_wait(1 if WITH_KEYS else 0, deps=(dv,))
    device.leave(grad_out_ring, stage)
    if WITH_KEYS:
        dk = warpgroup_mma_wait(0, deps=(dk,))
    device.leave(query_ring, stage)
    return dk, dv
