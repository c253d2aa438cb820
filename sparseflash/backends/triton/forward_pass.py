"""The forward pass: a program takes a tile of query rows and walks the key blocks of its row.

Base-2 online softmax. Scores are scaled by scale * log2(e); `row_max` is their running
maximum, `row_sum` the running sum of exp2(score - row_max), `acc` that of
exp2(score - row_max) * value.
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
    row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask,
    key_lengths, bias, bias_head, heads, q_len, k_len, num_masks, rows, use_schedule,
    longest_first, mask_batch_stride, mask_head_stride,
    scale2, cap, seed: tl.int64, threshold: tl.uint32, keep_scale,
    GROUP: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr, SCORE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK_STAGES: tl.constexpr, SWAP_AB: tl.constexpr,
):  # fmt: skip
    table = tiles.Table(
        row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask
    )
    sizes = tiles.Sizes(
        heads,
        q_len,
        k_len,
        num_masks,
        rows,
        use_schedule,
        longest_first,
        mask_batch_stride,
        mask_head_stride,
    )
    LENGTHS: tl.constexpr = key_lengths is not None
    PACKED: tl.constexpr = BN > BLOCK_K
    rank, part, batch, head = tiles.work_tile(sizes, BLOCK_Q // BM)
    kv_head = head // GROUP
    bh = batch * heads + head
    mask_index = tiles.mask_of_head(table, sizes, batch, head)
    row = tiles.scheduled_row(table, sizes, mask_index, rank)
    length = tl.load(key_lengths + batch).to(tl.int32) if LENGTHS else k_len
    starts, counts = tiles.key_block_lists(
        table, sizes, mask_index, row, length, BLOCK_K, BN, LENGTHS
    )
    firsts = tiles.first_blocks(table, starts, counts, k_len, BLOCK_K, BN)

    start = row * BLOCK_Q + part * BM
    strides = (query_batch, query_head, query_token, query_dim)
    queries = tiles.one_head(query, strides, batch, head, ALIGN, INDEX)
    q = tiles.transposed_if(
        tiles.load_rows(queries, start, q_len, BM, DIMS, HEAD_DIM, True), SWAP_AB
    )
    strides = (key_batch, key_head, key_token, key_dim)
    keys = tiles.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (value_batch, value_head, value_token, value_dim)
    values = tiles.one_head(value, strides, batch, kv_head, ALIGN, INDEX)

    biases = tiles.bias_of_head(bias, bias_head, head)
    tokens = start + tl.arange(0, BM)
    row_sum = zero_row_sum(BM, BN, SWAP_AB)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    acc = tiles.zero_sums(BM, DIMS, SWAP_AB)
    for BLOCK_LIST in tl.static_range(3 if LENGTHS and not PACKED else 2):
        row_sum, row_max, acc = attend(
            row_sum, row_max, acc, q,
            keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
            table, starts[BLOCK_LIST], counts[BLOCK_LIST], firsts[BLOCK_LIST], tokens, length,
            cap, biases, q_len, k_len, scale2, seed, threshold, bh,
            BLOCK_LIST == 0, PACKED or BLOCK_LIST == 2 or (BLOCK_LIST == 0 and LENGTHS),
            DROPOUT, SOFTCAP, SCORE, PRECISION,
            HEAD_DIM, DIMS, BLOCK_Q, BLOCK_K, BM, BN, MASK_STAGES, SWAP_AB,
        )  # fmt: skip

    if SWAP_AB:
        row_sum = tl.sum(row_sum, 0)
    row_lse, weight = finalize_softmax(row_sum, row_max, keep_scale, DROPOUT)
    tl.store(lse + bh.to(tl.int64) * q_len + tokens, row_lse, mask=tokens < q_len)
    strides = (out_batch, out_head, out_token, out_dim)
    outs = tiles.one_head(out, strides, batch, head, ALIGN, INDEX)
    tiles.store_rows(
        outs, tiles.transposed_if(acc, SWAP_AB) * weight[:, None], start, q_len, HEAD_DIM
    )


@triton.jit
def zero_row_sum(BM: tl.constexpr, BN: tl.constexpr, SWAP_AB: tl.constexpr):
    """A sum for each query; if SWAP_AB one for each pair of a tile, so that the warps that share a
    query add theirs up but once.
    """
    return tl.zeros([BN, BM] if SWAP_AB else [BM], tl.float32)


@triton.jit
def attend(
    row_sum, row_max, acc, q, keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
    table, start, count, block, tokens, limit,
    cap, biases, q_len, k_len, scale2, seed, threshold, bh,
    PARTIAL: tl.constexpr, CLIPPED: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCORE: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MASK_STAGES: tl.constexpr, SWAP_AB: tl.constexpr,
):  # fmt: skip
    """Adds `count` listed blocks, the first of them `block`, to the online softmax of a tile of
    queries `tokens`.

    PARTIAL applies the element mask of each block, CLIPPED masks the keys from `limit` on; without
    both there is no mask code. The next block is carried from step to step: loaded where it is
    used, it would halve the pipeline. A tile of more keys than a block holds several blocks, one
    for each of its keys in `block`. SWAP_AB: scores are (key, query), acc is (dim, query).
    """
    PACKED: tl.constexpr = BN > BLOCK_K
    KEY_AXIS: tl.constexpr = 0 if SWAP_AB else 1
    MASKED: tl.constexpr = PARTIAL or CLIPPED
    HAS_SCORE_MOD: tl.constexpr = SOFTCAP or SCORE is not None or biases is not None
    index = table.partial_index if PARTIAL else table.full_index
    bit_tile_index = (
        tiles.listed_bit_tile(table, start, count, 0, BLOCK_K, BN) if PARTIAL else block
    )
    steps = tiles.steps(count, BLOCK_K, BN)
    for step in tl.range(steps, num_stages=MASK_STAGES if PARTIAL else None):
        key_start = tiles.tile_start(block, step, BLOCK_K, BN)
        k = tiles.stream_rows(
            key_descriptor, batch, kv_head, keys, key_start, limit,
            BN, DIMS, HEAD_DIM, MASKED, CLIPPED, PACKED,
        )  # fmt: skip
        scores = tiles.dot_scores(q, k, PRECISION, SWAP_AB)
        if MASKED or HAS_SCORE_MOD:
            key_tokens = tiles.tokens_from(key_start, BN, PACKED)
            scores, _ = tiles.apply_score_mod(
                scores, batch, head, cap, biases, tokens, key_tokens, q_len, k_len, scale2,
                SOFTCAP, SCORE, SWAP_AB,
            )  # fmt: skip
            if PARTIAL:
                mask = tiles.element_mask(
                    table.bit_tiles,
                    bit_tile_index,
                    tokens,
                    key_start,
                    BN,
                    BLOCK_Q,
                    BLOCK_K,
                    SWAP_AB,
                )
                scores = tl.where(mask, scores, float("-inf"))
            if CLIPPED:
                valid = tl.expand_dims(key_tokens, 1 - KEY_AXIS) < limit
                scores = tl.where(valid, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, KEY_AXIS))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(scores - tl.expand_dims(shift, KEY_AXIS))
        else:
            new_max = tl.maximum(row_max, tl.max(scores, KEY_AXIS) * scale2)
            shift = new_max
            p = tl.exp2(scores * scale2 - tl.expand_dims(shift, KEY_AXIS))
        correction = tl.exp2(row_max - shift)
        row_max = new_max
        row_sum = (
            row_sum * correction[None, :] + p if SWAP_AB else row_sum * correction + tl.sum(p, 1)
        )
        acc = acc * tl.expand_dims(correction, KEY_AXIS)
        if DROPOUT:
            keep = tiles.dropout_keep_mask(
                seed, threshold, bh, tokens, key_start, BM, BN, PACKED, SWAP_AB
            )
            p = tl.where(keep, p, 0.0)
        v = tiles.stream_rows(
            value_descriptor, batch, kv_head, values, key_start, limit,
            BN, DIMS, HEAD_DIM, MASKED, CLIPPED, PACKED,
        )  # fmt: skip
        acc = tiles.dot_accumulate(acc, p, v, PRECISION, SWAP_AB)
        block = tiles.listed_block(index, start, count, step + 1, k_len, BLOCK_K, BN)
        if PARTIAL:
            bit_tile_index = tiles.listed_bit_tile(table, start, count, step + 1, BLOCK_K, BN)
    return row_sum, row_max, acc


@triton.jit
def finalize_softmax(row_sum, row_max, keep_scale, DROPOUT: tl.constexpr):
    """(lse, what to multiply acc by) of the sums of some rows; (-inf, finite) without a key."""
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(row_sum)) * tiles.LN2)
    return lse, (keep_scale if DROPOUT else 1.0) / row_sum
