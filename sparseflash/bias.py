"""Biases of scores that depend on the distance of key and query, as attention takes them."""

import torch
from torch import Tensor

from masks.arguments import check_floating, check_integer


def alibi(slopes: Tensor, q_len: int, k_len: int) -> Tensor:
    """The bias -slopes[h] |k - q|, with the last query at the last key. Differentiable.

    Args:
        slopes: Floating-point (heads,).
        q_len, k_len: Lengths in tokens.

    Returns:
        (heads, q_len + k_len - 1), a number for each distance.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.

    Reference:
        Press, Smith, Lewis, "Train short, test long", 2022.
    """
    check_floating("slopes", slopes)
    if slopes.dim() != 1:
        raise ValueError(f"slopes must be (heads,), got {tuple(slopes.shape)}")
    return -slopes.unsqueeze(1) * _distances(q_len, k_len, slopes.device).abs()


def relative_bias(weights: Tensor, q_len: int, k_len: int) -> Tensor:
    """The bias weights[h, r + clamp(k - q, -r, r)], with the last query at the last key.

    It is differentiable with respect to the weights.

    Args:
        weights: Floating-point (heads, 2 r + 1).
        q_len, k_len: Lengths in tokens.

    Returns:
        (heads, q_len + k_len - 1), a number for each distance.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.

    Reference:
        Shaw, Uszkoreit, Vaswani, "Self-attention with relative position representations", 2018.
    """
    check_floating("weights", weights)
    if weights.dim() != 2 or weights.shape[1] % 2 == 0:
        raise ValueError(f"weights must be (heads, 2 r + 1), got {tuple(weights.shape)}")
    radius = weights.shape[1] // 2
    distance = _distances(q_len, k_len, weights.device).clamp(-radius, radius)
    return weights[:, radius + distance]


def _distances(q_len: int, k_len: int, device: torch.device) -> Tensor:
    """k - q for every entry of a bias, with the last query at the last key."""
    q_len, k_len = check_integer("q_len", q_len, least=1), check_integer("k_len", k_len, least=1)
    return torch.arange(1 - k_len, q_len, device=device)
