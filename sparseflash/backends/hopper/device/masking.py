"""Element masks of tiles, from bit tiles of 32-bit words.

Pair (row, column) of a tile is bit column % 32 of word column // 32 of that row.
"""

from sparseflash.backends.hopper.device.gluon_compat import gl, gluon
from sparseflash.backends.hopper.device.layouts import WARPGROUP_M


@gluon.jit
def bit_tile_words(params, partial_entry, first_row, first_word, TILE_N: gl.constexpr,
               LAYOUT: gl.constexpr):  # fmt: skip
    """Words of the bit tile of a partial block: two or four tensors [64], for 64 or 128 columns.

    partial_entry:         entry of the block in table.partial_index
    first_row, first_word: first row of the tile in the block; first word of the tile in each row
    LAYOUT:                layout of S
    """
    WORDS: gl.constexpr = params.column_tokens // 32  # of a row of a bit tile
    bit_tile = gl.load(params.table.partial_bit_tile + partial_entry).to(gl.int64)
    rows = first_row + gl.arange(0, WARPGROUP_M, layout=gl.SliceLayout(1, LAYOUT))
    word_ptr = params.table.bit_tiles + (bit_tile * params.row_tokens + rows) * WORDS + first_word
    words = (gl.load(word_ptr), gl.load(word_ptr + 1))
    if TILE_N == 128:
        words = (words[0], words[1], gl.load(word_ptr + 2), gl.load(word_ptr + 3))
    return words


@gluon.jit
def key_mask_words_or_zeros(params, blocks, i, n_masked, first_row, TILE_N: gl.constexpr,
                        LAYOUT: gl.constexpr):  # fmt: skip
    """key_mask_words of the i-th tile of a block row of queries if i < n_masked, else zeros."""
    # Both paths of the branch must give tensors of one shape and layout.
    zeros = gl.zeros([WARPGROUP_M], gl.int32, gl.SliceLayout(1, LAYOUT))
    words = (zeros, zeros) if TILE_N == 64 else (zeros, zeros, zeros, zeros)
    if i < n_masked:
        words = key_mask_words(params, blocks, i, first_row, TILE_N, LAYOUT)
    return words


@gluon.jit
def query_mask_words_or_zeros(params, blocks, i, n_masked, first_row, LAYOUT: gl.constexpr):
    """query_mask_words of the i-th tile of a block row of keys if i < n_masked, else zeros."""
    zeros = gl.zeros([WARPGROUP_M], gl.int32, gl.SliceLayout(1, LAYOUT))
    words = zeros, zeros
    if i < n_masked:
        words = query_mask_words(params, blocks, i, first_row, LAYOUT)
    return words


@gluon.jit
def query_mask_words(params, blocks, i, first_row, LAYOUT: gl.constexpr):
    """bit_tile_words of the i-th tile of 64 queries of a block row of keys."""
    TILES_PER_BLOCK: gl.constexpr = params.column_tokens // WARPGROUP_M
    partial_entry = blocks.partial_start + i // TILES_PER_BLOCK
    first_word = i % TILES_PER_BLOCK * (WARPGROUP_M // 32)
    return bit_tile_words(params, partial_entry, first_row, first_word, WARPGROUP_M, LAYOUT)


@gluon.jit
def key_mask_words(params, blocks, i, first_row, TILE_N: gl.constexpr, LAYOUT: gl.constexpr):
    """bit_tile_words of the i-th tile of TILE_N keys of a block row of queries.

    Bits of keys past the key length are 0.
    """
    table = params.table
    TILES_PER_BLOCK: gl.constexpr = params.column_tokens // TILE_N
    i_block, first_key = i // TILES_PER_BLOCK, i % TILES_PER_BLOCK * TILE_N
    partial_entry = blocks.partial_start + i_block
    words = bit_tile_words(params, partial_entry, first_row, first_key // 32, TILE_N, LAYOUT)
    if params.key_lengths is not None:
        # The clipped block has no bit tile. For it `words` came from the entry after the partial
        # blocks, which every list has, so all of its bits are set here.
        is_partial = i_block < blocks.n_partial
        all_bits = gl.where(is_partial, 0, -1)
        partial_block = gl.load(table.partial_index + partial_entry)
        clipped_block = gl.load(table.full_index + blocks.full_start + blocks.n_full)
        key_block = gl.where(is_partial, partial_block, clipped_block)
        keys = blocks.key_length - key_block * params.column_tokens - first_key
        bounded = (
            (words[0] | all_bits) & low_bits(keys),
            (words[1] | all_bits) & low_bits(keys - 32),
        )
        if TILE_N == 128:
            bounded = (
                bounded[0],
                bounded[1],
                (words[2] | all_bits) & low_bits(keys - 64),
                (words[3] | all_bits) & low_bits(keys - 96),
            )
        words = bounded
    return words


@gluon.jit
def low_bits(count):
    """A word whose lowest `count` bits are set; none for negative counts, all for large ones."""
    low = (1 << gl.minimum(gl.maximum(count, 0), 31)) - 1
    return gl.where(count >= 32, -1, low)


@gluon.jit
def element_mask(words, TILE_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Element mask [64, TILE_N] out of the words of its rows.

    The column indices of a thread agree in bits 1 and 2. So one shift by `columns & 6` is right
    for all of its columns in a word, and the compiler knows which bit is then tested.
    """
    columns = gl.expand_dims(gl.arange(0, TILE_N, layout=gl.SliceLayout(0, LAYOUT)), 0)
    word = gl.expand_dims(words[0], 1) >> (columns & 6)
    for i in gl.static_range(1, TILE_N // 32):
        word = gl.where(columns // 32 == i, gl.expand_dims(words[i], 1) >> (columns & 6), word)
    return (word & (1 << (columns & 25))) != 0
