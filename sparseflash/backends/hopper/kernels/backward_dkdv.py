"""The kernel of dK and dV: one block row of keys per work tile, four products a tile of queries.

Persistent and warp specialised. A work tile sums over the query heads of its key head (grouped-
query attention). In blocks of 128:

    producer      | K V | Q LSE delta dO | Q LSE delta dO | ...                  TMA, one warp
    warpgroup 0   | dP^T S^T | P^T | dV, dS^T | dK | dP^T S^T | ...      | store dK, dV
    warpgroup 1   | dP^T S^T | P^T | dV, dS^T | dK | dP^T S^T | ...      | store dK, dV

Each warpgroup owns 64 of the 128 keys. S^T = K Q^T and dP^T = V dO^T give P^T and dS^T, which stay
in registers as the left operands of dV += P^T dO and dK += dS^T Q. A tile has 64 queries, which
leaves registers for both accumulators up to 128 dims. If tiles are wider the kernel runs twice:
once for dK with grad_values None, and once for dV with grad_keys None.
"""

from sparseflash.backends.hopper.device.block_list import (
    load_key_value_tile,
    query_blocks_of_row,
    tile_start,
)
from sparseflash.backends.hopper.device.budgets import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from sparseflash.backends.hopper.device.dropout import transposed_keep_bits
from sparseflash.backends.hopper.device.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
    where_bit,
)
from sparseflash.backends.hopper.device.layouts import (
    WARPGROUP_M,
    accumulator_layout,
    as_operand_a,
)
from sparseflash.backends.hopper.device.masking import element_mask, query_mask_words
from sparseflash.backends.hopper.device.params import (
    LN2,
    Constants,
    Dropout,
    Params,
    ScoreParams,
    Sizes,
    Table,
    has_derivative,
    has_score_mod,
    unspecialized_arguments,
)
from sparseflash.backends.hopper.device.pipeline import (
    PipelineState,
    advance,
    as_matrix,
    consumer_release,
    consumer_wait,
    make_named_barrier_pipeline,
    make_pipeline,
    producer_acquire,
    producer_load,
    release_all_stages,
    stage_as,
    stage_matrix,
    warpgroup_state,
)
from sparseflash.backends.hopper.device.scheduler import (
    WorkTile,
    decode_work_id,
    make_work_queue,
    next_work_id,
    publish_end,
    publish_work,
    receive_work,
)
from sparseflash.backends.hopper.device.scores import apply_score_mod, softmax_scale_log2
from sparseflash.backends.triton_common.score_mods import ScorePointers


@gluon.jit(**unspecialized_arguments())
def backward_dkdv_kernel(
    queries, grad_outs, lse_delta, keys, values, grad_keys, grad_values,
    row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask,
    key_lengths, work_counter,
    heads, q_len, k_len, mask_heads, num_rows, num_work_tiles, heads_per_group, mask_batch_stride,
    own_columns,
    scale_log2, seed_low, seed_high, threshold, keep_scale, softcap, bias, bias_stride,
    score_floats, score_integers, score_layout,
    SCORE: gl.constexpr, QHEADS_PER_KVHEAD: gl.constexpr, MASKED: gl.constexpr,
    ROW_TOKENS: gl.constexpr, COLUMN_TOKENS: gl.constexpr,
    STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
):  # fmt: skip
    gl.static_assert(ROW_TOKENS == COLUMN_TOKENS, "blocks of the backward pass must be square")
    table = Table(row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles,
                  head_to_mask)  # fmt: skip
    sizes = Sizes(heads, q_len, k_len, mask_heads, num_rows, num_work_tiles, heads_per_group,
                  mask_batch_stride, own_columns)  # fmt: skip
    WARPGROUPS: gl.constexpr = ROW_TOKENS // WARPGROUP_M
    query_pipeline = make_named_barrier_pipeline(queries, 0, STAGES, WARPGROUPS)
    grad_out_pipeline = make_named_barrier_pipeline(grad_outs, STAGES, STAGES, WARPGROUPS)
    key_pipeline = make_pipeline(keys, WARPGROUPS * KEY_STAGES, 1)
    value_pipeline = key_pipeline  # dV alone needs no V, and is stored through the buffers of K
    if grad_keys is not None:
        value_pipeline = make_pipeline(values, WARPGROUPS * KEY_STAGES, 1)
    lse_delta_buffers = gl.allocate_shared_memory(
        gl.float32, [2 * STAGES, 1, WARPGROUP_M], lse_delta.layout
    )
    work_queue = make_work_queue(WARPGROUPS)
    dropout = Dropout(seed_low, seed_high, threshold, keep_scale)
    fence_async_shared()
    specialize_warps(
        queries, grad_outs, lse_delta, keys, values, grad_keys, grad_values,
        (query_pipeline, grad_out_pipeline, key_pipeline, value_pipeline, lse_delta_buffers),
        Params(ROW_TOKENS, COLUMN_TOKENS, table, sizes, key_lengths, work_counter, work_queue,
               scale_log2, dropout, ScoreParams(softcap, bias, bias_stride,
                           ScorePointers(score_floats, score_integers, score_layout)), SCORE,
               has_score_mod(softcap, bias, SCORE), has_derivative(softcap, SCORE)),
        QHEADS_PER_KVHEAD, MASKED, STAGES, KEY_STAGES,
    )  # fmt: skip


@gluon.jit
def specialize_warps(queries, grad_outs, lse_delta, keys, values, grad_keys, grad_values,
                     pipelines, params, QHEADS_PER_KVHEAD: gl.constexpr, MASKED: gl.constexpr,
                     STAGES: gl.constexpr, KEY_STAGES: gl.constexpr):  # fmt: skip
    """Starts a consumer in each warpgroup and the producer in one warp."""
    if params.row_tokens == WARPGROUP_M:
        gl.warp_specialize(
            [
                (consumer, (grad_keys, grad_values, pipelines, params, 0, QHEADS_PER_KVHEAD,
                            MASKED, STAGES, KEY_STAGES)),
                (producer, (queries, grad_outs, lse_delta, keys, values, None, None, grad_keys,
                            pipelines, params, QHEADS_PER_KVHEAD, STAGES, KEY_STAGES)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (grad_keys, grad_values, pipelines, params, 0, QHEADS_PER_KVHEAD,
                            MASKED, STAGES, KEY_STAGES)),
                (consumer, (grad_keys, grad_values, pipelines, params, 1, QHEADS_PER_KVHEAD,
                            MASKED, STAGES, KEY_STAGES)),
                (producer, (queries, grad_outs, lse_delta, keys, values, None, None, grad_keys,
                            pipelines, params, QHEADS_PER_KVHEAD, STAGES, KEY_STAGES)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def producer(queries, grad_outs, lse_delta, keys, values, more_keys, more_values, grad_keys,
             pipelines, params, QHEADS_PER_KVHEAD: gl.constexpr, STAGES: gl.constexpr,
             KEY_STAGES: gl.constexpr, next_of_work=None):  # fmt: skip
    """Loads the tiles that consumers read, as far ahead as the pipelines allow.

    more_keys, more_values: None in the kernel of dK and dV, which needs no zeros past key lengths;
        else as in load_key_value_tile
    next_of_work: as in next_work_id
    """
    query_pipeline, grad_out_pipeline, key_pipeline, value_pipeline, lse_delta_buffers = pipelines
    state = PipelineState(0, 1)
    key_state = PipelineState(0, 1)
    work_state = PipelineState(0, 1)
    work_id = gl.program_id(0)
    while work_id < params.sizes.num_work_tiles:
        next_work = next_work_id(params, work_id, next_of_work)
        batch, kv_head, row = decode_work_id(params, work_id, QHEADS_PER_KVHEAD)
        # One queue entry for each query head, because heads may have different masks.
        for i in range(QHEADS_PER_KVHEAD):
            head = kv_head * QHEADS_PER_KVHEAD + i
            blocks = query_blocks_of_row(params, batch, head, row)
            work_state = publish_work(params, WorkTile(batch, kv_head, row, blocks), work_state)
            if i == 0:
                load_key_value_row(
                    keys, values, more_keys, more_values, key_pipeline, value_pipeline,
                    grad_keys is not None, params, batch, kv_head, row, blocks.key_length,
                    key_state,
                )  # fmt: skip
                key_state = advance(key_state, KEY_STAGES)
            state = load_query_tiles(
                queries, grad_outs, lse_delta, query_pipeline, grad_out_pipeline,
                lse_delta_buffers, params, batch, head, params.table.partial_index,
                blocks.partial_start, blocks.n_partial, state, STAGES,
            )  # fmt: skip
            state = load_query_tiles(
                queries, grad_outs, lse_delta, query_pipeline, grad_out_pipeline,
                lse_delta_buffers, params, batch, head, params.table.full_index,
                blocks.full_start, blocks.n_full, state, STAGES,
            )  # fmt: skip
        work_id = next_work
    publish_end(params, work_state)


@gluon.jit
def load_key_value_row(keys, values, more_keys, more_values, key_pipeline, value_pipeline,
                       LOAD_VALUES: gl.constexpr, params, batch, kv_head, row, key_length,
                       state):  # fmt: skip
    """Loads K and, if LOAD_VALUES, V of a block row of keys."""
    WARPGROUPS: gl.constexpr = params.row_tokens // WARPGROUP_M
    for warpgroup in gl.static_range(WARPGROUPS):
        key_start = row * params.row_tokens + warpgroup * WARPGROUP_M
        buffer_state = warpgroup_state(state, WARPGROUPS, warpgroup)
        load_key_value_tile(
            keys, values, more_keys, more_values, key_pipeline, value_pipeline, LOAD_VALUES,
            params, batch, kv_head, key_start, key_length, buffer_state,
        )  # fmt: skip


@gluon.jit
def load_query_tiles(queries, grad_outs, lse_delta, query_pipeline, grad_out_pipeline,
                     lse_delta_buffers, params, batch, head, index, start, count, state,
                     STAGES: gl.constexpr):  # fmt: skip
    """Loads all tiles of the blocks index[start : start + count]: Q, LSE and delta; dO."""
    lse_row = (batch * params.sizes.heads + head) * 2
    block = gl.load(index + start)
    for i in range(start, start + count):
        next_block = gl.load(index + i + 1)
        for tile in gl.static_range(params.column_tokens // WARPGROUP_M):
            query_start = block * params.column_tokens + tile * WARPGROUP_M
            # Q, LSE and delta share a stage and its full barrier, which expects the bytes of all.
            full_barrier = query_pipeline.full_barriers.index(state.stage)
            producer_acquire(query_pipeline, state)
            mbarrier.expect(
                full_barrier, queries.block_type.nbytes + 2 * lse_delta.block_type.nbytes
            )
            query_tile = query_pipeline.buffers.index(state.stage)
            tma_load(queries, [batch, head, query_start, 0], full_barrier, query_tile)
            lse_tile = lse_delta_buffers.index(2 * state.stage)
            tma_load(lse_delta, [lse_row, query_start], full_barrier, lse_tile)
            delta_row = lse_row + 1
            delta_tile = lse_delta_buffers.index(2 * state.stage + 1)
            tma_load(lse_delta, [delta_row, query_start], full_barrier, delta_tile)
            producer_load(grad_out_pipeline, grad_outs, batch, head, query_start, state)
            state = advance(state, STAGES)
        block = next_block
    return state


@gluon.jit
def consumer(grad_keys, grad_values, pipelines, params, WARPGROUP: gl.constexpr,
             QHEADS_PER_KVHEAD: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
             KEY_STAGES: gl.constexpr):  # fmt: skip
    """Computes 64 keys of each work tile. `state` is that of the next tile of queries."""
    WARPGROUPS: gl.constexpr = params.row_tokens // WARPGROUP_M
    query_pipeline, grad_out_pipeline, key_pipeline, value_pipeline, lse_delta_buffers = pipelines
    TILES_PER_BLOCK: gl.constexpr = params.column_tokens // WARPGROUP_M
    HEAD_DIMS: gl.constexpr = key_pipeline.buffers.shape[4]
    DTYPE: gl.constexpr = key_pipeline.buffers.dtype
    COMPUTE_DK: gl.constexpr = grad_keys is not None
    COMPUTE_DV: gl.constexpr = grad_values is not None
    S_LAYOUT: gl.constexpr = accumulator_layout(WARPGROUP_M)
    VALUE_DIMS: gl.constexpr = grad_values.block_type.shape[3] if COMPUTE_DV else HEAD_DIMS
    DK_LAYOUT: gl.constexpr = accumulator_layout(HEAD_DIMS)
    DV_LAYOUT: gl.constexpr = accumulator_layout(VALUE_DIMS)
    offsets = gl.arange(0, WARPGROUP_M, layout=gl.SliceLayout(1, DK_LAYOUT))
    release_all_stages(query_pipeline)
    release_all_stages(grad_out_pipeline)
    state = PipelineState(0, 0)
    key_state = PipelineState(0, 0)
    work_state = PipelineState(0, 0)
    work, work_state = receive_work(params, work_state)
    while work.row >= 0:
        key_start = work.row * params.row_tokens + WARPGROUP * WARPGROUP_M
        # receive_work overwrites `work` before dK and dV are stored.
        batch, kv_head, key_length = work.batch, work.head, work.blocks.key_length
        buffer = key_state.stage * WARPGROUPS + WARPGROUP
        kv_state = PipelineState(buffer, key_state.phase)
        key, value = stage_matrix(key_pipeline, buffer), stage_matrix(value_pipeline, buffer)
        dk = gl.zeros([WARPGROUP_M, HEAD_DIMS], gl.float32, DK_LAYOUT)  # [64, D]
        dv = gl.zeros([WARPGROUP_M, VALUE_DIMS], gl.float32, DV_LAYOUT)  # [64, D]
        consumer_wait(key_pipeline, kv_state)
        if COMPUTE_DK:
            consumer_wait(value_pipeline, kv_state)
        for i_head in range(QHEADS_PER_KVHEAD):
            bh = batch * params.sizes.heads + kv_head * QHEADS_PER_KVHEAD + i_head
            # One loop for partial and full blocks. With two, ptxas of CUDA 12.8 sets the wgmma
            # descriptor of K only before the first, which a row without partial blocks skips.
            for i in range(0, TILES_PER_BLOCK * (work.blocks.n_partial + work.blocks.n_full)):
                if MASKED and i < TILES_PER_BLOCK * work.blocks.n_partial:
                    dk, dv = mma_one_tile(
                        dk, dv, i, key, value, query_pipeline, grad_out_pipeline,
                        lse_delta_buffers, state, params, work.blocks, bh, key_start, True,
                        Constants(WARPGROUP, STAGES, S_LAYOUT, DK_LAYOUT), DV_LAYOUT, COMPUTE_DK,
                        COMPUTE_DV,
                    )  # fmt: skip
                else:
                    dk, dv = mma_one_tile(
                        dk, dv, i, key, value, query_pipeline, grad_out_pipeline,
                        lse_delta_buffers, state, params, work.blocks, bh, key_start, False,
                        Constants(WARPGROUP, STAGES, S_LAYOUT, DK_LAYOUT), DV_LAYOUT, COMPUTE_DK,
                        COMPUTE_DV,
                    )  # fmt: skip
                state = advance(state, STAGES)
            work, work_state = receive_work(params, work_state)
        dk = dk * (params.scale_log2 * LN2)
        if params.dropout.threshold is not None:
            dv = dv * params.dropout.keep_scale
        # The loop does not mask keys past the key length. Their gradients are set to 0 here.
        if params.key_lengths is not None:
            inside = gl.expand_dims(key_start + offsets < key_length, 1)
            dk = gl.where(inside, dk, 0.0)
            if VALUE_DIMS != HEAD_DIMS:
                inside = gl.convert_layout(
                    key_start + offsets < key_length, gl.SliceLayout(1, DV_LAYOUT)
                )
                inside = gl.expand_dims(inside, 1)
            dv = gl.where(inside, dv, 0.0)
        # All products have completed, so dK and dV are stored through the buffers of K and V.
        if COMPUTE_DK:
            key.store(dk.to(DTYPE))
        if COMPUTE_DV:
            value = as_matrix(stage_as(value_pipeline, buffer, WARPGROUP_M, VALUE_DIMS))
            value.store(dv.to(DTYPE))
        fence_async_shared()
        if COMPUTE_DK:
            dk_buffer = key_pipeline.buffers.index(buffer)
            tma_store(grad_keys, [batch, kv_head, key_start, 0], dk_buffer)
        if COMPUTE_DV:
            dv_buffer = stage_as(value_pipeline, buffer, WARPGROUP_M, VALUE_DIMS)
            tma_store(grad_values, [batch, kv_head, key_start, 0], dv_buffer)
        # The producer loads the next K and V into these buffers.
        tma_store_wait(0)
        consumer_release(key_pipeline, kv_state)
        if COMPUTE_DK:
            consumer_release(value_pipeline, kv_state)
        key_state = advance(key_state, KEY_STAGES)


@gluon.jit
def mma_one_tile(dk, dv, i, key, value, query_pipeline, grad_out_pipeline, lse_delta_buffers,
                 state, params, blocks, bh, key_start, PARTIAL: gl.constexpr, const,
                 DV_LAYOUT: gl.constexpr, COMPUTE_DK: gl.constexpr,
                 COMPUTE_DV: gl.constexpr):  # fmt: skip
    """(dK + dS^T Q, dV + P^T dO) of the i-th tile of 64 queries."""
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, const.S_LAYOUT)
    COMPUTE_BOTH: gl.constexpr = COMPUTE_DK and COMPUTE_DV
    if PARTIAL:
        first_row = const.WARPGROUP * WARPGROUP_M
        words = query_mask_words(params, blocks, i, first_row, const.S_LAYOUT)
    query, grad_out = (
        stage_matrix(query_pipeline, state.stage),
        stage_matrix(grad_out_pipeline, state.stage),
    )
    zeros = gl.zeros([WARPGROUP_M, WARPGROUP_M], gl.float32, const.S_LAYOUT)
    dp = zeros
    consumer_wait(query_pipeline, state)
    lse_buffer = lse_delta_buffers.index(2 * state.stage).reshape([WARPGROUP_M])
    delta_buffer = lse_delta_buffers.index(2 * state.stage + 1).reshape([WARPGROUP_M])
    if COMPUTE_BOTH:
        # Before any product is issued: a later load would wait until products have read operands.
        lse_log2 = lse_buffer.load(COLUMN_LAYOUT)  # [64 queries]
        consumer_wait(grad_out_pipeline, state)
        if params.dropout.threshold is None:
            dp = delta_buffer.load(COLUMN_LAYOUT)
            dp = gl.expand_dims(dp, 0).broadcast_to([WARPGROUP_M, WARPGROUP_M])
        # dP first: no product runs while the compiler writes the initial accumulator of another.
        # dP^T - delta = V dO^T - delta: [64 keys, D] [D, 64 queries] -> [64 keys, 64 queries]
        dp = warpgroup_mma(value, grad_out.permute((1, 0)), dp, is_async=True)
        # S^T = K Q^T: [64 keys, D] [D, 64 queries] -> [64 keys, 64 queries]
        scores = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        # Wide tiles leave no registers that could hold LSE and delta while products run.
        # S^T = K Q^T: [64 keys, D] [D, 64 queries] -> [64 keys, 64 queries]
        scores = warpgroup_mma(key, query.permute((1, 0)), zeros, use_acc=False, is_async=True)
        consumer_wait(grad_out_pipeline, state)
        if COMPUTE_DK:
            # dP^T = V dO^T: [64 keys, D] [D, 64 queries] -> [64 keys, 64 queries]
            dp = warpgroup_mma(value, grad_out.permute((1, 0)), dp, use_acc=False, is_async=True)
        lse_log2 = lse_buffer.load(COLUMN_LAYOUT)
    if params.dropout.threshold is not None or params.has_score_mod:
        query_start = tile_start(params, blocks, i, WARPGROUP_M)
    if params.dropout.threshold is not None:
        word, bit = transposed_keep_bits(
            params.dropout, bh, query_start, key_start, const.S_LAYOUT
        )
    # Products complete in the order of issue. S^T is issued last, except if only dK is computed:
    # then dP^T follows it and may still run.
    scores = warpgroup_mma_wait(0 if COMPUTE_DV else 1, deps=(scores,))
    if params.has_score_mod:
        scores, derivative = apply_score_mod(
            scores, params, bh, query_start, key_start, const.S_LAYOUT, True
        )
    p = gl.exp2(scores * softmax_scale_log2(params) - gl.expand_dims(lse_log2, 0))
    if PARTIAL:
        p = gl.where(element_mask(words, WARPGROUP_M, const.S_LAYOUT), p, 0.0)
    p_derivative = p
    if params.has_derivative:
        p_derivative = p * derivative
    if COMPUTE_DV:
        p_dropped = p
        if params.dropout.threshold is not None:
            p_dropped = where_bit(word, bit, p)
        p_dropped = as_operand_a(p_dropped, query.dtype, DV_LAYOUT)
        # dV += P^T dO: [64 keys, 64 queries] [64 queries, D] -> [64 keys, D]
        dv = warpgroup_mma(p_dropped, grad_out, dv, is_async=True)
    if COMPUTE_DK:
        # dV may still run while dS^T is computed.
        dp = warpgroup_mma_wait(1 if COMPUTE_DV else 0, deps=(dp,))
        if params.dropout.threshold is not None:
            dp = where_bit(word, bit, dp) * params.dropout.keep_scale
        if not COMPUTE_BOTH or params.dropout.threshold is not None:
            dp = dp + gl.expand_dims(delta_buffer.load(COLUMN_LAYOUT), 0)
        # dS^T = P^T * (dP^T - delta): [64 keys, 64 queries]
        ds = as_operand_a(p_derivative * dp, query.dtype, const.ACC_LAYOUT)
        # dK += dS^T Q: [64 keys, 64 queries] [64 queries, D] -> [64 keys, D]
        dk = warpgroup_mma(ds, query, dk, is_async=True)
    if COMPUTE_DV:
        dv = warpgroup_mma_wait(1 if COMPUTE_DK else 0, deps=(dv,))
    consumer_release(grad_out_pipeline, state)
    if COMPUTE_DK:
        dk = warpgroup_mma_wait(0, deps=(dk,))
    consumer_release(query_pipeline, state)
    return dk, dv
