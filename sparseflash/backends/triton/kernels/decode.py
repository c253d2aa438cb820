"""The forward pass of few queries (decoding): split-KV.

decode_kernel: the BM rows of a tile are the queries of HEADS_PER_TILE query heads that share a key
head. A program computes the forward pass of a tile for one split of the blocks of its row. With
several splits it stores accumulator (VALUE_DIMS), row sum and row max of each query to split_sums
(splits, batch * heads * q_len, VALUE_DIM + 2).

merge_kernel: a program merges the splits of one query, in the order of the splits.

Reference: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.kernels import block_lists, positions, scores, tensors
from sparseflash.backends.triton.kernels.forward import attend, finalize_softmax
from sparseflash.backends.triton.kernels.signature import unspecialized
from sparseflash.backends.triton_common import score_mods
from sparseflash.backends.triton_common.constants import LN2


@triton.jit(**unspecialized("query", "key", "value", "out"))
def decode_kernel(
    query, query_batch, query_head, query_token, query_dim,
    key, key_batch, key_head, key_token, key_dim,
    value, value_batch, value_head, value_token, value_dim,
    out, out_batch, out_head, out_token, out_dim,
    key_descriptor, value_descriptor, lse, max_logits, split_sums,
    row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask,
    key_lengths, bias, bias_head, score_floats, score_integers, score_layout, block_positions,
    heads, q_len, k_len, num_masks, num_rows, use_schedule, longest_first,
    mask_batch_stride, mask_head_stride,
    scale_log2, softcap, seed: tl.int64, threshold: tl.int32, keep_scale,
    GROUP: tl.constexpr, HEADS_PER_TILE: tl.constexpr, DROPOUT: tl.constexpr,
    SOFTCAP: tl.constexpr, SCORE: tl.constexpr, PRECISION: tl.constexpr,
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
    tiles_of_heads = tl.cdiv(q_len * HEADS_PER_TILE, BM)
    split = tl.program_id(0) // tiles_of_heads
    splits = tl.num_programs(0) // tiles_of_heads
    first_head = tl.program_id(1) * HEADS_PER_TILE
    batch = tl.program_id(2)
    kv_head = first_head // GROUP
    mask_index = block_lists.mask_of_head(table, sizes, batch, first_head)
    length = block_lists.key_length(key_lengths, batch, k_len)
    starts, counts = block_lists.key_block_lists(
        table, sizes, mask_index, 0, length, BLOCK_K, LENGTHS
    )
    starts, counts = split_lists(starts, counts, split, splits)
    lists = block_lists.with_first_blocks(table, starts, counts)

    rows = tl.program_id(0) % tiles_of_heads * BM + tl.arange(0, BM)
    tokens = rows // HEADS_PER_TILE
    row_heads = first_head + rows % HEADS_PER_TILE
    bh = batch * heads + row_heads
    valid = (tokens < q_len)[:, None]
    inside = valid & (tl.arange(0, DIMS) < HEAD_DIM)[None, :]
    strides = (query_batch, query_head, query_token, query_dim)
    pointers = row_pointers(query, strides, batch, row_heads, tokens, DIMS, ALIGN)
    q = tl.load(pointers, mask=inside, other=0.0)  # (BM, DIMS)
    strides = (key_batch, key_head, key_token, key_dim)
    keys = tensors.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (value_batch, value_head, value_token, value_dim)
    values = tensors.one_head(value, strides, batch, kv_head, ALIGN, INDEX)

    offset = positions.offset_of(of_query_blocks, 0, BLOCK_Q)
    head = row_heads[:, None]
    biases = score_mods.bias_of_head(bias, bias_head, head)
    whole_head = positions.whole_head(block_positions, head)
    whole_bh = positions.whole_bh(block_positions, batch, row_heads, heads)
    row_sum = tl.zeros([BM], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    acc = tl.zeros([BM, VALUE_DIMS], tl.float32)
    for LIST in tl.static_range(3 if LENGTHS else 2):
        row_sum, row_max, acc = attend(
            row_sum, row_max, acc, q, tokens + offset, of_key_blocks, table, lists[LIST],
            length,
            tensors.Stream(keys, key_descriptor, batch, kv_head),
            tensors.Stream(values, value_descriptor, batch, kv_head),
            score_mods.ScoreMods(scale_log2, softcap, biases, batch, whole_head,
                                 whole_q_len, whole_k_len,
                                 score_mods.ScorePointers(score_floats, score_integers,
                                                          score_layout),
                                 SOFTCAP, SCORE),
            scores.DropoutState(seed, threshold, keep_scale, whole_bh[:, None], DROPOUT),
            shape, of_values, LIST == 0, LIST == 2 or (LIST == 0 and LENGTHS), PRECISION,
            MASK_STAGES,
        )  # fmt: skip

    query_index = bh.to(tl.int64) * q_len + tokens
    inside = valid & (tl.arange(0, VALUE_DIMS) < VALUE_DIM)[None, :]
    if split_sums is None:
        row_lse, out_scale = finalize_softmax(row_sum, row_max, keep_scale, DROPOUT)
        tl.store(lse + query_index, row_lse, mask=tokens < q_len)
        if max_logits is not None:
            tl.store(max_logits + query_index, row_max * LN2, mask=tokens < q_len)
        strides = (out_batch, out_head, out_token, out_dim)
        pointers = row_pointers(out, strides, batch, row_heads, tokens, VALUE_DIMS, ALIGN)
        tl.store(pointers, (acc * out_scale[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        num_queries = tl.num_programs(2).to(tl.int64) * heads * q_len
        sums = split_sums + (split * num_queries + query_index) * (VALUE_DIM + 2)
        if DROPOUT:
            acc *= keep_scale
        tl.store(sums[:, None] + tl.arange(0, VALUE_DIMS)[None, :], acc, mask=inside)
        tl.store(sums + VALUE_DIM, row_sum, mask=tokens < q_len)
        tl.store(sums + VALUE_DIM + 1, row_max, mask=tokens < q_len)


@triton.jit
def split_lists(starts, counts, split, splits):
    """The entries of the lists of key_block_lists in a split; splits have equal parts of them."""
    partial_start, full_start, clipped_start = starts
    partial_count, full_count, clipped_count = counts
    listed = partial_count + full_count + clipped_count
    begin = listed * split // splits
    end = listed * (split + 1) // splits
    partial_start, n_partial = clip_list(partial_start, partial_count, begin, end)
    begin -= partial_count
    end -= partial_count
    full_start, n_full = clip_list(full_start, full_count, begin, end)
    begin -= full_count
    end -= full_count
    clipped_start, n_clipped = clip_list(clipped_start, clipped_count, begin, end)
    return (partial_start, full_start, clipped_start), (n_partial, n_full, n_clipped)


@triton.jit
def clip_list(start, count, begin, end):
    """(start, count) of the entries `begin` to `end` of a list."""
    begin = tl.minimum(tl.maximum(begin, 0), count)
    end = tl.minimum(tl.maximum(end, 0), count)
    return start + begin, end - begin


@triton.jit
def row_pointers(tensor, strides, batch, heads, tokens, DIMS: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers (BM, DIMS) to rows of several heads; strides as of tensors.one_head."""
    batch_stride, head_stride, token_stride, dim_stride = strides
    offsets = batch.to(tl.int64) * batch_stride + heads.to(tl.int64) * head_stride
    offsets += tokens.to(tl.int64) * token_stride
    dims = tl.arange(0, DIMS).to(tl.int64) * dim_stride
    return tensor + offsets[:, None] * ALIGN + dims[None, :]


@triton.jit(**unspecialized("out"))
def merge_kernel(
    out, out_batch, out_head, out_token, out_dim, lse, max_logits, split_sums,
    heads, q_len, splits,
    VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
    SPLITS_PER_STEP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    query_index = (batch * heads + head).to(tl.int64) * q_len + token
    num_queries = tl.num_programs(2).to(tl.int64) * heads * q_len
    dims = tl.arange(0, VALUE_DIMS)
    row_sum = tl.zeros([1], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    acc = tl.zeros([VALUE_DIMS], tl.float32)
    for first in range(0, splits, SPLITS_PER_STEP):
        split = first + tl.arange(0, SPLITS_PER_STEP)
        valid = split < splits
        sums = split_sums + (split * num_queries + query_index) * (VALUE_DIM + 2)
        sums_of_splits = tl.load(sums + VALUE_DIM, mask=valid, other=0.0)
        maxes_of_splits = tl.load(sums + VALUE_DIM + 1, mask=valid, other=float("-inf"))
        inside = valid[:, None] & (dims < VALUE_DIM)[None, :]
        accs = tl.load(sums[:, None] + dims[None, :], mask=inside, other=0.0)
        new_max = tl.maximum(row_max, tl.max(maxes_of_splits, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        corrections = tl.exp2(maxes_of_splits - shift)
        correction = tl.exp2(row_max - shift)
        row_max = new_max
        row_sum = row_sum * correction + tl.sum(sums_of_splits * corrections, 0)
        acc = acc * correction + tl.sum(accs * corrections[:, None], 0)
    row_lse, out_scale = finalize_softmax(row_sum, row_max, 1.0, False)
    tl.store(lse + query_index + tl.arange(0, 1), row_lse)
    if max_logits is not None:
        tl.store(max_logits + query_index + tl.arange(0, 1), row_max * LN2)
    strides = (out_batch, out_head, out_token, out_dim)
    outs = tensors.one_head(out, strides, batch, head, ALIGN, INDEX)
    tensors.store_rows(outs, (acc * out_scale)[None, :], token, q_len, VALUE_DIM)
