"""The kernel of dK and dV: a program takes a tile of keys, walks the query blocks of its row."""

import triton
import triton.language as tl

from sparseflash.backends.triton import tiles
from sparseflash.backends.triton.lse_delta import lse_delta_pointers


@triton.jit(**tiles.unspecialized("query", "key", "value", "grad_out", "grad_key", "grad_value"))
def key_value_gradient_kernel(
    query, query_batch, query_head, query_token, query_dim,
    key, key_batch, key_head, key_token, key_dim,
    value, value_batch, value_head, value_token, value_dim,
    grad_out, grad_out_batch, grad_out_head, grad_out_token, grad_out_dim,
    grad_key, grad_key_batch, grad_key_head, grad_key_token, grad_key_dim,
    grad_value, grad_value_batch, grad_value_head, grad_value_token, grad_value_dim,
    query_descriptor, grad_out_descriptor, lse_delta,
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
    """A program sums over the query heads of its key head.

    Keys past their length load as zero and their gradients are zeroed at the end: the rows of a
    tile do not mix, so the loops need no mask for them.
    """
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
    rank, part, batch, kv_head = tiles.work_tile(sizes, BLOCK_K // BN)
    mask_index = tiles.mask_of_head(table, sizes, batch, kv_head * GROUP)
    row = tiles.scheduled_row(table, sizes, mask_index, rank)
    start = row * BLOCK_K + part * BN
    length = k_len if key_lengths is None else tl.load(key_lengths + batch).to(tl.int32)
    strides = (key_batch, key_head, key_token, key_dim)
    keys = tiles.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (value_batch, value_head, value_token, value_dim)
    values = tiles.one_head(value, strides, batch, kv_head, ALIGN, INDEX)
    k = tiles.load_rows(keys, start, length, BN, DIMS, HEAD_DIM, True)
    v = tiles.load_rows(values, start, length, BN, DIMS, HEAD_DIM, True)
    k, v = tiles.transposed_if(k, SWAP_AB), tiles.transposed_if(v, SWAP_AB)

    dk = tiles.zero_sums(BN, DIMS, SWAP_AB)
    dv = tiles.zero_sums(BN, DIMS, SWAP_AB)
    for head_in_group in range(GROUP):
        head = kv_head * GROUP + head_in_group
        bh = batch * heads + head
        mask_index = tiles.mask_of_head(table, sizes, batch, head)
        full_start, full_count, partial_start, partial_count = tiles.lists_of_row(
            table, sizes, mask_index, row
        )
        partial_count = tl.where(start < length, partial_count, 0)
        full_count = tl.where(start < length, full_count, 0)
        starts = (partial_start, full_start)
        counts = (partial_count, full_count)
        firsts = (
            tiles.listed_block(partial_index, partial_start, partial_count, 0, q_len, BLOCK_Q, BM),
            tiles.listed_block(full_index, full_start, full_count, 0, q_len, BLOCK_Q, BM),
        )
        strides = (query_batch, query_head, query_token, query_dim)
        queries = tiles.one_head(query, strides, batch, head, ALIGN, INDEX)
        strides = (grad_out_batch, grad_out_head, grad_out_token, grad_out_dim)
        grad_outs = tiles.one_head(grad_out, strides, batch, head, ALIGN, INDEX)
        biases = tiles.bias_of_head(bias, bias_head, head)
        lse2_row, delta_row = lse_delta_pointers(lse_delta, bh, q_len, BLOCK_Q)
        for BLOCK_LIST in tl.static_range(2):
            dk, dv = add_key_value_gradients(
                dk, dv, k, v, lse2_row, delta_row,
                queries, grad_outs, query_descriptor, grad_out_descriptor, batch, head,
                table, starts[BLOCK_LIST], counts[BLOCK_LIST], firsts[BLOCK_LIST], start, q_len,
                cap, biases, k_len, scale2, seed, threshold, keep_scale, bh,
                BLOCK_LIST == 0, BLOCK_LIST == 0 or BM > BLOCK_Q,
                DROPOUT, SOFTCAP, SCORE, PRECISION,
                HEAD_DIM, DIMS, BLOCK_Q, BLOCK_K, BM, BN, MASK_STAGES, SWAP_AB,
            )  # fmt: skip

    valid = start + tl.arange(0, BN)[:, None] < length
    dk, dv = tiles.transposed_if(dk, SWAP_AB), tiles.transposed_if(dv, SWAP_AB)
    dk = tl.where(valid, dk * (scale2 * tiles.LN2), 0.0)
    dv = tl.where(valid, (dv * keep_scale) if DROPOUT else dv, 0.0)
    strides = (grad_key_batch, grad_key_head, grad_key_token, grad_key_dim)
    grad_keys = tiles.one_head(grad_key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (grad_value_batch, grad_value_head, grad_value_token, grad_value_dim)
    grad_values = tiles.one_head(grad_value, strides, batch, kv_head, ALIGN, INDEX)
    tiles.store_rows(grad_keys, dk, start, k_len, HEAD_DIM)
    tiles.store_rows(grad_values, dv, start, k_len, HEAD_DIM)


@triton.jit
def add_key_value_gradients(
    dk, dv, k, v, lse2_row, delta_row,
    queries, grad_outs, query_descriptor, grad_out_descriptor, batch, head,
    table, start, count, block, key_start, q_len,
    cap, biases, k_len, scale2, seed, threshold, keep_scale, bh,
    PARTIAL: tl.constexpr, BOUNDED: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCORE: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MASK_STAGES: tl.constexpr, SWAP_AB: tl.constexpr,
):  # fmt: skip
    """(dk + dS^T Q, dv + dropout(P)^T dO) over `count` listed blocks; scores are (key, query).

    BOUNDED says that tiles may reach past the queries. A tile of more queries than a block holds
    several blocks, one for each of its queries in `block`. SWAP_AB: scores are (query, key), dk
    and dv (dim, key).
    """
    PACKED: tl.constexpr = BM > BLOCK_Q
    KEY_AXIS: tl.constexpr = 1 if SWAP_AB else 0
    index = table.partial_index if PARTIAL else table.full_index
    bit_tile_index = block
    if PARTIAL:
        bit_tile_index = tiles.listed_block(
            table.partial_bit_tile, start, count, 0, 0, BLOCK_Q, BM
        )
    key_tokens = key_start + tl.arange(0, BN)
    steps = tiles.steps(count, BLOCK_Q, BM)
    for step in tl.range(steps, num_stages=MASK_STAGES if PARTIAL else None):
        query_start = tiles.tile_start(block, step, BLOCK_Q, BM)
        tokens = tiles.tokens_from(query_start, BM, PACKED)
        q = tiles.stream_rows(
            query_descriptor, batch, head, queries, query_start, q_len,
            BM, DIMS, HEAD_DIM, BOUNDED, False, PACKED,
        )  # fmt: skip
        lse2 = load_lse_delta(lse2_row, tokens, q_len, float("inf"), PACKED and BOUNDED)
        products = tiles.dot_scores(k, q, PRECISION, SWAP_AB)
        scores, slopes = tiles.apply_score_mod(
            products, batch, head, cap, biases, tokens, key_tokens, q_len, k_len, scale2,
            SOFTCAP, SCORE, not SWAP_AB,
        )  # fmt: skip
        scores -= tl.expand_dims(lse2, KEY_AXIS)
        if PARTIAL:
            mask = tiles.element_mask(
                table.bit_tiles,
                bit_tile_index,
                tokens,
                key_start,
                BN,
                BLOCK_Q,
                BLOCK_K,
                not SWAP_AB,
            )
            scores = tl.where(mask, scores, float("-inf"))
        p = tl.exp2(scores)
        do = tiles.stream_rows(
            grad_out_descriptor, batch, head, grad_outs, query_start, q_len,
            BM, DIMS, HEAD_DIM, BOUNDED, False, PACKED,
        )  # fmt: skip
        dropped = p
        if DROPOUT:
            keep = tiles.dropout_keep_mask(
                seed, threshold, bh, tokens, key_start, BM, BN, False, not SWAP_AB
            )
            dropped = tl.where(keep, p, 0.0)
        dv = tiles.dot_accumulate(dv, dropped, do, PRECISION, SWAP_AB)
        dp = tiles.dot_scores(v, do, PRECISION, SWAP_AB)
        if DROPOUT:
            dp = tl.where(keep, dp * keep_scale, 0.0)
        delta = load_lse_delta(delta_row, tokens, q_len, 0.0, PACKED and BOUNDED)
        ds = p * (dp - tl.expand_dims(delta, KEY_AXIS))
        if SOFTCAP or SCORE is not None:
            ds *= slopes
        dk = tiles.dot_accumulate(dk, ds, q, PRECISION, SWAP_AB)
        block = tiles.listed_block(index, start, count, step + 1, q_len, BLOCK_Q, BM)
        if PARTIAL:
            bit_tile_index = tiles.listed_block(
                table.partial_bit_tile, start, count, step + 1, 0, BLOCK_Q, BM
            )
    return dk, dv


@triton.jit
def load_lse_delta(row, tokens, q_len, other, BOUNDED: tl.constexpr):
    """LSE or delta of `tokens`; if BOUNDED `other` for those past the queries."""
    if BOUNDED:
        term = tl.load(row + tokens, mask=tokens < q_len, other=other)
    else:
        term = tl.load(row + tokens)
    return term
