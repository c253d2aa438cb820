"""The kernel of all three gradients: key rows, with five products for each block.

S^T = K Q^T and dP^T = V dO^T give P^T and dS^T, the left operands of dV += P^T dO and of
dK += dS^T Q, as in key_value_gradient. dS also goes through shared memory, where each group of
warps finds the keys of the other: each computes half of dS K (half the dims of every tile; all of
them of every other tile at 64 dims) and adds it to dQ in global memory, beside the programs of
other keys. The order of those sums, and with it the last bits of dQ, differs from run to run.

dK and dQ of a tile are computed with the next one, beside S^T and dV: so no group waits for the
other, and products run while the weights and dS are computed. Nothing may be in flight from one
round of the loop to the next: ptxas would then wait for every product.
"""

from typing import NamedTuple

from sparseflash.backends.hopper import device, dropout, element_masks, query_sums
from sparseflash.backends.hopper.device import PART
from sparseflash.backends.hopper.gluon_shim import (
    copied,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    opaque,
    reinterpreted,
    store_tile,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
    widened,
)
from sparseflash.backends.hopper.key_value_gradient import produce

PARTS = gl.constexpr(2)  # tiles of PART queries in a block
# Buffers of dS of each group. Where the other group reads it, a group writes one anew only after
# it has found the next one of the other there, which had then read it.
SIDES = gl.constexpr(2)


class Exchange(NamedTuple):
    """dS^T of both groups: entry 2 * side + group is filled by that group for both."""

    buffers: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor


class Rings(NamedTuple):
    """sum_buffers: for each group what it adds to dQ in global memory at a time"""

    query_ring: device.Ring
    grad_out_ring: device.Ring
    key_ring: device.Ring
    value_ring: device.Ring
    term_buffers: gl.shared_memory_descriptor
    exchange: Exchange
    sum_buffers: gl.shared_memory_descriptor


class Place(NamedTuple):
    """The buffers of a tile: in the rings of queries, its side of the exchange, and the first one
    of the keys and values of its row.
    """

    stage: gl.tensor
    phase: gl.tensor
    side: gl.tensor
    side_phase: gl.tensor
    own: gl.tensor


@gluon.jit(**device.unspecialized("key_lengths", "counter"))
def fused_gradient_kernel(
    queries, grad_outs, terms, keys, values, sums, grad_keys, grad_values,
    bounds, full_index, partial_index, partial_tile, order, bank, head_layer, key_lengths, counter,
    heads, q_len, k_len, mask_heads, rows, tiles, together, scale2,
    seed_low, seed_high, threshold, keep_scale,
    GROUP: gl.constexpr, MASKED: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
):  # fmt: skip
    table = device.Table(bounds, full_index, partial_index, partial_tile, order, bank, head_layer)
    sizes = device.Sizes(heads, q_len, k_len, mask_heads, rows, tiles, together)
    sum_shape: gl.constexpr = [2] + sums.block_type.shape  # noqa: RUF005 (no star in Gluon)
    rings = Rings(
        device.group_ring(queries, 0, STAGES, 2),
        device.group_ring(grad_outs, STAGES, STAGES, 2),
        device.ring(keys, 2 * KEY_STAGES, 2),
        device.ring(values, 2 * KEY_STAGES, 1),
        gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, PART], terms.layout),
        exchange_of(queries.dtype),
        gl.allocate_shared_memory(gl.float32, sum_shape, sums.layout),
    )
    loaded = (
        rings.query_ring,
        rings.grad_out_ring,
        rings.key_ring,
        rings.value_ring,
        rings.term_buffers,
    )
    announced = device.row_ring(2)
    drop = device.Dropout(seed_low, seed_high, threshold, keep_scale)
    fence_async_shared()
    specialize(
        queries, grad_outs, terms, keys, values, sums, grad_keys, grad_values, rings, loaded,
        device.Call(BLOCK, table, sizes, key_lengths, counter, announced, scale2, drop),
        GROUP, MASKED, STAGES, KEY_STAGES,
    )  # fmt: skip


@gluon.jit
def specialize(queries, grad_outs, terms, keys, values, sums, grad_keys, grad_values, rings,
               loaded, call, GROUP: gl.constexpr, MASKED: gl.constexpr,
               STAGES: gl.constexpr, KEY_STAGES: gl.constexpr):  # fmt: skip
    """Starts `consume` in each group of warps and `produce` in one warp."""
    gl.warp_specialize(
        [
            (consume, (sums, grad_keys, grad_values, rings, call, 0, GROUP, MASKED,
                       STAGES, KEY_STAGES)),
            (consume, (sums, grad_keys, grad_values, rings, call, 1, GROUP, MASKED,
                       STAGES, KEY_STAGES)),
            (produce, (queries, grad_outs, terms, keys, values, grad_keys, loaded, call,
                       GROUP, STAGES, KEY_STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def exchange_of(DTYPE: gl.constexpr):
    """An exchange of which every entry is filled by one group."""
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PART, PART], DTYPE)
    buffers = gl.allocate_shared_memory(DTYPE, [SIDES * 2, PART, PART], HALF)
    filled = gl.allocate_shared_memory(gl.int64, [SIDES * 2, 1], mbarrier.MBarrierLayout())
    for entry in gl.static_range(SIDES * 2):
        mbarrier.init(filled.index(entry), count=1)
    return Exchange(buffers, filled)


@gluon.jit
def consume(sums, grad_keys, grad_values, rings, call, MEMBER: gl.constexpr, GROUP: gl.constexpr,
            MASKED: gl.constexpr, STAGES: gl.constexpr,
            KEY_STAGES: gl.constexpr):  # fmt: skip
    """Computes dK and dV of one half of each tile, and half of dQ of all queries."""
    DIMS: gl.constexpr = rings.key_ring.buffers.shape[4]
    WHOLE: gl.constexpr = adds_whole_tiles(rings.sum_buffers, rings.key_ring.buffers)
    GRAD: gl.constexpr = device.product_layout(DIMS)
    # dV and dK leave by the buffer by which dQ did.
    leaving = reinterpreted(
        rings.sum_buffers.index(MEMBER), grad_keys.dtype, grad_keys.block_type.shape,
        grad_keys.layout,
    )  # fmt: skip
    device.hand_over(rings.query_ring)
    device.hand_over(rings.grad_out_ring)
    place = Place(0, 0, 0, 0, 0)
    key_stage, key_phase = 0, 0
    row_stage, row_phase = 0, 0
    batch, kv_head, row, walk, row_stage, row_phase = device.hear(call, row_stage, row_phase)
    while row >= 0:
        start = row * call.block + MEMBER * PART
        # The others are those of the next row before dK and dV of this one leave.
        own_batch, own_head = batch, kv_head
        dk = gl.zeros([PART, DIMS], gl.float32, GRAD)
        dv = gl.zeros([PART, DIMS], gl.float32, GRAD)
        own = key_stage * 2
        place = Place(place.stage, place.phase, place.side, place.side_phase, own)
        for part in gl.static_range(2):
            mbarrier.wait(rings.key_ring.filled.index(own + part), key_phase)
        mbarrier.wait(rings.value_ring.filled.index(own + MEMBER), key_phase)
        held = None, None
        if WHOLE:
            held = hold(rings.key_ring, own + MEMBER), hold(rings.value_ring, own + MEMBER)
            # Those loads have to be done before the accelerator fills their buffers.
            fence_async_shared()
        for member in range(GROUP):
            head = own_head * GROUP + member
            if walk.partials + walk.fulls > 0:
                dk, dv, place = visit_tiles(
                    dk, dv, place, held, sums, rings, call, walk, own_batch, head, start,
                    MEMBER, MASKED, STAGES, GRAD,
                )  # fmt: skip
            batch, kv_head, row, walk, row_stage, row_phase = device.hear(
                call, row_stage, row_phase
            )
        for part in gl.static_range(2):
            device.release(rings.key_ring, own + part)
        device.release(rings.value_ring, own + MEMBER)
        key_stage, key_phase = device.advance(key_stage, key_phase, KEY_STAGES)
        dk = dk * (call.scale2 * device.LN2)
        if call.dropout.threshold is not None:
            dv = dv * call.dropout.keep_scale
        leave(grad_values, leaving, dv, own_batch, own_head, start)
        leave(grad_keys, leaving, dk, own_batch, own_head, start)
    wait_for_stores(0)


@gluon.constexpr_function
def adds_whole_tiles(sum_buffers, key_buffers):
    """Whether a group adds all dims of every other tile of dQ, and not half of them of every tile.

    Then it has the registers to hold its keys and values, too.
    """
    return query_sums.share(sum_buffers) == key_buffers.shape[4]


@gluon.jit
def hold(ring, buffer):
    """This group's half of a tile as a left operand in registers: products that read it there
    leave shared memory to others.
    """
    PRODUCT: gl.constexpr = device.product_layout(PART)
    return device.matrix(ring, buffer).load(device.operand_layout(PRODUCT))


@gluon.jit
def leave(descriptor, buffer, matrix, batch, head, token):
    """Stores a matrix as soon as what is on its way from the buffer has left it."""
    wait_for_stores(0)
    device.as_matrix(buffer).store(matrix.to(buffer.dtype))
    fence_async_shared()
    store_tile(descriptor, [batch, head, token, 0], buffer)


@gluon.jit
def visit_tiles(dk, dv, place, held, sums, rings, call, walk, batch, head, start,
                MEMBER: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
                GRAD: gl.constexpr):  # fmt: skip
    """Adds the tiles of the listed blocks, of at least one.

    held: the keys and values of this group in registers, or None and None; start: the first key
    """
    pair = batch * call.sizes.heads + head
    # Which tile of a block it is has to be known where a group adds dQ of one of them alone.
    WHOLE: gl.constexpr = adds_whole_tiles(rings.sum_buffers, rings.key_ring.buffers)
    STEP: gl.constexpr = PARTS if WHOLE else 1
    first_tile = query_sums.first_tile(pair, call)
    count = (walk.partials + walk.fulls) * PARTS
    block = device.listed_block(call, walk, 0)
    dk, dv, ds = visit_tile(
        dk, dv, None, None, None, place, held, sums, rings, call, walk, pair, start, 0,
        MEMBER, MASKED, GRAD,
    )  # fmt: skip
    for i in range(1, count + 1 - STEP, STEP):
        ahead = device.listed_block(call, walk, (i + STEP - 1) // PARTS)
        for part in gl.static_range(STEP):
            tile = first_tile + block * PARTS + (i + part - 1) % PARTS
            following = after(place, STAGES)
            dk, dv, ds = visit_tile(
                dk, dv, ds, place, query_sums.added(tile, part, MEMBER, WHOLE), following,
                held, sums, rings, call, walk, pair, start, i + part, MEMBER, MASKED, GRAD,
            )  # fmt: skip
            place = following
        block = ahead
    tile = first_tile + block * PARTS
    last_tile = query_sums.added(tile + (PARTS - 1), PARTS - 1, MEMBER, WHOLE)
    if WHOLE:
        following = after(place, STAGES)
        dk, dv, ds = visit_tile(
            dk, dv, ds, place, query_sums.added(tile, 0, MEMBER, WHOLE), following,
            held, sums, rings, call, walk, pair, start, count - 1, MEMBER, MASKED, GRAD,
        )  # fmt: skip
        place = following
    dk = begin_key_gradient(dk, ds, rings, place)
    if last_tile is None:
        dk = warpgroup_mma_wait(0, deps=(dk,))
    else:
        dq = begin_query_gradient(rings, place, MEMBER)
        wait_for_stores(0)
        dk, dq = warpgroup_mma_wait(0, deps=(dk, dq))
        sum_buffer = rings.sum_buffers.index(MEMBER)
        query_sums.fill(sum_buffer, dq)
        fence_async_shared()
        query_sums.add(sums, sum_buffer, last_tile, MEMBER, WHOLE)
    device.leave(rings.query_ring, place.stage)
    return dk, dv, after(place, STAGES)


@gluon.jit
def after(place, STAGES: gl.constexpr):
    """The place of the next tile."""
    stage, phase = device.advance(place.stage, place.phase, STAGES)
    side, side_phase = device.advance(place.side, place.side_phase, SIDES)
    return Place(stage, phase, side, side_phase, place.own)


@gluon.jit
def visit_tile(dk, dv, last_ds, last, last_tile, place, held, sums, rings, call, walk, pair,
               start, i, MEMBER: gl.constexpr, MASKED: gl.constexpr,
               GRAD: gl.constexpr):  # fmt: skip
    """(dK, dV + P^T dO, dS^T) of the i-th tile of the listed blocks, which is at `place`.

    dK and dQ gain what the tile before it gives. That was at `last`, None at the first tile, and
    is number last_tile of the sums of dQ, None where the other group adds it.
    pair: of batch and head; start: the first key
    """
    SCORES: gl.constexpr = device.product_layout(PART)
    WHOLE: gl.constexpr = adds_whole_tiles(rings.sum_buffers, rings.key_ring.buffers)
    stage = place.stage
    key, value = held
    if key is None:
        # Found anew, since descriptors that live through the loop take registers.
        own = opaque(place.own + MEMBER)
        key, value = device.matrix(rings.key_ring, own), device.matrix(rings.value_ring, own)
    query = device.matrix(rings.query_ring, stage)
    grad_out = device.matrix(rings.grad_out_ring, stage)
    masked = walk.partials * PARTS
    if MASKED:
        words = element_masks.query_words(call, walk, i, masked, MEMBER * PART, SCORES)
    mbarrier.wait(rings.grad_out_ring.filled.index(stage), place.phase)
    mbarrier.wait(rings.query_ring.filled.index(stage), place.phase)
    scores, minus_delta = read_terms(rings.term_buffers, call, stage, start, walk.length, SCORES)
    dp = minus_delta
    if call.dropout.threshold is not None:
        dp = gl.zeros([PART, PART], gl.float32, SCORES)
    if last is not None:
        dk = begin_key_gradient(dk, last_ds, rings, last)
    scores = warpgroup_mma(key, query.permute((1, 0)), scores, is_async=True)
    dp = warpgroup_mma(value, grad_out.permute((1, 0)), dp, is_async=True)
    if call.dropout.threshold is not None:
        token = device.listed_token(call, walk, i, PART)
        kept = dropout.kept_words(call.dropout, pair, token, start, PART, SCORES)
        kept = dropout.transposed(kept, SCORES)
    if last_tile is not None:
        wait_for_stores(0)
    dk, scores = warpgroup_mma_wait(1, deps=(dk, scores))
    p = gl.exp2(scores * call.scale2)
    if MASKED and i < masked:
        p = gl.where(element_masks.attended(words, PART, SCORES), p, 0.0)
    p = p.to(value.dtype)  # which leaves registers for dQ
    weights = p
    if call.dropout.threshold is not None:
        weights = gl.where(kept, p, 0.0)
    dv = warpgroup_mma(device.operand(weights, value.dtype, GRAD), grad_out, dv, is_async=True)
    if last_tile is not None:
        dq = begin_query_gradient(rings, last, MEMBER)
    dp = warpgroup_mma_wait(1 if last_tile is None else 3, deps=(dp,))
    if call.dropout.threshold is not None:
        dp = gl.where(kept, dp * call.dropout.keep_scale, 0.0) + minus_delta
    ds = (widened(p) * dp).to(value.dtype)
    entry = place.side * 2 + MEMBER
    rings.exchange.buffers.index(entry).store(ds)
    sum_buffer = rings.sum_buffers.index(MEMBER)
    if last_tile is None:
        dv = warpgroup_mma_wait(0, deps=(dv,))
    else:
        dv, dq = warpgroup_mma_wait(0, deps=(dv, dq))
        query_sums.fill(sum_buffer, dq)
    fence_async_shared()
    mbarrier.arrive(rings.exchange.filled.index(entry), count=1)
    if last_tile is not None:
        query_sums.add(sums, sum_buffer, last_tile, MEMBER, WHOLE)
    if last is not None:
        device.leave(rings.query_ring, last.stage)
    device.leave(rings.grad_out_ring, stage)
    # While products run ptxas has no registers for it but those that it was computed in.
    return dk, dv, device.operand(copied(ds), value.dtype, GRAD)


@gluon.jit
def read_terms(term_buffers, call, stage, start, length, SCORES: gl.constexpr):
    """(-LSE / scale, -delta) of the queries of each score, to begin S^T and dP^T with; -inf for
    keys past the last one, whose weights might be inf otherwise, and dQ NaN.

    Before any product is begun: a load from shared memory would wait behind all that products
    read there, and the compiler lets none run while it sets what another is added to.
    """
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    lse2 = term_buffers.index(2 * stage).reshape([PART]).load(COLUMNS)
    minus_delta = term_buffers.index(2 * stage + 1).reshape([PART]).load(COLUMNS)
    keys = start + gl.arange(0, PART, layout=gl.SliceLayout(1, SCORES))
    past = gl.where(keys < length, 0.0, device.NEG_INF)
    scores = gl.expand_dims(lse2, 0) * (-1.0 / call.scale2) + gl.expand_dims(past, 1)
    return scores, gl.expand_dims(minus_delta, 0).broadcast_to([PART, PART])


@gluon.jit
def begin_key_gradient(dk, ds, rings, place):
    """dK + dS^T Q, in flight."""
    query = device.matrix(rings.query_ring, place.stage)
    return warpgroup_mma(ds, query, dk, is_async=True)


@gluon.jit
def begin_query_gradient(rings, place, MEMBER: gl.constexpr):
    """What this group adds of dS K, in flight: one product for the keys of each group, its own
    first.
    """
    SHARE: gl.constexpr = query_sums.share(rings.sum_buffers)
    WHOLE: gl.constexpr = adds_whole_tiles(rings.sum_buffers, rings.key_ring.buffers)
    exchange = rings.exchange
    dq = gl.zeros([PART, SHARE], gl.float32, device.product_layout(SHARE))
    for turn in gl.static_range(2):
        group = (MEMBER + turn) % 2
        entry = place.side * 2 + group
        if turn == 1:
            mbarrier.wait(exchange.filled.index(entry), place.side_phase)
        ds = exchange.buffers.index(entry).permute((1, 0))
        key = device.matrix(rings.key_ring, opaque(place.own + group))
        if not WHOLE:
            key = key.slice(MEMBER * SHARE, SHARE, dim=1)
        dq = warpgroup_mma(ds, key, dq, use_acc=turn == 1, is_async=True)
    return dq
