"""S of a tile, for Triton and Gluon: soft cap, score function and bias.

Scores are in base 2: S is scaled by log2(e), so that P = exp2(S - row_max).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from sparseflash.backends.triton_common.constants import LN2, LOG2E


class ScorePointers(NamedTuple):
    """Pointers to the score tensors of a call, each None if there are none.

    floats:   the entries of all floating-point tensors, one tensor after another
    integers: the entries of all integer tensors, one tensor after another
    layout:   int64; for each tensor its offset in `floats` or `integers`, then its sizes
    """

    floats: tl.tensor
    integers: tl.tensor
    layout: tl.tensor


class ScoreMods(NamedTuple):
    """The operations that change the products Q K^T to S.

    The constexpr fields are constexpr only while the tuple is passed as an argument: an assignment
    would make them run-time values.

    scale_log2:  scale * log2(e)
    softcap:     c of the soft cap, used if SOFTCAP
    biases:      pointer to the biases of the head, or None
    batch, head: batch element and head of the tile; head is one number, or a column with the head
        of each row
    pointers:    ScorePointers
    SCORE:       the score function, or None
    """

    scale_log2: tl.tensor
    softcap: tl.tensor
    biases: tl.tensor
    batch: tl.tensor
    head: tl.tensor
    q_len: tl.tensor
    k_len: tl.tensor
    pointers: tl.tensor
    SOFTCAP: tl.constexpr
    SCORE: tl.constexpr


@triton.jit
def bias_of_head(bias, bias_head, head):
    """Pointer to the biases of one head, or of a column of heads; None without a bias."""
    row = bias
    if bias is not None:
        row = bias + head.to(tl.int64) * bias_head
    return row


@triton.jit
def tanh(x):
    """(tanh x, its derivative) within two roundings; by a series near 0 to avoid cancellation."""
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
def apply_score_mod(
    products, tokens, keys, mods, TRANSPOSED: tl.constexpr, TANH: tl.constexpr = tanh
):
    """(scores in base 2, derivative of score function and soft cap) of a tile.

    scores = log2(e) * (score(softcap(scale * products)) + bias)

    products:     Q K^T, (BM, BN), or if TRANSPOSED (BN, BM)
    tokens, keys: positions of the queries (BM) and keys (BN)
    TANH:         a function like `tanh` for a tile
    """
    QUERY_AXIS: tl.constexpr = 1 if TRANSPOSED else 0
    queries = tl.expand_dims(tokens, 1 - QUERY_AXIS)
    keys = tl.expand_dims(keys, QUERY_AXIS)
    derivative = 1.0
    if mods.SOFTCAP:
        capped, derivative = TANH(products * (mods.scale_log2 * LN2 / mods.softcap))
        scores = capped * (mods.softcap * LOG2E)
    else:
        scores = products * mods.scale_log2
    if mods.SCORE is not None:
        if mods.pointers.layout is None:
            scores, score_derivative = mods.SCORE(
                scores * LN2, mods.batch, mods.head, queries, keys
            )
        else:
            scores, score_derivative = mods.SCORE(
                scores * LN2, mods.batch, mods.head, queries, keys,
                mods.pointers.floats, mods.pointers.integers, mods.pointers.layout,
            )  # fmt: skip
        tl.static_assert(
            scores.shape == products.shape, "f of a score function must have the shape of score"
        )
        scores *= LOG2E
        derivative *= score_derivative
    if mods.biases is not None:
        distance = keys - queries + (mods.q_len - 1)
        inside = (distance >= 0) & (distance < mods.q_len + mods.k_len - 1)
        scores += tl.load(mods.biases + distance, mask=inside, other=0.0) * LOG2E
    return scores, derivative
