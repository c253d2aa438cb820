"""The forward pass: a persistent kernel that keeps the tensor cores busy.

One warp loads tiles of queries, keys and values, two groups of four warps compute: each owns 64 of
the 128 queries of a block row. The groups begin products in turns, so that those of one run while
the other computes its softmax; within a group, the softmax of a block overlaps O += P V of the
block before. Where that pays a further warp waits for the tiles, and a group for its turn alone.
In blocks of 64 a program has one group, and other programs on the same multiprocessor have the
others.

Base-2 online softmax: `peak` is the running maximum of the raw scores, `total` the running sum of
exp2(scale2 * (score - peak)), in parts that add up to it, scale2 = scale * log2(e).

Source: Shah et al., "FlashAttention-3", 2024, for the schedule.
"""

import torch
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.backends.compiled import on_device
from sparseflash.backends.hopper import device, dropout, element_masks, launch
from sparseflash.backends.hopper.device import PART, THREADS
from sparseflash.backends.hopper.gluon_shim import (
    await_turn,
    fence_async_shared,
    gather,
    gl,
    gluon,
    let_in,
    mbarrier,
    opaque,
    pass_turn,
    store_tile,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from sparseflash.backends.hopper.launch import PART_TILES, Room
from sparseflash.dispatch.spec import AttentionSpec

# By the side of blocks and the width of tiles: buffers of keys and values, and of queries.
ROOMS = {
    128: {
        64: Room(1, {"STAGES": 4, "QUERY_STAGES": 3}),
        128: Room(1, {"STAGES": 2, "QUERY_STAGES": 2}),
        256: Room(1, {"STAGES": 2, "QUERY_STAGES": 1}),
    },
    64: {
        64: Room(3, {"STAGES": 3, "QUERY_STAGES": 2}),
        128: Room(2, {"STAGES": 3, "QUERY_STAGES": 1}),
    },
}
# Up to this width registers hold the queries of a row, which then leave shared memory once.
WIDEST_QUERY = gl.constexpr(128)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.Backend."""
    query = launch.addressable(query)
    key = launch.addressable(launch.unpadded(key, key_lengths))
    value = launch.addressable(launch.unpadded(value, key_lengths))
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    block = table.block_size[0]
    keys = launch.key_tiles(block, spec.head_dim)
    room = ROOMS[block][launch.width(spec.head_dim)]
    tensors, read = (query, key, value, out, lse), (PART_TILES, keys, keys, PART_TILES, None)
    with on_device(query.device):
        launch.launch_pass(forward_kernel, tensors, read, table, key_lengths, seed, spec, room)
    return out, lse


@gluon.jit(**device.unspecialized("lse", "key_lengths", "counter"))
def forward_kernel(
    queries, keys, values, outs, lse,
    bounds, full_index, partial_index, partial_tile, order, bank, head_layer, key_lengths, counter,
    heads, q_len, k_len, mask_heads, rows, tiles, together, scale2,
    seed_low, seed_high, threshold, keep_scale,
    GROUP: gl.constexpr, MASKED: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    table = device.Table(bounds, full_index, partial_index, partial_tile, order, bank, head_layer)
    sizes = device.Sizes(heads, q_len, k_len, mask_heads, rows, tiles, together)
    GROUPS: gl.constexpr = BLOCK // PART
    RELAYS: gl.constexpr = relays(BLOCK, queries.block_type.shape[3], MASKED)
    query_ring = device.ring(queries, GROUPS * QUERY_STAGES, 1)
    key_ring = device.group_ring(keys, 0, STAGES, GROUPS, RELAYS)
    value_ring = device.group_ring(values, STAGES, STAGES, GROUPS, RELAYS)
    announced = device.row_ring(GROUPS + RELAYS)
    drop = device.Dropout(seed_low, seed_high, threshold, keep_scale)
    fence_async_shared()
    specialize(
        queries, keys, values, outs, lse, (query_ring, key_ring, value_ring),
        device.Call(BLOCK, table, sizes, key_lengths, counter, announced, scale2, drop),
        RELAYS, GROUP, MASKED, STAGES, QUERY_STAGES,
    )  # fmt: skip


@gluon.constexpr_function
def relays(block, dims, masked):
    """How many warps wait for tiles in place of the groups: 1 where that is faster, else 0."""
    return int(block > PART.value and (dims == 128 or (dims == 64 and masked)))


@gluon.jit
def specialize(queries, keys, values, outs, lse, rings, call, RELAYS: gl.constexpr,
               GROUP: gl.constexpr, MASKED: gl.constexpr,
               STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr):  # fmt: skip
    """Starts `consume` in each group of warps, and `produce` and `relay` in a warp each."""
    if call.block == PART:
        gl.warp_specialize(
            [
                (consume, (outs, lse, rings, call, 0, RELAYS, MASKED, STAGES, QUERY_STAGES)),
                (produce, (queries, keys, values, rings, call, GROUP, STAGES, QUERY_STAGES)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (outs, lse, rings, call, 0, RELAYS, MASKED, STAGES, QUERY_STAGES)),
                (consume, (outs, lse, rings, call, 1, RELAYS, MASKED, STAGES, QUERY_STAGES)),
                (produce, (queries, keys, values, rings, call, GROUP, STAGES, QUERY_STAGES)),
                (relay, (rings, call, RELAYS, STAGES)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip


@gluon.jit
def produce(queries, keys, values, rings, call, GROUP: gl.constexpr, STAGES: gl.constexpr,
            QUERY_STAGES: gl.constexpr):  # fmt: skip
    """Loads the tiles that `consume` reads, as far ahead as the rings allow."""
    GROUPS: gl.constexpr = call.block // PART
    query_ring, key_ring, value_ring = rings
    stage, phase = 0, 1
    query_stage, query_phase = 0, 1
    row_stage, row_phase = 0, 1
    tile = gl.program_id(0)
    while tile < call.sizes.tiles:
        following = device.next_tile(call, tile)
        batch, head, row = device.locate(call, tile, 1)
        walk = device.walk_keys(call, batch, head, row)
        row_stage, row_phase = device.announce(call, batch, head, row, walk, row_stage, row_phase)
        for part in gl.static_range(GROUPS):
            token = row * call.block + part * PART
            device.fill(
                query_ring, queries, batch, head, token, query_stage * GROUPS + part, query_phase
            )
        query_stage, query_phase = device.advance(query_stage, query_phase, QUERY_STAGES)
        stage, phase = device.load_keys(
            keys, values, key_ring, value_ring, call, batch, head // GROUP, walk,
            stage, phase, STAGES,
        )  # fmt: skip
        tile = following
    device.announce_end(call, row_stage, row_phase)


@gluon.jit
def relay(rings, call, RELAYS: gl.constexpr, STAGES: gl.constexpr):
    """Waits for tiles in place of both groups, and lets each take its next turn once the tiles
    of it are there: at an mbarrier Triton would gather a group first.

    It hands tiles back like a group, for it may not miss one.
    """
    _, key_ring, value_ring = rings
    PARTS: gl.constexpr = call.block // key_ring.buffers.shape[3]
    if RELAYS > 0:
        stage, phase = 0, 0
        row_stage, row_phase = 0, 0
        device.hand_over(key_ring)
        device.hand_over(value_ring)
        _, _, row, walk, row_stage, row_phase = device.hear(call, row_stage, row_phase)
        while row >= 0:
            for i in range((walk.partials + walk.cuts + walk.fulls) * PARTS):
                mbarrier.wait(key_ring.filled.index(stage), phase)
                device.leave(key_ring, stage)
                if i > 0:
                    let_in(0, RELAYS)
                    let_in(1, RELAYS)
                mbarrier.wait(value_ring.filled.index(stage), phase)
                device.leave(value_ring, stage)
                stage, phase = device.advance(stage, phase, STAGES)
            _, _, row, walk, row_stage, row_phase = device.hear(call, row_stage, row_phase)


@gluon.jit
def consume(outs, lse, rings, call, MEMBER: gl.constexpr, RELAYS: gl.constexpr,
            MASKED: gl.constexpr, STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr):  # fmt: skip
    """Computes this group's rows of each tile. `stage` is that of the block last consumed."""
    query_ring, key_ring, value_ring = rings
    GROUPS: gl.constexpr = call.block // PART
    DIMS: gl.constexpr = outs.block_type.shape[3]
    COLUMNS: gl.constexpr = key_ring.buffers.shape[3]
    PARTS: gl.constexpr = call.block // COLUMNS
    SCORES: gl.constexpr = device.product_layout(COLUMNS)
    OUT: gl.constexpr = device.product_layout(DIMS)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    offsets = gl.arange(0, PART, layout=ROWS)
    stage, phase = STAGES - 1, 1
    query_stage, query_phase = 0, 0
    buffer = MEMBER
    done = 0
    row_stage, row_phase = 0, 0
    device.hand_over(key_ring)
    device.hand_over(value_ring)
    if MEMBER == 1:
        pass_turn(MEMBER, RELAYS)
    batch, head, row, walk, row_stage, row_phase = device.hear(call, row_stage, row_phase)
    while row >= 0:
        masked = (walk.partials + walk.cuts) * PARTS
        count = masked + walk.fulls * PARTS
        previous = buffer
        buffer = query_stage * GROUPS + MEMBER
        pair = batch * call.sizes.heads + head
        start = row * call.block + MEMBER * PART
        peak = gl.full([PART], device.NEG_INF, gl.float32, ROWS)
        total = gl.zeros([PART, THREADS], gl.float32, device.shares_layout())
        acc = gl.zeros([PART, DIMS], gl.float32, OUT)
        owed = (done > 0) & (QUERY_STAGES > 1)
        if QUERY_STAGES == 1:
            hand_back(query_ring, previous, done > 0)
        mbarrier.wait(query_ring.filled.index(buffer), query_phase)
        if count > 0:
            acc, peak, total, stage, phase = attend(
                acc, peak, total, stage, phase, buffer, rings, previous, owed,
                call, walk, pair, start, masked, count,
                MEMBER, RELAYS, MASKED, STAGES, SCORES, OUT,
            )  # fmt: skip
        else:
            hand_back(query_ring, previous, owed)
        total = gl.convert_layout(gl.sum(total, axis=1), ROWS, assert_trivial=True)
        empty = total == 0.0
        total = gl.where(empty, 1.0, total)
        row_lse = gl.where(
            empty, device.NEG_INF, (peak * call.scale2 + gl.log2(total)) * device.LN2
        )
        tokens = start + offsets
        lse_row = lse + pair.to(gl.int64) * call.sizes.q_len
        gl.store(lse_row + tokens, row_lse, mask=tokens < call.sizes.q_len)
        weight = 1.0 / total
        if call.dropout.threshold is not None:
            weight = weight * call.dropout.keep_scale
        # The last product that reads the queries is done: their buffer holds O on its way out.
        device.matrix(query_ring, buffer).store(scaled(acc, weight, OUT).to(outs.dtype))
        fence_async_shared()
        store_tile(outs, [batch, head, start, 0], query_ring.buffers.index(buffer))
        query_stage, query_phase = device.advance(query_stage, query_phase, QUERY_STAGES)
        done += 1
        batch, head, row, walk, row_stage, row_phase = device.hear(call, row_stage, row_phase)
    wait_for_stores(0)


@gluon.jit
def attend(acc, peak, total, stage, phase, buffer, rings, previous, owed,
           call, walk, pair, start, masked, count,
           MEMBER: gl.constexpr, RELAYS: gl.constexpr, MASKED: gl.constexpr,
           STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """Adds the tiles of a row, at least one.

    buffer: that of the queries; previous, owed: that of the row before, and whether it is to be
        handed back
    """
    query_ring, key_ring, value_ring = rings
    COLUMNS: gl.constexpr = key_ring.buffers.shape[3]
    DIMS: gl.constexpr = key_ring.buffers.shape[4]
    if DIMS <= WIDEST_QUERY:
        query = device.matrix(query_ring, buffer).load(device.operand_layout(SCORES))
    else:
        query = device.matrix(query_ring, opaque(buffer))
    stage, phase = device.advance(stage, phase, STAGES)
    if MASKED:
        words = element_masks.key_words(call, walk, 0, masked, MEMBER * PART, COLUMNS, SCORES)
    mbarrier.wait(key_ring.filled.index(stage), phase)
    key = device.matrix(key_ring, stage)
    zeros = gl.zeros([PART, COLUMNS], gl.float32, SCORES)
    scores = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    device.leave(key_ring, stage)
    if MASKED and masked > 0:
        scores = gl.where(element_masks.attended(words, COLUMNS, SCORES), scores, device.NEG_INF)
    p, peak, decay = softmax(scores, peak, call.scale2, MASKED)
    total = grown(total, decay, p, call.dropout.threshold is not None)
    if call.dropout.threshold is not None:
        token = device.listed_token(call, walk, 0, COLUMNS)
        kept = dropout.kept_words(call.dropout, pair, start, token, COLUMNS, SCORES)
        p = gl.where(element_masks.attended(kept, COLUMNS, SCORES), p, 0.0)
    acc = scaled(acc, decay, OUT)
    weights = device.operand(p, query.dtype, OUT)
    hand_back(query_ring, previous, owed)
    if RELAYS > 0:
        gather()  # else Triton would let the group gather in every step
    for i in range(1, count):
        acc, peak, total, weights, stage, phase = step(
            acc, peak, total, weights, stage, phase, query, key_ring, value_ring,
            call, walk, pair, start, i, masked, MEMBER, RELAYS, MASKED, STAGES, SCORES, OUT,
        )  # fmt: skip
    mbarrier.wait(value_ring.filled.index(stage), phase)
    acc = warpgroup_mma(weights, device.matrix(value_ring, stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    device.leave(value_ring, stage)
    return acc, peak, total, stage, phase


@gluon.jit
def step(acc, peak, total, weights, stage, phase, query, key_ring, value_ring,
         call, walk, pair, start, i, masked,
         MEMBER: gl.constexpr, RELAYS: gl.constexpr, MASKED: gl.constexpr,
         STAGES: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """Scores and softmax of tile i; O += P V of the tile before, which is at `stage`.

    pair: of batch and head; start: the first query; masked: how many tiles are of partial blocks,
        which come first
    """
    COLUMNS: gl.constexpr = key_ring.buffers.shape[3]
    value = device.matrix(value_ring, stage)
    last, last_phase = stage, phase
    stage, phase = device.advance(stage, phase, STAGES)
    if MASKED:
        words = element_masks.key_words(call, walk, i, masked, MEMBER * PART, COLUMNS, SCORES)
    zeros = gl.zeros([PART, COLUMNS], gl.float32, SCORES)
    if RELAYS == 0:
        mbarrier.wait(key_ring.filled.index(stage), phase)
    key = device.matrix(key_ring, stage)
    if call.block > PART:
        await_turn(MEMBER, RELAYS)
    scores = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if RELAYS == 0:
        mbarrier.wait(value_ring.filled.index(last), last_phase)
    acc = warpgroup_mma(weights, value, acc, is_async=True)
    if call.block > PART:
        pass_turn(MEMBER, RELAYS)
    if call.dropout.threshold is not None:
        token = device.listed_token(call, walk, i, COLUMNS)
        kept = dropout.kept_words(call.dropout, pair, start, token, COLUMNS, SCORES)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    device.leave(key_ring, stage)
    if MASKED and i < masked:
        scores = gl.where(element_masks.attended(words, COLUMNS, SCORES), scores, device.NEG_INF)
    p, peak, decay = softmax(scores, peak, call.scale2, MASKED)
    total = grown(total, decay, p, call.dropout.threshold is not None)
    if call.dropout.threshold is not None:
        p = gl.where(element_masks.attended(kept, COLUMNS, SCORES), p, 0.0)
    # The compiler moves this wait up, behind some of the exponentials or before the maxima.
    acc = warpgroup_mma_wait(0, deps=(acc,))
    device.leave(value_ring, last)
    acc = scaled(acc, decay, OUT)
    return acc, peak, total, device.operand(p, value.dtype, OUT), stage, phase


@gluon.jit
def scaled(acc, factor, OUT: gl.constexpr):
    """The rows of `acc` times their factors."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, OUT), assert_trivial=True)
    return acc * gl.expand_dims(factor, 1)


@gluon.jit
def grown(total, decay, p, DROPOUT: gl.constexpr):
    """(PART, THREADS): `total * decay` and the sums of rows of `p`, each thread's share of them.

    A row is added up at its end, so no thread waits for others meanwhile. With dropout one thread
    has all of it: ptxas of CUDA 13 would run short of registers, and wait for every product.
    """
    SHARES: gl.constexpr = device.shares_layout()
    sums = gl.sum(p.reshape([PART, p.shape[1] // (2 * THREADS), THREADS, 2]), axis=3)
    sums = gl.convert_layout(gl.sum(sums, axis=1), SHARES, assert_trivial=True)
    if DROPOUT:
        threads = gl.expand_dims(gl.arange(0, THREADS, layout=gl.SliceLayout(0, SHARES)), 0)
        sums = gl.where(threads == 0, gl.expand_dims(gl.sum(sums, axis=1), 1), 0.0)
    return scaled(total, decay, SHARES) + sums


@gluon.jit
def softmax(scores, peak, scale2, MASKED: gl.constexpr):
    """(exp2(scale2 * (scores - new peak)), new peak, what to multiply older sums by)."""
    new_peak = gl.maximum(peak, gl.max(scores, axis=1))
    shift = new_peak * scale2
    if MASKED:
        shift = gl.where(new_peak == device.NEG_INF, 0.0, shift)
    p = gl.exp2(scores * scale2 - gl.expand_dims(shift, 1))
    return p, new_peak, gl.exp2(peak * scale2 - shift)


@gluon.jit
def hand_back(query_ring, buffer, owed):
    """Returns the buffer of the row before to `produce` once its O has left it."""
    wait_for_stores(0)
    mbarrier.arrive(query_ring.emptied.index(buffer), count=1, pred=owed)
