"""Rotary position embedding."""

import torch
from einops import rearrange
from torch import Tensor, nn


class Rotary(nn.Module):
    """Turns each pair of features by an angle that grows with the token's position.

    angle of pair i at position t = t base^(-2 i / head_dim); feature i is paired with feature
    i + head_dim / 2.

    Scores of turned queries and keys depend on their distance alone. Angles are float32.
    Raises ValueError for an odd head_dim.
    Source: Su et al., "RoFormer", 2021; the pairing of GPT-NeoX and Llama.
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, base: float = 10000.0, device=None):
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even, got {head_dim}")
        exponent = torch.arange(0, head_dim, 2, device=device) / head_dim
        self.register_buffer("frequencies", base**-exponent, persistent=False)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """x: (batch, heads, seq, head_dim), whose first token has the position `offset`."""
        position = torch.arange(offset, offset + x.shape[2], device=x.device)
        return turned(x, position[:, None] * self.frequencies.float())


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """x (..., seq, head_dim) with features i and i + head_dim / 2 turned as a pair by angle i.

    angle: float32 (..., seq, head_dim / 2).
    """
    cosine, sine = angle.cos(), angle.sin()
    first, second = rearrange(x.float(), "... (half d) -> half ... d", half=2)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(
        x.dtype
    )
