"""Every way to attend that the room compares, by name or as a pattern.

An attend is a function (query, key, value, lengths, dropout_p) -> out: query, key, value, out are
(batch, heads, seq_len, head_dim), lengths is int (batch,) or None; keys at or past a length are
masked.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import dropout, elu, scaled_dot_product_attention

import masks
import sparseflash
from experiments.lra.packaged import PACKAGED

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def attend_by(expression: str | Sequence[str], block_size: int = 128) -> Attend:
    """The attend that `expression` names, one and the same for equal arguments.

    So compiled code, which holds a pattern by its identity, serves all layers and models of it.

    Args:
        expression: One of NAMED; a pattern as masks.parse reads it; or a list of patterns, one
            for each head.
        block_size: Of the patterns, in tokens.

    Raises:
        ValueError: With the known names.
    """
    return _attend_by(expression if isinstance(expression, str) else tuple(expression), block_size)


@lru_cache
def _attend_by(expression: str | tuple[str, ...], block_size: int) -> Attend:
    if isinstance(expression, str) and expression in NAMED:
        return NAMED[expression]
    try:
        if isinstance(expression, str):
            return by_pattern(masks.parse(expression), block_size)
        return by_pattern(masks.stack([masks.parse(head) for head in expression]), block_size)
    except ValueError as error:
        names = sorted([*NAMED, *PACKAGED])
        raise ValueError(f"{error}; attentions with a name: {names}") from error


def by_pattern(pattern: masks.Pattern, block_size: int) -> Attend:
    pattern = pattern.with_block_size(block_size)

    def attend(query, key, value, lengths, dropout_p):
        return sparseflash.attention(
            query, key, value, pattern, dropout_p=dropout_p, key_lengths=lengths
        )

    return attend


def standard(query, key, value, lengths, dropout_p):
    """Attention with materialised scores, O(N^2) memory."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if lengths is not None:
        scores = scores.masked_fill(~_inside(lengths, key), -torch.inf)
    return dropout(scores.softmax(-1), dropout_p) @ value


def sdpa(query, key, value, lengths, dropout_p):
    """torch's own dense attention: FlashAttention-2 or cuDNN where they can."""
    inside = None if lengths is None else _inside(lengths, key)
    return scaled_dot_product_attention(query, key, value, inside, dropout_p)


def linear(query, key, value, lengths, dropout_p):
    """phi(Q) (phi(K)^T V) / (phi(Q) sum phi(K)), phi = elu + 1; sums in float32.

    Source: Katharopoulos et al. 2020, Transformers are RNNs.
    """
    query, key = elu(query) + 1, elu(key) + 1
    if lengths is not None:
        key = key * _inside(lengths, key).mT
    with torch.autocast(query.device.type, enabled=False):
        query_, key_, value_ = query.float(), key.float(), value.float()
        weighted = query_ @ (key_.mT @ value_)
        total = query_ @ key_.sum(2, keepdim=True).mT
        return dropout((weighted / total).to(value.dtype), dropout_p)


def _inside(lengths: Tensor, key: Tensor) -> Tensor:
    """bool (batch, 1, 1, k_len)"""
    return (torch.arange(key.shape[2], device=key.device) < lengths[:, None])[:, None, None]


NAMED: dict[str, Attend] = {
    "standard": standard,
    "sdpa": sdpa,
    "linear": linear,
    "flash": by_pattern(masks.full(), 128),
}
