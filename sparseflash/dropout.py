"""Counter-based dropout: whether a pair is dropped depends on the seed and on its indices alone.

Forward and backward, every backend and every tile size make the same mask, and none stores it.

Dropout keeps a pair if a random number U of 16 binary digits is at least the threshold. Digit i of
the numbers of 32 keys is one random word, with a bit for each key, so that one instruction
compares a digit of all 32. A group of 64 keys has two words of each digit. Four threads hold a row
of the accumulators of tensor cores, and each has two neighbours out of every eight columns. The
first word of a group has its keys with k & 4 = 0 and the second word the others, so only two
threads hold the keys of a word.
"""

from functools import lru_cache

import torch
from torch import Tensor

from sparseflash.dropout_constants import DIGITS, GROUP, MULTIPLIERS, ROUNDS, WEYL

_LOW = 0xFFFFFFFF


def philox(
    key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, ...]:
    """Philox4x32: four independent uniform 32-bit words for each counter.

    Args:
        key: Two 32-bit words.
        counter: Four int64 tensors of 32-bit words, broadcast against one another.
        rounds: How often the counter is mixed.

    Returns:
        Four int64 tensors with values in [0, 2^32).

    Reference:
        Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(rounds):
        # An int64 product wraps modulo 2^64. Its upper half is right but for the sign that `>>`
        # extends, which the mask removes. c1 and c3 keep their upper halves: the next round only
        # xors them, before that mask.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) ^ k0 ^ c1) & _LOW, ((product0 >> 32) ^ k1 ^ c3) & _LOW
        c1, c3 = product1, product0
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1 & _LOW, c2, c3 & _LOW


def keep_mask(seed: int, bh: Tensor, q_index: Tensor, k_index: Tensor, dropout_p: float) -> Tensor:
    """The pairs that dropout keeps: bool, in the shape that the indices broadcast to.

    word = (k >> 6) * 2 + (k >> 2 & 1),  bit = (k >> 3 & 7) * 4 + (k & 3)
    digit 4 j + i of U = bit of philox(seed, (word, q, bh, j))[i],  keep = U >= threshold

    bh: int64, batch_index * heads + head; q_index, k_index: int64, tokens
    """
    word = k_index // GROUP * 2 + (k_index >> 2 & 1)
    bit = (k_index >> 3 & 7) * 4 + (k_index & 3)
    return (keep_words(seed, bh, q_index, word, dropout_p) >> bit & 1) > 0


def keep_mask_of_spans(
    seed: int, bh: Tensor, q_index: Tensor, first_keys: Tensor, span: int, dropout_p: float
) -> Tensor:
    """keep_mask of `span` keys from each of the first keys on, at a fraction of its cost.

    The indices broadcast to (..., spans), one first key for each entry; the result is
    (..., spans * span).
    span: keys, a divisor of GROUP and a multiple of 8; it divides the first keys
    """
    words = first_keys.unsqueeze(-1) // GROUP * 2 + torch.arange(2, device=first_keys.device)
    bh, q_index = bh.unsqueeze(-1), q_index.unsqueeze(-1)
    words = keep_words(seed, bh, q_index, words, dropout_p).int()  # (..., spans, 2)
    if span < GROUP:
        words = words >> (first_keys.unsqueeze(-1) % GROUP // 2).int()
    keep = words.unsqueeze(-1).unsqueeze(-3) & _bits(span).to(words.device)
    return (keep != 0).flatten(-4)


def keep_words(seed: int, bh: Tensor, q_index: Tensor, word: Tensor, dropout_p: float) -> Tensor:
    """The bits of 32 pairs each, 1 where dropout keeps them: int64; the indices are broadcast.

    The digits are compared from the lowest one on. Those below the lowest 1 of the threshold
    decide nothing.
    """
    key = (seed & _LOW, (seed >> 32) & _LOW)
    least, keep = threshold(dropout_p), None
    for i in range(DIGITS):
        if keep is None and least >> i & 1 == 0:
            continue
        if keep is None or i % 4 == 0:
            digits = philox(key, (word, q_index, bh, torch.full_like(bh, i // 4)))
        if keep is None:
            keep = digits[i % 4]
        elif least >> i & 1:
            keep = keep & digits[i % 4]
        else:
            keep = keep | digits[i % 4]
    if keep is None:
        return _LOW + 0 * (bh + q_index + word)
    return keep


def threshold(dropout_p: float) -> int:
    """The least random number, of DIGITS binary digits, that keeps its pair.

    The probability of dropout is rounded to a multiple of 2^-16.

    Raises:
        ValueError: A probability above 0 rounds to 0 or to 1.
    """
    least = round(dropout_p * 2**DIGITS)
    if dropout_p != 0 and not 0 < least < 2**DIGITS:
        raise ValueError(
            "dropout_p must be 0 or a number that rounds to a multiple of 2^-16 between 0 and 1, "
            f"got {dropout_p}"
        )
    return least


def keep_probability(dropout_p: float) -> float:
    """The probability with which dropout keeps a pair: of its threshold, not 1 - dropout_p."""
    return 1 - threshold(dropout_p) / 2**DIGITS


@lru_cache(maxsize=4)
def _bits(span: int) -> Tensor:
    """int32 (eights, 1, 4): the bit of each key of a span in its word."""
    bits = torch.arange(span // 2, dtype=torch.int32, device="cpu")
    return torch.bitwise_left_shift(torch.ones_like(bits), bits).view(-1, 1, 4)
