"""Exact block-sparse attention for any sparsity pattern that you can write in Python."""

from sparseflash.attention import attention
from sparseflash.backends import BackendError
from sparseflash.merge import merge_attention
from sparseflash.varlen import attention_varlen

__all__ = ["BackendError", "attention", "attention_varlen", "merge_attention"]
