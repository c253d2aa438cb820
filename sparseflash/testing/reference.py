"""The reference for tests of backends: attention that materialises its scores, usually in float64.

Shapes: query (batch, heads, q_len, head_dim); key (batch, kv_heads, k_len, head_dim); value
(batch, kv_heads, k_len, value_dim); out (batch, heads, q_len, value_dim); lse (batch, heads,
q_len). Query head h reads key head h // (heads // kv_heads).
"""

import math
from collections.abc import Sequence

import torch
from einops import einsum, repeat
from torch import Tensor

from sparseflash.dropout import keep_mask_of_spans, keep_probability
from sparseflash.dropout_constants import GROUP
from sparseflash.score import ScoreFunction


def standard_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask=None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    score: ScoreFunction | None = None,
    score_tensors: Sequence[Tensor] | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    key_lengths: Tensor | None = None,
    seed: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Softmax attention that materialises its scores, differentiable any number of times.

    S = score(softcap(scale Q K^T)) + bias, -inf where masked;  P = exp(S - lse);  O = dropout(P) V
    lse = log(sum_k exp(S) + exp(sink))

    Args:
        query: (batch, heads, q_len, head_dim).
        key: (batch, kv_heads, k_len, head_dim); query head h reads key head
            h // (heads // kv_heads).
        value: (batch, kv_heads, k_len, value_dim).
        mask: bool, broadcastable to (batch, heads or kv_heads, q_len, k_len), True means attend;
            or an object with a method to_dense that returns such a tensor; None for all pairs.
        scale, softcap, score, score_tensors, bias, sinks, dropout_p, key_lengths, seed: As in
            sparseflash.attention.
        dtype: Dtype of the products and of `out`. The softmax and lse are at least float32.

    Returns:
        out (batch, heads, q_len, value_dim) in `dtype`, and lse (batch, heads, q_len). A query
        without a key gets out 0, lse -inf and zero gradients.

    Raises:
        ValueError: There is dropout without a seed.

    Reference:
        Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022, Algorithm 0.
    """
    if dropout_p > 0 and seed is None:
        raise ValueError(f"dropout_p {dropout_p} needs a seed")
    allowed = _allowed(query, key, mask, key_lengths)
    query, key, value = _prepare(query, key, value, dtype)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = einsum(query, key, "b h q d, b h k d -> b h q k") * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if score is not None:
        read = score_tensors or ()
        converted = [x.to(scores.dtype) if x.is_floating_point() else x for x in read]
        scores = score.evaluate(scores, *_indices(scores), *converted)[0].to(dtype)
    if bias is not None:
        scores = scores + _by_pair(bias, query.shape[2], key.shape[2]).to(dtype)
    scores = scores.masked_fill(~allowed, -math.inf)
    scores = scores.to(torch.promote_types(dtype, torch.float32))

    # The softmax of a row of only -inf is undefined. It is computed for zeros, and then replaced.
    empty = ~allowed.any(dim=-1)
    scores = scores.masked_fill(empty.unsqueeze(-1), 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(empty, -math.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1).expand_as(lse))
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    p = torch.exp(scores - finite.unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0.0)

    if seed is not None and dropout_p > 0:
        p = p * dropout_mask(seed, *p.shape, dropout_p, p.device) / keep_probability(dropout_p)
    out = einsum(p.to(dtype), value, "b h q k, b h k d -> b h q d")
    return out, lse


def dropout_mask(
    seed: int,
    batch: int,
    heads: int,
    q_len: int,
    k_len: int,
    dropout_p: float,
    device: torch.device | str | None = None,
) -> Tensor:
    """The pairs that dropout keeps on every backend: bool (batch, heads, q_len, k_len)."""
    bh = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    q = torch.arange(q_len, device=device).unsqueeze(1)
    groups = torch.arange(0, k_len, GROUP, device=device)
    return keep_mask_of_spans(seed, bh, q, groups, GROUP, dropout_p)[..., :k_len]


def _allowed(query, key, mask, key_lengths) -> Tensor:
    """bool (batch, heads, q_len, k_len): the pairs that attend."""
    device, shape = query.device, (*query.shape[:3], key.shape[2])
    if mask is None:
        mask = torch.ones((), dtype=torch.bool, device=device)
    allowed = (mask if isinstance(mask, Tensor) else mask.to_dense()).to(device)
    if allowed.dim() > 2 and allowed.shape[-3] == key.shape[1] > 1:
        allowed = allowed.repeat_interleave(query.shape[1] // key.shape[1], dim=-3)
    if key_lengths is not None:
        token = torch.arange(key.shape[2], device=device)
        allowed = allowed & (token < key_lengths.to(device).view(-1, 1, 1, 1))
    return allowed.expand(shape)


def _prepare(query, key, value, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value in `dtype`, with key heads repeated to the number of query heads."""
    group = query.shape[1] // key.shape[1]
    key, value = (repeat(x.to(dtype), "b h k d -> b (h g) k d", g=group) for x in (key, value))
    return query.to(dtype), key, value


def _indices(scores: Tensor) -> list[Tensor]:
    """Batch element, head, query and key of every score, in shapes that broadcast."""
    sizes = [torch.arange(n, device=scores.device) for n in scores.shape]
    return [n.view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(sizes)]


def _by_pair(bias: Tensor, q_len: int, k_len: int) -> Tensor:
    """(1 or heads, q_len, k_len): the bias of every pair, from the bias of every distance."""
    query = torch.arange(q_len, device=bias.device).unsqueeze(1)
    return bias[:, torch.arange(k_len, device=bias.device) - query + q_len - 1]
