"""The public function: block-sparse attention, exact, for any mask."""

import math
from typing import Literal, overload

import torch
from torch import Tensor

from masks import BlockMask, Pattern, full
from sparseflash import operators
from sparseflash.autograd import BlockSparseAttention
from sparseflash.call import prepare

_FULL = full()
_PRECISIONS = ("ieee", "tf32")


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
    precision: str = "ieee",
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
    precision: str = "ieee",
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
    precision: str = "ieee",
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
        are masked.
    precision: of float32 products: "ieee", or "tf32", which lets a backend round their operands to
        10 bits where the device multiplies those faster.
    backend: "auto", or a name; a named backend never falls back.

    Returns out like query, and with return_lse the natural logsumexp of the masked scores, float32
    (batch, heads, q_len), whose gradient is supported. A query without a key gets out 0, lse -inf
    and zero gradients. Extra memory is O(q_len) in both passes. The same inputs give the same bits.
    Under autocast, query, key and value are cast as those of
    torch's own attention. Under torch.compile and torch.export the mask must be made outside.

    Raises TypeError or ValueError naming the argument, and BackendError when no backend can serve
    the call; all before anything is computed.
    Source: Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022, Algorithm 5 (block-sparse).
    """
    query, key, value = _autocast(query, key, value)
    _check_tensors(query, key, value)
    if key_lengths is not None:
        _check_key_lengths(key_lengths, query)
    mask = _checked_mask(mask)
    options = (
        _checked_scale(scale),
        _checked_dropout(dropout_p),
        _checked_precision(precision),
        backend,
    )
    drawn = _seed(seed) if dropout_p > 0 else None
    if operators.is_traced(query):
        out, lse = operators.attention(
            query, key, value, mask.handle, key_lengths, drawn, *options
        )
    else:
        drawn = 0 if drawn is None else int(drawn)
        call = prepare(query, key, mask, key_lengths, drawn, *options)
        out, lse = BlockSparseAttention.apply(query, key, value, call)
    return (out, lse) if return_lse else out


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, as torch's own attention takes them."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"query, key and value must be tensors, got {type(tensor).__name__}")
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
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


def _check_key_lengths(lengths: Tensor, query: Tensor) -> None:
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"key_lengths must be an int32 or int64 tensor, got "
            f"{getattr(lengths, 'dtype', lengths)!r}"
        )
    if lengths.shape != query.shape[:1] or lengths.device != query.device:
        raise ValueError(
            f"key_lengths must be ({query.shape[0]},) on {query.device}, got "
            f"{tuple(lengths.shape)} on {lengths.device}"
        )


def _checked_mask(mask: Pattern | BlockMask | None) -> Pattern | BlockMask:
    if mask is None:
        return _FULL
    if not isinstance(mask, (Pattern, BlockMask)):
        raise TypeError(f"mask must be a Pattern, a BlockMask or None, got {type(mask).__name__}")
    return mask


def _checked_scale(scale: float | None) -> float | None:
    if scale is None:
        return None
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return float(scale)


def _checked_dropout(dropout_p: float) -> float:
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    return float(dropout_p)


def _checked_precision(precision: str) -> str:
    if precision not in _PRECISIONS:
        raise ValueError(f"precision must be one of {_PRECISIONS}, got {precision!r}")
    return precision


def _seed(seed: int | None) -> Tensor:
    if seed is None:
        return torch.randint(2**63 - 1, (), device="cpu")
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an int of 64 bits, got {seed!r}")
    return torch.tensor(seed, device="cpu")
