"""Counter-based dropout: whether a pair is dropped depends on the seed and on its indices alone.

Forward and backward, every backend and every tile size make the same mask, and none stores it.
"""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Philox4x32-10: four independent uniform 32-bit words for each counter.

    Args:
        key: Two 32-bit words.
        counter: Four int64 tensors of 32-bit words, broadcast against one another.

    Returns:
        Four int64 tensors with values in [0, 2^32).

    Reference:
        Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(_ROUNDS):
        # An int64 product wraps modulo 2^64. Its upper half is right but for the sign that `>>`
        # extends, which the mask removes. c1 and c3 keep their upper halves: the next round only
        # xors them, before that mask.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) ^ k0 ^ c1) & _LOW, ((product0 >> 32) ^ k1 ^ c3) & _LOW
        c1, c3 = product1, product0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1 & _LOW, c2, c3 & _LOW


def keep_mask(seed: int, bh: Tensor, q_index: Tensor, k_index: Tensor, dropout_p: float) -> Tensor:
    """The pairs that dropout keeps: bool, in the shape that the indices broadcast to.

    keep = philox(seed, (k >> 2, q, bh, 0))[k & 3] >= floor(dropout_p * 2^32)

    bh: int64, batch_index * heads + head; q_index, k_index: int64, tokens
    """
    words = _words(seed, bh, q_index, k_index >> 2)
    which = k_index & 3
    even = torch.where(which == 0, words[0], words[2])
    odd = torch.where(which == 1, words[1], words[3])
    return torch.where(which % 2 == 0, even, odd) >= threshold(dropout_p)


def keep_mask_of_quads(
    seed: int, bh: Tensor, q_index: Tensor, quad_index: Tensor, dropout_p: float
) -> Tensor:
    """keep_mask of the keys 4 * quad + (0, 1, 2, 3) of each quad, at a quarter of its cost.

    The indices broadcast to (..., quads), one quad for each entry; the result is
    (..., 4 * quads).
    """
    words = _words(seed, bh, q_index, quad_index)
    return torch.stack([w >= threshold(dropout_p) for w in words], dim=-1).flatten(-2)


def threshold(dropout_p: float) -> int:
    """The least random word, of 32 bits, that keeps its pair."""
    return int(dropout_p * 2**32)


def _words(seed: int, bh: Tensor, q_index: Tensor, quad_index: Tensor) -> tuple[Tensor, ...]:
    key = (seed & _LOW, (seed >> 32) & _LOW)
    return philox(key, (quad_index, q_index, bh, torch.zeros_like(bh)))
