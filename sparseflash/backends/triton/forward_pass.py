"""The forward pass: a program takes a tile of query rows and walks the key blocks of its row.

Base-2 online softmax. Scores are scaled by scale * log2(e); `peak` is their running maximum,
`total` the running sum of exp2(score - peak), `acc` that of exp2(score - peak) * value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.backends.compiled import on_device
from sparseflash.backends.triton import tiles
from sparseflash.backends.triton.launch import launch_pass
from sparseflash.dispatch.spec import AttentionSpec


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.Backend."""
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    tensors = (query, key, value, out)
    with on_device(query.device):
        launch_pass(
            "forward",
            forward_kernel,
            tensors,
            (1, 2),
            (lse,),
            table,
            key_lengths,
            seed,
            spec,
            bias,
        )
    return out, lse


@triton.jit(**tiles.unspecialized("query", "key", "value", "out"))
def forward_kernel(
    query, query_batch, query_head, query_token, query_dim,
    key, key_batch, key_head, key_token, key_dim,
    value, value_batch, value_head, value_token, value_dim,
    out, out_batch, out_head, out_token, out_dim,
    key_descriptor, value_descriptor, lse,
    bounds, full_index, partial_index, partial_tile, order, bank, head_layer,
    key_lengths, bias, bias_head, heads, q_len, k_len, layers, rows, ordered, heavy_first,
    mask_batch, mask_head,
    scale2, cap, seed: tl.int64, threshold: tl.uint32, keep_scale,
    GROUP: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr, SCORE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK_STAGES: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    table = tiles.Table(bounds, full_index, partial_index, partial_tile, order, bank, head_layer)
    sizes = tiles.Sizes(
        heads, q_len, k_len, layers, rows, ordered, heavy_first, mask_batch, mask_head
    )
    LENGTHS: tl.constexpr = key_lengths is not None
    PACKED: tl.constexpr = BN > BLOCK_K
    rank, part, batch, head = tiles.program_tile(sizes, BLOCK_Q // BM)
    kv_head = head // GROUP
    pair = batch * heads + head
    layer = tiles.mask_layer(table, sizes, batch, head)
    row = tiles.ranked_row(table, sizes, layer, rank)
    length = tl.load(key_lengths + batch).to(tl.int32) if LENGTHS else k_len
    starts, counts = tiles.key_phases(table, sizes, layer, row, length, BLOCK_K, BN, LENGTHS)
    firsts = tiles.first_blocks(table, starts, counts, k_len, BLOCK_K, BN)

    start = row * BLOCK_Q + part * BM
    strides = (query_batch, query_head, query_token, query_dim)
    queries = tiles.one_head(query, strides, batch, head, ALIGN, INDEX)
    q = tiles.turned(tiles.load_rows(queries, start, q_len, BM, DIMS, HEAD_DIM, True), FLIPPED)
    strides = (key_batch, key_head, key_token, key_dim)
    keys = tiles.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (value_batch, value_head, value_token, value_dim)
    values = tiles.one_head(value, strides, batch, kv_head, ALIGN, INDEX)

    biases = tiles.of_head(bias, bias_head, head)
    tokens = start + tl.arange(0, BM)
    total = zero_total(BM, BN, FLIPPED)
    peak = tl.full([BM], float("-inf"), tl.float32)
    acc = tiles.zero_sums(BM, DIMS, FLIPPED)
    for PHASE in tl.static_range(3 if LENGTHS and not PACKED else 2):
        total, peak, acc = attend(
            total, peak, acc, q,
            keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
            table, starts[PHASE], counts[PHASE], firsts[PHASE], tokens, length,
            cap, biases, q_len, k_len, scale2, seed, threshold, pair,
            PHASE == 0, PACKED or PHASE == 2 or (PHASE == 0 and LENGTHS),
            DROPOUT, SOFTCAP, SCORE, PRECISION,
            HEAD_DIM, DIMS, BLOCK_Q, BLOCK_K, BM, BN, MASK_STAGES, FLIPPED,
        )  # fmt: skip

    if FLIPPED:
        total = tl.sum(total, 0)
    row_lse, weight = finished(total, peak, keep_scale, DROPOUT)
    tl.store(lse + pair.to(tl.int64) * q_len + tokens, row_lse, mask=tokens < q_len)
    strides = (out_batch, out_head, out_token, out_dim)
    outs = tiles.one_head(out, strides, batch, head, ALIGN, INDEX)
    tiles.store_rows(outs, tiles.turned(acc, FLIPPED) * weight[:, None], start, q_len, HEAD_DIM)


@triton.jit
def zero_total(BM: tl.constexpr, BN: tl.constexpr, FLIPPED: tl.constexpr):
    """A sum for each query; if FLIPPED one for each pair of a tile, so that the warps that share a
    query add theirs up but once.
    """
    return tl.zeros([BN, BM] if FLIPPED else [BM], tl.float32)


@triton.jit
def attend(
    total, peak, acc, q, keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
    table, start, count, block, tokens, limit,
    cap, biases, q_len, k_len, scale2, seed, threshold, pair,
    PARTIAL: tl.constexpr, CUT: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCORE: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MASK_STAGES: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """Adds `count` listed blocks, the first of them `block`, to the online softmax of a tile of
    queries `tokens`.

    PARTIAL applies the element mask of each block, CUT masks the keys from `limit` on; without
    both there is no mask code. The next block is carried from step to step: loaded where it is
    used, it would halve the pipeline. A tile of more keys than a block holds several blocks, one
    for each of its keys in `block`. FLIPPED: scores are (key, query), acc is (dim, query).
    """
    PACKED: tl.constexpr = BN > BLOCK_K
    KEY_AXIS: tl.constexpr = 0 if FLIPPED else 1
    MASKED: tl.constexpr = PARTIAL or CUT
    MODIFIED: tl.constexpr = SOFTCAP or SCORE is not None or biases is not None
    index = table.partial_index if PARTIAL else table.full_index
    bits = tiles.listed_tile(table, start, count, 0, BLOCK_K, BN) if PARTIAL else block
    steps = tiles.steps(count, BLOCK_K, BN)
    for step in tl.range(steps, num_stages=MASK_STAGES if PARTIAL else None):
        key_start = tiles.step_start(block, step, BLOCK_K, BN)
        k = tiles.stream_rows(
            key_descriptor, batch, kv_head, keys, key_start, limit,
            BN, DIMS, HEAD_DIM, MASKED, CUT, PACKED,
        )  # fmt: skip
        scores = tiles.score_products(q, k, PRECISION, FLIPPED)
        if MASKED or MODIFIED:
            key_tokens = tiles.tokens_from(key_start, BN, PACKED)
            scores, _ = tiles.modified(
                scores, batch, head, cap, biases, tokens, key_tokens, q_len, k_len, scale2,
                SOFTCAP, SCORE, FLIPPED,
            )  # fmt: skip
            if PARTIAL:
                mask = tiles.attended(
                    table.bank, bits, tokens, key_start, BN, BLOCK_Q, BLOCK_K, FLIPPED
                )
                scores = tl.where(mask, scores, float("-inf"))
            if CUT:
                valid = tl.expand_dims(key_tokens, 1 - KEY_AXIS) < limit
                scores = tl.where(valid, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, KEY_AXIS))
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            p = tl.exp2(scores - tl.expand_dims(shift, KEY_AXIS))
        else:
            new_peak = tl.maximum(peak, tl.max(scores, KEY_AXIS) * scale2)
            shift = new_peak
            p = tl.exp2(scores * scale2 - tl.expand_dims(shift, KEY_AXIS))
        decay = tl.exp2(peak - shift)
        peak = new_peak
        total = total * decay[None, :] + p if FLIPPED else total * decay + tl.sum(p, 1)
        acc = acc * tl.expand_dims(decay, KEY_AXIS)
        if DROPOUT:
            keep = tiles.kept(seed, threshold, pair, tokens, key_start, BM, BN, PACKED, FLIPPED)
            p = tl.where(keep, p, 0.0)
        v = tiles.stream_rows(
            value_descriptor, batch, kv_head, values, key_start, limit,
            BN, DIMS, HEAD_DIM, MASKED, CUT, PACKED,
        )  # fmt: skip
        acc = tiles.add_weighted(acc, p, v, PRECISION, FLIPPED)
        block = tiles.listed_block(index, start, count, step + 1, k_len, BLOCK_K, BN)
        if PARTIAL:
            bits = tiles.listed_tile(table, start, count, step + 1, BLOCK_K, BN)
    return total, peak, acc


@triton.jit
def finished(total, peak, keep_scale, DROPOUT: tl.constexpr):
    """(lse, what to multiply acc by) of the sums of some rows; (-inf, finite) without a key."""
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (peak + tl.log2(total)) * tiles.LN2)
    return lse, (keep_scale if DROPOUT else 1.0) / total
