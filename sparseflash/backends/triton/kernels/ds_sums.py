"""Sums of dS: the gradients of a bias, of block scores and of score tensors.

The gradient of a bias is the sum of dS over each distance, that of block scores the sum over each
block, and that of score tensors the sum over the pairs that read each entry.

A program computes every n-th tile of BM queries of a head, one after another, and loops over the
key blocks of their row. A step computes dS (BM, BN) as the kernel of dQ does, and adds

    the sum of dS to by_tile (batch, heads, query tiles, key tiles), for block scores;
    the diagonals of dS to by_distance (heads, programs, q_len + k_len - 1), for a bias;
    dS times the derivative of the score function by an entry to the sum of this entry, for score
        tensors.

Each program has its own sums over distances, so their order is always the same. The host adds the
sums of all programs of a head. The sums of entries of score tensors are shared by all programs;
see triton_common.read_sums.
"""

import triton
import triton.language as tl

from sparseflash.backends.triton.kernels import block_lists, positions, scores, tensors
from sparseflash.backends.triton.kernels.dq import score_gradients
from sparseflash.backends.triton.kernels.lse_delta import lse_delta_pointers
from sparseflash.backends.triton.kernels.signature import unspecialized
from sparseflash.backends.triton_common import score_mods
from sparseflash.backends.triton_common.constants import LN2
from sparseflash.backends.triton_common.read_sums import ReadSums


@triton.jit(**unspecialized("query", "key", "value", "grad_out"))
def ds_sums_kernel(
    query, query_batch, query_head, query_token, query_dim,
    key, key_batch, key_head, key_token, key_dim,
    value, value_batch, value_head, value_token, value_dim,
    grad_out, grad_out_batch, grad_out_head, grad_out_token, grad_out_dim,
    key_descriptor, value_descriptor,
    lse_delta, by_distance, by_tile, read_any_order, read_largest, read_fixed, read_steps, batches,
    row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask,
    key_lengths, bias, bias_head, score_floats, score_integers, score_layout, block_positions,
    heads, q_len, k_len, num_masks, num_rows, use_schedule, longest_first,
    mask_batch_stride, mask_head_stride,
    scale_log2, softcap, seed: tl.int64, threshold: tl.int32, keep_scale,
    GROUP: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr, SCORE: tl.constexpr,
    ADD_READS: tl.constexpr, PRECISION: tl.constexpr,
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
    TILES_PER_BLOCK: tl.constexpr = BLOCK_Q // BM
    head = tl.program_id(1)
    kv_head = head // GROUP
    biases = score_mods.bias_of_head(bias, bias_head, head)
    whole_head = positions.whole_head(block_positions, head)
    distances = by_distance
    if by_distance is not None:
        program = head.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        distances = by_distance + program * (whole_q_len + whole_k_len - 1)
    num_tiles = num_rows * TILES_PER_BLOCK
    for work in tl.range(tl.program_id(0), batches * num_tiles, tl.num_programs(0)):
        batch = work // num_tiles
        tile = work % num_tiles
        row = tile // TILES_PER_BLOCK
        start = tile * BM
        mask_index = block_lists.mask_of_head(table, sizes, batch, head)
        length = block_lists.key_length(key_lengths, batch, k_len)
        starts, counts = block_lists.key_block_lists(
            table, sizes, mask_index, row, length, BLOCK_K, LENGTHS
        )
        lists = block_lists.with_first_blocks(table, starts, counts)
        strides = (query_batch, query_head, query_token, query_dim)
        queries = tensors.one_head(query, strides, batch, head, ALIGN, INDEX)
        strides = (grad_out_batch, grad_out_head, grad_out_token, grad_out_dim)
        grad_outs = tensors.one_head(grad_out, strides, batch, head, ALIGN, INDEX)
        q = tensors.load_rows(queries, start, q_len, shape, BM, True)  # (BM, DIMS)
        do = tensors.load_rows(grad_outs, start, q_len, of_values, BM, True)  # (BM, VALUE_DIMS)
        bh = batch * heads + head
        whole_bh = positions.whole_bh(block_positions, batch, head, heads)
        lse_log2_row, delta_row = lse_delta_pointers(lse_delta, bh, q_len, BLOCK_Q)
        tokens = start + tl.arange(0, BM)
        query_position = start + positions.offset_of(of_query_blocks, row, BLOCK_Q)
        lse_log2, delta = tl.load(lse_log2_row + tokens), tl.load(delta_row + tokens)  # (BM)
        strides = (key_batch, key_head, key_token, key_dim)
        keys = tensors.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
        strides = (value_batch, value_head, value_token, value_dim)
        values = tensors.one_head(value, strides, batch, kv_head, ALIGN, INDEX)
        tile_sums = by_tile
        if by_tile is not None:
            columns = tl.cdiv(k_len, BLOCK_K) * (BLOCK_K // BN)
            tile_sums = by_tile + (bh.to(tl.int64) * num_rows * TILES_PER_BLOCK + tile) * columns
        for LIST in tl.static_range(3 if LENGTHS else 2):
            add_ds_sums(
                distances, tile_sums, q, do, lse_log2, delta, query_position, of_key_blocks, table,
                lists[LIST], length,
                tensors.Stream(keys, key_descriptor, batch, kv_head),
                tensors.Stream(values, value_descriptor, batch, kv_head),
                score_mods.ScoreMods(scale_log2, softcap, biases, batch, whole_head,
                                     whole_q_len, whole_k_len,
                                     score_mods.ScorePointers(score_floats, score_integers,
                                                              score_layout),
                                     SOFTCAP, SCORE),
                ReadSums(read_any_order, read_largest, read_fixed, read_steps),
                scores.DropoutState(seed, threshold, keep_scale, whole_bh, DROPOUT),
                shape, of_values, LIST == 0, LIST == 2 or (LIST == 0 and LENGTHS), ADD_READS,
                PRECISION, MASK_STAGES,
            )  # fmt: skip


@triton.jit
def add_ds_sums(
    distances, tile_sums, q, do, lse_log2, delta, query_position, of_key_blocks, table, block_list,
    limit, keys, values, mods, read_sums, dropout, shape, of_values,
    PARTIAL: tl.constexpr, CLIPPED: tl.constexpr, ADD_READS: tl.constexpr,
    PRECISION: tl.constexpr, MASK_STAGES: tl.constexpr,
):  # fmt: skip
    """Adds dS of the blocks of a list; PARTIAL and CLIPPED as in forward.attend."""
    tokens = query_position + tl.arange(0, shape.BM)
    index = table.partial_index if PARTIAL else table.full_index
    start, count, block = block_list
    offset = positions.offset_of(of_key_blocks, block, shape.BLOCK_K)
    bit_tile = tl.load(table.partial_bit_tile + start) if PARTIAL else block
    steps = count * (shape.BLOCK_K // shape.BN)
    for step in tl.range(steps, num_stages=MASK_STAGES if PARTIAL else None):
        key_start = block_lists.tile_start(block, step, shape.BLOCK_K, shape.BN)
        key_position = key_start + offset
        ds, _, _, products = score_gradients(
            q, do, lse_log2, delta, tokens, table, bit_tile, key_start, key_position, limit,
            keys, values, mods, dropout, shape, of_values, PARTIAL, CLIPPED, PRECISION,
        )  # fmt: skip
        if tile_sums is not None:
            tl.store(tile_sums + key_start // shape.BN, tl.sum(ds))
        if distances is not None:
            add_by_distance(distances, ds, query_position, key_position, mods, shape)
        if ADD_READS is not None:
            s = products * (mods.scale_log2 * LN2)
            if mods.SOFTCAP:
                capped, _ = score_mods.tanh(s / mods.softcap)
                s = capped * mods.softcap
            key_tokens = key_position + tl.arange(0, shape.BN)
            pointers = mods.pointers
            ADD_READS(
                s, mods.batch, mods.head, tokens[:, None], key_tokens[None, :],
                pointers.floats, pointers.integers, pointers.layout, ds, read_sums,
            )  # fmt: skip
        entry = block_lists.entry_of_step(start, step + 1, shape.BLOCK_K, shape.BN)
        block = tl.load(index + entry)
        if of_key_blocks is not None:
            offset = positions.offset_of(of_key_blocks, block, shape.BLOCK_K)
        if PARTIAL:
            bit_tile = tl.load(table.partial_bit_tile + entry)


@triton.jit
def add_by_distance(distances, ds, query_position, key_position, mods, shape):
    """Adds the diagonals of dS (BM, BN) to `distances`, which only this program uses."""
    SIDE: tl.constexpr = 2 * shape.BM if shape.BM > shape.BN else 2 * shape.BN
    distance = tl.arange(0, SIDE) - (shape.BM - 1)  # key - query, from the corner of the tile
    column = distance[None, :] + tl.arange(0, shape.BM)[:, None]  # (BM, SIDE)
    inside = (column >= 0) & (column < shape.BN)
    diagonals = tl.gather(ds, tl.where(inside, column, 0), 1)
    sums = tl.sum(tl.where(inside, diagonals, 0.0), 0)  # (SIDE)
    index = key_position - query_position + mods.q_len - 1 + distance
    valid = (index >= 0) & (index < mods.q_len + mods.k_len - 1)
    # Other threads of the program wrote some of these sums for the previous tile.
    tl.debug_barrier()
    sums = tl.load(distances + index, mask=valid, other=0.0) + sums
    tl.debug_barrier()
    tl.store(distances + index, sums, mask=valid)
