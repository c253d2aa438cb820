"""Exact block-sparse attention for any sparsity pattern that you can write in Python."""

from sparseflash import nn
from sparseflash.attention import attention
from sparseflash.backends import BackendError
from sparseflash.bias import alibi, relative_bias
from sparseflash.conformance import selfcheck
from sparseflash.explanation import explain
from sparseflash.mass import block_mass
from sparseflash.merge import merge_attention
from sparseflash.score import ScoreFunction
from sparseflash.varlen import attention_varlen

__all__ = [
    "BackendError",
    "ScoreFunction",
    "alibi",
    "attention",
    "attention_varlen",
    "block_mass",
    "explain",
    "merge_attention",
    "nn",
    "relative_bias",
    "selfcheck",
]
