"""Attention over sequences that are packed one after another."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, Unpack, overload

import torch
from einops import rearrange
from torch import Tensor

from masks import BlockMask, DynamicMask, Pattern, documents
from masks._parse import parse
from masks.arguments import check_dtype
from sparseflash._attention import attention
from sparseflash.compiled import stores_masks
from sparseflash.options import CallKeywords, OptionKeywords

_Mask = Pattern | BlockMask | DynamicMask | str


@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    mask: _Mask | None = None, *, score_tensors: Sequence[Tensor] | None = None,
    return_lse: Literal[False] = False, return_max_logits: Literal[False] = False,
    **keywords: Unpack[CallKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    mask: _Mask | None = None, *, score_tensors: Sequence[Tensor] | None = None,
    return_lse: Literal[True], return_max_logits: Literal[False] = False,
    **keywords: Unpack[CallKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    mask: _Mask | None = None, *, score_tensors: Sequence[Tensor] | None = None,
    return_lse: bool = False, return_max_logits: Literal[True],
    **keywords: Unpack[CallKeywords],
) -> tuple[Tensor, ...]: ...  # fmt: skip
def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Pattern | BlockMask | DynamicMask | str | None = None,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: int | None = None,
    score_tensors: Sequence[Tensor] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **options: Unpack[OptionKeywords],
) -> Tensor | tuple[Tensor, ...]:
    """Attention within each of several documents that are packed one after another.

    One lookup table describes all documents. It is compiled when their lengths are new, in about
    3 ms per document, and the last 32 tables are cached.

    Args:
        query: (total_q, heads, head_dim), any strides.
        key: (total_k, kv_heads, head_dim), any strides.
        value: (total_k, kv_heads, value_dim), any strides.
        cu_seqlens_q: int32 or int64 (documents + 1,), from 0 to total_q: document n has the
            queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1. The host reads it, so it waits for
            a tensor on the GPU.
        cu_seqlens_k: The same for the keys.
        mask: Which pairs of a document attend. A Pattern, or text that masks.parse reads, is
            applied to each document at its own lengths; None means all pairs of a document. A
            BlockMask or DynamicMask has the packed lengths (total_q, total_k) and is restricted
            to pairs within documents.
        bias: (1 or heads, total_q + total_k - 1), as in sparseflash.attention: one number for each
            distance between packed positions. If the queries and the keys of a document begin at
            the same position, this is the distance within the document.
        sinks, seed, score_tensors, return_lse, return_max_logits: As in sparseflash.attention.
        **options: As in AttentionOptions. A score function gets the positions of tokens in the
            packed sequence.

    Returns:
        out (total_q, heads, value_dim), and if asked for the lse and the maximum logits, each
        (heads, total_q).

    Raises:
        TypeError, ValueError, BackendError: As sparseflash.attention does.

    Reference:
        Dao et al., FlashAttention's varlen interface.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor (total, heads, head_dim), got {got}")
    if "key_lengths" in options:
        raise TypeError("key_lengths must not be given: cu_seqlens_k bounds the keys of documents")
    mask = _checked(mask)
    q_lengths = _lengths("cu_seqlens_q", cu_seqlens_q, query.shape[0])
    k_lengths = _lengths("cu_seqlens_k", cu_seqlens_k, key.shape[0])
    if len(q_lengths) != len(k_lengths):
        raise ValueError(
            f"cu_seqlens_k must have {len(q_lengths)} documents like cu_seqlens_q, got "
            f"{len(k_lengths)}"
        )
    query, key, value = (
        rearrange(x, "total heads dim -> 1 heads total dim") for x in (query, key, value)
    )
    packed = None
    if query.numel() and key.numel():
        packed = _packed(q_lengths, k_lengths, mask, query.device)
    results = attention(
        query,
        key,
        value,
        packed,
        bias=bias,
        sinks=sinks,
        seed=seed,
        score_tensors=score_tensors,
        return_lse=return_lse,
        return_max_logits=return_max_logits,  # pyright: ignore[reportArgumentType]
        **options,
    )
    out, *of_rows = results if isinstance(results, tuple) else (results,)
    out = rearrange(out, "1 heads total dim -> total heads dim")
    return (out, *(x.squeeze(0) for x in of_rows)) if of_rows else out


def _checked(
    mask: Pattern | BlockMask | DynamicMask | str | None,
) -> Pattern | BlockMask | DynamicMask | None:
    if isinstance(mask, str):
        return parse(mask)
    if mask is None or isinstance(mask, Pattern | BlockMask | DynamicMask):
        return mask
    raise TypeError(
        "mask must be a Pattern, its text, a BlockMask, a DynamicMask or None, got "
        f"{type(mask).__name__}"
    )


def _packed(
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
    mask: Pattern | BlockMask | DynamicMask | None,
    device: torch.device,
) -> BlockMask | DynamicMask:
    """The mask of all documents; on `device` if it is made from a pattern."""
    if mask is None or isinstance(mask, Pattern):
        return _documents(q_lengths, k_lengths, mask, device)
    if mask.seq_len != (sum(q_lengths), sum(k_lengths)):
        raise ValueError(
            f"mask must have seq_len {(sum(q_lengths), sum(k_lengths))}, got {mask.seq_len}"
        )
    if isinstance(mask, BlockMask):
        return _within_documents(q_lengths, k_lengths, mask)
    support = _within_documents(q_lengths, k_lengths, mask.support)
    return support.select(mask.blocks, mask.scores)


@stores_masks(maxsize=32)
def _documents(
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
    pattern: Pattern | None,
    device: torch.device,
) -> BlockMask:
    return documents(q_lengths, k_lengths, pattern)(
        (sum(q_lengths), sum(k_lengths)), device=device
    )


def _within_documents(
    q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], mask: BlockMask
) -> BlockMask:
    """The pairs of a mask that are inside documents; cached with the mask."""
    signature = ("documents", q_lengths, k_lengths)
    if signature not in mask.cache:
        own = documents(q_lengths, k_lengths)(mask.seq_len, mask.block_size, mask.device)
        mask.cache[signature] = mask & own
    return mask.cache[signature]


def unpad(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Removes padding: packs the tokens of all sequences one after another, for attention_varlen.

    Args:
        x: (batch, seq, ...), such as (batch, seq, heads, head_dim).
        keep: bool (batch, seq), false at padding, which may be anywhere in a sequence. The host
            waits for it.

    Returns:
        The tokens, (total, ...), and their cu_seqlens: int32 (batch + 1,), on the device of x.

    Raises:
        TypeError, ValueError: `x` is not such a tensor, or `keep` has another dtype or shape.

    Reference:
        Dao et al., FlashAttention's unpad_input.
    """
    _check_tokens(x, ("batch", "seq"))
    _check_keep(keep)
    if keep.shape != x.shape[:2]:
        raise ValueError(f"keep must be {tuple(x.shape[:2])} like x, got {tuple(keep.shape)}")
    bounds = torch.nn.functional.pad(keep.sum(1).cumsum(0), (1, 0))
    return x[keep.to(x.device)], bounds.to(x.device, torch.int32)


def pad(x: Tensor, keep: Tensor) -> Tensor:
    """The inverse of unpad: returns packed tokens to their sequences, with zeros at padding.

    Args:
        x: (total, ...).
        keep: bool (batch, seq), true at as many positions as x has tokens.

    Returns:
        (batch, seq, ...).

    Raises:
        TypeError, ValueError: `x` is not a tensor, `keep` has another dtype, or the number of
            tokens differs.

    Reference:
        Dao et al., FlashAttention's pad_input.
    """
    _check_tokens(x, ("total",))
    _check_keep(keep)
    keep = keep.to(x.device)
    if int(keep.sum()) != len(x):
        raise ValueError(f"keep must be true at {len(x)} positions, got {int(keep.sum())}")
    return x.new_zeros(*keep.shape, *x.shape[1:]).index_put((keep,), x)


def _check_tokens(x: Tensor, first_dims: tuple[str, ...]) -> None:
    if not isinstance(x, Tensor) or x.dim() < len(first_dims):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a tensor ({', '.join(first_dims)}, ...), got {got}")


def _check_keep(keep: Tensor) -> None:
    check_dtype("keep", keep, torch.bool)
    if keep.dim() != 2:
        raise ValueError(f"keep must be (batch, seq), got {tuple(keep.shape)}")


def _lengths(name: str, cu_seqlens: Tensor, total: int) -> tuple[int, ...]:
    """The length of each document."""
    check_dtype(name, cu_seqlens, torch.int32, torch.int64)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        raise ValueError(f"{name} must be (documents + 1,), got {tuple(cu_seqlens.shape)}")
    bounds = cu_seqlens.tolist()
    if bounds != sorted(bounds) or bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(f"{name} must ascend from 0 to {total}, got {bounds}")
    return tuple(end - begin for begin, end in pairwise(bounds))
