"""Keep words of sparseflash.dropout in tiles of any shape and layout, for Triton and Gluon."""

import triton
import triton.language as tl

from sparseflash import dropout_constants

DIGITS, ROUNDS = map(tl.constexpr, (dropout_constants.DIGITS, dropout_constants.ROUNDS))
MULTIPLIER_0, MULTIPLIER_1 = map(tl.constexpr, dropout_constants.MULTIPLIERS)
# Words of 32 bits, signed as all integers of the kernels.
WEYL_0, WEYL_1 = (tl.constexpr(word - 2**32) for word in dropout_constants.WEYL)


@triton.jit
def keep_words(seed_low, seed_high, threshold, bh, query, word):
    """The bits of 32 pairs each, 1 for those that dropout keeps; see dropout.keep_words.

    query, word: int32, in one shape or broadcast to it
    """
    keep = query * 0 + word * 0 - 1
    for i in tl.static_range(DIGITS):
        if i % 4 == 0:
            digits = philox(seed_low, seed_high, word, query, bh, i // 4)
        # All ones where the threshold has a 0: a number with a 1 there is larger.
        zero_digit = (threshold >> i & 1) - 1
        keep = (digits[i % 4] & keep) | (zero_digit & (digits[i % 4] | keep))
    return keep


@triton.jit
def philox(k0, k1, c0, c1, c2, c3):
    """Four words for each counter; see dropout.philox."""
    for _ in tl.static_range(ROUNDS):
        high0, low0 = wide_product(c0, MULTIPLIER_0)
        high1, low1 = wide_product(c2, MULTIPLIER_1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + WEYL_0, k1 + WEYL_1
    return c0, c1, c2, c3


@triton.jit
def wide_product(word, MULTIPLIER: tl.constexpr):
    """(upper, lower) halves of a product; one instruction gives both, umulhi and * take two."""
    product = word.to(tl.uint32).to(tl.uint64) * MULTIPLIER
    return (product >> 32).to(tl.int32), product.to(tl.int32)
