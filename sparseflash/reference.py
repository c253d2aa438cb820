"""Attention in float64 to compare with; see sparseflash.testing.reference."""

from sparseflash.testing.reference import (
    dropout_mask,
    memory_efficient_attention,
    standard_attention,
)

__all__ = ["dropout_mask", "memory_efficient_attention", "standard_attention"]
