"""Rotary position embedding."""

from numbers import Real

import torch
from einops import rearrange
from torch import Tensor, nn

from masks.arguments import check_floating, check_integer


class Rotary(nn.Module):
    """Rotary position embedding (RoPE): rotates pairs of features by angles of the position.

    angle(i, t) = t base^(-2 i / head_dim) for features i and i + head_dim / 2 at position t

    The scores of rotated queries and keys depend only on their distance. Angles are float32, also
    if the module is cast to another dtype.

    Args:
        head_dim: Head dim, even.
        base: Base of the angles, positive.

    Raises:
        TypeError, ValueError: An argument is not a number or out of range.

    Reference:
        Su et al., "RoFormer", 2021, with the order of features of GPT-NeoX and Llama.
    """

    def __init__(self, head_dim: int, base: float = 10000.0):
        super().__init__()
        if check_integer("head_dim", head_dim, least=1) % 2:
            raise ValueError(f"head_dim must be even, got {head_dim}")
        if not isinstance(base, Real) or not base > 0:
            raise ValueError(f"base must be positive, got {base!r}")
        self.head_dim, self.base = head_dim, base

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Rotates queries or keys.

        Args:
            x: (batch, heads, seq, head_dim).
            offset: Position of the first token.

        Returns:
            The rotated tensor, with the shape and dtype of x.

        Raises:
            TypeError: `x` is not a floating-point tensor.
            ValueError: `x` has another shape.
        """
        check_floating("x", x)
        if x.dim() != 4 or x.shape[3] != self.head_dim:
            raise ValueError(
                f"x must be (batch, heads, seq, {self.head_dim}), got {tuple(x.shape)}"
            )
        position = torch.arange(offset, offset + x.shape[2], device=x.device)
        # Not a buffer: that would be cast with the module, and far tokens need float32 angles.
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=x.device)
        return rotate(x, position[:, None] * self.base ** (-exponent / self.head_dim))

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}"


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotates features i and i + head_dim / 2 by angle i.

    Args:
        x: (..., seq, head_dim).
        angle: float32 (..., seq, head_dim / 2).
    """
    cosine, sine = angle.cos(), angle.sin()
    first, second = rearrange(x.float(), "... (half d) -> half ... d", half=2)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(
        x.dtype
    )
