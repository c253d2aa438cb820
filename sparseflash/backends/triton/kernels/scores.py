"""Pairs of a tile that have no weight: element masks of partial blocks, dropout."""

from typing import NamedTuple

import triton
import triton.language as tl


class DropoutState(NamedTuple):
    """Dropout of one bh; passed as an argument only, as block_lists.Shape.

    threshold: least random word that keeps a pair; keep_scale: 1 / (1 - dropout_p)
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

    One Philox call serves four neighbouring keys: (q, k) uses word k % 4 of counter
    (k // 4, q, bh, 0).
    """
    fours = key_start // 4 + tl.arange(0, shape.BN // 4)
    keys = tl.broadcast_to(fours[None, :], shape.BM, shape.BN // 4)
    queries = tl.broadcast_to(tokens[:, None], shape.BM, shape.BN // 4)
    zero = tl.zeros_like(keys)
    word0, word1, word2, word3 = tl.philox(dropout.seed, keys, queries, zero + dropout.bh, zero)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    keep = tl.reshape(words, (shape.BM, shape.BN)) >= dropout.threshold.to(tl.uint32)
    return tl.trans(keep) if TRANSPOSED else keep
