"""The fused kernel of dQ, dK and dV: one block row of keys per work tile, five products a tile.

Persistent and warp specialised like the kernel of dK and dV. With tiles of 64 dims:

    producer      | K V | Q LSE delta dO | Q LSE delta dO | ...                  TMA, one warp
    warpgroup 0   | dK_{i-1} S_i dP_i | P_i | dV_i | dS_i -> shared | ...
    warpgroup 1   | dK_{i-1} S_i dP_i | P_i | dV_i | dS_i -> shared | ...
    dQ warpgroup  | dQ_{i-1} | add dQ_{i-1} | dQ_i | add dQ_i | ...

Registers do not suffice for a dQ warpgroup beside tiles of 128 dims. There the other two compute
dQ, each half of the dims:

    warpgroup 0   | dK_{i-1} S_i dP_i | P_i | dV_i, dQ_{i-1} | dS_i -> shared | add dQ_{i-1} | ...
    warpgroup 1   | dK_{i-1} S_i dP_i | P_i | dV_i, dQ_{i-1} | dS_i -> shared | add dQ_{i-1} | ...

S^T = K Q^T and dP^T = V dO^T give P^T and dS^T, the left operands of dV += P^T dO and dK += dS^T
Q. dS also goes through shared memory: dQ = dS K sums over the keys of both warpgroups. It is added
to dQ in global memory, to which the CTAs of other keys add too. The order of those sums, and with
it the last bits of dQ, differs from run to run, unless sums are ordered, with tiles of 64 dims:
then two warps of their own, the dQ adders, each add one of the two tiles of every block, after the
tiles of other keys that come before it.

    dQ adder      | wait for ordinal i, dQ_i in shared memory | add dQ_i | count ordinal i | ...

dK of a tile, and dQ too where there is no dQ warpgroup, is computed during the next tile, beside
S^T and dV. So products run while P and dS are computed. No product may be in flight from one
iteration of the loop to the next: ptxas would then wait for every product.
"""

from typing import NamedTuple

from sparseflash.backends.hopper.device.block_list import block_index, tile_start
from sparseflash.backends.hopper.device.budgets import (
    CONSUMER_REGISTERS,
    CONSUMER_REGISTERS_BESIDE_DQ,
    DQ_REGISTERS,
    PRODUCER_REGISTERS,
)
from sparseflash.backends.hopper.device.dropout import transposed_keep_bits
from sparseflash.backends.hopper.device.gluon_compat import (
    copy_registers,
    count_completed_stores,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque,
    reinterpret,
    tma_store,
    tma_store_wait,
    to_float32,
    wait_for_count,
    warpgroup_mma,
    warpgroup_mma_wait,
    where_bit,
)
from sparseflash.backends.hopper.device.layouts import (
    WARPGROUP_M,
    accumulator_layout,
    as_operand_a,
    operand_a_layout,
)
from sparseflash.backends.hopper.device.masking import element_mask, query_mask_words_or_zeros
from sparseflash.backends.hopper.device.params import (
    LN2,
    NEG_INF,
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
    Pipeline,
    PipelineState,
    advance,
    as_matrix,
    consumer_release,
    consumer_wait,
    make_mbarriers,
    make_named_barrier_pipeline,
    make_pipeline,
    release_all_stages,
    stage_matrix,
    warpgroup_state,
)
from sparseflash.backends.hopper.device.scheduler import make_work_queue, receive_work
from sparseflash.backends.hopper.kernels.backward_dkdv import producer
from sparseflash.backends.hopper.kernels.dq_accumulator import (
    added_dims,
    first_tile_of_head,
    reduce_add,
    store_to_shared,
)
from sparseflash.backends.triton_common.score_mods import ScorePointers

TILES_PER_BLOCK = gl.constexpr(2)  # tiles of 64 queries
# Buffers of dS for each warpgroup. Without a dQ warpgroup, two buffers need no empty barriers. A
# warpgroup writes dS_{i+2} into the buffer of dS_i. The other warpgroup signals its own dS_{i+1}
# after it has read dS_i, and this warpgroup waits for that dS_{i+1} before it writes dS_{i+2}.
DS_STAGES = gl.constexpr(2)


class DsExchange(NamedTuple):
    """Buffers for dS^T of both warpgroups, [64 keys, 64 queries] each.

    A warpgroup writes buffer 2 * stage + warpgroup. The dQ warpgroup reads it, or both warpgroups
    do. Only the dQ warpgroup signals an empty barrier, one for each stage.
    """

    buffers: gl.shared_memory_descriptor
    full_barriers: gl.shared_memory_descriptor
    empty_barriers: gl.shared_memory_descriptor


class Order(NamedTuple):
    """The order of the sums of dQ, see hopper.order; all None if there is none.

    next_of_work:   next work tile of the same CTA
    first_ordinals: for each (batch, head, block row of keys), where its ordinals start
    ordinals:       for each block of a row, in the order of computation, how many blocks of the
        same queries are added before it
    counters:       for each tile of dQ, how many blocks have been added
    """

    next_of_work: gl.tensor
    first_ordinals: gl.tensor
    ordinals: gl.tensor
    counters: gl.tensor


class DqHandover(NamedTuple):
    """Barriers of the buffers of dQ through which the dQ adders get tiles, one for each buffer."""

    full_barriers: gl.shared_memory_descriptor
    empty_barriers: gl.shared_memory_descriptor


class Pipelines(NamedTuple):
    """All buffers of a CTA.

    dq_buffers:   float32, sources of TMA reductions to dQ: two of the dQ warpgroup, or one of each
        warpgroup
    dq_handover:  barriers of dq_buffers; None if sums are not ordered
    grad_buffers: one for each warpgroup, from which dV and dK are stored
    """

    query_pipeline: Pipeline
    grad_out_pipeline: Pipeline
    key_pipeline: Pipeline
    value_pipeline: Pipeline
    lse_delta_buffers: gl.shared_memory_descriptor
    ds_exchange: DsExchange
    dq_buffers: gl.shared_memory_descriptor
    dq_handover: DqHandover
    grad_buffers: gl.shared_memory_descriptor


class TileStates(NamedTuple):
    """Where the operands of a tile of queries are in shared memory.

    query:     stage of its Q and dO
    ds:        stage of its dS
    kv_buffer: first of the two buffers, one for each warpgroup, of K and V of its work tile
    """

    query: PipelineState
    ds: PipelineState
    kv_buffer: gl.tensor


@gluon.jit(**unspecialized_arguments("next_of_work", "first_ordinals", "ordinals", "counters"))
def backward_fused_kernel(
    queries, grad_outs, lse_delta, keys, values, more_keys, more_values, dq_accumulator, grad_keys,
    grad_values, next_of_work, first_ordinals, ordinals, counters,
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
    dq_shape: gl.constexpr = [2] + dq_accumulator.block_type.shape  # noqa: RUF005 (no star in Gluon)
    DQ_WARPGROUP: gl.constexpr = has_dq_warpgroup(dq_accumulator, keys)
    query_pipeline = make_named_barrier_pipeline(queries, 0, STAGES, 2)
    grad_out_pipeline = make_named_barrier_pipeline(grad_outs, STAGES, STAGES, 2)
    # Keys are read by both warpgroups, or by one of them and the dQ warpgroup; values by one.
    key_pipeline = make_pipeline(keys, 2 * KEY_STAGES, 2)
    value_pipeline = make_pipeline(values, 2 * KEY_STAGES, 1)
    lse_delta_buffers = gl.allocate_shared_memory(
        gl.float32, [2 * STAGES, 1, WARPGROUP_M], lse_delta.layout
    )
    ds_exchange = make_ds_exchange(queries.dtype, DQ_WARPGROUP)
    dq_buffers = gl.allocate_shared_memory(gl.float32, dq_shape, dq_accumulator.layout)
    dq_handover = counters  # None if sums are not ordered
    if counters is not None:
        dq_handover = make_dq_handover()
    pipelines = Pipelines(
        query_pipeline, grad_out_pipeline, key_pipeline, value_pipeline, lse_delta_buffers,
        ds_exchange, dq_buffers, dq_handover,
        make_grad_buffers(grad_keys, dq_buffers, DQ_WARPGROUP),
    )  # fmt: skip
    load_pipelines = (
        query_pipeline,
        grad_out_pipeline,
        key_pipeline,
        value_pipeline,
        lse_delta_buffers,
    )
    ORDERED: gl.constexpr = counters is not None
    gl.static_assert(DQ_WARPGROUP or not ORDERED, "ordered sums of dQ need the dQ warpgroup")
    ADDERS: gl.constexpr = 2 if ORDERED else 0
    work_queue = make_work_queue((3 if DQ_WARPGROUP else 2) + ADDERS)
    dropout = Dropout(seed_low, seed_high, threshold, keep_scale)
    fence_async_shared()
    specialize_warps(
        queries, grad_outs, lse_delta, keys, values, more_keys, more_values, dq_accumulator,
        grad_keys, grad_values, pipelines, load_pipelines,
        Params(ROW_TOKENS, COLUMN_TOKENS, table, sizes, key_lengths, work_counter, work_queue,
               scale_log2, dropout, ScoreParams(softcap, bias, bias_stride,
                           ScorePointers(score_floats, score_integers, score_layout)), SCORE,
               has_score_mod(softcap, bias, SCORE), has_derivative(softcap, SCORE)),
        Order(next_of_work, first_ordinals, ordinals, counters), QHEADS_PER_KVHEAD, MASKED, STAGES,
        KEY_STAGES, DQ_WARPGROUP,
    )  # fmt: skip


@gluon.jit
def specialize_warps(queries, grad_outs, lse_delta, keys, values, more_keys, more_values,
                     dq_accumulator, grad_keys, grad_values, pipelines, load_pipelines, params,
                     order, QHEADS_PER_KVHEAD: gl.constexpr, MASKED: gl.constexpr,
                     STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
                     DQ_WARPGROUP: gl.constexpr):  # fmt: skip
    """Starts two consumers, and the dQ warpgroup if there is one; the producer and, if sums are
    ordered, two dQ adders, in one warp each.

    There are two dQ adders, because one does not keep up with the steps. Their registers are those
    of the producer's padding.
    """
    if order.counters is not None:
        gl.warp_specialize(
            [
                (consumer, (dq_accumulator, grad_keys, grad_values, pipelines, params, 0,
                            QHEADS_PER_KVHEAD, MASKED, STAGES, KEY_STAGES, True)),
                (consumer, (dq_accumulator, grad_keys, grad_values, pipelines, params, 1,
                            QHEADS_PER_KVHEAD, MASKED, STAGES, KEY_STAGES, True)),
                (dq_warpgroup, (dq_accumulator, pipelines, params, QHEADS_PER_KVHEAD, KEY_STAGES)),
                (producer, (queries, grad_outs, lse_delta, keys, values, more_keys, more_values,
                            grad_keys, load_pipelines, params, QHEADS_PER_KVHEAD, STAGES,
                            KEY_STAGES, order.next_of_work)),
                (dq_adder, (dq_accumulator, pipelines, params, order, QHEADS_PER_KVHEAD, 0)),
                (dq_adder, (dq_accumulator, pipelines, params, order, QHEADS_PER_KVHEAD, 1)),
            ],
            [4, 4, 1, 1, 1],
            [CONSUMER_REGISTERS_BESIDE_DQ, DQ_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS,
             PRODUCER_REGISTERS],
        )  # fmt: skip
    elif DQ_WARPGROUP:
        gl.warp_specialize(
            [
                (consumer, (dq_accumulator, grad_keys, grad_values, pipelines, params, 0,
                            QHEADS_PER_KVHEAD, MASKED, STAGES, KEY_STAGES, True)),
                (consumer, (dq_accumulator, grad_keys, grad_values, pipelines, params, 1,
                            QHEADS_PER_KVHEAD, MASKED, STAGES, KEY_STAGES, True)),
                (dq_warpgroup, (dq_accumulator, pipelines, params, QHEADS_PER_KVHEAD, KEY_STAGES)),
                (producer, (queries, grad_outs, lse_delta, keys, values, more_keys, more_values,
                            grad_keys, load_pipelines, params, QHEADS_PER_KVHEAD, STAGES,
                            KEY_STAGES)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS_BESIDE_DQ, DQ_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consumer, (dq_accumulator, grad_keys, grad_values, pipelines, params, 0,
                            QHEADS_PER_KVHEAD, MASKED, STAGES, KEY_STAGES, False)),
                (consumer, (dq_accumulator, grad_keys, grad_values, pipelines, params, 1,
                            QHEADS_PER_KVHEAD, MASKED, STAGES, KEY_STAGES, False)),
                (producer, (queries, grad_outs, lse_delta, keys, values, more_keys, more_values,
                            grad_keys, load_pipelines, params, QHEADS_PER_KVHEAD, STAGES,
                            KEY_STAGES)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def make_dq_handover():
    return DqHandover(make_mbarriers(2, 1), make_mbarriers(2, 1))


@gluon.jit
def make_grad_buffers(grad_keys, dq_buffers, DQ_WARPGROUP: gl.constexpr):
    """Buffers for dV and dK: those of dQ, or new ones if the dQ warpgroup uses these."""
    shape: gl.constexpr = [2] + grad_keys.block_type.shape  # noqa: RUF005 (no star in Gluon)
    buffers = dq_buffers
    if DQ_WARPGROUP:
        buffers = gl.allocate_shared_memory(grad_keys.dtype, shape, grad_keys.layout)
    return buffers


@gluon.jit
def make_ds_exchange(DTYPE: gl.constexpr, DQ_WARPGROUP: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_M, WARPGROUP_M], DTYPE)
    shape: gl.constexpr = [DS_STAGES * 2, WARPGROUP_M, WARPGROUP_M]
    buffers = gl.allocate_shared_memory(DTYPE, shape, LAYOUT)
    full_barriers = make_mbarriers(DS_STAGES * 2, 1)
    empty_barriers = full_barriers  # not used
    if DQ_WARPGROUP:
        empty_barriers = make_mbarriers(DS_STAGES, 1)
    return DsExchange(buffers, full_barriers, empty_barriers)


@gluon.jit
def consumer(dq_accumulator, grad_keys, grad_values, pipelines, params, WARPGROUP: gl.constexpr,
             QHEADS_PER_KVHEAD: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
             KEY_STAGES: gl.constexpr, DQ_WARPGROUP: gl.constexpr):  # fmt: skip
    """Computes dK and dV of 64 keys of each work tile, and half of dQ of all queries unless there
    is a dQ warpgroup.
    """
    HEAD_DIMS: gl.constexpr = pipelines.key_pipeline.buffers.shape[4]
    GRAD_LAYOUT: gl.constexpr = accumulator_layout(HEAD_DIMS)
    grad_buffer = reinterpret(
        pipelines.grad_buffers.index(WARPGROUP), grad_keys.dtype, grad_keys.block_type.shape,
        grad_keys.layout,
    )  # fmt: skip
    release_all_stages(pipelines.query_pipeline)
    release_all_stages(pipelines.grad_out_pipeline)
    states = TileStates(PipelineState(0, 0), PipelineState(0, 0), 0)
    key_state = PipelineState(0, 0)
    work_state = PipelineState(0, 0)
    work, work_state = receive_work(params, work_state)
    while work.row >= 0:
        key_start = work.row * params.row_tokens + WARPGROUP * WARPGROUP_M
        # receive_work overwrites `work` before dK and dV are stored.
        batch, kv_head = work.batch, work.head
        dk = gl.zeros([WARPGROUP_M, HEAD_DIMS], gl.float32, GRAD_LAYOUT)  # [64, D]
        dv = gl.zeros([WARPGROUP_M, HEAD_DIMS], gl.float32, GRAD_LAYOUT)  # [64, D]
        kv_buffer = key_state.stage * 2
        states = TileStates(states.query, states.ds, kv_buffer)
        for warpgroup in gl.static_range(2):
            if not DQ_WARPGROUP or warpgroup == WARPGROUP:
                buffer_state = warpgroup_state(key_state, 2, warpgroup)
                consumer_wait(pipelines.key_pipeline, buffer_state)
        kv_state = PipelineState(kv_buffer + WARPGROUP, key_state.phase)
        consumer_wait(pipelines.value_pipeline, kv_state)
        kv_operands = None, None
        if DQ_WARPGROUP and params.dropout.threshold is None:
            key = load_operand_a(pipelines.key_pipeline, kv_buffer + WARPGROUP)
            value = load_operand_a(pipelines.value_pipeline, kv_buffer + WARPGROUP)
            kv_operands = key, value
            # Those loads must complete before TMA overwrites their buffers.
            fence_async_shared()
        for i_head in range(QHEADS_PER_KVHEAD):
            head = kv_head * QHEADS_PER_KVHEAD + i_head
            if work.blocks.n_partial + work.blocks.n_full > 0:
                dk, dv, states = mainloop(
                    dk, dv, states, kv_operands, dq_accumulator, pipelines, params, work.blocks,
                    batch, head, key_start, WARPGROUP, MASKED, STAGES, GRAD_LAYOUT, DQ_WARPGROUP,
                )  # fmt: skip
            work, work_state = receive_work(params, work_state)
        for warpgroup in gl.static_range(2):
            if not DQ_WARPGROUP or warpgroup == WARPGROUP:
                buffer_state = warpgroup_state(key_state, 2, warpgroup)
                consumer_release(pipelines.key_pipeline, buffer_state)
        consumer_release(pipelines.value_pipeline, kv_state)
        key_state = advance(key_state, KEY_STAGES)
        dk = dk * (params.scale_log2 * LN2)
        if params.dropout.threshold is not None:
            dv = dv * params.dropout.keep_scale
        store_gradient(grad_values, grad_buffer, dv, batch, kv_head, key_start)
        store_gradient(grad_keys, grad_buffer, dk, batch, kv_head, key_start)
    tma_store_wait(0)


@gluon.constexpr_function
def has_dq_warpgroup(dq_accumulator, keys):
    """Whether all dims of a tile are added to dQ at a time, which the dQ warpgroup does.

    In that case the registers of the other warpgroups can also hold their K and V.
    """
    rows, columns = dq_accumulator.block_type.shape
    return rows * columns == WARPGROUP_M * keys.block_type.shape[3]


@gluon.jit
def load_operand_a(pipeline, buffer):
    """This warpgroup's half of K or V, [64, D], as a left operand in registers.

    Products that read it from registers need no bandwidth of shared memory.
    """
    LAYOUT: gl.constexpr = accumulator_layout(WARPGROUP_M)
    return stage_matrix(pipeline, buffer).load(operand_a_layout(LAYOUT))


@gluon.jit
def store_gradient(descriptor, buffer, gradient, batch, head, token):
    """Stores a gradient [64, D] after all earlier stores from the buffer have completed."""
    tma_store_wait(0)
    as_matrix(buffer).store(gradient.to(buffer.dtype))
    fence_async_shared()
    tma_store(descriptor, [batch, head, token, 0], buffer)


@gluon.jit
def mainloop(dk, dv, states, kv_operands, dq_accumulator, pipelines, params, blocks, batch, head,
             key_start, WARPGROUP: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
             GRAD_LAYOUT: gl.constexpr, DQ_WARPGROUP: gl.constexpr):  # fmt: skip
    """All tiles of queries of a head; there is at least one block.

    kv_operands: K and V of this warpgroup in registers, or None and None
    """
    bh = batch * params.sizes.heads + head
    first_tile = first_tile_of_head(bh, params)
    n_tiles = (blocks.n_partial + blocks.n_full) * TILES_PER_BLOCK
    block = block_index(params, blocks, 0)
    dk, dv, ds = mma_one_tile(
        dk, dv, None, None, None, states, kv_operands, dq_accumulator, pipelines, params, blocks,
        bh, key_start, 0, WARPGROUP, MASKED, GRAD_LAYOUT, DQ_WARPGROUP,
    )  # fmt: skip
    for i in range(1, n_tiles):
        next_block = block_index(params, blocks, i // TILES_PER_BLOCK)
        prev_dq_tile = None
        if not DQ_WARPGROUP:
            prev_dq_tile = first_tile + block * TILES_PER_BLOCK + (i - 1) % TILES_PER_BLOCK
        next_states = advance_states(states, STAGES)
        dk, dv, ds = mma_one_tile(
            dk, dv, ds, states, prev_dq_tile, next_states, kv_operands, dq_accumulator, pipelines,
            params, blocks, bh, key_start, i, WARPGROUP, MASKED, GRAD_LAYOUT, DQ_WARPGROUP,
        )  # fmt: skip
        states = next_states
        block = next_block
    dk = issue_dk_mma(dk, ds, pipelines, states)
    if DQ_WARPGROUP:
        dk = warpgroup_mma_wait(0, deps=(dk,))
    else:
        dq = issue_dq_mma(pipelines, states, WARPGROUP)
        tma_store_wait(0)
        dk, dq = warpgroup_mma_wait(0, deps=(dk, dq))
        dq_buffer = pipelines.dq_buffers.index(WARPGROUP)
        store_to_shared(dq_buffer, dq)
        fence_async_shared()
        last_tile = first_tile + block * TILES_PER_BLOCK + (TILES_PER_BLOCK - 1)
        reduce_add(dq_accumulator, dq_buffer, last_tile * 2 + WARPGROUP)
    consumer_release(pipelines.query_pipeline, states.query)
    return dk, dv, advance_states(states, STAGES)


@gluon.jit
def advance_states(states, STAGES: gl.constexpr):
    """The states of the next tile."""
    query, ds = advance(states.query, STAGES), advance(states.ds, DS_STAGES)
    return TileStates(query, ds, states.kv_buffer)


@gluon.jit
def mma_one_tile(dk, dv, prev_ds, prev_states, prev_dq_tile, states, kv_operands, dq_accumulator,
                 pipelines, params, blocks, bh, key_start, i, WARPGROUP: gl.constexpr,
                 MASKED: gl.constexpr, GRAD_LAYOUT: gl.constexpr,
                 DQ_WARPGROUP: gl.constexpr):  # fmt: skip
    """(dK + dS_{i-1}^T Q_{i-1}, dV + P_i^T dO_i, dS_i^T); adds dS_{i-1} K to dQ.

    prev_states:  those of tile i - 1, None at the first tile
    prev_dq_tile: index of tile i - 1 in the accumulator of dQ, None at the first tile or if the dQ
        warpgroup adds it
    """
    S_LAYOUT: gl.constexpr = accumulator_layout(WARPGROUP_M)
    state = states.query
    key, value = kv_operands
    if key is None:
        # Computed in every step: descriptors that live through the loop take registers.
        buffer = opaque(states.kv_buffer + WARPGROUP)
        key = stage_matrix(pipelines.key_pipeline, buffer)
        value = stage_matrix(pipelines.value_pipeline, buffer)
    query = stage_matrix(pipelines.query_pipeline, state.stage)
    grad_out = stage_matrix(pipelines.grad_out_pipeline, state.stage)
    n_masked = blocks.n_partial * TILES_PER_BLOCK
    if MASKED:
        words = query_mask_words_or_zeros(
            params, blocks, i, n_masked, WARPGROUP * WARPGROUP_M, S_LAYOUT
        )
    consumer_wait(pipelines.grad_out_pipeline, state)
    consumer_wait(pipelines.query_pipeline, state)
    scores, minus_delta = load_lse_delta(
        pipelines.lse_delta_buffers, params, state.stage, key_start, blocks.key_length, S_LAYOUT
    )
    dp = minus_delta
    if params.dropout.threshold is not None:
        dp = gl.zeros([WARPGROUP_M, WARPGROUP_M], gl.float32, S_LAYOUT)
    if prev_states is not None:
        dk = issue_dk_mma(dk, prev_ds, pipelines, prev_states)
    # S^T - LSE / scale = K Q^T - LSE / scale: [64 keys, D] [D, 64 queries] -> [64, 64]
    scores = warpgroup_mma(key, query.permute((1, 0)), scores, is_async=True)
    # dP^T - delta = V dO^T - delta: [64 keys, D] [D, 64 queries] -> [64, 64]
    dp = warpgroup_mma(value, grad_out.permute((1, 0)), dp, is_async=True)
    if params.dropout.threshold is not None:
        query_start = tile_start(params, blocks, i, WARPGROUP_M)
        word, bit = transposed_keep_bits(params.dropout, bh, query_start, key_start, S_LAYOUT)
    # The buffer of dQ is written below, so its previous TMA reduction must have completed.
    if prev_dq_tile is not None:
        tma_store_wait(0)
    if DQ_WARPGROUP:
        # The dQ warpgroup must have read the previous dS of the buffer that is written below.
        ds_empty = pipelines.ds_exchange.empty_barriers.index(states.ds.stage)
        mbarrier.wait(ds_empty, states.ds.phase ^ 1)
    dk, scores = warpgroup_mma_wait(1, deps=(dk, scores))
    p = gl.exp2(scores * params.scale_log2)
    if MASKED and i < n_masked:
        p = gl.where(element_mask(words, WARPGROUP_M, S_LAYOUT), p, 0.0)
    p_dropped = p
    if params.dropout.threshold is not None:
        p_dropped = where_bit(word, bit, p)
    if not DQ_WARPGROUP:
        p = p.to(value.dtype)  # 16 bits, so that registers hold dQ beside dV
    # dV += P^T dO: [64 keys, 64 queries] [64 queries, D] -> [64 keys, D]
    p_dropped = as_operand_a(p_dropped, value.dtype, GRAD_LAYOUT)
    dv = warpgroup_mma(p_dropped, grad_out, dv, is_async=True)
    if prev_dq_tile is not None:
        dq = issue_dq_mma(pipelines, prev_states, WARPGROUP)
    # dV and the two products of dQ may still run.
    dp = warpgroup_mma_wait(1 if prev_dq_tile is None else 3, deps=(dp,))
    if params.dropout.threshold is not None:
        dp = where_bit(word, bit, dp) * params.dropout.keep_scale + minus_delta
    # dS^T = P^T * (dP^T - delta): [64 keys, 64 queries]
    if not DQ_WARPGROUP:
        p = to_float32(p)
    ds = (p * dp).to(value.dtype)
    ds_buffer = states.ds.stage * 2 + WARPGROUP
    pipelines.ds_exchange.buffers.index(ds_buffer).store(ds)
    dq_buffer = pipelines.dq_buffers.index(WARPGROUP)
    if prev_dq_tile is None:
        dv = warpgroup_mma_wait(0, deps=(dv,))
    else:
        dv, dq = warpgroup_mma_wait(0, deps=(dv, dq))
        store_to_shared(dq_buffer, dq)
    # One fence for dS, which wgmma reads, and dQ, which TMA reads. Signalling dS before that wait
    # was slower: up to 4 % with a second fence for dQ, 1 % beside the dQ warpgroup.
    fence_async_shared()
    mbarrier.arrive(pipelines.ds_exchange.full_barriers.index(ds_buffer), count=1)
    if prev_dq_tile is not None:
        reduce_add(dq_accumulator, dq_buffer, prev_dq_tile * 2 + WARPGROUP)
    if prev_states is not None:
        consumer_release(pipelines.query_pipeline, prev_states.query)
    consumer_release(pipelines.grad_out_pipeline, state)
    # Copied while no product runs: otherwise ptxas runs out of registers and waits for every
    # product.
    return dk, dv, as_operand_a(copy_registers(ds), value.dtype, GRAD_LAYOUT)


@gluon.jit
def load_lse_delta(lse_delta_buffers, params, stage, key_start, key_length,
                   S_LAYOUT: gl.constexpr):  # fmt: skip
    """(-LSE / scale, -delta), each [64 keys, 64 queries]: initial accumulators of S^T and dP^T.

    The first is -inf for keys past the key length. Otherwise their P might be inf, and dQ NaN.

    Both are loaded before any product is issued, for two reasons: a later load from shared memory
    would wait for the operands of these products, and no product runs while the compiler writes
    the initial accumulator of another one.
    """
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    lse_log2 = lse_delta_buffers.index(2 * stage).reshape([WARPGROUP_M]).load(COLUMN_LAYOUT)
    minus_delta = lse_delta_buffers.index(2 * stage + 1).reshape([WARPGROUP_M])
    minus_delta = minus_delta.load(COLUMN_LAYOUT)
    keys = key_start + gl.arange(0, WARPGROUP_M, layout=gl.SliceLayout(1, S_LAYOUT))
    key_padding = gl.where(keys < key_length, 0.0, NEG_INF)
    scores = gl.expand_dims(lse_log2, 0) * (-1.0 / params.scale_log2)
    scores = scores + gl.expand_dims(key_padding, 1)
    return scores, gl.expand_dims(minus_delta, 0).broadcast_to([WARPGROUP_M, WARPGROUP_M])


@gluon.jit
def issue_dk_mma(dk, ds, pipelines, states):
    """dK + dS^T Q, in flight: [64 keys, 64 queries] [64 queries, D] -> [64 keys, D]"""
    query = stage_matrix(pipelines.query_pipeline, states.query.stage)
    return warpgroup_mma(ds, query, dk, is_async=True)


@gluon.jit
def issue_dq_mma(pipelines, states, WARPGROUP: gl.constexpr):
    """This warpgroup's half of the dims of dS K, in flight.

    Two products, one for the keys of each warpgroup: [64 queries, 64 keys] [64 keys, added dims]
    -> [64 queries, added dims].
    """
    ADDED_DIMS: gl.constexpr = added_dims(pipelines.dq_buffers)
    ds_exchange = pipelines.ds_exchange
    dq = gl.zeros([WARPGROUP_M, ADDED_DIMS], gl.float32, accumulator_layout(ADDED_DIMS))
    for i in gl.static_range(2):
        warpgroup = (WARPGROUP + i) % 2
        ds_buffer = states.ds.stage * 2 + warpgroup
        # Its own dS comes first and needs no wait.
        if i == 1:
            mbarrier.wait(ds_exchange.full_barriers.index(ds_buffer), states.ds.phase)
        ds = ds_exchange.buffers.index(ds_buffer).permute((1, 0))
        key = stage_matrix(pipelines.key_pipeline, opaque(states.kv_buffer + warpgroup))
        key = key.slice(WARPGROUP * ADDED_DIMS, ADDED_DIMS, dim=1)
        dq = warpgroup_mma(ds, key, dq, use_acc=i == 1, is_async=True)
    return dq


@gluon.jit
def dq_warpgroup(dq_accumulator, pipelines, params, QHEADS_PER_KVHEAD: gl.constexpr,
                 KEY_STAGES: gl.constexpr):  # fmt: skip
    """Adds dS K of all tiles of queries of each work tile to dQ."""
    ds_state, key_state = PipelineState(0, 0), PipelineState(0, 0)
    work_state = PipelineState(0, 0)
    work, work_state = receive_work(params, work_state)
    while work.row >= 0:
        batch, kv_head = work.batch, work.head
        for warpgroup in gl.static_range(2):
            consumer_wait(pipelines.key_pipeline, warpgroup_state(key_state, 2, warpgroup))
        for i_head in range(QHEADS_PER_KVHEAD):
            bh = batch * params.sizes.heads + kv_head * QHEADS_PER_KVHEAD + i_head
            first_tile = first_tile_of_head(bh, params)
            n_tiles = (work.blocks.n_partial + work.blocks.n_full) * TILES_PER_BLOCK
            for i in range(n_tiles):
                block = block_index(params, work.blocks, i // TILES_PER_BLOCK)
                tile = first_tile + block * TILES_PER_BLOCK + i % TILES_PER_BLOCK
                add_one_tile(dq_accumulator, pipelines, ds_state, key_state.stage * 2, tile)
                ds_state = advance(ds_state, DS_STAGES)
            work, work_state = receive_work(params, work_state)
        for warpgroup in gl.static_range(2):
            consumer_release(pipelines.key_pipeline, warpgroup_state(key_state, 2, warpgroup))
        key_state = advance(key_state, KEY_STAGES)
    tma_store_wait(0)


@gluon.jit
def add_one_tile(dq_accumulator, pipelines, ds_state, kv_buffer, tile):
    """Adds dS K, [64 queries, 128 keys] [128 keys, D], to a tile of dQ."""
    HEAD_DIMS: gl.constexpr = added_dims(pipelines.dq_buffers)
    ds_exchange = pipelines.ds_exchange
    dq = gl.zeros([WARPGROUP_M, HEAD_DIMS], gl.float32, accumulator_layout(HEAD_DIMS))
    for warpgroup in gl.static_range(2):
        ds_buffer = ds_state.stage * 2 + warpgroup
        mbarrier.wait(ds_exchange.full_barriers.index(ds_buffer), ds_state.phase)
        ds = ds_exchange.buffers.index(ds_buffer).permute((1, 0))
        key = stage_matrix(pipelines.key_pipeline, opaque(kv_buffer + warpgroup))
        dq = warpgroup_mma(ds, key, dq, use_acc=warpgroup == 1, is_async=True)
    # There are as many buffers of dQ as stages of dS. The TMA reduction from this one, two tiles
    # ago, must have read it: that of this warpgroup, or of a dQ adder.
    tma_store_wait(DS_STAGES - 1)
    if pipelines.dq_handover is not None:
        dq_empty = pipelines.dq_handover.empty_barriers.index(ds_state.stage)
        mbarrier.wait(dq_empty, ds_state.phase ^ 1)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    dq_buffer = pipelines.dq_buffers.index(ds_state.stage)
    store_to_shared(dq_buffer, dq)
    fence_async_shared()
    # Triton synchronises the warps here, each of which must have read dS.
    mbarrier.arrive(ds_exchange.empty_barriers.index(ds_state.stage), count=1)
    if pipelines.dq_handover is None:
        reduce_add(dq_accumulator, dq_buffer, tile)
    else:
        mbarrier.arrive(pipelines.dq_handover.full_barriers.index(ds_state.stage), count=1)


@gluon.jit
def dq_adder(dq_accumulator, pipelines, params, order, QHEADS_PER_KVHEAD: gl.constexpr,
             NUMBER: gl.constexpr):  # fmt: skip
    """Adds one tile of dQ of each block, when the ordinal of the block is reached, in one warp.

    What it reads from global memory is loaded during the addition before.

    NUMBER: 0 or 1, that of the tile in its block
    """
    phase = 0
    work_state = PipelineState(0, 0)
    work, work_state = receive_work(params, work_state)
    while work.row >= 0:
        batch, kv_head, row = work.batch, work.head, work.row
        for i_head in range(QHEADS_PER_KVHEAD):
            bh = batch * params.sizes.heads + kv_head * QHEADS_PER_KVHEAD + i_head
            first_tile = first_tile_of_head(bh, params) + NUMBER
            ordinals = order.ordinals + gl.load(
                order.first_ordinals + bh * params.sizes.num_rows + row
            )
            n_blocks = work.blocks.n_partial + work.blocks.n_full
            if n_blocks > 0:
                block = block_index(params, work.blocks, 0)
                ordinal = gl.load(ordinals)
                for i in range(n_blocks):
                    tile = first_tile + block * TILES_PER_BLOCK
                    wait_for_count(order.counters + tile, ordinal)
                    mbarrier.wait(pipelines.dq_handover.full_barriers.index(NUMBER), phase)
                    reduce_add(dq_accumulator, pipelines.dq_buffers.index(NUMBER), tile)
                    following = gl.minimum(i + 1, n_blocks - 1)
                    block = block_index(params, work.blocks, following)
                    ordinal = gl.load(ordinals + following)
                    tma_store_wait(0)
                    mbarrier.arrive(pipelines.dq_handover.empty_barriers.index(NUMBER), count=1)
                    count_completed_stores(order.counters + tile)
                    phase = phase ^ 1
            work, work_state = receive_work(params, work_state)
