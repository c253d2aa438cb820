"""Pairs of a tile that have no weight: element masks of partial blocks, dropout."""

from typing import NamedTuple

import triton
import triton.language as tl

from sparseflash.backends.triton_common.dropout import keep_words


class DropoutState(NamedTuple):
    """Dropout of one bh; passed as an argument only, as block_lists.Shape.

    threshold: least random number that keeps a pair; keep_scale: 1 / its probability
    bh: batch index * heads + head, one or a column of them
    """

    seed: tl.tensor
    threshold: tl.tensor
    keep_scale: tl.tensor
    bh: tl.tensor
    DROPOUT: tl.constexpr


@triton.jit
def element_mask(bit_tiles, index, tokens, key_start, shape, TRANSPOSED: tl.constexpr):
    """Which pairs of a partial block attend: (BM, BN), or if TRANSPOSED (BN, BM).

    The queries `tokens` with the keys from key_start on, by the bit tile `index` of the block,
    one for all queries or for each. A query's bits are read word by word: a tile of pointers
    would be pipelined through shared memory.
    """
    WORDS: tl.constexpr = (shape.BLOCK_K + 31) // 32
    QUERY_AXIS: tl.constexpr = 1 if TRANSPOSED else 0
    rows = (
        bit_tiles + index.to(tl.int64) * (shape.BLOCK_Q * WORDS) + tokens % shape.BLOCK_Q * WORDS
    )
    words = rows + key_start % shape.BLOCK_K // 32
    keys = tl.expand_dims(tl.arange(0, shape.BN), QUERY_AXIS)
    word = tl.expand_dims(tl.load(words), 1 - QUERY_AXIS)
    for WORD in tl.static_range(1, shape.BN // 32):
        word = tl.where(
            keys // 32 == WORD, tl.expand_dims(tl.load(words + WORD), 1 - QUERY_AXIS), word
        )
    bit = keys % 32 if shape.BN >= 32 else key_start % shape.BLOCK_K % 32 + keys
    return ((word >> bit) & 1) != 0


@triton.jit
def dropout_keep_mask(dropout, tokens, key_start, shape, TRANSPOSED: tl.constexpr):
    """Which pairs dropout keeps: (BM, BN), or if TRANSPOSED (BN, BM).

    A group of 64 keys has two words, each with the bits of half of every eight keys; see
    sparseflash.dropout.
    """
    GROUPS: tl.constexpr = (shape.BN + 63) // 64
    # Transposed, the bits of two keys are joined. Without the join every thread draws the words of
    # all its pairs with Triton 3.6.
    STEP: tl.constexpr = 2 if TRANSPOSED else 1
    EIGHTS: tl.constexpr = shape.BN // 8 if shape.BN < 64 else 8
    words = keep_words(
        dropout.seed.to(tl.int32), (dropout.seed >> 32).to(tl.int32), dropout.threshold,
        dropout.bh, tokens[:, None], (key_start // 64 * 2 + tl.arange(0, 2 * GROUPS))[None, :],
    )  # fmt: skip
    if shape.BN < 64:
        words = words >> (key_start % 64 // 2)
    # The numbers of all pairs. Of sums of ranges the compiler would exchange bits between threads,
    # and not words.
    pairs = tl.arange(0, shape.BM * shape.BN // STEP) * STEP
    keys = tl.reshape(pairs % shape.BN, (shape.BM, GROUPS, EIGHTS, 2, 4 // STEP))
    words = tl.reshape(words, (shape.BM, GROUPS, 1, 2, 1)) >> (keys // 8 % 8 * 4 + keys % 4)
    keep = (words & 1) != 0
    if TRANSPOSED:
        keep = tl.join(keep, (words & 2) != 0)
    keep = tl.reshape(keep, (shape.BM, shape.BN))
    return tl.trans(keep) if TRANSPOSED else keep
