"""Dropout in the kernels: the keep words of sparseflash.dropout, a bit for each pair.

Each word of a tile is drawn by one thread. Then each thread gets the words of its own pairs, and
tests bits of which the compiler knows the numbers.
"""

from sparseflash.backends.hopper.device.gluon_compat import gl, gluon
from sparseflash.backends.hopper.device.layouts import (
    WARPGROUP_M,
    groups_layout,
    thread_word_layout,
    transposed_groups_layout,
)
from sparseflash.backends.triton_common.dropout import keep_words


@gluon.jit
def dropout_words(dropout, bh, query, key, TILE_N: gl.constexpr):
    """Words with a 1 for every pair that dropout keeps, [64 queries, groups of 64 keys, 2].

    query, key: first of the 64 queries and first of the TILE_N keys
    """
    GROUPS: gl.constexpr = TILE_N // 64
    LAYOUT: gl.constexpr = thread_word_layout(GROUPS)
    queries = query + gl.arange(0, WARPGROUP_M, layout=gl.SliceLayout(1, LAYOUT))
    words = key // 32 + gl.arange(0, 2 * GROUPS, layout=gl.SliceLayout(0, LAYOUT))
    queries, words = gl.expand_dims(queries, 1), gl.expand_dims(words, 0)
    drawn = keep_words(
        dropout.seed_low, dropout.seed_high, dropout.threshold,
        bh.to(gl.int32), queries.to(gl.int32), words.to(gl.int32),
    )  # fmt: skip
    return drawn.reshape([WARPGROUP_M, GROUPS, 2])


@gluon.jit
def dropout_row_words(dropout, bh, query, key, TILE_N: gl.constexpr):
    """dropout_words for keep_bits: two threads of a row have the keys of a word."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, groups_layout(TILE_N // 64)))
    return gl.convert_layout(dropout_words(dropout, bh, query, key, TILE_N), LAYOUT)


@gluon.jit
def keep_bits(words, TILE_N: gl.constexpr, LAYOUT: gl.constexpr):
    """(word, bit) of each pair [64 queries, TILE_N keys] for where_bit, from dropout_row_words.

    The keys of a thread agree in bit 1, by which one shift is right for all of them.
    """
    GROUPS_LAYOUT: gl.constexpr = groups_layout(TILE_N // 64)
    OF_KEYS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, GROUPS_LAYOUT))
    SHAPE: gl.constexpr = [WARPGROUP_M, TILE_N // 64, 8, 2, 4]
    eights = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, OF_KEYS)))
    keys = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, OF_KEYS)))
    eights = gl.expand_dims(gl.expand_dims(eights, 1), 2)
    keys = gl.expand_dims(gl.expand_dims(keys, 0), 0)
    bits = gl.expand_dims(gl.expand_dims(1 << (4 * eights + (keys & 1)), 0), 0)
    shifts = gl.expand_dims(gl.expand_dims(keys & 2, 0), 0)
    words = gl.expand_dims(gl.expand_dims(words, 2), 4) >> shifts
    words = words.broadcast_to(SHAPE).reshape([WARPGROUP_M, TILE_N])
    bits = bits.broadcast_to(SHAPE).reshape([WARPGROUP_M, TILE_N])
    return (
        gl.convert_layout(words, LAYOUT, assert_trivial=True),
        gl.convert_layout(bits, LAYOUT, assert_trivial=True),
    )


@gluon.jit
def transposed_keep_bits(dropout, bh, query, key, LAYOUT: gl.constexpr):
    """(word, bit) of each pair [64 keys, 64 queries] for where_bit.

    The two keys of a thread differ in bit 3 alone. So one shift by the other bits is right for
    both.
    """
    GROUPS_LAYOUT: gl.constexpr = transposed_groups_layout()
    OF_WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, GROUPS_LAYOUT))
    OF_KEYS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, GROUPS_LAYOUT))
    SHAPE: gl.constexpr = [8, 2, 4, WARPGROUP_M]
    words = dropout_words(dropout, bh, query, key, WARPGROUP_M).reshape([WARPGROUP_M, 2])
    words = gl.convert_layout(words.permute((1, 0)), OF_WORDS)
    words = gl.expand_dims(gl.expand_dims(words, 1), 0)
    eights = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, OF_KEYS)), 1)
    keys = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, OF_KEYS)), 0)
    shifts = gl.expand_dims(gl.expand_dims(4 * (eights & 6) + keys, 1), 3)
    bits = gl.expand_dims(gl.expand_dims(1 << (4 * (eights & 1) + keys * 0), 1), 3)
    words = (words >> shifts).broadcast_to(SHAPE).reshape([WARPGROUP_M, WARPGROUP_M])
    bits = bits.broadcast_to(SHAPE).reshape([WARPGROUP_M, WARPGROUP_M])
    return (
        gl.convert_layout(words, LAYOUT, assert_trivial=True),
        gl.convert_layout(bits, LAYOUT, assert_trivial=True),
    )
