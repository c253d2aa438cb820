"""dK and dV.

A program has BN keys of one key head. For every query head of this key head it loops over the
query blocks of its row: partial blocks, then full blocks. The scores are transposed, so that the
rows of the accumulators are keys. A step computes one tile (BN, BM):

    P^T  = exp2(mask(mod(K Q^T)) - log2(e) LSE)  (BN, BM)
    dV   = dV + dropout(P)^T dO                  (BN, VALUE_DIMS), in float32
    dS^T = P^T * (dropout(V dO^T) - delta)       (BN, BM)
    dK   = dK + dS^T Q                           (BN, DIMS), in float32; scaled at the end

Keys past the key length are loaded as zero, and their gradients are set to zero at the end. Rows
of a tile do not affect one another, so the loops need no mask for these keys. No program adds to
memory that another program writes.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.kernels import block_lists, positions, scores, tensors
from sparseflash.backends.triton.kernels.lse_delta import lse_delta_pointers
from sparseflash.backends.triton.kernels.signature import unspecialized
from sparseflash.backends.triton_common import score_mods
from sparseflash.backends.triton_common.constants import LN2


@triton.jit(**unspecialized("query", "key", "value", "grad_out", "grad_key", "grad_value"))
def key_value_gradient_kernel(
    query, query_batch, query_head, query_token, query_dim,
    key, key_batch, key_head, key_token, key_dim,
    value, value_batch, value_head, value_token, value_dim,
    grad_out, grad_out_batch, grad_out_head, grad_out_token, grad_out_dim,
    grad_key, grad_key_batch, grad_key_head, grad_key_token, grad_key_dim,
    grad_value, grad_value_batch, grad_value_head, grad_value_token, grad_value_dim,
    query_descriptor, grad_out_descriptor, lse_delta,
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
    position, tile, batch, kv_head = block_lists.work_tile(sizes, BLOCK_K // BN)
    mask_index = block_lists.mask_of_head(table, sizes, batch, kv_head * GROUP)
    row = block_lists.scheduled_row(table, sizes, mask_index, position)
    start = row * BLOCK_K + tile * BN
    key_position = start + positions.offset_of(of_key_blocks, row, BLOCK_K)
    length = block_lists.key_length(key_lengths, batch, k_len)
    strides = (key_batch, key_head, key_token, key_dim)
    keys = tensors.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (value_batch, value_head, value_token, value_dim)
    values = tensors.one_head(value, strides, batch, kv_head, ALIGN, INDEX)
    k = tensors.load_rows(keys, start, length, shape, BN, True)  # (BN, DIMS)
    v = tensors.load_rows(values, start, length, of_values, BN, True)  # (BN, VALUE_DIMS)

    dk = tl.zeros([BN, DIMS], tl.float32)
    dv = tl.zeros([BN, VALUE_DIMS], tl.float32)
    for head_in_group in range(GROUP):
        head = kv_head * GROUP + head_in_group
        bh = batch * heads + head
        mask_index = block_lists.mask_of_head(table, sizes, batch, head)
        full_start, full_count, partial_start, partial_count = block_lists.lists_of_row(
            table, sizes, mask_index, row
        )
        partial_count = tl.where(start < length, partial_count, 0)
        full_count = tl.where(start < length, full_count, 0)
        lists = (
            block_lists.BlockList(
                partial_start, partial_count, tl.load(partial_index + partial_start)
            ),
            block_lists.BlockList(full_start, full_count, tl.load(full_index + full_start)),
        )
        strides = (query_batch, query_head, query_token, query_dim)
        queries = tensors.one_head(query, strides, batch, head, ALIGN, INDEX)
        strides = (grad_out_batch, grad_out_head, grad_out_token, grad_out_dim)
        grad_outs = tensors.one_head(grad_out, strides, batch, head, ALIGN, INDEX)
        biases = score_mods.bias_of_head(bias, bias_head, head)
        whole_head = positions.whole_head(block_positions, head)
        whole_bh = positions.whole_bh(block_positions, batch, head, heads)
        lse_log2_row, delta_row = lse_delta_pointers(lse_delta, bh, q_len, BLOCK_Q)
        for LIST in tl.static_range(2):
            dk, dv = add_key_value_gradients(
                dk, dv, k, v, lse_log2_row, delta_row, key_position, of_query_blocks, table,
                lists[LIST], q_len,
                tensors.Stream(queries, query_descriptor, batch, head),
                tensors.Stream(grad_outs, grad_out_descriptor, batch, head),
                score_mods.ScoreMods(scale_log2, softcap, biases, batch, whole_head,
                                     whole_q_len, whole_k_len,
                                     score_mods.ScorePointers(score_floats, score_integers,
                                                              score_layout),
                                     SOFTCAP, SCORE),
                scores.DropoutState(seed, threshold, keep_scale, whole_bh, DROPOUT),
                shape, of_values, LIST == 0, PRECISION, MASK_STAGES,
            )  # fmt: skip

    valid = start + tl.arange(0, BN)[:, None] < length
    dk = tl.where(valid, dk * (scale_log2 * LN2), 0.0)
    dv = tl.where(valid, (dv * keep_scale) if DROPOUT else dv, 0.0)
    strides = (grad_key_batch, grad_key_head, grad_key_token, grad_key_dim)
    grad_keys = tensors.one_head(grad_key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (grad_value_batch, grad_value_head, grad_value_token, grad_value_dim)
    grad_values = tensors.one_head(grad_value, strides, batch, kv_head, ALIGN, INDEX)
    tensors.store_rows(grad_keys, dk, start, k_len, HEAD_DIM)
    tensors.store_rows(grad_values, dv, start, k_len, VALUE_DIM)


@triton.jit
def add_key_value_gradients(
    dk, dv, k, v, lse_log2_row, delta_row, key_position, of_query_blocks, table, block_list, limit,
    queries, grad_outs, mods, dropout, shape, of_values,
    PARTIAL: tl.constexpr, PRECISION: tl.constexpr, MASK_STAGES: tl.constexpr,
):  # fmt: skip
    """(dk + dS^T Q, dv + dropout(P)^T dO) over the blocks of a list.

    Only PARTIAL blocks may extend past the end of the queries, which is `limit`.
    """
    index = table.partial_index if PARTIAL else table.full_index
    start, count, block = block_list
    offset = positions.offset_of(of_query_blocks, block, shape.BLOCK_Q)
    bit_tile = tl.load(table.partial_bit_tile + start) if PARTIAL else block
    key_tokens = key_position + tl.arange(0, shape.BN)
    steps = count * (shape.BLOCK_Q // shape.BM)
    for step in tl.range(steps, num_stages=MASK_STAGES if PARTIAL else None):
        query_start = block_lists.tile_start(block, step, shape.BLOCK_Q, shape.BM)
        tokens = query_start + tl.arange(0, shape.BM)
        query_position = query_start + offset
        query_tokens = query_position + tl.arange(0, shape.BM)
        q = tensors.stream_rows(
            queries, query_start, limit, shape, shape.BM, PARTIAL, False
        )  # (BM, DIMS)
        lse_log2 = tl.load(lse_log2_row + tokens)  # (BM)
        products = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # (BN, BM)
        s, derivative = score_mods.apply_score_mod(products, query_tokens, key_tokens, mods, True)
        s -= lse_log2[None, :]
        if PARTIAL:
            mask = scores.element_mask(
                table.bit_tiles, bit_tile, tokens, key_position, shape, True
            )
            s = tl.where(mask, s, float("-inf"))
        p = tl.exp2(s)
        do = tensors.stream_rows(
            grad_outs, query_start, limit, of_values, shape.BM, PARTIAL, False
        )  # (BM, VALUE_DIMS)
        dropped = p
        if dropout.DROPOUT:
            keep = scores.dropout_keep_mask(dropout, query_tokens, key_position, shape, True)
            dropped = tl.where(keep, p, 0.0)
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)  # (BN, VALUE_DIMS)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)  # (BN, BM)
        if dropout.DROPOUT:
            dp = tl.where(keep, dp * dropout.keep_scale, 0.0)
        delta = tl.load(delta_row + tokens)  # (BM)
        ds = p * (dp - delta[None, :])
        if mods.SOFTCAP or mods.SCORE is not None:
            ds *= derivative
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)  # (BN, DIMS)
        entry = block_lists.entry_of_step(start, step + 1, shape.BLOCK_Q, shape.BM)
        block = tl.load(index + entry)
        if of_query_blocks is not None:
            offset = positions.offset_of(of_query_blocks, block, shape.BLOCK_Q)
        if PARTIAL:
            bit_tile = tl.load(table.partial_bit_tile + entry)
    return dk, dv
