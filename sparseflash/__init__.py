"""Exact block-sparse attention for any sparsity pattern that you can write in Python."""

from sparseflash.attention import attention
from sparseflash.backends import BackendError

__all__ = ["BackendError", "attention"]
