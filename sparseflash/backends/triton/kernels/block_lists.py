"""The work tile of a program, and the lists of blocks that it reads.

A work tile consists of BM queries (or BN keys) of one block row of one (batch, head). The lookup
table lists the partial and full blocks of the block row. A loop over a list has one step for every
tile of a block.
"""

from typing import NamedTuple

import triton
import triton.language as tl

SCAN_WIDTH = tl.constexpr(256)


class Table(NamedTuple):
    """One direction of a masks.LookupTable."""

    row_ptr: tl.tensor
    full_index: tl.tensor
    partial_index: tl.tensor
    partial_bit_tile: tl.tensor
    schedule: tl.tensor
    bit_tiles: tl.tensor
    head_to_mask: tl.tensor


class Sizes(NamedTuple):
    """Run-time integers.

    num_rows: block rows of a mask in the direction of the kernel
    use_schedule: 1 if rows start in the order of the table's schedule, 0 if all are equally long
    longest_first: 1 if the longest rows of all heads start before any shorter row, 0 if the heads
        follow one another
    mask_batch_stride, mask_head_stride: strides of head_to_mask; 0 if all batch elements or heads
        share an entry
    """

    heads: tl.tensor
    q_len: tl.tensor
    k_len: tl.tensor
    num_masks: tl.tensor
    num_rows: tl.tensor
    use_schedule: tl.tensor
    longest_first: tl.tensor
    mask_batch_stride: tl.tensor
    mask_head_stride: tl.tensor


class Shape(NamedTuple):
    """Compile-time sizes of a tile.

    BM, BN:           queries and keys of a tile
    BLOCK_Q, BLOCK_K: queries and keys of a block of the mask
    HEAD_DIM, DIMS:   dims of a tensor, and of its tile, which is padded with zeros

    Values and their gradients have another Shape, because the value dim may differ from the head
    dim. The fields are constexpr only while the tuple is passed as an argument: an assignment
    would make them run-time values.
    """

    BM: tl.constexpr
    BN: tl.constexpr
    BLOCK_Q: tl.constexpr
    BLOCK_K: tl.constexpr
    HEAD_DIM: tl.constexpr
    DIMS: tl.constexpr


class BlockList(NamedTuple):
    """`count` entries of a list from `start` on. The value of the first one is `first_block`.

    Each entry is read one step before it is used, the first one before the loop. If an entry were
    read in the step that uses it, the pipeline would have half as many stages.
    """

    start: tl.tensor
    count: tl.tensor
    first_block: tl.tensor


@triton.jit
def work_tile(sizes, TILES_PER_BLOCK: tl.constexpr):
    """(position of the block row, tile within the row, batch element, head) of this program."""
    first, second, third = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile = tl.where(sizes.longest_first != 0, third, first)
    head = tl.where(sizes.longest_first != 0, first, second)
    batch = tl.where(sizes.longest_first != 0, second, third)
    return tile // TILES_PER_BLOCK, tile % TILES_PER_BLOCK, batch, head


@triton.jit
def mask_of_head(table, sizes, batch, head):
    """The index of the mask that a query head reads."""
    mask_index = 0
    if sizes.num_masks > 1:
        masks_of_batch = table.head_to_mask + batch * sizes.mask_batch_stride
        mask_index = tl.load(masks_of_batch + head * sizes.mask_head_stride)
    return mask_index


@triton.jit
def scheduled_row(table, sizes, mask_index, position):
    """The block row at position `position` in the schedule of a mask."""
    row = position
    if sizes.use_schedule:
        row = tl.load(table.schedule + mask_index * sizes.num_rows + position)
    return row


@triton.jit
def lists_of_row(table, sizes, mask_index, row):
    """(full_start, full_count, partial_start, partial_count) of a block row."""
    entry = table.row_ptr + (mask_index * sizes.num_rows + row) * 4
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def key_length(key_lengths, batch, k_len):
    """The number of keys of a batch element, int32."""
    return k_len if key_lengths is None else tl.load(key_lengths + batch).to(tl.int32)


@triton.jit
def key_block_lists(
    table, sizes, mask_index, row, length, BLOCK_K: tl.constexpr, LENGTHS: tl.constexpr
):
    """(starts, counts) of the lists of a row of queries.

    0. partial blocks; 1. full blocks that end before `length`; 2. the full block that the length
    clips.
    """
    full_start, full_count, partial_start, partial_count = lists_of_row(
        table, sizes, mask_index, row
    )
    inside = full_count
    clipped = 0
    if LENGTHS:
        end = tl.cdiv(length, BLOCK_K)
        inside = count_below(table.full_index, full_start, full_count, length // BLOCK_K)
        clipped = count_below(table.full_index, full_start, full_count, end) - inside
        partial_count = count_below(table.partial_index, partial_start, partial_count, end)
    return (partial_start, full_start, full_start + inside), (partial_count, inside, clipped)


@triton.jit
def with_first_blocks(table, starts, counts):
    """The BlockLists of key_block_lists, in the same order."""
    first_partial = tl.load(table.partial_index + starts[0])
    first_full = tl.load(table.full_index + starts[1])
    first_clipped = tl.load(table.full_index + starts[2])
    return (
        BlockList(starts[0], counts[0], first_partial),
        BlockList(starts[1], counts[1], first_full),
        BlockList(starts[2], counts[2], first_clipped),
    )


@triton.jit
def entry_of_step(start, step, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The index of the list entry of a step; BLOCK // TILE steps have the same entry."""
    return start + step // (BLOCK // TILE)


@triton.jit
def tile_start(block, step, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The first token of the tile of a step."""
    return block * BLOCK + step % (BLOCK // TILE) * TILE


@triton.jit
def count_below(index, start, count, limit):
    """How many of the ascending entries index[start : start + count] are below `limit`.

    It counts SCAN_WIDTH entries at a time: a binary search would wait for memory in every step.
    """
    below = 0
    for first in range(0, count, SCAN_WIDTH):
        entry = first + tl.arange(0, SCAN_WIDTH)
        listed = tl.load(index + start + entry, mask=entry < count, other=limit)
        below += tl.sum((listed < limit).to(tl.int32), 0)
    return below
