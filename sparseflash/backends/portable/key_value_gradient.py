"""The kernel of dK and dV: a program takes a tile of keys, walks the query blocks of its row."""

import triton
import triton.language as tl

from sparseflash.backends.portable import tiles
from sparseflash.backends.portable.row_terms import term_rows


@triton.jit(**tiles.unspecialized("query", "key", "value", "grad_out", "grad_key", "grad_value"))
def key_value_gradient_kernel(
    query, query_batch, query_head, query_token, query_dim,
    key, key_batch, key_head, key_token, key_dim,
    value, value_batch, value_head, value_token, value_dim,
    grad_out, grad_out_batch, grad_out_head, grad_out_token, grad_out_dim,
    grad_key, grad_key_batch, grad_key_head, grad_key_token, grad_key_dim,
    grad_value, grad_value_batch, grad_value_head, grad_value_token, grad_value_dim,
    query_descriptor, grad_out_descriptor, terms,
    bounds, full_index, partial_index, partial_tile, order, bank, head_layer,
    key_lengths, bias, bias_head, heads, q_len, k_len, layers, rows, ordered, heavy_first,
    mask_batch, mask_head,
    scale2, cap, seed: tl.int64, threshold: tl.uint32, keep_scale,
    GROUP: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr, SCORE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK_STAGES: tl.constexpr,
):  # fmt: skip
    """A program sums over the query heads of its key head.

    Keys past their length load as zero and their gradients are zeroed at the end: the rows of a
    tile do not mix, so the loops need no mask for them.
    """
    table = tiles.Table(bounds, full_index, partial_index, partial_tile, order, bank, head_layer)
    sizes = tiles.Sizes(
        heads, q_len, k_len, layers, rows, ordered, heavy_first, mask_batch, mask_head
    )
    rank, part, batch, kv_head = tiles.program_tile(sizes, BLOCK_K // BN)
    layer = tiles.mask_layer(table, sizes, batch, kv_head * GROUP)
    row = tiles.ranked_row(table, sizes, layer, rank)
    start = row * BLOCK_K + part * BN
    length = k_len if key_lengths is None else tl.load(key_lengths + batch).to(tl.int32)
    strides = (key_batch, key_head, key_token, key_dim)
    keys = tiles.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (value_batch, value_head, value_token, value_dim)
    values = tiles.one_head(value, strides, batch, kv_head, ALIGN, INDEX)
    k = tiles.load_rows(keys, start, length, BN, DIMS, HEAD_DIM, True)
    v = tiles.load_rows(values, start, length, BN, DIMS, HEAD_DIM, True)

    dk = tl.zeros([BN, DIMS], tl.float32)
    dv = tl.zeros([BN, DIMS], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        pair = batch * heads + head
        layer = tiles.mask_layer(table, sizes, batch, head)
        full_start, full_count, partial_start, partial_count = tiles.row_lists(
            table, sizes, layer, row
        )
        starts = (partial_start, full_start)
        counts = (
            tl.where(start < length, partial_count, 0),
            tl.where(start < length, full_count, 0),
        )
        firsts = (tl.load(partial_index + partial_start), tl.load(full_index + full_start))
        strides = (query_batch, query_head, query_token, query_dim)
        queries = tiles.one_head(query, strides, batch, head, ALIGN, INDEX)
        strides = (grad_out_batch, grad_out_head, grad_out_token, grad_out_dim)
        grad_outs = tiles.one_head(grad_out, strides, batch, head, ALIGN, INDEX)
        biases = tiles.of_head(bias, bias_head, head)
        lse2_row, delta_row = term_rows(terms, pair, q_len, BLOCK_Q)
        for PHASE in tl.static_range(2):
            dk, dv = add_key_value_gradients(
                dk, dv, k, v, lse2_row, delta_row,
                queries, grad_outs, query_descriptor, grad_out_descriptor, batch, head,
                table, starts[PHASE], counts[PHASE], firsts[PHASE], start, q_len,
                cap, biases, k_len, scale2, seed, threshold, keep_scale, pair,
                PHASE == 0, DROPOUT, SOFTCAP, SCORE, PRECISION,
                HEAD_DIM, DIMS, BLOCK_Q, BLOCK_K, BM, BN, MASK_STAGES,
            )  # fmt: skip

    valid = start + tl.arange(0, BN)[:, None] < length
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
    cap, biases, k_len, scale2, seed, threshold, keep_scale, pair,
    PARTIAL: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr, SCORE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MASK_STAGES: tl.constexpr,
):  # fmt: skip
    """(dk + dS^T Q, dv + dropout(P)^T dO) over `count` listed blocks; scores are (key, query)."""
    PARTS: tl.constexpr = BLOCK_Q // BM
    index = table.partial_index if PARTIAL else table.full_index
    bits = tl.load(table.partial_tile + start) if PARTIAL else block
    for step in tl.range(count * PARTS, num_stages=MASK_STAGES if PARTIAL else None):
        query_start = block * BLOCK_Q + step % PARTS * BM
        tokens = query_start + tl.arange(0, BM)
        q = tiles.stream_rows(
            query_descriptor, batch, head, queries, query_start, q_len,
            BM, DIMS, HEAD_DIM, PARTIAL, False,
        )  # fmt: skip
        lse2 = tl.load(lse2_row + tokens)
        products = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        scores, slopes = tiles.modified(
            products, batch, head, cap, biases, tokens, key_start, q_len, k_len, scale2,
            SOFTCAP, SCORE, BN, True,
        )  # fmt: skip
        scores -= lse2[None, :]
        if PARTIAL:
            mask = tiles.attended(
                table.bank, bits, tokens, key_start, BM, BN, BLOCK_Q, BLOCK_K, True
            )
            scores = tl.where(mask, scores, float("-inf"))
        p = tl.exp2(scores)
        do = tiles.stream_rows(
            grad_out_descriptor, batch, head, grad_outs, query_start, q_len,
            BM, DIMS, HEAD_DIM, PARTIAL, False,
        )  # fmt: skip
        dropped = p
        if DROPOUT:
            keep = tl.trans(tiles.kept(seed, threshold, pair, tokens, key_start, BM, BN))
            dropped = tl.where(keep, p, 0.0)
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - tl.load(delta_row + tokens)[None, :])
        if SOFTCAP or SCORE is not None:
            ds *= slopes
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        ahead = start + (step + 1) // PARTS
        block = tl.load(index + ahead)
        if PARTIAL:
            bits = tl.load(table.partial_tile + ahead)
    return dk, dv
