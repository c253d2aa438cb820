"""Attention in float64, to be read and to be tested against; never dispatched.

Two forms of the same function. `standard_attention` writes the whole score matrix down.
`memory_efficient_attention` visits it piece by piece and carries a running maximum and a running
sum, the idea that every fast kernel builds on. Both are plain differentiable PyTorch.

Shapes: query (batch, heads, q_len, head_dim); key, value (batch, kv_heads, k_len, head_dim), where
query head h reads key head h // (heads // kv_heads); out like query; lse (batch, heads, q_len).
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from einops import einsum, repeat
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparseflash.dropout import keep_mask
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
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    key_lengths: Tensor | None = None,
    seed: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Softmax attention with its score matrix written down: (out, lse).

    S = score(softcap(scale Q K^T)) + bias, -inf where masked;  P = exp(S - lse);  O = dropout(P) V
    lse = log(sum_k exp(S) + exp(sink))

    mask:  bool, broadcastable to (batch, heads, q_len, k_len), True means attend; or anything
           with a .to_dense() that returns such a tensor; None for all pairs
    softcap, score, bias, sinks: as in sparseflash.attention
    dtype: of the products and of `out`; the softmax and lse are float32 at least
    A query without a key gets out 0, lse -inf and zero gradients.
    Raises ValueError for dropout without a seed.
    Source: Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022, Algorithm 0.
    """
    pairs = _pairs(query, key, mask, key_lengths, dropout_p, seed)
    query, key, value = _prepare(query, key, value, dtype)
    scores = einsum(query, key, "b h q d, b h k d -> b h q k") * _scale(scale, query)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if score is not None:
        scores = score.of_tensors(scores, *_places(scores))[0].to(dtype)
    if bias is not None:
        scores = scores + _by_pair(bias, query.shape[2], key.shape[2]).to(dtype)
    scores = scores.masked_fill(~pairs.allowed, -math.inf)
    scores = scores.to(torch.promote_types(dtype, torch.float32))

    # A row of nothing but -inf has no softmax. Zeros stand in for it and its results are replaced.
    empty = ~pairs.allowed.any(dim=-1)
    scores = scores.masked_fill(empty.unsqueeze(-1), 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(empty, -math.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1).expand_as(lse))
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    weights = torch.exp(scores - finite.unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0.0)

    weights = pairs.drop(weights, slice(0, scores.shape[2]), slice(0, scores.shape[3]))
    out = einsum(weights.to(dtype), value, "b h q k, b h k d -> b h q d")
    return out, lse


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask=None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_lengths: Tensor | None = None,
    seed: int | None = None,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """The results of `standard_attention` from pieces of chunk_size x chunk_size scores.

    For every chunk of keys, with m the running maximum, l the running sum and A the output before
    it is normalised:

        m' = max(m, max S),  l' = e^(m - m') l + sum e^(S - m'),  A' = e^(m - m') A + e^(S - m') V

    and at the end O = A / l, lse = m + log l. The backward pass recomputes every piece, so memory
    grows with q_len and with k_len but, the mask aside, never with their product.
    Source: Rabe, Staats, "Self-attention does not need O(n^2) memory", 2021.
    """
    pairs = _pairs(query, key, mask, key_lengths, dropout_p, seed)
    query, key, value = _prepare(query, key, value, torch.float64)
    query = query * _scale(scale, query)
    results = [
        _recomputed(partial(_attend, pairs, rows, chunk_size), query[:, :, rows], key, value)
        for rows in _chunks(query.shape[2], chunk_size)
    ]
    out, lse = (torch.cat(parts, dim=2) for parts in zip(*results, strict=True))
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
    return _kept(seed, batch, heads, slice(0, q_len), slice(0, k_len), dropout_p, device)


class _Pairs(NamedTuple):
    """What happens to each (query, key) pair besides its score."""

    allowed: Tensor  # bool (batch, heads, q_len, k_len)
    dropout_p: float
    seed: int | None

    def drop(self, weights: Tensor, rows: slice, columns: slice) -> Tensor:
        """Dropout of the weights of queries `rows` and keys `columns`."""
        if self.dropout_p == 0:
            return weights
        batch, heads = weights.shape[:2]
        kept = _kept(self.seed, batch, heads, rows, columns, self.dropout_p, weights.device)
        return weights * kept / (1 - self.dropout_p)


def _attend(pairs: _Pairs, rows: slice, chunk_size: int, query, key, value):
    """(out, lse) of the queries in `rows`, one chunk of keys after another."""
    state = (
        query.new_full(query.shape[:3], -math.inf),
        query.new_zeros(query.shape[:3]),
        torch.zeros_like(query),
    )
    for columns in _chunks(key.shape[2], chunk_size):
        absorb = partial(_absorb, pairs, rows, columns)
        state = _recomputed(absorb, *state, query, key[:, :, columns], value[:, :, columns])
    maximum, total, weighted = state
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (maximum + torch.log(total)).masked_fill(empty, -math.inf)
    return weighted / total.unsqueeze(-1), lse


def _absorb(
    pairs: _Pairs, rows: slice, columns: slice, maximum, total, weighted, query, key, value
):
    """One step of the recurrence: the state after the keys in `columns`."""
    scores = einsum(query, key, "b h q d, b h k d -> b h q k")
    scores = scores.masked_fill(~pairs.allowed[:, :, rows, columns], -math.inf)
    # The results do not depend on the maximum, so it takes no gradient.
    raised = torch.maximum(maximum, scores.detach().amax(dim=-1))
    # As long as a row has seen no key its maximum is -inf, and -inf - (-inf) would be NaN.
    shift = raised.masked_fill(raised == -math.inf, 0.0)
    decay = torch.exp(maximum - shift)
    weights = torch.exp(scores - shift.unsqueeze(-1))
    total = decay * total + weights.sum(dim=-1)
    weights = pairs.drop(weights, rows, columns)
    added = einsum(weights, value, "b h q k, b h k d -> b h q d")
    return raised, total, decay.unsqueeze(-1) * weighted + added


def _kept(seed, batch, heads, rows: slice, columns: slice, dropout_p, device) -> Tensor:
    """The part rows x columns of the dropout mask of every head."""
    bh = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    q = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    k = torch.arange(columns.start, columns.stop, device=device)
    return keep_mask(seed, bh, q, k, dropout_p)


def _pairs(query, key, mask, key_lengths, dropout_p, seed) -> _Pairs:
    if dropout_p > 0 and seed is None:
        raise ValueError(f"dropout_p {dropout_p} needs a seed")
    device, shape = query.device, (*query.shape[:3], key.shape[2])
    if mask is None:
        mask = torch.ones((), dtype=torch.bool, device=device)
    allowed = (mask if isinstance(mask, Tensor) else mask.to_dense()).to(device)
    if key_lengths is not None:
        token = torch.arange(key.shape[2], device=device)
        allowed = allowed & (token < key_lengths.to(device).view(-1, 1, 1, 1))
    return _Pairs(allowed.expand(shape), dropout_p, seed)


def _prepare(query, key, value, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """All three in `dtype`, with as many key heads as query heads."""
    group = query.shape[1] // key.shape[1]
    key, value = (repeat(x.to(dtype), "b h k d -> b (h g) k d", g=group) for x in (key, value))
    return query.to(dtype), key, value


def _places(scores: Tensor) -> list[Tensor]:
    """Batch element, head, query and key of every score, to broadcast."""
    sizes = [torch.arange(n, device=scores.device) for n in scores.shape]
    return [n.view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(sizes)]


def _by_pair(bias: Tensor, q_len: int, k_len: int) -> Tensor:
    """(1 or heads, q_len, k_len): the bias of every pair, from that of every distance."""
    query = torch.arange(q_len, device=bias.device).unsqueeze(1)
    return bias[:, torch.arange(k_len, device=bias.device) - query + q_len - 1]


def _scale(scale, query) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _recomputed(function, *tensors):
    """function(*tensors), which the backward pass runs again instead of keeping what it made."""
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
