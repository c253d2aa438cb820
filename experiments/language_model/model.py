"""A decoder with the shape of GPT-2, whose attention is selected for each layer and head."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, linear, scaled_dot_product_attention

import masks
from experiments.language_model.books import BOUNDARY
from experiments.language_model.settings import ModelConfig
from experiments.long_context.model import ROTARY_BASE
from masks import Pattern
from sparseflash.nn import KeyValueCache, Rotary, SparseAttention

INITIAL_STD = 0.02


class LanguageModel(nn.Module):
    """A language model: the logits of the next token at every position of a sequence.

    Raises:
        ValueError: A text in `attention` cannot be parsed, or sizes do not divide.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.context, config.dim) if learned else None
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What layers add grows with their number: 2 in each.
                added = name.endswith(("out_proj.weight", "narrow.weight"))
                scale = (2 * config.layers) ** -0.5 if added else 1.0
                nn.init.normal_(parameter, std=scale * INITIAL_STD)

    def forward(self, tokens: Tensor, caches: Sequence[KeyValueCache] | None = None) -> Tensor:
        """The logits (batch, seq, vocabulary).

        Args:
            tokens: int64 (batch, seq), with BOUNDARY first.
            caches: One for each layer, with the keys and values of earlier tokens.
        """
        x = self.embedding(tokens)
        if self.positions is not None:
            begin = caches[0].length if caches else 0
            x = x + self.positions.weight[begin : begin + tokens.shape[1]]
        x = dropout(x, self.config.dropout, self.training)
        for number, layer in enumerate(self.layers):
            x = layer(x, caches[number] if caches else None)
        return linear(self.norm(x), self.embedding.weight)

    def caches(self, batch: int) -> list[KeyValueCache]:
        """Empty caches for `batch` sequences of up to the context."""
        config, weight = self.config, self.embedding.weight
        sizes = (batch, config.heads, config.context, config.dim // config.heads)
        return [KeyValueCache(*sizes, weight.dtype, weight.device) for _ in self.layers]


class Layer(nn.Module):
    """Attention and a feed-forward network, each normalised before and added."""

    def __init__(self, config: ModelConfig, number: int):
        super().__init__()
        self.dropout = config.dropout
        self.before_attention, self.before_widen = (nn.LayerNorm(config.dim) for _ in range(2))
        self.attention = attention_of(config, number)
        self.widen = nn.Linear(config.dim, 4 * config.dim)
        self.narrow = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        x = x + self._dropped(self.attention(self.before_attention(x), cache=cache))
        return x + self._dropped(self.narrow(gelu(self.widen(self.before_widen(x)))))

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


class TorchAttention(SparseAttention):
    """Dense causal attention by torch, or with a cache by sparseflash, with equal results."""

    def forward(self, x: Tensor, memory=None, *, key_lengths=None, cache=None) -> Tensor:
        if cache is not None:
            return super().forward(x, cache=cache)
        query, key, value = self._projected(x, None)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        out = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


def attention_of(config: ModelConfig, layer: int) -> SparseAttention:
    """The attention of a layer. Raises ValueError for text that cannot be parsed."""
    text = config.attention[layer % len(config.attention)]
    if config.dim % config.heads or config.context % config.block_size:
        raise ValueError(
            "heads must divide dim and block_size the context, got "
            f"{config.heads}, {config.dim} and {config.block_size}, {config.context}"
        )
    rotary = None
    if config.positions == "rotary":
        rotary = Rotary(config.dim // config.heads, ROTARY_BASE)
    kind = TorchAttention if text == "sdpa" else SparseAttention
    pattern = causal_pattern(text, config.heads, config.block_size)
    return kind(config.dim, config.heads, pattern, rotary=rotary)


@lru_cache
def causal_pattern(text: str, heads: int, block_size: int) -> Pattern:
    """The pattern of the attention of a layer; see ModelConfig.

    Equal arguments give the same object, so that layers share a lookup table.
    """
    causal = masks.causal()
    if text in ("flash", "sdpa"):
        return causal.with_block_size(block_size)
    texts = text.split(";")
    if len(texts) > heads:
        raise ValueError(f"attention has patterns for {len(texts)} heads of {heads}: {text!r}")
    patterns = [masks.parse(part.strip()) & causal for part in texts]
    if len(patterns) == 1:
        return patterns[0].with_block_size(block_size)
    turns = [patterns[head % len(patterns)] for head in range(heads)]
    return masks.stack(turns).with_block_size(block_size)


@torch.inference_mode()
def generate(
    model: LanguageModel, prompt: Sequence[int], temperature: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Yields sampled tokens after a prompt, one by one, up to the context of the model.

    Args:
        model: A model in evaluation mode.
        prompt: Tokens of the prompt, fewer than the context.
        temperature: Divisor of the logits; 0 selects the most likely token.
        seed: Seed of the random numbers.

    Raises:
        ValueError: The prompt is too long, or the temperature is negative.
    """
    if temperature < 0:
        raise ValueError(f"temperature must be 0 or more, got {temperature}")
    free_tokens = model.config.context - 1 - len(prompt)  # BOUNDARY comes first
    if free_tokens < 0:
        raise ValueError(
            f"prompt must be shorter than the context of {model.config.context} tokens, got "
            f"{len(prompt)}"
        )
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    caches = model.caches(1)
    tokens = torch.tensor([[BOUNDARY, *prompt]], device=device)
    for _ in range(free_tokens + 1):
        logits = model(tokens, caches)[0, -1].float().cpu()
        if temperature:
            odds = (logits / temperature).softmax(-1)
            token = int(torch.multinomial(odds, 1, generator=generator))
        else:
            token = int(logits.argmax())
        yield token
        tokens = torch.tensor([[token]], device=device)
