"""Reads the blocks of a work tile from the lookup table, and loads their tiles."""

from typing import NamedTuple

from sparseflash.backends.hopper.device.gluon_compat import gl, gluon
from sparseflash.backends.hopper.device.pipeline import advance, producer_load


class RowBlocks(NamedTuple):
    """The blocks of one block row: kernels compute partial blocks, the clipped block, full blocks.

    key_length:    keys of the batch element
    partial_start: first entry of the row in table.partial_index
    n_clipped:     1 if the key length ends inside a full block of the row, else 0; the index of
        this block is entry full_start + n_full of table.full_index
    full_start:    first entry of the row in table.full_index
    n_full:        full blocks without the clipped one
    """

    key_length: gl.tensor
    partial_start: gl.tensor
    n_partial: gl.tensor
    n_clipped: gl.tensor
    full_start: gl.tensor
    n_full: gl.tensor


@gluon.jit
def read_key_length(params, batch):
    """The number of keys of a batch element."""
    length = params.sizes.k_len
    if params.key_lengths is not None:
        length = gl.load(params.key_lengths + batch)
    return length


@gluon.jit
def mask_of_head(params, batch, head):
    """The index of the mask that a query head reads."""
    head_to_mask = params.table.head_to_mask
    if params.sizes.mask_batch_stride is not None:
        head_to_mask = head_to_mask + batch * params.sizes.mask_batch_stride
    return gl.load(head_to_mask + head % params.sizes.mask_heads)


@gluon.jit
def read_block_row(params, batch, head, row):
    """All blocks of a block row of a query head."""
    table, sizes = params.table, params.sizes
    mask = mask_of_head(params, batch, head)
    row_ptr = table.row_ptr + (mask * sizes.num_rows + row) * 4
    full_start, n_full = gl.load(row_ptr), gl.load(row_ptr + 1)
    partial_start, n_partial = gl.load(row_ptr + 2), gl.load(row_ptr + 3)
    key_length = read_key_length(params, batch)
    return RowBlocks(key_length, partial_start, n_partial, n_full * 0, full_start, n_full)


@gluon.jit
def key_blocks_of_row(params, batch, head, row):
    """The blocks of a block row of queries that contain keys before the key length."""
    blocks = read_block_row(params, batch, head, row)
    if params.key_lengths is not None:
        partial_start, full_start = blocks.partial_start, blocks.full_start
        # Block indices ascend within a row, so the blocks before the key length come first.
        n_reached = gl.cdiv(blocks.key_length, params.column_tokens)
        n_partial = count_below(
            params.table.partial_index, partial_start, blocks.n_partial, n_reached
        )
        n_whole = blocks.key_length // params.column_tokens
        n_full = count_below(params.table.full_index, full_start, blocks.n_full, n_whole)
        n_full_or_clipped = count_below(
            params.table.full_index, full_start, blocks.n_full, n_reached
        )
        blocks = RowBlocks(blocks.key_length, partial_start, n_partial,
                           n_full_or_clipped - n_full, full_start, n_full)  # fmt: skip
    return blocks


@gluon.jit
def query_blocks_of_row(params, batch, head, row):
    """The blocks of a block row of keys; none if all of its keys are past the key length."""
    blocks = read_block_row(params, batch, head, row)
    if params.key_lengths is not None:
        inside = row * params.row_tokens < blocks.key_length
        n_partial = gl.where(inside, blocks.n_partial, 0)
        n_full = gl.where(inside, blocks.n_full, 0)
        blocks = RowBlocks(blocks.key_length, blocks.partial_start, n_partial, blocks.n_clipped,
                            blocks.full_start, n_full)  # fmt: skip
    return blocks


@gluon.jit
def tile_start(params, blocks, i, TILE: gl.constexpr):
    """The first token of the i-th tile of a block row, in tiles of TILE tokens."""
    TILES_PER_BLOCK: gl.constexpr = params.column_tokens // TILE
    block = block_index(params, blocks, i // TILES_PER_BLOCK)
    return block * params.column_tokens + i % TILES_PER_BLOCK * TILE


@gluon.jit
def block_index(params, blocks, i):
    """The index, among all blocks of the sequence, of the i-th block of a block row."""
    table = params.table
    is_partial = i < blocks.n_partial
    i_full = i - blocks.n_partial - blocks.n_clipped
    partial_ptr = table.partial_index + blocks.partial_start + i
    full_ptr = table.full_index + blocks.full_start + gl.where(i_full < 0, blocks.n_full, i_full)
    block = gl.load(partial_ptr, mask=is_partial, other=0)
    return block + gl.load(full_ptr, mask=is_partial == 0, other=0)


@gluon.jit
def count_below(index, start, count, limit):
    """How many of the ascending entries index[start : start + count] are below `limit`."""
    low = count * 0  # a tensor: the type of a value may not change in a loop
    high = count
    while low < high:
        middle = (low + high) // 2
        if gl.load(index + start + middle) < limit:
            low = middle + 1
        else:
            high = middle
    return low


@gluon.jit
def load_key_value_tiles(keys, values, more_keys, more_values, key_pipeline, value_pipeline,
                         params, batch, kv_head, blocks, state, STAGES: gl.constexpr):  # fmt: skip
    """Loads K and V of all blocks of a block row of queries."""
    table = params.table
    state = load_block_list(
        keys, values, more_keys, more_values, key_pipeline, value_pipeline, params, batch, kv_head,
        blocks.key_length, table.partial_index, blocks.partial_start, blocks.n_partial, state,
        STAGES,
    )  # fmt: skip
    if params.key_lengths is not None:
        state = load_block_list(
            keys, values, more_keys, more_values, key_pipeline, value_pipeline, params, batch,
            kv_head, blocks.key_length, table.full_index, blocks.full_start + blocks.n_full,
            blocks.n_clipped, state, STAGES,
        )  # fmt: skip
    return load_block_list(
        keys, values, more_keys, more_values, key_pipeline, value_pipeline, params, batch, kv_head,
        blocks.key_length, table.full_index, blocks.full_start, blocks.n_full, state, STAGES,
    )  # fmt: skip


@gluon.jit
def load_block_list(keys, values, more_keys, more_values, key_pipeline, value_pipeline, params,
                    batch, kv_head, key_length, index, start, count, state,
                    STAGES: gl.constexpr):  # fmt: skip
    """Loads K and V of blocks index[start : start + count]; reads the index one block ahead."""
    TILE_N: gl.constexpr = keys.block_type.shape[2]
    # Every list ends in readable entries (masks.lookup_table.PREFETCH). So neither the first load
    # of an empty list nor the one after the last block is out of bounds.
    block = gl.load(index + start)
    for i in range(start, start + count):
        next_block = gl.load(index + i + 1)
        for tile in gl.static_range(params.column_tokens // TILE_N):
            key_start = block * params.column_tokens + tile * TILE_N
            load_key_value_tile(
                keys, values, more_keys, more_values, key_pipeline, value_pipeline, True, params,
                batch, kv_head, key_start, key_length, state,
            )  # fmt: skip
            state = advance(state, STAGES)
        block = next_block
    return state


@gluon.jit
def load_key_value_tile(keys, values, more_keys, more_values, key_pipeline, value_pipeline,
                        LOAD_VALUES: gl.constexpr, params, batch, kv_head, key_start, key_length,
                        state):  # fmt: skip
    """Loads K and, if LOAD_VALUES, V of the tile that starts at token `key_start`.

    more_keys, more_values: the blocks from token first_of_more(...) on, or None
    """
    if more_keys is None:
        producer_load(key_pipeline, keys, batch, kv_head, key_start, state)
        if LOAD_VALUES:
            producer_load(value_pipeline, values, batch, kv_head, key_start, state)
    else:
        more_start = key_start - first_of_more(params, key_length)
        if more_start < 0:
            producer_load(key_pipeline, keys, batch, kv_head, key_start, state)
            if LOAD_VALUES:
                producer_load(value_pipeline, values, batch, kv_head, key_start, state)
        else:
            producer_load(key_pipeline, more_keys, batch, kv_head, more_start, state)
            if LOAD_VALUES:
                producer_load(value_pipeline, more_values, batch, kv_head, more_start, state)


@gluon.jit
def first_of_more(params, key_length):
    """The first token of more_keys and more_values.

    With key lengths they are the block in which that of the batch element ends, with zeros past
    it: see kernels/clipped_block.py. Where rows are of keys, blocks are square.
    """
    columns = params.sizes.own_columns
    if params.key_lengths is not None:
        columns = key_length // params.column_tokens
    return columns * params.column_tokens
