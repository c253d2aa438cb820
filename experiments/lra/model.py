"""A pre-norm encoder with the options of the published configurations, and any attention."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, pad, relu

from experiments.attention import AttentionFunction, attended, parse_attention
from experiments.lra.tasks import Shape
from experiments.packaged import PACKAGED
from masks.analysis.reach import pixels_in_order
from sparseflash.nn.rotary import rotate

Expressions = str | list[str | list[str]]

ROTARY_BASE = 10_000.0
AXIAL_BASE = 100.0  # smaller than for text, because coordinates of pixels are small
BLACK = 0


@dataclass(frozen=True)
class EncoderConfig:
    """The configuration of an encoder; the published ones are in presets/.

    Args:
        attention: The attention of all layers, or a list with one for each layer. It is
            "standard", "flash", "sdpa", "linear"; a pattern such as "local(128) |
            global_tokens(16)"; a list of patterns with one for each head; or "nystromformer",
            "performer", "linformer", "reformer" of other packages.
        block_size: Side of a block of patterns, in tokens.
        positions: "learned" and "sinusoidal" are added to the embeddings. "rotary" rotates queries
            and keys by their position in the sequence, "axial" by the row and column of their
            pixel, with equal angles in images of all sizes.
        pool: "mean" or "max" over all tokens except padding. "mean_padded" divides the sum by the
            padded length, as published code does. "cls" reads an additional first token.
        order: Order of pixels: "raster", or "tiles", which adds knowledge of the two dimensions.
        tile: (rows, columns) of a tile, in pixels.
        embedding_std: Standard deviation of the initial embeddings of ids and positions.
        mask_black: Whether pixels of value 0 are treated as padding, as by `ids != 0` in published
            code.
    """

    attention: Expressions = "flash"
    block_size: int = 128
    layers: int = 2
    dim: int = 64
    heads: int = 2
    feedforward: int = 128
    positions: Literal["learned", "sinusoidal", "rotary", "axial", "none"] = "learned"
    pool: Literal["mean", "mean_padded", "max", "cls"] = "mean"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    order: Literal["raster", "tiles"] = "raster"
    tile: tuple[int, int] = (8, 16)
    embedding_std: float = 0.02
    mask_black: bool = False


class Encoder(nn.Module):
    """Encodes ids (batch, seq_len), with lengths (batch,) or None.

    Returns features (batch, tokens, dim), and which tokens are keys: lengths (batch,), a mask
    (batch, tokens), or None for all. tokens is seq_len, plus 1 with a CLS token.
    """

    order: Tensor | None

    def __init__(self, config: EncoderConfig, shape: Shape):
        super().__init__()
        expressions = per_layer(config)
        _check(config, shape, expressions)
        self.config, self.cls = config, config.pool == "cls"
        self.register_buffer("order", order_of(shape, config.order, config.tile), persistent=False)
        # One additional id: for the CLS token, and for hidden tokens.
        self.extra_id = shape.vocabulary
        self.embedding = nn.Embedding(shape.vocabulary + 1, config.dim)
        self.positions = Positions(config, shape, self.order)
        tokens = shape.seq_len + self.cls
        self.layers = nn.ModuleList(
            Layer(config, attention_of(config, expression, tokens)) for expression in expressions
        )
        self.norm = nn.LayerNorm(config.dim)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=config.embedding_std)

    def forward(self, ids: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.order is not None:
            ids = ids[:, self.order]
        if self.cls:
            ids = pad(ids, (1, 0), value=self.extra_id)
            lengths = None if lengths is None else lengths + 1
        x, rotary_angles = self.positions(self.embedding(ids))
        keys = ids != BLACK if self.config.mask_black else lengths
        x = dropout(x, self.config.dropout, self.training)
        for layer in self.layers:
            x = layer(x, rotary_angles, keys)
        return self.norm(x), keys


def order_of(shape: Shape, order: str, tile: tuple[int, int]) -> Tensor | None:
    """The pixel of each token, in raster order; None if the order is "raster".

    With "tiles" a block of rows x columns tokens is a patch and not a part of a row. This is
    knowledge of the two dimensions that raster order does not have.

    Raises:
        ValueError: The task is text, or tiles do not fill the image.
    """
    if order == "raster":
        return None
    if shape.side is None:
        raise ValueError("order 'tiles' is for images, this task is text")
    return torch.from_numpy(pixels_in_order(shape.side, shape.side, tile))


def per_layer(config: EncoderConfig) -> list[str | list[str]]:
    """The attention of each layer. Raises ValueError for a list of another length."""
    if isinstance(config.attention, str):
        return [config.attention] * config.layers
    if len(config.attention) != config.layers:
        raise ValueError(
            f"attention must be one expression, or one for each of {config.layers} layers, got "
            f"{len(config.attention)}"
        )
    return config.attention


def _check(config: EncoderConfig, shape: Shape, expressions: list[str | list[str]]) -> None:
    if config.dim % config.heads:
        raise ValueError(f"heads must divide dim {config.dim}, got {config.heads}")
    if config.positions == "axial" and shape.side is None:
        raise ValueError("positions 'axial' are for images, this task is text")
    if config.positions == "axial" and config.dim // config.heads % 4:
        raise ValueError(
            f"positions 'axial' need a head dim divisible by 4, got {config.dim // config.heads}"
        )
    packaged = [e for e in expressions if isinstance(e, str) and e in PACKAGED]
    if packaged and config.positions in ("rotary", "axial"):
        raise ValueError(f"positions {config.positions!r} cannot be used with {packaged[0]!r}")
    if config.mask_black and shape.side is None:
        raise ValueError("mask_black is for images, this task is text")


class Positions(nn.Module):
    """Adds position embeddings to embeddings (batch, tokens, dim).

    Also returns the angles (tokens, head_dim / 2) of rotary embeddings, or None.
    """

    place: Tensor
    added: Tensor | None
    rotary_angles: Tensor | None

    def __init__(self, config: EncoderConfig, shape: Shape, order: Tensor | None):
        super().__init__()
        self.cls = config.pool == "cls"
        place = torch.arange(shape.seq_len) if order is None else order
        self.register_buffer("place", pad(place + self.cls, (int(self.cls), 0)), persistent=False)
        self.learned = None
        added = rotary_angles = None
        tokens = shape.seq_len + self.cls
        if config.positions == "learned":
            self.learned = nn.Embedding(tokens, config.dim)
        elif config.positions == "sinusoidal":
            angles = frequencies(torch.arange(tokens), config.dim // 2, ROTARY_BASE)
            added = torch.cat([angles.sin(), angles.cos()], -1)
        elif config.positions == "rotary":
            rotary_angles = frequencies(self.place, config.dim // config.heads // 2, ROTARY_BASE)
        elif config.positions == "axial":
            assert shape.side is not None
            pairs = config.dim // config.heads // 4
            row, column = place // shape.side, place % shape.side
            angles = [frequencies(at, pairs, AXIAL_BASE) for at in (row, column)]
            # The CLS token does not rotate.
            rotary_angles = pad(torch.cat(angles, -1), (0, 0, int(self.cls), 0))
        self.register_buffer("added", added, persistent=False)
        self.register_buffer("rotary_angles", rotary_angles, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.learned is not None:
            x = x + self.learned(self.place)
        elif self.added is not None:
            x = x + self.added[self.place]
        return x, self.rotary_angles


def frequencies(place: Tensor, count: int, base: float) -> Tensor:
    """position base^(-i / count) for i = 0..count-1: (positions, count)."""
    return place[:, None] * base ** (-torch.arange(count) / count)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feedforward(norm(x))."""

    def __init__(self, config: EncoderConfig, attention: nn.Module):
        super().__init__()
        self.dropout = config.dropout
        self.norm_attention = nn.LayerNorm(config.dim)
        self.attention = attention
        self.norm_feedforward = nn.LayerNorm(config.dim)
        self.widen = nn.Linear(config.dim, config.feedforward)
        self.narrow = nn.Linear(config.feedforward, config.dim)

    def forward(self, x: Tensor, rotary_angles: Tensor | None, keys: Tensor | None) -> Tensor:
        x = x + self._dropped(self.attention(self.norm_attention(x), rotary_angles, keys))
        wide = self._dropped(gelu(self.widen(self.norm_feedforward(x))))
        return x + self._dropped(self.narrow(wide))

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


class SelfAttention(nn.Module):
    """Projections around an attention function."""

    def __init__(self, config: EncoderConfig, attention_function: AttentionFunction):
        super().__init__()
        self.attention_function, self.heads, self.dropout = (
            attention_function,
            config.heads,
            config.attention_dropout,
        )
        self.query_key_value = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, rotary_angles: Tensor | None, keys: Tensor | None) -> Tensor:
        batch, tokens, dim = x.shape
        projected = self.query_key_value(x).view(batch, tokens, 3, self.heads, -1)
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind()
        if rotary_angles is not None:
            query, key = rotate(query, rotary_angles), rotate(key, rotary_angles)
        p = self.dropout if self.training else 0.0
        attended = self.attention_function(query, key, value, keys, p)
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, dim))


class PackagedAttention(nn.Module):
    """A layer of another package. It masks keys, but has no rotary embedding."""

    def __init__(self, config: EncoderConfig, name: str, tokens: int):
        super().__init__()
        self.layer = PACKAGED[name](config.dim, config.heads, tokens)

    def forward(self, x: Tensor, rotary_angles: Tensor | None, keys: Tensor | None) -> Tensor:
        return self.layer(x, None if keys is None else attended(keys, x))


def attention_of(config: EncoderConfig, expression: str | list[str], tokens: int) -> nn.Module:
    if isinstance(expression, str) and expression in PACKAGED:
        return PackagedAttention(config, expression, tokens)
    return SelfAttention(config, parse_attention(expression, config.block_size))


class Classifier(nn.Module):
    """Classifies ids (batch, documents, seq_len) with lengths (batch, documents) or None.

    The same encoder reads two documents a and b; the classifier gets [a, b, a b, a - b].
    """

    def __init__(self, config: EncoderConfig, shape: Shape):
        super().__init__()
        self.pool = config.pool
        self.encoder = Encoder(config, shape)
        features = config.dim * (1 if shape.documents == 1 else 4)
        self.hidden = nn.Linear(features, config.feedforward)
        self.answer = nn.Linear(config.feedforward, shape.classes)

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        x, keys = self.encoder(ids.flatten(0, 1), None if lengths is None else lengths.flatten())
        pooled = pooled_by(self.pool, x, keys).unflatten(0, ids.shape[:2])
        if ids.shape[1] == 1:
            return self.classify(pooled[:, 0])
        a, b = pooled.unbind(1)
        return self.classify(torch.cat([a, b, a * b, a - b], dim=-1))

    def classify(self, features: Tensor) -> Tensor:
        return self.answer(relu(self.hidden(features)))


def pooled_by(pool: str, x: Tensor, keys: Tensor | None) -> Tensor:
    """Pools (batch, tokens, dim) to (batch, dim) over the tokens that are keys.

    See EncoderConfig.pool and Encoder.
    """
    if pool == "cls":
        return x[:, 0]
    if keys is None:
        return x.amax(1) if pool == "max" else x.mean(1)
    mask = attended(keys, x)
    if pool == "max":
        return x.masked_fill(~mask[..., None], -torch.inf).amax(1)
    divisor = mask.sum(1, keepdim=True) if pool == "mean" else x.shape[1]
    return x.masked_fill(~mask[..., None], 0).sum(1) / divisor
