"""All implementations of attention that are compared, by name or as a pattern.

An attention function takes (query, key, value, keys, dropout_p) and returns out. query, key, value
and out are (batch, heads, seq_len, head_dim). `keys` selects the keys that are attended: int
(batch,), the number of keys; bool (batch, seq_len), true for these keys; or None for all.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import dropout, elu, scaled_dot_product_attention

import masks
import sparseflash
from experiments.packaged import PACKAGED

AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def parse_attention(expression: str | Sequence[str], block_size: int = 128) -> AttentionFunction:
    """The attention function of an expression; equal arguments give the same object.

    So all layers and models with this function share compiled code, which refers to a pattern by
    its identity.

    Args:
        expression: One of NAMED; the text of a pattern; or a list of patterns, one for each head.
        block_size: Side of a block of patterns, in tokens.

    Raises:
        ValueError: The expression cannot be parsed; the message lists the known names.
    """
    return _parse_attention(
        expression if isinstance(expression, str) else tuple(expression), block_size
    )


@lru_cache
def _parse_attention(expression: str | tuple[str, ...], block_size: int) -> AttentionFunction:
    if isinstance(expression, str) and expression in NAMED:
        return NAMED[expression]
    try:
        if isinstance(expression, str):
            return pattern_attention(masks.parse(expression), block_size)
        return pattern_attention(
            masks.stack([masks.parse(head) for head in expression]), block_size
        )
    except ValueError as error:
        names = sorted([*NAMED, *PACKAGED])
        raise ValueError(f"{error}; attentions with a name: {names}") from error


def pattern_attention(pattern: masks.Pattern, block_size: int) -> AttentionFunction:
    """Attention with a pattern.

    A query whose pattern contains only masked keys attends these keys.
    """
    pattern = pattern.with_block_size(block_size)

    def attention(query, key, value, keys, dropout_p):
        if keys is None or keys.dtype != torch.bool:
            return sparseflash.attention(
                query, key, value, pattern, dropout_p=dropout_p, key_lengths=keys
            )
        scale, head_dim = query.shape[-1] ** -0.5, query.shape[-1]
        query, key, value = with_masked_keys(query, key, value, keys)
        out = sparseflash.attention(query, key, value, pattern, dropout_p=dropout_p, scale=scale)
        return out[..., :head_dim]

    return attention


# Its square, times any usual scale, is a score whose probability is 0 in float32; and it is a
# number of every precision.
MASKING = 256.0
PADDED = 16  # head dims that every backend has are multiples of this


def with_masked_keys(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds features, one of which lowers the score of masked keys by MASKING^2 scale.

    The kernels mask keys only by length. This mask costs features up to the next multiple of
    PADDED.

    Args:
        query, key, value: (batch, heads, seq_len, head_dim).
        keys: bool (batch, seq_len), False where a key is masked.

    Returns:
        query, key and value of (batch, heads, seq_len, more).
    """
    more = PADDED - query.shape[-1] % PADDED
    masked = torch.zeros_like(key[..., :more])
    masked[..., 0] = torch.where(keys, 0.0, -MASKING)[:, None]
    asked = torch.zeros_like(query[..., :more])
    asked[..., 0] = MASKING
    return (
        torch.cat([query, asked], -1),
        torch.cat([key, masked], -1),
        torch.cat([value, torch.zeros_like(masked)], -1),
    )


def standard(query, key, value, keys, dropout_p):
    """Attention with materialised scores, O(N^2) memory."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if keys is not None:
        scores = scores.masked_fill(~attended(keys, key)[:, None, None], -torch.inf)
    return dropout(scores.softmax(-1), dropout_p) @ value


def sdpa(query, key, value, keys, dropout_p):
    """The dense attention of torch, which may run FlashAttention-2 or cuDNN."""
    mask = None if keys is None else attended(keys, key)[:, None, None]
    return scaled_dot_product_attention(query, key, value, mask, dropout_p)


def linear(query, key, value, keys, dropout_p):
    """phi(Q) (phi(K)^T V) / (phi(Q) sum phi(K)), phi = elu + 1; sums in float32.

    Reference:
        Katharopoulos et al. 2020, Transformers are RNNs.
    """
    query, key = elu(query) + 1, elu(key) + 1
    if keys is not None:
        key = key * attended(keys, key)[:, None, :, None]
    with torch.autocast(query.device.type, enabled=False):
        query_, key_, value_ = query.float(), key.float(), value.float()
        weighted = query_ @ (key_.mT @ value_)
        total = query_ @ key_.sum(2, keepdim=True).mT
        return dropout((weighted / total).to(value.dtype), dropout_p)


def attended(keys: Tensor, key: Tensor) -> Tensor:
    """The keys that are attended, bool (batch, k_len), from lengths or a mask.

    Args:
        keys: Lengths (batch,), on any device, or a mask (batch, k_len).
        key: (..., k_len, dim), whose length and device count.
    """
    if keys.dtype == torch.bool:
        return keys
    lengths = keys.to(key.device, non_blocking=True)
    return torch.arange(key.shape[-2], device=key.device) < lengths[:, None]


NAMED: dict[str, AttentionFunction] = {
    "standard": standard,
    "sdpa": sdpa,
    "linear": linear,
    "flash": pattern_attention(masks.full(), 128),
}
