"""Dropout in the kernels: the bits of sparseflash.dropout, packed like the bits of a bit tile.

One Philox call gives the bits of a quad: four neighbouring keys of a query. Four threads share a
row of an accumulator. Each draws the bits of a quarter of the keys, and then they exchange them.
"""

from sparseflash.backends.hopper.device.gluon_compat import gl, gluon
from sparseflash.backends.hopper.device.layouts import (
    THREADS_PER_ROW,
    WARPGROUP_M,
    thread_row_layout,
)

ROUNDS = gl.constexpr(10)
# Words of 32 bits, signed as all integers of the kernels.
MULTIPLIER_0, MULTIPLIER_1 = gl.constexpr(0xD2511F53 - 2**32), gl.constexpr(0xCD9E8D57 - 2**32)
WEYL_0, WEYL_1 = gl.constexpr(0x9E3779B9 - 2**32), gl.constexpr(0xBB67AE85 - 2**32)
SIGN = gl.constexpr(-(2**31))


@gluon.jit
def dropout_keep_words(dropout, bh, query, key, TILE_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Words with a 1 for every pair that dropout keeps; tensors as of masking.bit_tile_words.

    query, key: first of the 64 queries and first of the TILE_N keys
    """
    THREAD_LAYOUT: gl.constexpr = thread_row_layout()
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    QUADS: gl.constexpr = TILE_N // (4 * THREADS_PER_ROW)  # of each thread
    THREADS_PER_WORD: gl.constexpr = 8 // QUADS  # threads that share a word
    threads = gl.arange(0, THREADS_PER_ROW, layout=gl.SliceLayout(0, THREAD_LAYOUT)).to(gl.int32)
    queries = query + gl.arange(0, WARPGROUP_M, layout=gl.SliceLayout(1, THREAD_LAYOUT))
    queries = gl.expand_dims(queries.to(gl.int32), 1)
    quads = gl.expand_dims(key // 4 + threads * QUADS, 0)
    bits = gl.zeros([WARPGROUP_M, THREADS_PER_ROW], gl.int32, THREAD_LAYOUT)
    for i in gl.static_range(QUADS):
        words = philox(dropout, (quads + i).to(gl.int32), queries, bh.to(gl.int32))
        for k in gl.static_range(4):
            keep = (words[k] ^ SIGN) >= dropout.threshold
            bits = bits | (keep.to(gl.int32) << (4 * i + k))
    threads = gl.expand_dims(threads, 0)
    bits = bits << (threads % THREADS_PER_WORD * (4 * QUADS))
    first = gl.sum(gl.where(threads // THREADS_PER_WORD == 0, bits, 0), axis=1)
    second = gl.sum(gl.where(threads // THREADS_PER_WORD == 1, bits, 0), axis=1)
    packed = (
        gl.convert_layout(first, ROW_LAYOUT, assert_trivial=True),
        gl.convert_layout(second, ROW_LAYOUT, assert_trivial=True),
    )
    if THREADS_PER_WORD == 1:
        third = gl.sum(gl.where(threads == 2, bits, 0), axis=1)
        fourth = gl.sum(gl.where(threads == 3, bits, 0), axis=1)
        packed = (
            packed[0],
            packed[1],
            gl.convert_layout(third, ROW_LAYOUT, assert_trivial=True),
            gl.convert_layout(fourth, ROW_LAYOUT, assert_trivial=True),
        )
    return packed


@gluon.jit
def transposed_element_mask(words, LAYOUT: gl.constexpr):
    """Element mask [64 keys, 64 queries] from the words of dropout_keep_words.

    The two keys of a thread differ in bit 3 alone. So one shift by the other bits is right for
    both.
    """
    COLUMN_LAYOUT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    keys = gl.expand_dims(gl.arange(0, WARPGROUP_M, layout=gl.SliceLayout(1, LAYOUT)), 1)
    first = gl.expand_dims(gl.convert_layout(words[0], COLUMN_LAYOUT), 0)
    second = gl.expand_dims(gl.convert_layout(words[1], COLUMN_LAYOUT), 0)
    word = gl.where((keys & 32) == 0, first, second) >> (keys & 23)
    return (word & (1 << (keys & 8))) != 0


@gluon.jit
def philox(dropout, c0, c1, c2):
    """Four words for each counter (c0, c1, c2, 0); see sparseflash.dropout.philox."""
    k0, k1, c3 = dropout.seed_low, dropout.seed_high, c2 * 0
    for _ in gl.static_range(ROUNDS):
        high0, high1 = gl.umulhi(c0, MULTIPLIER_0), gl.umulhi(c2, MULTIPLIER_1)
        low0, low1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + WEYL_0, k1 + WEYL_1
    return c0, c1, c2, c3
