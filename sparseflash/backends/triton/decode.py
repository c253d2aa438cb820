"""The forward pass of few queries: the keys are split between programs and the parts merged.

A row of queries against a long cache would keep few multiprocessors busy. So each program takes a
share of the blocks that the row lists, and leaves its sums (see forward_pass) for a second kernel
to add up; a call that needs no split does without it. The heads of a group, which read the same
keys, are rows of the same tile where they share their mask.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.backends.compiled import on_device
from sparseflash.backends.triton import configs, tiles
from sparseflash.backends.triton.forward_pass import attend, finalize_softmax
from sparseflash.backends.triton.launch import (
    PreparedPass,
    launch_prepared,
    launch_with_layout,
    prepare,
)
from sparseflash.dispatch.spec import AttentionSpec

MAX_SPLITS = 128
# What a program takes besides its keys, and what merging takes, as the time of so many keys.
OVERHEAD_KEYS = 128
SPLITS_PER_STEP = 16  # splits


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
    prepared = prepare("decode", spec, tensors, (1, 2), _packed(table, spec))
    splits = splits_of(prepared, table, spec)
    parts = None
    if splits > 1:
        shape = (splits, lse.numel(), spec.head_dim + 2)
        parts = torch.empty(shape, dtype=torch.float32, device=query.device)
    grid = (splits * prepared.parts, prepared.heads, spec.batch)
    with on_device(query.device):
        launch_prepared(
            *(prepared, decode_kernel, tensors, (lse, parts)),
            *(table, key_lengths, seed, spec, bias, grid),
        )
        if parts is not None:
            _launch_merge(out, lse, parts, spec)
    return out, lse


def describe(key: Tensor, value: Tensor, table: LookupTable, spec: AttentionSpec) -> str:
    """How a call would be split, and with which configuration."""
    prepared = prepare("decode", spec, (key, value), (0, 1), _packed(table, spec))
    return f"decoding in {splits_of(prepared, table, spec)} splits of the keys, {prepared.config}"


def splits_of(prepared: PreparedPass, table: LookupTable, spec: AttentionSpec) -> int:
    """Between how many programs the keys of a row are split."""
    programs = prepared.parts * prepared.heads * spec.batch
    longest = table.by_query.max_blocks
    blocks = table.by_key.num_rows if longest is None else longest
    return fastest_splits(programs, blocks, spec.block_size[1], prepared.slots)


@lru_cache(maxsize=4096)
def fastest_splits(programs: int, blocks: int, block_k: int, slots: int) -> int:
    """The splits of rows of `blocks` that take the least time where `slots` programs run at once.

    The programs run in waves, each as long as the longest share of a row takes.
    """

    def keys(splits: int) -> int:
        longest_share = -(-blocks // splits) * block_k + OVERHEAD_KEYS
        merging = OVERHEAD_KEYS if splits > 1 else 0
        return -(-programs * splits // slots) * longest_share + merging

    return min(range(1, max(1, min(blocks, MAX_SPLITS)) + 1), key=keys)


def _packed(table: LookupTable, spec: AttentionSpec) -> int:
    """How many heads are rows of one tile."""
    shared = spec.mask_heads == 1 or table.by_query.row_ptr.shape[0] == 1
    return spec.heads // spec.kv_heads if shared else 1


def _launch_merge(out: Tensor, lse: Tensor, parts: Tensor, spec: AttentionSpec) -> None:
    launch_with_layout(
        merge_kernel,
        (spec.q_len, spec.heads, spec.batch),
        (out,),
        (lse, parts, spec.heads, spec.q_len, parts.shape[0]),
        {
            "HEAD_DIM": spec.head_dim,
            "DIMS": configs.padded_dims(spec.head_dim),
            "SPLITS_PER_STEP": SPLITS_PER_STEP,
            "enable_fp_fusion": True,
        },
    )


@triton.jit(**tiles.unspecialized("query", "key", "value", "out"))
def decode_kernel(
    query, query_batch, query_head, query_token, query_dim,
    key, key_batch, key_head, key_token, key_dim,
    value, value_batch, value_head, value_token, value_dim,
    out, out_batch, out_head, out_token, out_dim,
    key_descriptor, value_descriptor, lse, parts,
    row_ptr, full_index, partial_index, partial_bit_tile, schedule, bit_tiles, head_to_mask,
    key_lengths, bias, bias_head, heads, q_len, k_len, num_masks, rows, use_schedule,
    longest_first, mask_batch_stride, mask_head_stride,
    scale2, cap, seed: tl.int64, threshold: tl.uint32, keep_scale,
    GROUP: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, SOFTCAP: tl.constexpr,
    SCORE: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    MASK_STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes BM of the PACKED heads' queries, and its share of the blocks of their row.

    parts: for each split and each query its sums: acc, row_sum and row_max; None without a split
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
    LENGTHS: tl.constexpr = key_lengths is not None
    tiles_of_row = tl.cdiv(q_len * PACKED, BM)
    split = tl.program_id(0) // tiles_of_row
    splits = tl.num_programs(0) // tiles_of_row
    first_head = tl.program_id(1) * PACKED
    batch = tl.program_id(2)
    kv_head = first_head // GROUP
    mask_index = tiles.mask_of_head(table, sizes, batch, first_head)
    length = tl.load(key_lengths + batch).to(tl.int32) if LENGTHS else k_len
    starts, counts = tiles.key_block_lists(
        table, sizes, mask_index, 0, length, BLOCK_K, BN, LENGTHS
    )
    starts, counts = share_of_lists(starts, counts, split, splits)
    firsts = tiles.first_blocks(table, starts, counts, k_len, BLOCK_K, BN)

    rows_of_tile = tl.program_id(0) % tiles_of_row * BM + tl.arange(0, BM)
    tokens = rows_of_tile // PACKED
    heads_of_rows = first_head + rows_of_tile % PACKED
    bh = batch * heads + heads_of_rows
    inside = (tokens < q_len)[:, None] & (tl.arange(0, DIMS) < HEAD_DIM)[None, :]
    strides = (query_batch, query_head, query_token, query_dim)
    pointers = packed_rows(query, strides, batch, heads_of_rows, tokens, DIMS, ALIGN)
    q = tl.load(pointers, mask=inside, other=0.0)
    strides = (key_batch, key_head, key_token, key_dim)
    keys = tiles.one_head(key, strides, batch, kv_head, ALIGN, INDEX)
    strides = (value_batch, value_head, value_token, value_dim)
    values = tiles.one_head(value, strides, batch, kv_head, ALIGN, INDEX)

    head = heads_of_rows[:, None]
    biases = tiles.bias_of_head(bias, bias_head, head)
    row_sum = tl.zeros([BM], tl.float32)
    row_max = tl.full([BM], float("-inf"), tl.float32)
    acc = tl.zeros([BM, DIMS], tl.float32)
    for BLOCK_LIST in tl.static_range(3 if LENGTHS else 2):
        row_sum, row_max, acc = attend(
            row_sum, row_max, acc, q,
            keys, values, key_descriptor, value_descriptor, batch, head, kv_head,
            table, starts[BLOCK_LIST], counts[BLOCK_LIST], firsts[BLOCK_LIST], tokens, length,
            cap, biases, q_len, k_len, scale2, seed, threshold, bh[:, None],
            BLOCK_LIST == 0, BLOCK_LIST == 2 or (BLOCK_LIST == 0 and LENGTHS),
            DROPOUT, SOFTCAP, SCORE, PRECISION,
            HEAD_DIM, DIMS, BLOCK_Q, BLOCK_K, BM, BN, MASK_STAGES, False,
        )  # fmt: skip

    row = bh.to(tl.int64) * q_len + tokens
    if parts is None:
        row_lse, weight = finalize_softmax(row_sum, row_max, keep_scale, DROPOUT)
        tl.store(lse + row, row_lse, mask=tokens < q_len)
        strides = (out_batch, out_head, out_token, out_dim)
        pointers = packed_rows(out, strides, batch, heads_of_rows, tokens, DIMS, ALIGN)
        tl.store(pointers, (acc * weight[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        num_rows = tl.num_programs(2).to(tl.int64) * heads * q_len
        sums = parts + (split * num_rows + row) * (HEAD_DIM + 2)
        if DROPOUT:
            acc *= keep_scale
        tl.store(sums[:, None] + tl.arange(0, DIMS)[None, :], acc, mask=inside)
        tl.store(sums + HEAD_DIM, row_sum, mask=tokens < q_len)
        tl.store(sums + HEAD_DIM + 1, row_max, mask=tokens < q_len)


@triton.jit
def share_of_lists(starts, counts, split, splits):
    """(start, count) of each list of key_block_lists, of which `split` takes its part."""
    partial_start, full_start, clipped_start = starts
    partial_count, full_count, clipped_count = counts
    listed = partial_count + full_count + clipped_count
    begin = listed * split // splits
    end = listed * (split + 1) // splits
    partial_start, partials = clip_list(partial_start, partial_count, begin, end)
    begin -= partial_count
    end -= partial_count
    full_start, fulls = clip_list(full_start, full_count, begin, end)
    begin -= full_count
    end -= full_count
    clipped_start, clipped = clip_list(clipped_start, clipped_count, begin, end)
    return (partial_start, full_start, clipped_start), (partials, fulls, clipped)


@triton.jit
def clip_list(start, count, begin, end):
    """(start, count) of the entries `begin` to `end` of a list."""
    begin = tl.minimum(tl.maximum(begin, 0), count)
    end = tl.minimum(tl.maximum(end, 0), count)
    return start + begin, end - begin


@triton.jit
def packed_rows(tensor, strides, batch, heads, tokens, DIMS: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to rows of several heads; strides as of tiles.one_head."""
    batch_stride, head_stride, token_stride, dim_stride = strides
    offsets = batch.to(tl.int64) * batch_stride + heads.to(tl.int64) * head_stride
    offsets += tokens.to(tl.int64) * token_stride
    dims = tl.arange(0, DIMS).to(tl.int64) * dim_stride
    return tensor + offsets[:, None] * ALIGN + dims[None, :]


@triton.jit(**tiles.unspecialized("out"))
def merge_kernel(
    out, out_batch, out_head, out_token, out_dim, lse, parts, heads, q_len, splits,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
    SPLITS_PER_STEP: tl.constexpr,
):  # fmt: skip
    """A program adds up the sums of all splits of one query, in their order."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    row = (batch * heads + head).to(tl.int64) * q_len + token
    num_rows = tl.num_programs(2).to(tl.int64) * heads * q_len
    dims = tl.arange(0, DIMS)
    row_sum = tl.zeros([1], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    acc = tl.zeros([DIMS], tl.float32)
    for first in range(0, splits, SPLITS_PER_STEP):
        split = first + tl.arange(0, SPLITS_PER_STEP)
        real = split < splits
        sums = parts + (split * num_rows + row) * (HEAD_DIM + 2)
        row_sums = tl.load(sums + HEAD_DIM, mask=real, other=0.0)
        row_maxes = tl.load(sums + HEAD_DIM + 1, mask=real, other=float("-inf"))
        inside = real[:, None] & (dims < HEAD_DIM)[None, :]
        accs = tl.load(sums[:, None] + dims[None, :], mask=inside, other=0.0)
        new_max = tl.maximum(row_max, tl.max(row_maxes, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(row_maxes - shift)
        correction = tl.exp2(row_max - shift)
        row_max = new_max
        row_sum = row_sum * correction + tl.sum(row_sums * weights, 0)
        acc = acc * correction + tl.sum(accs * weights[:, None], 0)
    row_lse, weight = finalize_softmax(row_sum, row_max, 1.0, False)
    tl.store(lse + row + tl.arange(0, 1), row_lse)
    strides = (out_batch, out_head, out_token, out_dim)
    outs = tiles.one_head(out, strides, batch, head, ALIGN, INDEX)
    tiles.store_rows(outs, (acc * weight)[None, :], token, q_len, HEAD_DIM)
