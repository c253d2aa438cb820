"""A small causal language model that takes its attention function as an argument."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparseflash.nn.rotary import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
ROTARY_BASE = 1e6  # large, so that distant positions have different angles


class Layer(nn.Module):
    """Attention and a feed-forward network, each normalised before and added."""

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.before_attention, self.before_feed_forward = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor, angle: Tensor, attend: Attend) -> Tensor:
        """x: (batch, tokens, width); angle: float32 (tokens, head_dim / 2)."""
        qkv = self.qkv(self.before_attention(x)).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        attended = attend(rotate(query, angle), rotate(key, angle), value)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.before_feed_forward(x))


class LanguageModel(nn.Module):
    """Embedding, layers, and logits of the next token.

    Args:
        vocabulary: Number of tokens in the vocabulary.
        layers, width, heads, kv_heads: Sizes of the network; heads divides width.
        recompute: Whether activations inside of layers are recomputed in the backward pass.
    """

    def __init__(
        self,
        vocabulary: int,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        recompute: bool = False,
    ):
        super().__init__()
        self.recompute, self.head_dim = recompute, width // heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The logits (batch, tokens, vocabulary) of tokens with the given positions."""
        exponent = torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim
        angle = positions[:, None].float() * ROTARY_BASE**-exponent
        x = self.embedding(tokens)
        for layer in self.layers:
            run = partial(checkpoint, layer, use_reentrant=False) if self.recompute else layer
            x = run(x, angle, attend)
        return self.logits(self.norm(x))
