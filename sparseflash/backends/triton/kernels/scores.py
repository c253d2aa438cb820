"""S of a tile: soft cap, score function and bias, element masks of partial blocks, dropout.

Scores are in base 2: S is scaled by log2(e), so that P = exp2(S - row_max).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from sparseflash.backends.triton_common.constants import LN2, LOG2E


class ScoreMods(NamedTuple):
    """What becomes of the products Q K^T; passed as an argument only, as block_lists.Shape.

    scale2: scale * log2(e); cap: of the soft cap, if SOFTCAP
    biases: pointer to the biases of the head, or None
    batch, head: those of the tile, head one or a column of them
    SCORE: the score function, or None
    """

    scale2: tl.tensor
    cap: tl.tensor
    biases: tl.tensor
    batch: tl.tensor
    head: tl.tensor
    q_len: tl.tensor
    k_len: tl.tensor
    SOFTCAP: tl.constexpr
    SCORE: tl.constexpr


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
def bias_of_head(bias, bias_head, head):
    """Pointer to the biases of one head, or of a column of heads; None without a bias."""
    row = bias
    if bias is not None:
        row = bias + head.to(tl.int64) * bias_head
    return row


@triton.jit
def apply_score_mod(products, tokens, keys, mods, TRANSPOSED: tl.constexpr):
    """(scores in base 2, derivative of score function and soft cap) of the products Q K^T of the
    queries `tokens` (BM) with `keys` (BN): (BM, BN), or if TRANSPOSED (BN, BM).

    scores = log2(e) * (score(softcap(scale * products)) + bias)
    """
    QUERY_AXIS: tl.constexpr = 1 if TRANSPOSED else 0
    queries = tl.expand_dims(tokens, 1 - QUERY_AXIS)
    keys = tl.expand_dims(keys, QUERY_AXIS)
    slopes = 1.0
    if mods.SOFTCAP:
        capped, slopes = tanh(products * (mods.scale2 * LN2 / mods.cap))
        scores = capped * (mods.cap * LOG2E)
    else:
        scores = products * mods.scale2
    if mods.SCORE is not None:
        scores, slope = mods.SCORE(scores * LN2, mods.batch, mods.head, queries, keys)
        scores *= LOG2E
        slopes *= slope
    if mods.biases is not None:
        distance = keys - queries + (mods.q_len - 1)
        inside = (distance >= 0) & (distance < mods.q_len + mods.k_len - 1)
        scores += tl.load(mods.biases + distance, mask=inside, other=0.0) * LOG2E
    return scores, slopes


@triton.jit
def tanh(x):
    """(tanh x, its derivative) to a rounding or two: by its series near 0, where it cancels."""
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    near = tl.minimum(size, 0.3)
    square = near * near
    series = -17 / 315 + square * (62 / 2835)
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * series))
    value = tl.where(size < 0.3, near * series, far)
    return tl.where(x < 0.0, -value, value), 4.0 * e / ((1.0 + e) * (1.0 + e))


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
