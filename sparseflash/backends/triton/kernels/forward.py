"""The forward pass: O, LSE and, on request, the maximum logits.

A program has BM queries of one bh, and loops over the key blocks of its row: partial blocks, full
blocks, and the full block that the key length clips. A step computes one tile (BM, BN):

    S       = mask(mod(Q K^T))                   (BM, BN)
    row_max = max(row_max, max of each row of S) (BM)
    P       = exp2(S - row_max)                  (BM, BN)
    row_sum = row_sum * correction + sum of each row of P
    O       = O * correction + dropout(P) V      (BM, VALUE_DIMS), in float32

The epilogue divides O by row_sum and stores LSE = ln(2) (row_max + log2(row_sum)); the maximum
logits are ln(2) row_max.

Reference: Dao, "FlashAttention-2", 2023, Algorithm 1.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.kernels import block_lists, positions, scores, tensors
from sparseflash.backends.triton.kernels.signature import unspecialized
from sparseflash.backends.triton_common import score_mods
from sparseflash.backends.triton_common.constants import LN2


@triton.jit(**unspecialized("query", "key", "value", "out"))
def forward_kernel(
    query, query_batch, query_head, query_token, query_dim,
    key, key_batch, key_head, key_token, key_dim,
    value, value_batch, value_head, value_token, value_dim,
    out, out_batch, out_head, out_token, out_dim,
    key_descriptor, value_descriptor, lse, max_logits,
    row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask,
    key_lengths, bias, bias_head, score_floats, score_integers, score_layout, block_positions,
    heads, q_len, k_len, num_masks, num_rows, use_schedule, longest_first,
    mask_batch_stride, mask_head_stride,
    scale_log2, softcap, seed: tl.int64, threshold: tl.int32, keep_scale,
    GROUP: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr, SCORE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr,
    ALIGN: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK_STAGES: tl.constexpr,
):  # fmt: skip
    table = block_lists.Table(
        row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask
    )
    sizes = block_lists.Sizes(
        heads, q_len, k_len, num_masks, num_rows, use_schedule, longest_first,
        mask_batch_stride, mask_head_stride,
    )  # fmt: skip
    shape: tl.constexpr = block_lists.Shape(BM, BN, BLOCK_Q, BLOCK_K, HEAD_DIM, DIMS)
    of_values: tl.constexpr = block_lists.Shape(BM, BN, BLOCK_Q, BLOCK_K, VALUE_DIM, VALUE_DIMS)
    whole_q_len = positions.whole_length(block_positions, q_len)
    whole_k_len = positions.whole_length(block_positions, k_len)
    of_query_blocks = positions.of_query_blocks(block_positions)
    of_key_blocks = positions.of_key_blocks(block_positions, q_len, BLOCK_Q)
    LENGTHS: tl.constexpr = key_lengths is not None
    position, tile, batch, head = block_lists.work_tile(sizes, BLOCK_Q // BM)
    kv_head = head // GROUP
    bh = batch * heads + head
    mask_index = block_lists.mask_of_head(table, sizes, batch, head)
    row = block_lists.scheduled_row(table, sizes, mask_index, position)
    length = block_lists.key_length(key_lengths, batch, k_len)
    starts, counts = block_lists.key_block_lists(
        table, sizes, mask_index, row, length, BLOCK_K, LENGTHS
    )
    lists = block_lists.with_first_blocks(table, starts, counts)

    start = row * BLOCK_Q + tile * BM
    strides = (query_batch, query_head, query_token, query_dim)
    queries = tensors.one_head(query, strides, batch, head, ALIGN, INDEX)
    q = tensors.load_rows(queries, start, q_len, shape, BM, True)  # (BM, DIMS)
    strides = (key_batch, key_head, key_token, key_dim)
    keys = tensors.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (value_batch, value_head, value_token, value_dim)
    values = tensors.one_head(value, strides, batch, kv_head, ALIGN, INDEX)

    biases = score_mods.bias_of_head(bias, bias_head, head)
    whole_head = positions.whole_head(block_positions, head)
    whole_bh = positions.whole_bh(block_positions, batch, head, heads)
    tokens = start + tl.arange(0, BM)
    query_position = start + positions.offset_of(of_query_blocks, row, BLOCK_Q)
    row_sum = tl.zeros([BM], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    acc = tl.zeros([BM, VALUE_DIMS], tl.float32)
    for LIST in tl.static_range(3 if LENGTHS else 2):
        row_sum, row_max, acc = attend(
            row_sum, row_max, acc, q, query_position + tl.arange(0, BM), of_key_blocks, table,
            lists[LIST], length,
            tensors.Stream(keys, key_descriptor, batch, kv_head),
            tensors.Stream(values, value_descriptor, batch, kv_head),
            score_mods.ScoreMods(scale_log2, softcap, biases, batch, whole_head,
                                 whole_q_len, whole_k_len,
                                 score_mods.ScorePointers(score_floats, score_integers,
                                                          score_layout),
                                 SOFTCAP, SCORE),
            scores.DropoutState(seed, threshold, keep_scale, whole_bh, DROPOUT),
            shape, of_values, LIST == 0, LIST == 2 or (LIST == 0 and LENGTHS), PRECISION,
            MASK_STAGES,
        )  # fmt: skip

    row_lse, out_scale = finalize_softmax(row_sum, row_max, keep_scale, DROPOUT)
    tl.store(lse + bh.to(tl.int64) * q_len + tokens, row_lse, mask=tokens < q_len)
    if max_logits is not None:
        row = max_logits + bh.to(tl.int64) * q_len
        tl.store(row + tokens, row_max * LN2, mask=tokens < q_len)
    strides = (out_batch, out_head, out_token, out_dim)
    outs = tensors.one_head(out, strides, batch, head, ALIGN, INDEX)
    tensors.store_rows(outs, acc * out_scale[:, None], start, q_len, VALUE_DIM)


@triton.jit
def attend(
    row_sum, row_max, acc, q, tokens, of_key_blocks, table, block_list, limit, keys, values, mods,
    dropout, shape, of_values, PARTIAL: tl.constexpr, CLIPPED: tl.constexpr,
    PRECISION: tl.constexpr, MASK_STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the blocks of a list to the online softmax of the queries at the positions `tokens`.

    PARTIAL applies the element mask of each block. CLIPPED masks the keys from `limit` on. Without
    both, no mask code is compiled.
    """
    MASKED: tl.constexpr = PARTIAL or CLIPPED
    MODIFIED: tl.constexpr = mods.SOFTCAP or mods.SCORE is not None or mods.biases is not None
    index = table.partial_index if PARTIAL else table.full_index
    start, count, block = block_list
    offset = positions.offset_of(of_key_blocks, block, shape.BLOCK_K)
    bit_tile = tl.load(table.partial_bit_tile + start) if PARTIAL else block
    steps = count * (shape.BLOCK_K // shape.BN)
    for step in tl.range(steps, num_stages=MASK_STAGES if PARTIAL else None):
        key_start = block_lists.tile_start(block, step, shape.BLOCK_K, shape.BN)
        key_position = key_start + offset
        k = tensors.stream_rows(
            keys, key_start, limit, shape, shape.BN, MASKED, CLIPPED
        )  # (BN, DIMS)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BM, BN)
        if MASKED or MODIFIED:
            key_tokens = key_start + tl.arange(0, shape.BN)
            s, _ = score_mods.apply_score_mod(
                s, tokens, key_position + tl.arange(0, shape.BN), mods, False
            )
            if PARTIAL:
                mask = scores.element_mask(
                    table.bit_tiles, bit_tile, tokens, key_start, shape, False
                )
                s = tl.where(mask, s, float("-inf"))
            if CLIPPED:
                s = tl.where(key_tokens[None, :] < limit, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))  # (BM)
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # no NaN before the first key
            p = tl.exp2(s - shift[:, None])
        else:
            # One fused multiply-add for each pair: S is not scaled separately.
            new_max = tl.maximum(row_max, tl.max(s, 1) * mods.scale_log2)
            shift = new_max
            p = tl.exp2(s * mods.scale_log2 - shift[:, None])
        correction = tl.exp2(row_max - shift)
        row_max = new_max
        row_sum = row_sum * correction + tl.sum(p, 1)
        acc = acc * correction[:, None]
        if dropout.DROPOUT:
            keep = scores.dropout_keep_mask(dropout, tokens, key_position, shape, False)
            p = tl.where(keep, p, 0.0)
        v = tensors.stream_rows(
            values, key_start, limit, of_values, shape.BN, MASKED, CLIPPED
        )  # (BN, VALUE_DIMS)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (BM, VALUE_DIMS)
        entry = block_lists.entry_of_step(start, step + 1, shape.BLOCK_K, shape.BN)
        block = tl.load(index + entry)
        if of_key_blocks is not None:
            offset = positions.offset_of(of_key_blocks, block, shape.BLOCK_K)
        if PARTIAL:
            bit_tile = tl.load(table.partial_bit_tile + entry)
    return row_sum, row_max, acc


@triton.jit
def finalize_softmax(row_sum, row_max, keep_scale, DROPOUT: tl.constexpr):
    """(LSE, factor of the accumulator) of each row; (-inf, a finite factor) without a key."""
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(row_sum)) * LN2)
    return lse, (keep_scale if DROPOUT else 1.0) / row_sum
