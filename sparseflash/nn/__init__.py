"""Modules of torch.nn: attention with a sparsity pattern as a layer of a model.

SparseAttention replaces torch.nn.MultiheadAttention, and SparseEncoderLayer replaces
torch.nn.TransformerEncoderLayer. Rotary rotates queries and keys by their positions, and
KeyValueCache stores keys and values during decoding.
"""

from sparseflash.nn.attention import SparseAttention
from sparseflash.nn.encoder import SparseEncoderLayer
from sparseflash.nn.kv_cache import KeyValueCache
from sparseflash.nn.rotary import Rotary

__all__ = ["KeyValueCache", "Rotary", "SparseAttention", "SparseEncoderLayer"]
