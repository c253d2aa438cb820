"""dS summed over each distance, the gradient of a bias, and over each block, that of the blocks.

A program takes every n-th tile of query rows of a head, one after another, and walks the key
blocks of their rows. Its sums over distances are its own, so their order is always the same; those
of the programs of a head are added up at the end.
"""

import triton
import triton.language as tl
from einops import reduce
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.backends.triton import tiles
from sparseflash.backends.triton.launch import launch_prepared, prepare
from sparseflash.backends.triton.lse_delta import lse_delta_pointers
from sparseflash.backends.triton.query_gradient import score_gradients
from sparseflash.dispatch.spec import AttentionSpec

# Programs of all heads where each has sums over distances of its own, which take the memory of
# this many rows of a bias.
PROGRAMS = 512


def ds_sums(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    lse_delta: Tensor,
    needs_bias: bool,
    needs_blocks: bool,
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
    bias: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of bias and blocks, each None where it is not needed.

    tensors: query, key, value, grad_out; lse_delta: see lse_delta.py
    """
    prepared = prepare("ds_sums", spec, tensors, (1, 2))
    row_parts, column_parts = prepared.parts, spec.block_size[1] // prepared.config.bn
    row_tiles = table.by_query.num_rows * row_parts
    column_tiles = table.by_key.num_rows * column_parts
    programs = spec.batch * row_tiles
    by_distance = by_tile = None
    if needs_bias:
        programs = min(programs, -(-PROGRAMS // spec.heads))
        distances = spec.q_len + spec.k_len - 1
        by_distance = lse_delta.new_zeros(spec.heads, programs, distances)
    if needs_blocks:
        by_tile = lse_delta.new_zeros(spec.batch, spec.heads, row_tiles, column_tiles)
    others = (lse_delta, by_distance, by_tile, spec.batch)
    grid = (programs, spec.heads, 1)
    launch_prepared(
        *(prepared, ds_sums_kernel, tensors, others),
        *(table, key_lengths, seed, spec, bias, grid),
    )
    grad_bias = grad_blocks = None
    if by_distance is not None and bias is not None:
        grad_bias = by_distance.sum(1).sum_to_size(bias.shape)
    if by_tile is not None:
        parts = {"p": row_parts, "r": column_parts}
        grad_blocks = reduce(by_tile, "b h (i p) (j r) -> b h i j", "sum", **parts)
    return grad_bias, grad_blocks


@triton.jit(**tiles.unspecialized("query", "key", "value", "grad_out"))
def ds_sums_kernel(
    query, query_batch, query_head, query_token, query_dim,
    key, key_batch, key_head, key_token, key_dim,
    value, value_batch, value_head, value_token, value_dim,
    grad_out, grad_out_batch, grad_out_head, grad_out_token, grad_out_dim,
    key_descriptor, value_descriptor,
    lse_delta, by_distance, by_tile, batches,
    row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask,
    key_lengths, bias, bias_head, heads, q_len, k_len, num_masks, rows, use_schedule,
    longest_first, mask_batch_stride, mask_head_stride,
    scale2, cap, seed: tl.int64, threshold: tl.uint32, keep_scale,
    GROUP: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr, SCORE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK_STAGES: tl.constexpr,
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
    PARTS: tl.constexpr = BLOCK_Q // BM
    head = tl.program_id(1)
    kv_head = head // GROUP
    biases = tiles.bias_of_head(bias, bias_head, head)
    distances = by_distance
    if by_distance is not None:
        slot = head.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        distances = by_distance + slot * (q_len + k_len - 1)
    for tile in tl.range(tl.program_id(0), batches * rows * PARTS, tl.num_programs(0)):
        batch = tile // (rows * PARTS)
        tile_row = tile % (rows * PARTS)
        row = tile_row // PARTS
        start = tile_row * BM
        mask_index = tiles.mask_of_head(table, sizes, batch, head)
        length = tl.load(key_lengths + batch).to(tl.int32) if LENGTHS else k_len
        starts, counts = tiles.key_block_lists(
            table, sizes, mask_index, row, length, BLOCK_K, BN, LENGTHS
        )
        firsts = tiles.first_blocks(table, starts, counts, k_len, BLOCK_K, BN)
        strides = (query_batch, query_head, query_token, query_dim)
        queries = tiles.one_head(query, strides, batch, head, ALIGN, INDEX)
        strides = (grad_out_batch, grad_out_head, grad_out_token, grad_out_dim)
        grad_outs = tiles.one_head(grad_out, strides, batch, head, ALIGN, INDEX)
        q = tiles.load_rows(queries, start, q_len, BM, DIMS, HEAD_DIM, True)
        do = tiles.load_rows(grad_outs, start, q_len, BM, DIMS, HEAD_DIM, True)
        bh = batch * heads + head
        lse2_row, delta_row = lse_delta_pointers(lse_delta, bh, q_len, BLOCK_Q)
        tokens = start + tl.arange(0, BM)
        lse2, delta = tl.load(lse2_row + tokens), tl.load(delta_row + tokens)
        strides = (key_batch, key_head, key_token, key_dim)
        keys = tiles.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
        strides = (value_batch, value_head, value_token, value_dim)
        values = tiles.one_head(value, strides, batch, kv_head, ALIGN, INDEX)
        tile_sums = by_tile
        if by_tile is not None:
            columns = tl.cdiv(k_len, BLOCK_K) * (BLOCK_K // BN)
            tile_sums = by_tile + (bh.to(tl.int64) * rows * PARTS + tile_row) * columns
        for BLOCK_LIST in tl.static_range(3 if LENGTHS else 2):
            add_ds_sums(
                distances, tile_sums, q, do, lse2, delta,
                keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
                table, starts[BLOCK_LIST], counts[BLOCK_LIST], firsts[BLOCK_LIST], start, length,
                cap, biases, q_len, k_len, scale2, seed, threshold, keep_scale, bh,
                BLOCK_LIST == 0, BLOCK_LIST == 2 or (BLOCK_LIST == 0 and LENGTHS),
                DROPOUT, SOFTCAP, SCORE, PRECISION,
                HEAD_DIM, DIMS, BLOCK_Q, BLOCK_K, BM, BN, MASK_STAGES,
            )  # fmt: skip


@triton.jit
def add_ds_sums(
    distances, tile_sums, q, do, lse2, delta,
    keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
    table, start, count, block, query_start, limit,
    cap, biases, q_len, k_len, scale2, seed, threshold, keep_scale, bh,
    PARTIAL: tl.constexpr, CLIPPED: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCORE: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MASK_STAGES: tl.constexpr,
):  # fmt: skip
    """Adds dS of `count` listed blocks; PARTIAL, CLIPPED and `block` as in the forward pass."""
    tokens = query_start + tl.arange(0, BM)
    index = table.partial_index if PARTIAL else table.full_index
    bit_tile_index = (
        tiles.listed_bit_tile(table, start, count, 0, BLOCK_K, BN) if PARTIAL else block
    )
    steps = tiles.steps(count, BLOCK_K, BN)
    for step in tl.range(steps, num_stages=MASK_STAGES if PARTIAL else None):
        key_start = tiles.tile_start(block, step, BLOCK_K, BN)
        ds, _, _ = score_gradients(
            q, do, lse2, delta,
            keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
            table, bit_tile_index, tokens, key_start, limit,
            cap, biases, q_len, k_len, scale2, seed, threshold, keep_scale, bh,
            PARTIAL, CLIPPED, DROPOUT, SOFTCAP, SCORE, PRECISION,
            HEAD_DIM, DIMS, BLOCK_Q, BLOCK_K, BM, BN, False,
        )  # fmt: skip
        if tile_sums is not None:
            tl.store(tile_sums + key_start // BN, tl.sum(ds))
        if distances is not None:
            add_by_distance(distances, ds, query_start, key_start, q_len, k_len, BM, BN)
        block = tiles.listed_block(index, start, count, step + 1, k_len, BLOCK_K, BN)
        if PARTIAL:
            bit_tile_index = tiles.listed_bit_tile(table, start, count, step + 1, BLOCK_K, BN)


@triton.jit
def add_by_distance(
    distances, ds, query_start, key_start, q_len, k_len, BM: tl.constexpr, BN: tl.constexpr
):
    """Adds the diagonals of a tile to `distances`, which this program alone reads and writes."""
    SIDE: tl.constexpr = 2 * BM if BM > BN else 2 * BN
    along = tl.arange(0, SIDE) - (BM - 1)  # key - query, counted from the corner of the tile
    column = along[None, :] + tl.arange(0, BM)[:, None]
    inside = (column >= 0) & (column < BN)
    diagonals = tl.gather(ds, tl.where(inside, column, 0), 1)
    sums = tl.sum(tl.where(inside, diagonals, 0.0), 0)
    places = key_start - query_start + q_len - 1 + along
    valid = (places >= 0) & (places < q_len + k_len - 1)
    # Other threads wrote some of these places for the tile before.
    tl.debug_barrier()
    row_sums = tl.load(distances + places, mask=valid, other=0.0) + sums
    tl.debug_barrier()
    tl.store(distances + places, row_sums, mask=valid)
