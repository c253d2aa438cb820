"""Attention in float64 to compare with; see sparseflash.testing.reference."""

from sparseflash.testing.reference import dropout_mask, standard_attention

__all__ = ["dropout_mask", "standard_attention"]
