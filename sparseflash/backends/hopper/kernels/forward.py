"""The forward kernel: O = softmax(S) V and LSE of one block row of queries per work tile.

It also writes the maximum logits if the call asks for them.

Persistent and warp specialised, after Shah et al., "FlashAttention-3", 2024. In tiles of 128
queries, which two consumer warpgroups share:

    producer        | Q  K0 V0 K1 V1 K2 V2 ...                      TMA loads, one warp
    load-wait warp  |    K0 full, K1 full: signal both, V0 full ...           one warp
    warpgroup 0     |   S0 | softmax 0 | S1, PV0 | softmax 1 | S2, PV1 | ... | O, LSE
    warpgroup 1     |      S0 | softmax 0 | S1, PV0 | softmax 1 | ...        | O, LSE

Each warpgroup owns 64 queries. Ping-pong: they issue S_i = Q K_i^T and O += P_{i-1} V_{i-1}
alternately, so that the tensor cores work for one while the other is in softmax; within a
warpgroup softmax i overlaps P_{i-1} V_{i-1}.

In tiles of 192 queries x 128 keys a CTA has a third warpgroup. They issue in the order 0, 1, 2,
the load-wait warp signals all three, and all read Q from shared memory. In tiles of 64 a CTA has
one warpgroup. Its softmax overlaps with products of other CTAs on the same multiprocessor. With
packed heads (PACKED_HEADS = 2) it has two: a work tile is the same 64 queries of two query heads,
one for each warpgroup, which share their key head and their mask. So K and V are loaded once for
both, and the warpgroups alternate as in tiles of 128.

The online softmax is in base 2. `row_max` is the running maximum of the unscaled scores Q K^T.
`row_sum` is the running sum of exp2(scale_log2 * (Q K^T - row_max)), divided among the threads
that share a row. scale_log2 is scale * log2(e), or 1 if a soft cap, a score function or a bias has
already scaled the scores (device/scores.py).
"""

from typing import NamedTuple

from sparseflash.backends.hopper.device.barriers import (
    pingpong_signal,
    pingpong_wait,
    signal_warpgroup,
)
from sparseflash.backends.hopper.device.block_list import (
    key_blocks_of_row,
    load_key_value_tiles,
    tile_start,
)
from sparseflash.backends.hopper.device.budgets import (
    CONSUMER_REGISTERS,
    MAX_QUERY_REGISTER_DIMS,
    PRODUCER_REGISTERS,
    REGISTERS_BESIDE_3_CONSUMERS,
    REGISTERS_OF_3_CONSUMERS,
)
from sparseflash.backends.hopper.device.dropout import dropout_row_words, keep_bits
from sparseflash.backends.hopper.device.gluon_compat import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque,
    sync_partition,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
    where_bit,
)
from sparseflash.backends.hopper.device.layouts import (
    THREADS_PER_ROW,
    WARPGROUP_M,
    accumulator_layout,
    as_operand_a,
    operand_a_layout,
    rescale_rows,
    thread_row_layout,
)
from sparseflash.backends.hopper.device.masking import element_mask, key_mask_words_or_zeros
from sparseflash.backends.hopper.device.params import (
    LN2,
    NEG_INF,
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


class SoftmaxState(NamedTuple):
    """State of the online softmax: row_max [64]; row_sum [64, 4].

    Column t of row_sum is the partial sum of thread t of the four that share a row.
    """

    row_max: gl.tensor
    row_sum: gl.tensor


@gluon.jit(**unspecialized_arguments("lse", "max_logits"))
def forward_kernel(
    queries, keys, values, more_keys, more_values, outs, lse, max_logits,
    row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask,
    key_lengths, work_counter,
    heads, q_len, k_len, mask_heads, num_rows, num_work_tiles, heads_per_group, mask_batch_stride,
    own_columns,
    scale_log2, seed_low, seed_high, threshold, keep_scale, softcap, bias, bias_stride,
    score_floats, score_integers, score_layout,
    SCORE: gl.constexpr, QHEADS_PER_KVHEAD: gl.constexpr, MASKED: gl.constexpr,
    ROW_TOKENS: gl.constexpr, COLUMN_TOKENS: gl.constexpr,
    PACKED_HEADS: gl.constexpr, STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    table = Table(row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles,
                  head_to_mask)  # fmt: skip
    sizes = Sizes(heads, q_len, k_len, mask_heads, num_rows, num_work_tiles, heads_per_group,
                  mask_batch_stride, own_columns)  # fmt: skip
    WARPGROUPS: gl.constexpr = num_warpgroups(ROW_TOKENS, PACKED_HEADS)
    DIMS: gl.constexpr = queries.block_type.shape[3]
    LOAD_WAIT_WARPS: gl.constexpr = num_load_wait_warps(ROW_TOKENS * PACKED_HEADS, DIMS, MASKED)
    # O is stored through the buffer of Q.
    if outs.block_type.shape[3] > queries.block_type.shape[3]:
        query_pipeline = make_pipeline(outs, WARPGROUPS * QUERY_STAGES, 1)
    else:
        query_pipeline = make_pipeline(queries, WARPGROUPS * QUERY_STAGES, 1)
    key_pipeline = make_named_barrier_pipeline(keys, 0, STAGES, WARPGROUPS, LOAD_WAIT_WARPS)
    value_pipeline = make_named_barrier_pipeline(
        values, STAGES, STAGES, WARPGROUPS, LOAD_WAIT_WARPS
    )
    work_queue = make_work_queue(WARPGROUPS + LOAD_WAIT_WARPS)
    dropout = Dropout(seed_low, seed_high, threshold, keep_scale)
    # Threads initialised the mbarriers; TMA signals them through the async proxy.
    fence_async_shared()
    specialize_warps(
        queries, keys, values, more_keys, more_values, outs, lse, max_logits,
        (query_pipeline, key_pipeline, value_pipeline),
        Params(ROW_TOKENS, COLUMN_TOKENS, table, sizes, key_lengths, work_counter, work_queue,
               scale_log2, dropout, ScoreParams(softcap, bias, bias_stride,
                           ScorePointers(score_floats, score_integers, score_layout)), SCORE,
               has_score_mod(softcap, bias, SCORE), has_derivative(softcap, SCORE)),
        LOAD_WAIT_WARPS, QHEADS_PER_KVHEAD, MASKED, PACKED_HEADS, STAGES, QUERY_STAGES,
    )  # fmt: skip


@gluon.constexpr_function
def num_warpgroups(row_tokens, packed_heads):
    """Consumer warpgroups: each computes 64 queries of one head."""
    return row_tokens * packed_heads // WARPGROUP_M.value


@gluon.constexpr_function
def first_row_of(warpgroup, packed_heads):
    """The first query of a warpgroup in the block row: all packed heads begin at query 0."""
    return warpgroup // packed_heads * WARPGROUP_M.value


@gluon.constexpr_function
def num_load_wait_warps(rows, dims, masked):
    """1 if a load-wait warp makes the kernel faster, else 0; rows: of S, of all warpgroups."""
    # At 64 dims masks of full blocks are 1 to 4 % faster without it.
    return int(rows > WARPGROUP_M.value and (dims == 128 or (dims == 64 and masked)))


@gluon.constexpr_function
def holds_query_in_registers(rows, dims):
    """Whether registers hold Q, so that products read K alone; rows: of S, of all warpgroups."""
    return dims <= MAX_QUERY_REGISTER_DIMS.value and rows <= 2 * WARPGROUP_M.value


@gluon.jit
def specialize_warps(queries, keys, values, more_keys, more_values, outs, lse, max_logits,
                     pipelines, params, LOAD_WAIT_WARPS: gl.constexpr,
                     QHEADS_PER_KVHEAD: gl.constexpr, MASKED: gl.constexpr,
                     PACKED_HEADS: gl.constexpr, STAGES: gl.constexpr,
                     QUERY_STAGES: gl.constexpr):  # fmt: skip
    """Starts a consumer in each warpgroup, the producer and the load-wait warp in a warp each."""
    WARPGROUPS: gl.constexpr = num_warpgroups(params.row_tokens, PACKED_HEADS)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (outs, lse, max_logits, pipelines, params, 0, LOAD_WAIT_WARPS, MASKED,
                            PACKED_HEADS, STAGES, QUERY_STAGES)),
                (producer, (queries, keys, values, more_keys, more_values, pipelines, params,
                            QHEADS_PER_KVHEAD, PACKED_HEADS, STAGES, QUERY_STAGES)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (consumer, (outs, lse, max_logits, pipelines, params, 0, LOAD_WAIT_WARPS, MASKED,
                            PACKED_HEADS, STAGES, QUERY_STAGES)),
                (consumer, (outs, lse, max_logits, pipelines, params, 1, LOAD_WAIT_WARPS, MASKED,
                            PACKED_HEADS, STAGES, QUERY_STAGES)),
                (consumer, (outs, lse, max_logits, pipelines, params, 2, LOAD_WAIT_WARPS, MASKED,
                            PACKED_HEADS, STAGES, QUERY_STAGES)),
                (producer, (queries, keys, values, more_keys, more_values, pipelines, params,
                            QHEADS_PER_KVHEAD, PACKED_HEADS, STAGES, QUERY_STAGES)),
                (load_wait_warp, (pipelines, params, LOAD_WAIT_WARPS, WARPGROUPS, STAGES)),
            ],
            [4, 4, 1, 1],
            [REGISTERS_OF_3_CONSUMERS, REGISTERS_OF_3_CONSUMERS, REGISTERS_BESIDE_3_CONSUMERS,
             REGISTERS_BESIDE_3_CONSUMERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (outs, lse, max_logits, pipelines, params, 0, LOAD_WAIT_WARPS, MASKED,
                            PACKED_HEADS, STAGES, QUERY_STAGES)),
                (consumer, (outs, lse, max_logits, pipelines, params, 1, LOAD_WAIT_WARPS, MASKED,
                            PACKED_HEADS, STAGES, QUERY_STAGES)),
                (producer, (queries, keys, values, more_keys, more_values, pipelines, params,
                            QHEADS_PER_KVHEAD, PACKED_HEADS, STAGES, QUERY_STAGES)),
                (load_wait_warp, (pipelines, params, LOAD_WAIT_WARPS, WARPGROUPS, STAGES)),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def producer(queries, keys, values, more_keys, more_values, pipelines, params,
             QHEADS_PER_KVHEAD: gl.constexpr, PACKED_HEADS: gl.constexpr,
             STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr):  # fmt: skip
    """Loads the tiles that consumers read, as far ahead as the pipelines allow."""
    WARPGROUPS: gl.constexpr = num_warpgroups(params.row_tokens, PACKED_HEADS)
    query_pipeline, key_pipeline, value_pipeline = pipelines
    state = PipelineState(0, 1)
    query_state = PipelineState(0, 1)
    work_state = PipelineState(0, 1)
    work_id = gl.program_id(0)
    while work_id < params.sizes.num_work_tiles:
        # Early, so that the atomic completes while this work tile is loaded.
        next_work = next_work_id(params, work_id)
        batch, head, row = decode_work_id(params, work_id, PACKED_HEADS)
        if PACKED_HEADS > 1:
            head = head * PACKED_HEADS  # the first of them
        blocks = key_blocks_of_row(params, batch, head, row)
        work_state = publish_work(params, WorkTile(batch, head, row, blocks), work_state)
        for warpgroup in gl.static_range(WARPGROUPS):
            query_start = row * params.row_tokens + first_row_of(warpgroup, PACKED_HEADS)
            query_head = head_of_warpgroup(head, warpgroup, PACKED_HEADS)
            buffer_state = warpgroup_state(query_state, WARPGROUPS, warpgroup)
            producer_load(query_pipeline, queries, batch, query_head, query_start, buffer_state)
        query_state = advance(query_state, QUERY_STAGES)
        state = load_key_value_tiles(
            keys, values, more_keys, more_values, key_pipeline, value_pipeline, params, batch,
            head // QHEADS_PER_KVHEAD, blocks, state, STAGES,
        )  # fmt: skip
        work_id = next_work
    publish_end(params, work_state)


@gluon.jit
def head_of_warpgroup(head, WARPGROUP: gl.constexpr, PACKED_HEADS: gl.constexpr):
    """The query head that a warpgroup computes; head: the first query head of its work tile."""
    if PACKED_HEADS > 1:
        head = head + WARPGROUP % PACKED_HEADS
    return head


@gluon.jit
def load_wait_warp(pipelines, params, LOAD_WAIT_WARPS: gl.constexpr, WARPGROUPS: gl.constexpr,
                   STAGES: gl.constexpr):  # fmt: skip
    """Waits for loads on behalf of all warpgroups and signals their ping-pong barriers.

    Triton lowers mbarrier.wait in a partition of several warps with a partition-wide bar.sync,
    which would join the four warps of a warpgroup in every step. This warp must release every
    stage too, for the empty barriers count it.
    """
    _, key_pipeline, value_pipeline = pipelines
    TILES_PER_BLOCK: gl.constexpr = params.column_tokens // key_pipeline.buffers.shape[3]
    if LOAD_WAIT_WARPS > 0:
        state = PipelineState(0, 0)
        work_state = PipelineState(0, 0)
        release_all_stages(key_pipeline)
        release_all_stages(value_pipeline)
        work, work_state = receive_work(params, work_state)
        while work.row >= 0:
            n_blocks = work.blocks.n_partial + work.blocks.n_clipped + work.blocks.n_full
            for i in range(n_blocks * TILES_PER_BLOCK):
                consumer_wait(key_pipeline, state)
                consumer_release(key_pipeline, state)
                # A step issues S_i, which needs K_i, and P_{i-1} V_{i-1}: both tiles are full now.
                # The first tile of a row is outside of the ping-pong.
                if i > 0:
                    signal_warpgroup(0, LOAD_WAIT_WARPS)
                    signal_warpgroup(1, LOAD_WAIT_WARPS)
                    if WARPGROUPS == 3:
                        signal_warpgroup(2, LOAD_WAIT_WARPS)
                consumer_wait(value_pipeline, state)
                consumer_release(value_pipeline, state)
                state = advance(state, STAGES)
            work, work_state = receive_work(params, work_state)


@gluon.jit
def consumer(outs, lse, max_logits, pipelines, params, WARPGROUP: gl.constexpr,
             LOAD_WAIT_WARPS: gl.constexpr, MASKED: gl.constexpr, PACKED_HEADS: gl.constexpr,
             STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr):  # fmt: skip
    """Computes 64 queries of each work tile. `state` is that of the tile last consumed."""
    query_pipeline, key_pipeline, value_pipeline = pipelines
    WARPGROUPS: gl.constexpr = num_warpgroups(params.row_tokens, PACKED_HEADS)
    FIRST_ROW: gl.constexpr = first_row_of(WARPGROUP, PACKED_HEADS)
    VALUE_DIMS: gl.constexpr = outs.block_type.shape[3]
    TILE_N: gl.constexpr = key_pipeline.buffers.shape[3]
    TILES_PER_BLOCK: gl.constexpr = params.column_tokens // TILE_N
    S_LAYOUT: gl.constexpr = accumulator_layout(TILE_N)
    O_LAYOUT: gl.constexpr = accumulator_layout(VALUE_DIMS)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    offsets = gl.arange(0, WARPGROUP_M, layout=ROW_LAYOUT)
    state = PipelineState(STAGES - 1, 1)  # the first advance gives stage 0 in phase 0
    query_state = PipelineState(0, 0)
    query_buffer = WARPGROUP
    rows_done = 0
    work_state = PipelineState(0, 0)
    release_all_stages(key_pipeline)
    release_all_stages(value_pipeline)
    # Warpgroup 0 issues first, so the last one signals it here. All have the same number of tiles,
    # so every later wait has its signal.
    if WARPGROUPS > 1 and WARPGROUP == WARPGROUPS - 1:
        pingpong_signal(WARPGROUP, WARPGROUPS, LOAD_WAIT_WARPS)
    work, work_state = receive_work(params, work_state)
    while work.row >= 0:
        n_masked = (work.blocks.n_partial + work.blocks.n_clipped) * TILES_PER_BLOCK
        n_tiles = n_masked + work.blocks.n_full * TILES_PER_BLOCK
        prev_query_buffer = query_buffer
        query_buffer = query_state.stage * WARPGROUPS + WARPGROUP
        head = head_of_warpgroup(work.head, WARPGROUP, PACKED_HEADS)
        bh = work.batch * params.sizes.heads + head
        query_start = work.row * params.row_tokens + FIRST_ROW
        row_max = gl.full([WARPGROUP_M], NEG_INF, gl.float32, ROW_LAYOUT)
        row_sum = gl.zeros([WARPGROUP_M, THREADS_PER_ROW], gl.float32, thread_row_layout())
        softmax = SoftmaxState(row_max, row_sum)
        acc = gl.zeros([WARPGROUP_M, VALUE_DIMS], gl.float32, O_LAYOUT)  # [64, D]
        # TMA may still store O of the previous row from its query buffer.
        is_storing = (rows_done > 0) & (QUERY_STAGES > 1)
        # With one stage, Q of this row is loaded into that same buffer. It is released before the
        # wait for Q: otherwise the producer would never load Q.
        if QUERY_STAGES == 1:
            release_query_after_store(query_pipeline, prev_query_buffer, rows_done > 0)
        consumer_wait(query_pipeline, PipelineState(query_buffer, query_state.phase))
        if n_tiles > 0:
            acc, softmax, state = mainloop(
                acc, softmax, state, query_buffer, pipelines, prev_query_buffer, is_storing,
                params, work.blocks, bh, query_start, n_masked, n_tiles,
                Constants(WARPGROUP, STAGES, S_LAYOUT, O_LAYOUT), LOAD_WAIT_WARPS, MASKED,
                PACKED_HEADS,
            )  # fmt: skip
        else:
            release_query_after_store(query_pipeline, prev_query_buffer, is_storing)
        row_sum = gl.convert_layout(
            gl.sum(softmax.row_sum, axis=1), ROW_LAYOUT, assert_trivial=True
        )
        is_empty = row_sum == 0.0
        row_sum = gl.where(is_empty, 1.0, row_sum)
        row_max_log2 = softmax.row_max * softmax_scale_log2(params)
        row_lse = gl.where(is_empty, NEG_INF, (row_max_log2 + gl.log2(row_sum)) * LN2)
        tokens = query_start + offsets
        lse_ptr = lse + bh.to(gl.int64) * params.sizes.q_len
        gl.store(lse_ptr + tokens, row_lse, mask=tokens < params.sizes.q_len)
        if max_logits is not None:
            max_logits_ptr = max_logits + bh.to(gl.int64) * params.sizes.q_len
            gl.store(max_logits_ptr + tokens, row_max_log2 * LN2, mask=tokens < params.sizes.q_len)
        out_scale = 1.0 / row_sum
        if params.dropout.threshold is not None:
            out_scale = out_scale * params.dropout.keep_scale
        # All products that read Q have completed, so O is stored through its buffer.
        out_tile = as_matrix(stage_as(query_pipeline, query_buffer, WARPGROUP_M, VALUE_DIMS))
        out_tile.store(rescale_rows(acc, out_scale, O_LAYOUT).to(outs.dtype))  # [64, D]
        fence_async_shared()
        out_buffer = stage_as(query_pipeline, query_buffer, WARPGROUP_M, VALUE_DIMS)
        tma_store(outs, [work.batch, head, query_start, 0], out_buffer)
        query_state = advance(query_state, QUERY_STAGES)
        rows_done += 1
        work, work_state = receive_work(params, work_state)
    # The shared memory of a CTA is freed when it ends.
    tma_store_wait(0)


@gluon.jit
def mainloop(acc, softmax, state, query_buffer, pipelines, prev_query_buffer, is_storing, params,
             blocks, bh, query_start, n_masked, n_tiles, const, LOAD_WAIT_WARPS: gl.constexpr,
             MASKED: gl.constexpr, PACKED_HEADS: gl.constexpr):  # fmt: skip
    """All tiles of a row, at least one. The first `n_masked` of them have element masks.

    prev_query_buffer: query buffer of the previous row
    is_storing:        whether TMA may still store O of the previous row from that buffer
    """
    query_pipeline, key_pipeline, value_pipeline = pipelines
    TILE_N: gl.constexpr = key_pipeline.buffers.shape[3]
    HEAD_DIMS: gl.constexpr = key_pipeline.buffers.shape[4]
    FIRST_ROW: gl.constexpr = first_row_of(const.WARPGROUP, PACKED_HEADS)
    if holds_query_in_registers(params.row_tokens * PACKED_HEADS, HEAD_DIMS):
        query = as_matrix(stage_as(query_pipeline, query_buffer, WARPGROUP_M, HEAD_DIMS))
        query = query.load(operand_a_layout(const.S_LAYOUT))
    else:
        query = stage_matrix(query_pipeline, opaque(query_buffer))
    state = advance(state, const.STAGES)
    if MASKED:
        words = key_mask_words_or_zeros(
            params, blocks, 0, n_masked, FIRST_ROW, TILE_N, const.S_LAYOUT
        )
    consumer_wait(key_pipeline, state)
    key = stage_matrix(key_pipeline, state.stage)
    zeros = gl.zeros([WARPGROUP_M, TILE_N], gl.float32, const.S_LAYOUT)
    # S_0 = Q K_0^T: [64, D] [D, N] -> [64, N]
    scores = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    consumer_release(key_pipeline, state)
    if params.has_score_mod:
        key_start = tile_start(params, blocks, 0, TILE_N)
        scores, _ = apply_score_mod(
            scores, params, bh, query_start, key_start, const.S_LAYOUT, False
        )
    if MASKED and n_masked > 0:
        scores = gl.where(element_mask(words, TILE_N, const.S_LAYOUT), scores, NEG_INF)
    p, softmax, correction = online_softmax(scores, softmax, params, MASKED)
    if params.dropout.threshold is not None:
        key_start = tile_start(params, blocks, 0, TILE_N)
        keep_words = dropout_row_words(params.dropout, bh, query_start, key_start, TILE_N)
        p = where_bit(*keep_bits(keep_words, TILE_N, const.S_LAYOUT), p)
    acc = rescale_rows(acc, correction, const.ACC_LAYOUT)
    p = as_operand_a(p, query.dtype, const.ACC_LAYOUT)
    # Not earlier, so that the store of O of the previous row overlaps the first tile of this row.
    release_query_after_store(query_pipeline, prev_query_buffer, is_storing)
    if LOAD_WAIT_WARPS > 0:
        # Without it Triton would synchronise the warpgroup in every step of the loop.
        sync_partition()
    # One loop for partial and full tiles: with two, short rows took up to 1.3 times as long.
    for i in range(1, n_tiles):
        acc, softmax, p, state = mma_one_tile(
            acc, softmax, p, state, query, key_pipeline, value_pipeline, params, blocks, bh,
            query_start, i, n_masked, const, LOAD_WAIT_WARPS, MASKED, PACKED_HEADS,
        )  # fmt: skip
    consumer_wait(value_pipeline, state)
    # O += P V of the last tile: [64, N] [N, D] -> [64, D]
    acc = warpgroup_mma(p, stage_matrix(value_pipeline, state.stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    consumer_release(value_pipeline, state)
    return acc, softmax, state


@gluon.jit
def mma_one_tile(acc, softmax, prev_p, prev_state, query, key_pipeline, value_pipeline, params,
                 blocks, bh, query_start, i, n_masked, const, LOAD_WAIT_WARPS: gl.constexpr,
                 MASKED: gl.constexpr, PACKED_HEADS: gl.constexpr):  # fmt: skip
    """S_i and its softmax, and O += P_{i-1} V_{i-1}. V_{i-1} is in the stage of `prev_state`."""
    TILE_N: gl.constexpr = key_pipeline.buffers.shape[3]
    WARPGROUPS: gl.constexpr = num_warpgroups(params.row_tokens, PACKED_HEADS)
    FIRST_ROW: gl.constexpr = first_row_of(const.WARPGROUP, PACKED_HEADS)
    prev_value = stage_matrix(value_pipeline, prev_state.stage)
    state = advance(prev_state, const.STAGES)
    if MASKED:
        words = key_mask_words_or_zeros(
            params, blocks, i, n_masked, FIRST_ROW, TILE_N, const.S_LAYOUT
        )
    zeros = gl.zeros([WARPGROUP_M, TILE_N], gl.float32, const.S_LAYOUT)
    if LOAD_WAIT_WARPS == 0:
        consumer_wait(key_pipeline, state)
    key = stage_matrix(key_pipeline, state.stage)
    if WARPGROUPS > 1:
        pingpong_wait(const.WARPGROUP, LOAD_WAIT_WARPS)
    # S_i = Q K_i^T: [64, D] [D, N] -> [64, N]
    scores = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if LOAD_WAIT_WARPS == 0:
        consumer_wait(value_pipeline, prev_state)
    # O += P_{i-1} V_{i-1}: [64, N] [N, D] -> [64, D]
    acc = warpgroup_mma(prev_p, prev_value, acc, is_async=True)
    # After both products: to signal between them was no faster.
    if WARPGROUPS > 1:
        pingpong_signal(const.WARPGROUP, WARPGROUPS, LOAD_WAIT_WARPS)
    if params.dropout.threshold is not None or params.has_score_mod:
        key_start = tile_start(params, blocks, i, TILE_N)
    if params.dropout.threshold is not None:
        keep_words = dropout_row_words(params.dropout, bh, query_start, key_start, TILE_N)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    consumer_release(key_pipeline, state)
    if params.has_score_mod:
        scores, _ = apply_score_mod(
            scores, params, bh, query_start, key_start, const.S_LAYOUT, False
        )
    if MASKED and i < n_masked:
        scores = gl.where(element_mask(words, TILE_N, const.S_LAYOUT), scores, NEG_INF)
    p, softmax, correction = online_softmax(scores, softmax, params, MASKED)
    if params.dropout.threshold is not None:
        p = where_bit(*keep_bits(keep_words, TILE_N, const.S_LAYOUT), p)
    # The compiler moves this wait up, after some of the exponentials or before the row maxima.
    acc = warpgroup_mma_wait(0, deps=(acc,))
    consumer_release(value_pipeline, prev_state)
    # In every step: to skip it where no row max has risen was 2 to 6 % slower.
    acc = rescale_rows(acc, correction, const.ACC_LAYOUT)
    return acc, softmax, as_operand_a(p, prev_value.dtype, const.ACC_LAYOUT), state


@gluon.jit
def online_softmax(scores, softmax, params, MASKED: gl.constexpr):
    """(P [64, N], the new state, the correction [64]) of P = exp2(scale_log2 * (S - row_max))."""
    row_max = gl.maximum(softmax.row_max, gl.max(scores, axis=1))
    # Scaled after the maximum, so that the argument of exp2 is one FMA an element.
    scale = softmax_scale_log2(params)
    max_scaled = row_max * scale
    if MASKED or params.score_params.pointers.layout is not None:
        # All pairs of the row may be masked so far, and -inf - (-inf) would be NaN.
        max_scaled = gl.where(row_max == NEG_INF, 0.0, max_scaled)
    p = gl.exp2(scores * scale - gl.expand_dims(max_scaled, 1))
    correction = gl.exp2(softmax.row_max * scale - max_scaled)
    row_sum = update_row_sum(softmax.row_sum, correction, p)
    return p, SoftmaxState(row_max, row_sum), correction


@gluon.jit
def update_row_sum(row_sum, correction, p):
    """row_sum * correction + row sums of P, [64, 4]. Each thread adds up its own columns.

    The four threads of a row add their partial sums only after the last tile, so that no step
    exchanges data between threads.
    """
    THREAD_LAYOUT: gl.constexpr = thread_row_layout()
    TILE_N: gl.constexpr = p.shape[1]
    sums = p.reshape([WARPGROUP_M, TILE_N // (2 * THREADS_PER_ROW), THREADS_PER_ROW, 2])
    sums = gl.sum(gl.sum(sums, axis=3), axis=1)  # [64, 4]
    sums = gl.convert_layout(sums, THREAD_LAYOUT, assert_trivial=True)
    return rescale_rows(row_sum, correction, THREAD_LAYOUT) + sums


@gluon.jit
def release_query_after_store(query_pipeline, query_buffer, is_storing):
    """Releases the query buffer of the previous row after TMA has stored O from it."""
    tma_store_wait(0)
    mbarrier.arrive(query_pipeline.empty_barriers.index(query_buffer), count=1, pred=is_storing)
