"""The public function: block-sparse attention, exact, for any mask."""

import math
from functools import lru_cache
from typing import Literal, overload

import torch
from torch import Tensor

from masks import BlockMask, Pattern, full
from sparseflash.autograd import BlockSparseAttention
from sparseflash.backends import select
from sparseflash.spec import AttentionSpec

_FULL = full()


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Pattern | BlockMask | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_lengths: Tensor | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
    seed: int | None = None,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Pattern | BlockMask | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_lengths: Tensor | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
    seed: int | None = None,
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Pattern | BlockMask | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_lengths: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    seed: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention that skips every zero block of `mask`, forward and backward.

    S = scale Q K^T, -inf where masked;  P = softmax over keys;  O = dropout(P) V

    query: (batch, heads, q_len, head_dim); key, value: (batch, kv_heads, k_len, head_dim), any
        strides. heads is a multiple of kv_heads; query head h reads key head h // (heads //
        kv_heads).
    mask: a Pattern, a BlockMask of this length, or None for all pairs; True means attend. A
        Pattern is compiled once per length and device, in blocks of 128 tokens.
    scale: 1 / sqrt(head_dim) by default.
    dropout_p, seed: dropout on P, in [0, 1); the same seed drops the same pairs on every backend.
        Without a seed one is drawn from torch's default generator.
    key_lengths: integers (batch,), 0 to k_len: keys at or past the length of their batch element
        are masked. Those on the CPU are checked without waiting for the device; those on a CUDA
        device are waited for, except while a CUDA graph is captured: then they are clamped.
    backend: "auto", or a name; a named backend never falls back.

    Returns out like query, and with return_lse the natural logsumexp of the masked scores, float32
    (batch, heads, q_len), whose gradient is supported. A query without a key gets out 0, lse -inf
    and zero gradients. float32 products are IEEE. Extra memory is O(q_len) in both passes. The
    same inputs give the same bits.

    Raises TypeError or ValueError naming the argument, and BackendError when no backend can serve
    the call; all before anything is computed.
    Source: Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022, Algorithm 5 (block-sparse).
    """
    _check_tensors(query, key, value)
    batch, heads, q_len, head_dim = query.shape
    kv_heads, k_len = key.shape[1:3]
    block_mask = _block_mask(mask, q_len, k_len, heads, query.device)
    scale = 1.0 / math.sqrt(head_dim) if scale is None else _checked_scale(scale)
    seed = _checked_dropout(dropout_p, seed)
    if key_lengths is not None:
        key_lengths = _checked_key_lengths(key_lengths, batch, k_len, query.device)
    spec = AttentionSpec(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        k_len=k_len,
        head_dim=head_dim,
        dtype=query.dtype,
        device=query.device,
        block_size=block_mask.block_size,
        mask_heads=block_mask.num_heads,
        scale=scale,
        dropout_p=float(dropout_p),
        has_key_lengths=key_lengths is not None,
    )
    chosen = select(backend, spec)
    table = block_mask.table(query.device)
    out, lse = BlockSparseAttention.apply(
        query, key, value, table, key_lengths, seed, spec, chosen
    )
    return (out, lse) if return_lse else out


@lru_cache(maxsize=128)
def _compiled(pattern: Pattern, q_len: int, k_len: int, device: torch.device) -> BlockMask:
    return pattern((q_len, k_len), device=device)


def _block_mask(mask, q_len: int, k_len: int, heads: int, device: torch.device) -> BlockMask:
    if isinstance(mask, BlockMask):
        if mask.seq_len != (q_len, k_len):
            raise ValueError(f"mask must have seq_len {(q_len, k_len)}, got {mask.seq_len}")
        block_mask = mask
    elif mask is None or isinstance(mask, Pattern):
        block_mask = _compiled(_FULL if mask is None else mask, q_len, k_len, device)
    else:
        raise TypeError(f"mask must be a Pattern, a BlockMask or None, got {type(mask).__name__}")
    if block_mask.num_heads not in (1, heads):
        raise ValueError(f"mask must have 1 or {heads} heads, got {block_mask.num_heads}")
    return block_mask


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(
                f"{name} must be (batch, heads, seq, head_dim) with nothing empty, got "
                f"{tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} must be {query.dtype} on {query.device} like query, got {tensor.dtype} "
                f"on {tensor.device}"
            )
    if not query.dtype.is_floating_point:
        raise TypeError(f"query must be of a floating-point dtype, got {query.dtype}")
    if key.shape != value.shape:
        raise ValueError(
            f"value must have the shape of key, {tuple(key.shape)}, got {tuple(value.shape)}"
        )
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"key must share batch and head_dim with query {tuple(query.shape)}, got "
            f"{tuple(key.shape)}"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"key heads must divide the {query.shape[1]} query heads, got {key.shape[1]}"
        )


def _checked_scale(scale: float) -> float:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def _checked_dropout(dropout_p: float, seed: int | None) -> int:
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if dropout_p == 0:
        return 0
    if seed is None:
        return int(torch.randint(2**63 - 1, ()))
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an int of 64 bits, got {seed!r}")
    return seed


def _checked_key_lengths(lengths: Tensor, batch: int, k_len: int, device: torch.device) -> Tensor:
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"key_lengths must be an int32 or int64 tensor, got "
            f"{getattr(lengths, 'dtype', lengths)!r}"
        )
    if lengths.shape != (batch,) or lengths.device not in (device, torch.device("cpu")):
        raise ValueError(
            f"key_lengths must be ({batch},) on {device} or the CPU, got {tuple(lengths.shape)} "
            f"on {lengths.device}"
        )
    if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
        lengths = lengths.clamp(0, k_len)
    elif bool(((lengths < 0) | (lengths > k_len)).any()):
        raise ValueError(f"key_lengths must be 0 to {k_len}, got {lengths.tolist()}")
    return lengths.to(device, torch.int32)
