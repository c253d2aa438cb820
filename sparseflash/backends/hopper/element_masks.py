"""Which pairs of a tile are attended: words of bits, a row of pairs in each few of them."""

from sparseflash.backends.hopper.device import PART
from sparseflash.backends.hopper.gluon_shim import gl, gluon


@gluon.jit
def mask_words(call, entry, first_row, first_word, COLUMNS: gl.constexpr,
               LAYOUT: gl.constexpr):  # fmt: skip
    """The bits of a partial block: for each of PART rows from `first_row` of the block on, the
    words of COLUMNS columns, 64 or 128, from `first_word` on. LAYOUT is that of the scores.
    """
    WORDS: gl.constexpr = call.block // 32  # of a row of a tile of the bank
    tile = gl.load(call.table.partial_tile + entry).to(gl.int64)
    rows = first_row + gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
    words = call.table.bank + (tile * call.block + rows) * WORDS + first_word
    loaded = (gl.load(words), gl.load(words + 1))
    if COLUMNS == 128:
        loaded = (loaded[0], loaded[1], gl.load(words + 2), gl.load(words + 3))
    return loaded


@gluon.jit
def key_words(call, walk, i, masked, first_row, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """key_mask_words of the i-th tile of a row of queries if that is one of the first `masked`."""
    none = gl.zeros([PART], gl.int32, gl.SliceLayout(1, LAYOUT))
    words = (none, none) if COLUMNS == 64 else (none, none, none, none)
    if i < masked:
        words = key_mask_words(call, walk, i, first_row, COLUMNS, LAYOUT)
    return words


@gluon.jit
def query_words(call, walk, i, masked, first_row, LAYOUT: gl.constexpr):
    """mask_words of the i-th tile of PART queries of a row of keys if that is one of the first
    `masked`.
    """
    PARTS: gl.constexpr = call.block // PART
    none = gl.zeros([PART], gl.int32, gl.SliceLayout(1, LAYOUT))
    words = none, none
    if i < masked:
        entry, first_word = walk.partial_start + i // PARTS, i % PARTS * (PART // 32)
        words = mask_words(call, entry, first_row, first_word, PART, LAYOUT)
    return words


@gluon.jit
def key_mask_words(call, walk, i, first_row, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """mask_words of the i-th tile of COLUMNS keys of a row of queries, with the bits of keys past
    `length` 0.
    """
    table = call.table
    PARTS: gl.constexpr = call.block // COLUMNS
    block, first_key = i // PARTS, i % PARTS * COLUMNS
    entry = walk.partial_start + block
    words = mask_words(call, entry, first_row, first_key // 32, COLUMNS, LAYOUT)
    if call.key_lengths is not None:
        is_partial = block < walk.partials
        every = gl.where(is_partial, 0, -1)
        partial = gl.load(table.partial_index + entry)
        cut = gl.load(table.full_index + walk.full_start + walk.fulls)
        keys = walk.length - gl.where(is_partial, partial, cut) * call.block - first_key
        bounded = ((words[0] | every) & low_bits(keys), (words[1] | every) & low_bits(keys - 32))
        if COLUMNS == 128:
            bounded = (
                bounded[0],
                bounded[1],
                (words[2] | every) & low_bits(keys - 64),
                (words[3] | every) & low_bits(keys - 96),
            )
        words = bounded
    return words


@gluon.jit
def low_bits(count):
    """A word whose lowest `count` bits are set; none for negative counts, all for large ones."""
    some = (1 << gl.minimum(gl.maximum(count, 0), 31)) - 1
    return gl.where(count >= 32, -1, some)


@gluon.jit
def attended(words, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Element mask (rows, COLUMNS) out of the bits of mask_words.

    A thread's columns differ in their lowest bit and in multiples of 8: split there, one shift
    serves all of its bits in a word, and the compiler knows the bit that is left to test.
    """
    columns = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    word = gl.expand_dims(words[0], 1) >> (columns & 6)
    for i in gl.static_range(1, COLUMNS // 32):
        word = gl.where(columns // 32 == i, gl.expand_dims(words[i], 1) >> (columns & 6), word)
    return (word & (1 << (columns & 25))) != 0
