"""dQ, and LSE and delta for the kernel of dK and dV.

A program has BM queries of one bh, and loops over the key blocks of its row as the forward pass
does. A step computes one tile (BM, BN):

    P  = exp2(mask(mod(Q K^T)) - log2(e) LSE)    (BM, BN)
    dS = P * (dropout(dO V^T) - delta)           (BM, BN)
    dQ = dQ + dS K                               (BM, DIMS), in float32; scaled at the end
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.kernels import block_lists, positions, scores, tensors
from sparseflash.backends.triton.kernels.lse_delta import compute_lse_delta
from sparseflash.backends.triton.kernels.signature import unspecialized
from sparseflash.backends.triton_common import score_mods
from sparseflash.backends.triton_common.constants import LN2


@triton.jit(**unspecialized("query", "key", "value", "out", "grad_out", "grad_query", "grad_lse"))
def query_gradient_kernel(
    query, query_batch, query_head, query_token, query_dim,
    key, key_batch, key_head, key_token, key_dim,
    value, value_batch, value_head, value_token, value_dim,
    out, out_batch, out_head, out_token, out_dim,
    grad_out, grad_out_batch, grad_out_head, grad_out_token, grad_out_dim,
    grad_query, grad_query_batch, grad_query_head, grad_query_token, grad_query_dim,
    key_descriptor, value_descriptor,
    grad_lse, grad_lse_batch, grad_lse_head, grad_lse_token, lse, lse_delta,
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
    strides = (grad_out_batch, grad_out_head, grad_out_token, grad_out_dim)
    grad_outs = tensors.one_head(grad_out, strides, batch, head, ALIGN, INDEX)
    strides = (out_batch, out_head, out_token, out_dim)
    outs = tensors.one_head(out, strides, batch, head, ALIGN, INDEX)
    q = tensors.load_rows(queries, start, q_len, shape, BM, True)  # (BM, DIMS)
    do = tensors.load_rows(grad_outs, start, q_len, of_values, BM, True)  # (BM, VALUE_DIMS)
    strides = (grad_lse_batch, grad_lse_head, grad_lse_token)
    lse_log2, delta = compute_lse_delta(
        do, outs, grad_lse, strides, lse, lse_delta, batch, head, heads, start, q_len, of_values
    )
    strides = (key_batch, key_head, key_token, key_dim)
    keys = tensors.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (value_batch, value_head, value_token, value_dim)
    values = tensors.one_head(value, strides, batch, kv_head, ALIGN, INDEX)

    biases = score_mods.bias_of_head(bias, bias_head, head)
    whole_head = positions.whole_head(block_positions, head)
    whole_bh = positions.whole_bh(block_positions, batch, head, heads)
    tokens = start + positions.offset_of(of_query_blocks, row, BLOCK_Q) + tl.arange(0, BM)
    dq = tl.zeros([BM, DIMS], tl.float32)
    for LIST in tl.static_range(3 if LENGTHS else 2):
        dq = add_query_gradient(
            dq, q, do, lse_log2, delta, tokens, of_key_blocks, table, lists[LIST], length,
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

    strides = (grad_query_batch, grad_query_head, grad_query_token, grad_query_dim)
    grad_queries = tensors.one_head(grad_query, strides, batch, head, ALIGN, INDEX)
    tensors.store_rows(grad_queries, dq * (scale_log2 * LN2), start, q_len, HEAD_DIM)


@triton.jit
def add_query_gradient(
    dq, q, do, lse_log2, delta, tokens, of_key_blocks, table, block_list, limit, keys, values,
    mods, dropout, shape, of_values, PARTIAL: tl.constexpr, CLIPPED: tl.constexpr,
    PRECISION: tl.constexpr, MASK_STAGES: tl.constexpr,
):  # fmt: skip
    """dq + dS K over the blocks of a list; PARTIAL and CLIPPED as in forward.attend."""
    index = table.partial_index if PARTIAL else table.full_index
    start, count, block = block_list
    offset = positions.offset_of(of_key_blocks, block, shape.BLOCK_K)
    bit_tile = tl.load(table.partial_bit_tile + start) if PARTIAL else block
    steps = count * (shape.BLOCK_K // shape.BN)
    for step in tl.range(steps, num_stages=MASK_STAGES if PARTIAL else None):
        key_start = block_lists.tile_start(block, step, shape.BLOCK_K, shape.BN)
        key_position = key_start + offset
        ds, derivative, k, _ = score_gradients(
            q, do, lse_log2, delta, tokens, table, bit_tile, key_start, key_position, limit,
            keys, values, mods, dropout, shape, of_values, PARTIAL, CLIPPED, PRECISION,
        )  # fmt: skip
        if mods.SOFTCAP or mods.SCORE is not None:
            ds *= derivative
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)  # (BM, DIMS)
        entry = block_lists.entry_of_step(start, step + 1, shape.BLOCK_K, shape.BN)
        block = tl.load(index + entry)
        if of_key_blocks is not None:
            offset = positions.offset_of(of_key_blocks, block, shape.BLOCK_K)
        if PARTIAL:
            bit_tile = tl.load(table.partial_bit_tile + entry)
    return dq


@triton.jit
def score_gradients(
    q, do, lse_log2, delta, tokens, table, bit_tile, key_start, key_position, limit,
    keys, values, mods, dropout, shape, of_values,
    PARTIAL: tl.constexpr, CLIPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(dS before soft cap and score function, their derivative, K, Q K^T) of one tile.

    The queries have the positions `tokens`. The first key is at key_start in `keys`, and at
    key_position in the whole sequence.
    """
    MASKED: tl.constexpr = PARTIAL or CLIPPED
    k = tensors.stream_rows(keys, key_start, limit, shape, shape.BN, MASKED, CLIPPED)  # (BN, DIMS)
    products = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BM, BN)
    key_tokens = key_start + tl.arange(0, shape.BN)
    s, derivative = score_mods.apply_score_mod(
        products, tokens, key_position + tl.arange(0, shape.BN), mods, False
    )
    s -= lse_log2[:, None]
    if PARTIAL:
        mask = scores.element_mask(table.bit_tiles, bit_tile, tokens, key_start, shape, False)
        s = tl.where(mask, s, float("-inf"))
    if CLIPPED:
        s = tl.where(key_tokens[None, :] < limit, s, float("-inf"))
    p = tl.exp2(s)
    v = tensors.stream_rows(
        values, key_start, limit, of_values, shape.BN, MASKED, CLIPPED
    )  # (BN, VALUE_DIMS)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)  # (BM, BN)
    if dropout.DROPOUT:
        keep = scores.dropout_keep_mask(dropout, tokens, key_position, shape, False)
        dp = tl.where(keep, dp * dropout.keep_scale, 0.0)
    return p * (dp - delta[:, None]), derivative, k, products
