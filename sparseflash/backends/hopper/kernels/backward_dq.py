"""The kernel of dQ: one block row of queries per work tile, three products a tile of keys.

Persistent and warp specialised like the forward kernel. In blocks of 128:

    producer      | O (through the buffers of K0, V0) dO Q | K V K V ...         TMA, one warp
    warpgroup 0   | LSE, delta | S dP | dS | dQ | S dP | dS | dQ | ...  | store dQ
    warpgroup 1   | LSE, delta | S dP | dS | dQ | S dP | dS | dQ | ...  | store dQ

S = Q K^T and dP = dO V^T give dS = P * (dP - delta), which stays in registers as the left operand
of dQ += dS K. Warpgroups do not wait for one another.

The prologue computes delta from dO and O, and writes it with LSE for the kernel of dK and dV. O is
loaded through the pipelines of keys and values before the first tile, at the same time as dO. The
64 queries of warpgroup 0 use a stage of keys, and those of warpgroup 1, if it exists, a stage of
values. In blocks of 64, if O is wider than keys, the only warpgroup uses a stage of values, which
is as wide as O.
"""

from sparseflash.backends.hopper.device.block_list import (
    key_blocks_of_row,
    load_key_value_tiles,
    tile_start,
)
from sparseflash.backends.hopper.device.budgets import CONSUMER_REGISTERS, PRODUCER_REGISTERS
from sparseflash.backends.hopper.device.dropout import dropout_row_words, keep_bits
from sparseflash.backends.hopper.device.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
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
from sparseflash.backends.hopper.device.masking import element_mask, key_mask_words
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
    producer_commit,
    producer_load,
    release_all_stages,
    stage_as,
    stage_matrix,
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
from sparseflash.backends.hopper.kernels.lse_delta import (
    LseTensors,
    compute_minus_delta,
    delta_input_layout,
    read_lse,
    write_lse_delta,
)
from sparseflash.backends.triton_common.score_mods import ScorePointers


@gluon.jit(**unspecialized_arguments("lse", "grad_lse", "lse_delta"))
def backward_dq_kernel(
    queries, grad_outs, outs, keys, values, more_keys, more_values, grad_queries, lse, grad_lse,
    lse_delta,
    row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask,
    key_lengths, work_counter,
    heads, q_len, k_len, mask_heads, num_rows, num_work_tiles, heads_per_group, mask_batch_stride,
    own_columns,
    scale_log2, seed_low, seed_high, threshold, keep_scale, softcap, bias, bias_stride,
    score_floats, score_integers, score_layout,
    SCORE: gl.constexpr, QHEADS_PER_KVHEAD: gl.constexpr, MASKED: gl.constexpr,
    ROW_TOKENS: gl.constexpr, COLUMN_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    gl.static_assert(ROW_TOKENS == COLUMN_TOKENS, "blocks of the backward pass must be square")
    table = Table(row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles,
                  head_to_mask)  # fmt: skip
    sizes = Sizes(heads, q_len, k_len, mask_heads, num_rows, num_work_tiles, heads_per_group,
                  mask_batch_stride, own_columns)  # fmt: skip
    WARPGROUPS: gl.constexpr = ROW_TOKENS // WARPGROUP_M
    pipelines = (
        # Used once for each row, so mbarriers are fast enough; there are only 16 named barriers.
        make_pipeline(queries, WARPGROUPS, 1),
        make_pipeline(grad_outs, WARPGROUPS, 1),
        make_named_barrier_pipeline(keys, 0, STAGES, WARPGROUPS),
        make_named_barrier_pipeline(values, STAGES, STAGES, WARPGROUPS),
    )
    work_queue = make_work_queue(WARPGROUPS)
    dropout = Dropout(seed_low, seed_high, threshold, keep_scale)
    lse_tensors = LseTensors(lse, grad_lse, lse_delta)
    fence_async_shared()
    specialize_warps(
        queries, grad_outs, outs, keys, values, more_keys, more_values, grad_queries, lse_tensors,
        pipelines,
        Params(ROW_TOKENS, COLUMN_TOKENS, table, sizes, key_lengths, work_counter, work_queue,
               scale_log2, dropout, ScoreParams(softcap, bias, bias_stride,
                           ScorePointers(score_floats, score_integers, score_layout)), SCORE,
               has_score_mod(softcap, bias, SCORE), has_derivative(softcap, SCORE)),
        QHEADS_PER_KVHEAD, MASKED, STAGES,
    )  # fmt: skip


@gluon.jit
def specialize_warps(queries, grad_outs, outs, keys, values, more_keys, more_values, grad_queries,
                     lse_tensors, pipelines, params, QHEADS_PER_KVHEAD: gl.constexpr,
                     MASKED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Starts a consumer in each warpgroup and the producer in one warp."""
    if params.row_tokens == WARPGROUP_M:
        gl.warp_specialize(
            [
                (consumer, (grad_queries, lse_tensors, pipelines, params, 0, MASKED, STAGES)),
                (producer, (queries, grad_outs, outs, keys, values, more_keys, more_values,
                            pipelines, params, QHEADS_PER_KVHEAD, STAGES)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (grad_queries, lse_tensors, pipelines, params, 0, MASKED, STAGES)),
                (consumer, (grad_queries, lse_tensors, pipelines, params, 1, MASKED, STAGES)),
                (producer, (queries, grad_outs, outs, keys, values, more_keys, more_values,
                            pipelines, params, QHEADS_PER_KVHEAD, STAGES)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def producer(queries, grad_outs, outs, keys, values, more_keys, more_values, pipelines, params,
             QHEADS_PER_KVHEAD: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Loads the tiles that consumers read, as far ahead as the pipelines allow."""
    WARPGROUPS: gl.constexpr = params.row_tokens // WARPGROUP_M
    query_pipeline, grad_out_pipeline, key_pipeline, value_pipeline = pipelines
    state = PipelineState(0, 1)
    query_phase = 1
    work_state = PipelineState(0, 1)
    work_id = gl.program_id(0)
    while work_id < params.sizes.num_work_tiles:
        next_work = next_work_id(params, work_id)
        batch, head, row = decode_work_id(params, work_id, 1)
        blocks = key_blocks_of_row(params, batch, head, row)
        work_state = publish_work(params, WorkTile(batch, head, row, blocks), work_state)
        query_start = row * params.row_tokens
        # Both pipelines share one state, so with one warpgroup the other one skips a stage.
        if WARPGROUPS == 1 and outs.block_type.shape[3] > keys.block_type.shape[3]:
            producer_acquire(key_pipeline, state)
            producer_commit(key_pipeline, state)
            producer_load(value_pipeline, outs, batch, head, query_start, state)
        elif WARPGROUPS == 1:
            producer_load(key_pipeline, outs, batch, head, query_start, state)
            producer_acquire(value_pipeline, state)
            producer_commit(value_pipeline, state)
        else:
            producer_load(key_pipeline, outs, batch, head, query_start, state)
            second_half = query_start + WARPGROUP_M
            producer_load(value_pipeline, outs, batch, head, second_half, state)
        state = advance(state, STAGES)
        # In the order in which consumers release the buffers of the work tile before.
        for warpgroup in gl.static_range(WARPGROUPS):
            query_start = row * params.row_tokens + warpgroup * WARPGROUP_M
            buffer_state = PipelineState(warpgroup, query_phase)
            producer_load(grad_out_pipeline, grad_outs, batch, head, query_start, buffer_state)
            producer_load(query_pipeline, queries, batch, head, query_start, buffer_state)
        query_phase = query_phase ^ 1
        state = load_key_value_tiles(
            keys, values, more_keys, more_values, key_pipeline, value_pipeline, params, batch,
            head // QHEADS_PER_KVHEAD, blocks, state, STAGES,
        )  # fmt: skip
        work_id = next_work
    publish_end(params, work_state)


@gluon.jit
def consumer(grad_queries, lse_tensors, pipelines, params, WARPGROUP: gl.constexpr,
             MASKED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Computes 64 queries of each work tile. `state` is that of the last tile read, or of O."""
    query_pipeline, grad_out_pipeline, key_pipeline, value_pipeline = pipelines
    HEAD_DIMS: gl.constexpr = grad_queries.block_type.shape[3]
    TILE_N: gl.constexpr = key_pipeline.buffers.shape[3]
    TILES_PER_BLOCK: gl.constexpr = params.column_tokens // TILE_N
    S_LAYOUT: gl.constexpr = accumulator_layout(TILE_N)
    DQ_LAYOUT: gl.constexpr = accumulator_layout(HEAD_DIMS)
    query = stage_matrix(query_pipeline, WARPGROUP)
    grad_out = stage_matrix(grad_out_pipeline, WARPGROUP)
    release_all_stages(key_pipeline)
    release_all_stages(value_pipeline)
    state = PipelineState(STAGES - 1, 1)
    query_phase = 0
    work_state = PipelineState(0, 0)
    work, work_state = receive_work(params, work_state)
    while work.row >= 0:
        n_masked = (work.blocks.n_partial + work.blocks.n_clipped) * TILES_PER_BLOCK
        n_tiles = n_masked + work.blocks.n_full * TILES_PER_BLOCK
        bh = work.batch * params.sizes.heads + work.head
        query_start = work.row * params.row_tokens + WARPGROUP * WARPGROUP_M
        state = advance(state, STAGES)
        lse_log2, minus_delta = prologue(
            lse_tensors, pipelines, params, bh, query_start, state, query_phase, WARPGROUP,
            S_LAYOUT,
        )  # fmt: skip
        dq = gl.zeros([WARPGROUP_M, HEAD_DIMS], gl.float32, DQ_LAYOUT)  # [64, D]
        consumer_wait(query_pipeline, PipelineState(WARPGROUP, query_phase))
        # Two loops, unlike the forward kernel: one took up to 5 % longer on local masks.
        if MASKED:
            for i in range(0, n_masked):
                dq, state = mma_one_tile(
                    dq, state, i, lse_log2, minus_delta, query, grad_out, key_pipeline,
                    value_pipeline, params, work.blocks, bh, query_start, True,
                    Constants(WARPGROUP, STAGES, S_LAYOUT, DQ_LAYOUT),
                )  # fmt: skip
        for i in range(n_masked, n_tiles):
            dq, state = mma_one_tile(
                dq, state, i, lse_log2, minus_delta, query, grad_out, key_pipeline,
                value_pipeline, params, work.blocks, bh, query_start, False,
                Constants(WARPGROUP, STAGES, S_LAYOUT, DQ_LAYOUT),
            )  # fmt: skip
        consumer_release(grad_out_pipeline, PipelineState(WARPGROUP, query_phase))
        # All products that read Q have completed, so dQ is stored through its buffer.
        query.store((dq * (params.scale_log2 * LN2)).to(grad_queries.dtype))
        fence_async_shared()
        dq_buffer = query_pipeline.buffers.index(WARPGROUP)
        tma_store(grad_queries, [work.batch, work.head, query_start, 0], dq_buffer)
        tma_store_wait(0)
        consumer_release(query_pipeline, PipelineState(WARPGROUP, query_phase))
        query_phase = query_phase ^ 1
        work, work_state = receive_work(params, work_state)


@gluon.jit
def prologue(lse_tensors, pipelines, params, bh, query_start, state, query_phase,
             WARPGROUP: gl.constexpr, S_LAYOUT: gl.constexpr):  # fmt: skip
    """(log2(e) * LSE, -delta), each [64], of this warpgroup's queries; also writes both.

    O [64, Dv] is in the stage `state` of the pipeline of keys or of values.
    """
    _, grad_out_pipeline, key_pipeline, value_pipeline = pipelines
    VALUE_DIMS: gl.constexpr = grad_out_pipeline.buffers.shape[4]
    IS_WIDER: gl.constexpr = key_pipeline.buffers.shape[4] < VALUE_DIMS
    OUT_IN_KEYS: gl.constexpr = WARPGROUP == 0 and not (
        params.row_tokens == WARPGROUP_M and IS_WIDER
    )
    LAYOUT: gl.constexpr = delta_input_layout(VALUE_DIMS)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    # A thread reads LSE and delta of the rows of S that it holds, so no exchange is needed.
    tokens = query_start + gl.arange(0, WARPGROUP_M, layout=gl.SliceLayout(1, LAYOUT))
    lse_log2, grad_lse = read_lse(lse_tensors, bh, tokens, params.sizes.q_len)
    consumer_wait(key_pipeline, state)
    consumer_wait(value_pipeline, state)
    out_pipeline = key_pipeline if OUT_IN_KEYS else value_pipeline
    out = as_matrix(stage_as(out_pipeline, state.stage, WARPGROUP_M, VALUE_DIMS))
    out = out.load(LAYOUT)  # [64, D]
    consumer_wait(grad_out_pipeline, PipelineState(WARPGROUP, query_phase))
    grad_out = stage_matrix(grad_out_pipeline, WARPGROUP).load(LAYOUT)  # [64, D]
    minus_delta = compute_minus_delta(out, grad_out, grad_lse)
    padded_len = gl.cdiv(params.sizes.q_len, params.row_tokens) * params.row_tokens
    write_lse_delta(lse_tensors, lse_log2, minus_delta, bh, tokens, padded_len)
    # These loads of O must complete before TMA overwrites its buffers.
    fence_async_shared()
    consumer_release(value_pipeline, state)
    consumer_release(key_pipeline, state)
    lse_log2 = gl.convert_layout(lse_log2, ROW_LAYOUT, assert_trivial=True)
    return lse_log2, gl.convert_layout(minus_delta, ROW_LAYOUT, assert_trivial=True)


@gluon.jit
def mma_one_tile(dq, state, i, lse_log2, minus_delta, query, grad_out, key_pipeline,
                 value_pipeline, params, blocks, bh, query_start, PARTIAL: gl.constexpr,
                 const):  # fmt: skip
    """dQ + dS_i K_i. Tile i is in the stage after `state`."""
    TILE_N: gl.constexpr = key_pipeline.buffers.shape[3]
    state = advance(state, const.STAGES)
    if PARTIAL:
        words = key_mask_words(
            params, blocks, i, const.WARPGROUP * WARPGROUP_M, TILE_N, const.S_LAYOUT
        )
    key = stage_matrix(key_pipeline, state.stage)
    value = stage_matrix(value_pipeline, state.stage)
    zeros = gl.zeros([WARPGROUP_M, TILE_N], gl.float32, const.S_LAYOUT)
    consumer_wait(key_pipeline, state)
    # S = Q K^T: [64, D] [D, N] -> [64, N]
    scores = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    consumer_wait(value_pipeline, state)
    # dP = dO V^T: [64, D] [D, N] -> [64, N]
    dp = warpgroup_mma(grad_out, value.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if params.dropout.threshold is not None or params.has_score_mod:
        key_start = tile_start(params, blocks, i, TILE_N)
    if params.dropout.threshold is not None:
        keep_words = dropout_row_words(params.dropout, bh, query_start, key_start, TILE_N)
    # dP may still run while P is computed.
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if params.has_score_mod:
        scores, derivative = apply_score_mod(
            scores, params, bh, query_start, key_start, const.S_LAYOUT, False
        )
    p = gl.exp2(scores * softmax_scale_log2(params) - gl.expand_dims(lse_log2, 1))
    if params.has_derivative:
        p = p * derivative  # only dS uses it: dS = P * derivative * (dP - delta)
    if PARTIAL:
        p = gl.where(element_mask(words, TILE_N, const.S_LAYOUT), p, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    # V is not needed any more; dS K still reads K.
    consumer_release(value_pipeline, state)
    if params.dropout.threshold is not None:
        word, bit = keep_bits(keep_words, TILE_N, const.S_LAYOUT)
        dp = where_bit(word, bit, dp) * params.dropout.keep_scale
    # dS = P * (dP - delta): [64, N]
    ds = as_operand_a(p * (dp + gl.expand_dims(minus_delta, 1)), key.dtype, const.ACC_LAYOUT)
    # dQ += dS K: [64, N] [N, D] -> [64, D]
    dq = warpgroup_mma(ds, key, dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    consumer_release(key_pipeline, state)
    return dq, state
