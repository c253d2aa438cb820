"""SMYRF: attention inside clusters of equal size, found by asymmetric hashing.

Queries and keys are embedded such that their distance falls as their product rises. They are
hashed by random projections, sorted by hash, and cut into clusters. Several rounds are averaged,
weighted by the share of the softmax that each covers.

Reference:
    Daras, Kitaev, Odena, Dimakis 2020, SMYRF: Efficient attention using asymmetric clustering.
"""

import torch
from torch import Tensor, nn

ROUNDS, CLUSTER = 4, 32


class Smyrf(nn.Module):
    """SMYRF attention with its projections.

    Args:
        dim: Of a token.
        heads: Number of heads.
    """

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.inputs, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor, inside: Tensor | None) -> Tensor:
        batch, tokens, dim = x.shape
        projected = self.inputs(x).view(batch, tokens, 3, self.heads, dim // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        out = clustered_attention(query, key, value, inside)
        return self.out(out.transpose(1, 2).reshape(x.shape))


def clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    inside: Tensor | None,
    rounds: int = ROUNDS,
    cluster: int = CLUSTER,
) -> Tensor:
    """Softmax attention of each query to the keys of its clusters.

    Args:
        query, key, value: (batch, heads, seq_len, head_dim).
        inside: bool (batch, seq_len), False for tokens that no query attends to; or None.
        rounds: Of hashing; each gives a query one cluster.
        cluster: Tokens in a cluster, a divisor of seq_len.

    Returns:
        (batch, heads, seq_len, head_dim).
    """
    # In float32: equal hashes would be clusters of neighbors.
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        queries, keys = (
            hashed.argsort(-1) for hashed in hashes(query, key, inside, rounds)
        )  # (rounds, batch, heads, seq_len)

    def clusters(x: Tensor, order: Tensor) -> Tensor:
        return _taken(x.expand(rounds, *x.shape), order).unflatten(-2, (-1, cluster))

    scores = clusters(query, queries) @ clusters(key, keys).mT * query.shape[-1] ** -0.5
    scores = scores.float()
    if inside is not None:
        attended = inside[:, None, :, None].expand(*key.shape[:3], 1)
        scores = scores.masked_fill(~clusters(attended, keys).mT, torch.finfo(scores.dtype).min)
    seen = scores.logsumexp(-1, keepdim=True)
    out = (scores - seen).exp().to(value.dtype) @ clusters(value, keys)
    place = queries.argsort(-1)
    out, seen = (_taken(part.flatten(-3, -2), place) for part in (out, seen))
    return (seen.softmax(0).to(out.dtype) * out).sum(0)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of x (..., tokens, dim) in an order (..., tokens)."""
    return x.gather(-2, order[..., None].expand(*order.shape, x.shape[-1]))


def hashes(
    query: Tensor, key: Tensor, inside: Tensor | None, rounds: int
) -> tuple[Tensor, Tensor]:
    """A hash of every query and key, (rounds, batch, heads, seq_len): near for large products.

    Tokens that are not inside come last, so that the others share clusters with one another.
    """
    both = embedded(query.float(), key.float())
    projection = torch.randn(rounds, 1, query.shape[1], both[0].shape[-1], 1, device=query.device)
    found = [(x @ projection)[..., 0] for x in both]
    if inside is not None:
        found = [x.masked_fill(~inside[:, None], torch.inf) for x in found]
    return found[0], found[1]


def embedded(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with two more features: |q' - k'|^2 = 2 (max |q|^2 + max |k|^2 - q k)."""
    norms = [x.square().sum(-1, keepdim=True) for x in (query, key)]
    longest = sum(norm.amax(-2, keepdim=True) for norm in norms)
    more = [(longest - norm).clamp_min(0).sqrt() for norm in norms]
    nothing = torch.zeros_like(more[0])
    return torch.cat([query, nothing, more[0]], -1), torch.cat([key, more[1], nothing], -1)
