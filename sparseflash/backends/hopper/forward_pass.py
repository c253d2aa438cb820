"""The forward pass: a persistent kernel that keeps the tensor cores busy.

One warp loads tiles of queries, keys and values, two groups of four warps compute: each owns 64 of
the 128 queries of a block row. While the products of one group run, the other computes its
softmax; within a group, the softmax of a block overlaps O += P V of the block before.

Base-2 online softmax: `peak` is the running maximum of the raw scores, `total` the running sum of
exp2(scale2 * (score - peak)), scale2 = scale * log2(e).

Source: Shah et al., "FlashAttention-3", 2024, for the schedule.
"""

import torch
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.backends.compiled import on_device
from sparseflash.backends.hopper import device, launch
from sparseflash.backends.hopper.device import BLOCK, PART
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
from sparseflash.spec import AttentionSpec

STAGES = {64: {"STAGES": 4, "QUERY_STAGES": 3}, 128: {"STAGES": 2, "QUERY_STAGES": 2}}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: LookupTable,
    key_lengths: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.Backend."""
    query = launch.addressable(query)
    key, value = (launch.addressable(launch.unpadded(x, key_lengths)) for x in (key, value))
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    tensors = (
        launch.tiles_of(query, PART.value),
        *(launch.tiles_of(x, BLOCK.value) for x in (key, value)),
        *(launch.tiles_of(out, PART.value), lse),
    )
    with on_device(query.device):
        launch.launch_pass(
            forward_kernel, tensors, table, key_lengths, spec, STAGES[spec.head_dim]
        )
    return out, lse


@gluon.jit(**device.unspecialized("lse", "key_lengths", "counter"))
def forward_kernel(
    queries, keys, values, outs, lse,
    bounds, full_index, partial_index, partial_tile, order, bank, head_layer, key_lengths, counter,
    heads, q_len, k_len, mask_heads, rows, tiles, together, scale2,
    GROUP: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr,
):  # fmt: skip
    table = device.Table(bounds, full_index, partial_index, partial_tile, order, bank, head_layer)
    sizes = device.Sizes(heads, q_len, k_len, mask_heads, rows, tiles, together)
    query_ring = device.ring(queries, 2 * QUERY_STAGES, 1)
    key_ring = device.ring(keys, STAGES, 2)
    value_ring = device.ring(values, STAGES, 2)
    call = device.Call(table, sizes, key_lengths, counter, device.number_ring(), scale2)
    fence_async_shared()
    rings = (query_ring, key_ring, value_ring)
    gl.warp_specialize(
        [
            (consume, (outs, lse, rings, call, 0, MASKED, STAGES, QUERY_STAGES)),
            (consume, (outs, lse, rings, call, 1, MASKED, STAGES, QUERY_STAGES)),
            (produce, (queries, keys, values, rings, call, GROUP, STAGES, QUERY_STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def produce(queries, keys, values, rings, call, GROUP: gl.constexpr, STAGES: gl.constexpr,
            QUERY_STAGES: gl.constexpr):  # fmt: skip
    """Loads the tiles that `consume` reads, as far ahead as the rings allow."""
    query_ring, key_ring, value_ring = rings
    stage, phase = 0, 1
    query_stage, query_phase = 0, 1
    turn, turn_phase = 0, 1
    tile = gl.program_id(0)
    while tile < call.sizes.tiles:
        following, turn, turn_phase = device.announce_next(call, tile, turn, turn_phase)
        batch, head, row = device.locate(call, tile, 1)
        walk = device.walk_keys(call, batch, head, row)
        for part in gl.static_range(2):
            token = row * BLOCK + part * PART
            device.fill(
                query_ring, queries, batch, head, token, query_stage * 2 + part, query_phase
            )
        query_stage, query_phase = device.advance(query_stage, query_phase, QUERY_STAGES)
        stage, phase = device.load_keys(
            keys, values, key_ring, value_ring, call, batch, head // GROUP, walk,
            stage, phase, STAGES,
        )  # fmt: skip
        tile = following


@gluon.jit
def consume(outs, lse, rings, call, MEMBER: gl.constexpr, MASKED: gl.constexpr,
            STAGES: gl.constexpr, QUERY_STAGES: gl.constexpr):  # fmt: skip
    """Computes the rows of one half of each tile. `stage` is that of the block last consumed."""
    query_ring, key_ring, value_ring = rings
    DIMS: gl.constexpr = outs.block_type.shape[3]
    SCORES: gl.constexpr = device.product_layout(BLOCK)
    OUT: gl.constexpr = device.product_layout(DIMS)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    offsets = gl.arange(0, PART, layout=ROWS)
    stage, phase = STAGES - 1, 1
    query_stage, query_phase = 0, 0
    buffer = MEMBER
    done = 0
    turn, turn_phase = 0, 0
    tile = gl.program_id(0)
    while tile < call.sizes.tiles:
        batch, head, row = device.locate(call, tile, 1)
        walk = device.walk_keys(call, batch, head, row)
        masked = walk.partials + walk.cuts
        count = masked + walk.fulls
        previous = buffer
        buffer = query_stage * 2 + MEMBER
        query = device.matrix(query_ring, buffer)
        peak = gl.full([PART], device.NEG_INF, gl.float32, ROWS)
        total = gl.zeros([PART], gl.float32, ROWS)
        acc = gl.zeros([PART, DIMS], gl.float32, OUT)
        mbarrier.wait(query_ring.filled.index(buffer), query_phase)
        if count > 0:
            stage, phase = device.advance(stage, phase, STAGES)
            mbarrier.wait(key_ring.filled.index(stage), phase)
            key = device.matrix(key_ring, stage)
            zeros = gl.zeros([PART, BLOCK], gl.float32, SCORES)
            scores = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            device.release(key_ring, stage)
            if MASKED and masked > 0:
                words = device.key_mask_words(call, walk, 0, MEMBER * PART, SCORES)
                scores = gl.where(device.attended(words, BLOCK, SCORES), scores, device.NEG_INF)
            p, peak, _ = softmax(scores, peak, call.scale2, MASKED)
            total = gl.sum(p, axis=1)
            weights = device.operand(p, outs.dtype, OUT)
            hand_back(query_ring, previous, done)
            mbarrier.wait(value_ring.filled.index(stage), phase)
            if MASKED:
                for i in range(1, masked):
                    acc, peak, total, weights, stage, phase = step(
                        acc, peak, total, weights, stage, phase, query, key_ring, value_ring,
                        call, walk, i, MEMBER, True, STAGES, SCORES, OUT,
                    )  # fmt: skip
            for i in range(gl.maximum(masked, 1), count):
                acc, peak, total, weights, stage, phase = step(
                    acc, peak, total, weights, stage, phase, query, key_ring, value_ring,
                    call, walk, i, MEMBER, False, STAGES, SCORES, OUT,
                )  # fmt: skip
            acc = warpgroup_mma(weights, device.matrix(value_ring, stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            device.release(value_ring, stage)
        else:
            hand_back(query_ring, previous, done)
        empty = total == 0.0
        total = gl.where(empty, 1.0, total)
        row_lse = gl.where(
            empty, device.NEG_INF, (peak * call.scale2 + gl.log2(total)) * device.LN2
        )
        tokens = row * BLOCK + MEMBER * PART + offsets
        lse_row = lse + (batch * call.sizes.heads + head).to(gl.int64) * call.sizes.q_len
        gl.store(lse_row + tokens, row_lse, mask=tokens < call.sizes.q_len)
        weight = gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUT), assert_trivial=True)
        # The last product that reads the queries is done: their buffer holds O on its way out.
        query.store((acc * gl.expand_dims(weight, 1)).to(outs.dtype))
        fence_async_shared()
        token = row * BLOCK + MEMBER * PART
        store_tile(outs, [batch, head, token, 0], query_ring.buffers.index(buffer))
        query_stage, query_phase = device.advance(query_stage, query_phase, QUERY_STAGES)
        done += 1
        tile, turn, turn_phase = device.hear_next(call, tile, turn, turn_phase)
    wait_for_stores(0)


@gluon.jit
def step(acc, peak, total, weights, stage, phase, query, key_ring, value_ring,
         call, walk, i, MEMBER: gl.constexpr, PARTIAL: gl.constexpr, STAGES: gl.constexpr,
         SCORES: gl.constexpr, OUT: gl.constexpr):  # fmt: skip
    """Scores and softmax of block i; O += P V of the block before, which is at `stage`."""
    value = device.matrix(value_ring, stage)
    last = stage
    stage, phase = device.advance(stage, phase, STAGES)
    if PARTIAL:
        words = device.key_mask_words(call, walk, i, MEMBER * PART, SCORES)
    zeros = gl.zeros([PART, BLOCK], gl.float32, SCORES)
    mbarrier.wait(key_ring.filled.index(stage), phase)
    key = device.matrix(key_ring, stage)
    scores = warpgroup_mma(query, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma(weights, value, acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    device.release(key_ring, stage)
    if PARTIAL:
        scores = gl.where(device.attended(words, BLOCK, SCORES), scores, device.NEG_INF)
    p, peak, decay = softmax(scores, peak, call.scale2, PARTIAL)
    total = total * decay + gl.sum(p, axis=1)
    # The compiler would move the wait for O += P V up across the softmax, but not across this one.
    mbarrier.wait(value_ring.filled.index(stage), phase)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    device.release(value_ring, last)
    acc = acc * gl.expand_dims(
        gl.convert_layout(decay, gl.SliceLayout(1, OUT), assert_trivial=True), 1
    )
    return acc, peak, total, device.operand(p, value.dtype, OUT), stage, phase


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
def hand_back(query_ring, buffer, done):
    """Returns the buffer of the tile before to `produce` once its O has left it."""
    wait_for_stores(0)
    mbarrier.arrive(query_ring.emptied.index(buffer), count=1, pred=done > 0)
