"""The kernel of dQ: a program takes a tile of query rows and walks the key blocks of its row."""

import triton
import triton.language as tl

from sparseflash.backends.triton import tiles
from sparseflash.backends.triton.lse_delta import compute_lse_delta


@triton.jit(
    **tiles.unspecialized("query", "key", "value", "out", "grad_out", "grad_query", "grad_lse")
)
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
    strides = (grad_out_batch, grad_out_head, grad_out_token, grad_out_dim)
    grad_outs = tiles.one_head(grad_out, strides, batch, head, ALIGN, INDEX)
    strides = (out_batch, out_head, out_token, out_dim)
    outs = tiles.one_head(out, strides, batch, head, ALIGN, INDEX)
    q = tiles.load_rows(queries, start, q_len, BM, DIMS, HEAD_DIM, True)
    do = tiles.load_rows(grad_outs, start, q_len, BM, DIMS, HEAD_DIM, True)
    lse2, delta = compute_lse_delta(
        do, outs, grad_lse, grad_lse_batch, grad_lse_head, grad_lse_token, lse, lse_delta,
        batch, head, heads, start, q_len, HEAD_DIM, DIMS, BLOCK_Q, BM,
    )  # fmt: skip
    q, do = tiles.transposed_if(q, SWAP_AB), tiles.transposed_if(do, SWAP_AB)
    strides = (key_batch, key_head, key_token, key_dim)
    keys = tiles.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (value_batch, value_head, value_token, value_dim)
    values = tiles.one_head(value, strides, batch, kv_head, ALIGN, INDEX)

    biases = tiles.bias_of_head(bias, bias_head, head)
    tokens = start + tl.arange(0, BM)
    dq = tiles.zero_sums(BM, DIMS, SWAP_AB)
    for BLOCK_LIST in tl.static_range(3 if LENGTHS and not PACKED else 2):
        dq = add_query_gradient(
            dq, q, do, lse2, delta,
            keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
            table, starts[BLOCK_LIST], counts[BLOCK_LIST], firsts[BLOCK_LIST], tokens, length,
            cap, biases, q_len, k_len, scale2, seed, threshold, keep_scale, batch * heads + head,
            BLOCK_LIST == 0, PACKED or BLOCK_LIST == 2 or (BLOCK_LIST == 0 and LENGTHS),
            DROPOUT, SOFTCAP, SCORE, PRECISION,
            HEAD_DIM, DIMS, BLOCK_Q, BLOCK_K, BM, BN, MASK_STAGES, SWAP_AB,
        )  # fmt: skip

    strides = (grad_query_batch, grad_query_head, grad_query_token, grad_query_dim)
    grad_queries = tiles.one_head(grad_query, strides, batch, head, ALIGN, INDEX)
    dq = tiles.transposed_if(dq, SWAP_AB)
    tiles.store_rows(grad_queries, dq * (scale2 * tiles.LN2), start, q_len, HEAD_DIM)


@triton.jit
def add_query_gradient(
    dq, q, do, lse2, delta, keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
    table, start, count, block, tokens, limit,
    cap, biases, q_len, k_len, scale2, seed, threshold, keep_scale, bh,
    PARTIAL: tl.constexpr, CLIPPED: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCORE: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MASK_STAGES: tl.constexpr, SWAP_AB: tl.constexpr,
):  # fmt: skip
    """dq + dS K over `count` listed blocks; PARTIAL, CLIPPED, `block` and SWAP_AB as in
    forward_pass.attend.
    """
    index = table.partial_index if PARTIAL else table.full_index
    bit_tile_index = (
        tiles.listed_bit_tile(table, start, count, 0, BLOCK_K, BN) if PARTIAL else block
    )
    steps = tiles.steps(count, BLOCK_K, BN)
    for step in tl.range(steps, num_stages=MASK_STAGES if PARTIAL else None):
        key_start = tiles.tile_start(block, step, BLOCK_K, BN)
        ds, slopes, k = score_gradients(
            q, do, lse2, delta,
            keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
            table, bit_tile_index, tokens, key_start, limit,
            cap, biases, q_len, k_len, scale2, seed, threshold, keep_scale, bh,
            PARTIAL, CLIPPED, DROPOUT, SOFTCAP, SCORE, PRECISION,
            HEAD_DIM, DIMS, BLOCK_Q, BLOCK_K, BM, BN, SWAP_AB,
        )  # fmt: skip
        if SOFTCAP or SCORE is not None:
            ds *= slopes
        dq = tiles.dot_accumulate(dq, ds, k, PRECISION, SWAP_AB)
        block = tiles.listed_block(index, start, count, step + 1, k_len, BLOCK_K, BN)
        if PARTIAL:
            bit_tile_index = tiles.listed_bit_tile(table, start, count, step + 1, BLOCK_K, BN)
    return dq


@triton.jit
def score_gradients(
    q, do, lse2, delta, keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
    table, bit_tile_index, tokens, key_start, limit,
    cap, biases, q_len, k_len, scale2, seed, threshold, keep_scale, bh,
    PARTIAL: tl.constexpr, CLIPPED: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCORE: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SWAP_AB: tl.constexpr,
):  # fmt: skip
    """(dS, the derivative of the soft cap, K) of one tile."""
    PACKED: tl.constexpr = BN > BLOCK_K
    KEY_AXIS: tl.constexpr = 0 if SWAP_AB else 1
    MASKED: tl.constexpr = PARTIAL or CLIPPED
    k = tiles.stream_rows(
        key_descriptor, batch, kv_head, keys, key_start, limit,
        BN, DIMS, HEAD_DIM, MASKED, CLIPPED, PACKED,
    )  # fmt: skip
    products = tiles.dot_scores(q, k, PRECISION, SWAP_AB)
    key_tokens = tiles.tokens_from(key_start, BN, PACKED)
    scores, slopes = tiles.apply_score_mod(
        products, batch, head, cap, biases, tokens, key_tokens, q_len, k_len, scale2,
        SOFTCAP, SCORE, SWAP_AB,
    )  # fmt: skip
    scores -= tl.expand_dims(lse2, KEY_AXIS)
    if PARTIAL:
        mask = tiles.element_mask(
            table.bit_tiles, bit_tile_index, tokens, key_start, BN, BLOCK_Q, BLOCK_K, SWAP_AB
        )
        scores = tl.where(mask, scores, float("-inf"))
    if CLIPPED:
        valid = tl.expand_dims(key_tokens, 1 - KEY_AXIS) < limit
        scores = tl.where(valid, scores, float("-inf"))
    p = tl.exp2(scores)
    v = tiles.stream_rows(
        value_descriptor, batch, kv_head, values, key_start, limit,
        BN, DIMS, HEAD_DIM, MASKED, CLIPPED, PACKED,
    )  # fmt: skip
    dp = tiles.dot_scores(do, v, PRECISION, SWAP_AB)
    if DROPOUT:
        keep = tiles.dropout_keep_mask(
            seed, threshold, bh, tokens, key_start, BM, BN, PACKED, SWAP_AB
        )
        dp = tl.where(keep, dp * keep_scale, 0.0)
    return p * (dp - tl.expand_dims(delta, KEY_AXIS)), slopes, k
