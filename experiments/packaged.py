"""Approximate attention layers, with projections of their own.

All but SMYRF are of other packages: `pip install 'sparseflash[lra-peers]'`.
"""

from collections.abc import Callable
from importlib import import_module

from torch import Tensor, nn

from experiments.smyrf import CLUSTER, Smyrf

LANDMARKS = 64
PROJECTED = 256
HASHES, CHUNK = 2, 64


class Masked(nn.Module):
    """A layer, and which tokens of x (batch, tokens, dim) are inside: bool (batch, tokens)
    or None."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, inside: Tensor | None) -> Tensor:
        return self.layer(x, mask=inside)


class Zeroed(Masked):
    """A layer that knows no mask: tokens outside are 0."""

    def forward(self, x: Tensor, inside: Tensor | None) -> Tensor:
        return self.layer(x if inside is None else x * inside[..., None])


def nystromformer(dim: int, heads: int, seq_len: int) -> Masked:
    """Xiong et al. 2021."""
    layer = _package("nystrom_attention").NystromAttention
    return Masked(layer(dim, dim // heads, heads, num_landmarks=LANDMARKS))


def performer(dim: int, heads: int, seq_len: int) -> Masked:
    """Choromanski et al. 2021."""
    layer = _package("performer_pytorch").SelfAttention
    return Masked(layer(dim, heads=heads, dim_head=dim // heads))


def linformer(dim: int, heads: int, seq_len: int) -> Masked:
    """Wang et al. 2020."""
    layer = _package("linformer").LinformerSelfAttention
    return Zeroed(layer(dim, seq_len, PROJECTED, heads))


class Hashed(nn.Module):
    """Reformer's attention between its projections, given which tokens are inside."""

    def __init__(self, attention: nn.Module, dim: int):
        super().__init__()
        self.attention, self.out = attention, nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, inside: Tensor | None) -> Tensor:
        return self.out(self.attention(x, attention_mask=inside).hidden_states)


def reformer(dim: int, heads: int, seq_len: int) -> Hashed:
    """Kitaev, Kaiser, Levskaya 2020. Raises ValueError for a seq_len that chunks do not fill."""
    if seq_len % CHUNK:
        raise ValueError(f"reformer needs a multiple of {CHUNK} tokens, got {seq_len}")
    models = _package("transformers").models.reformer
    config = models.ReformerConfig(
        hidden_size=dim,
        num_attention_heads=heads,
        attention_head_size=dim // heads,
        num_hashes=HASHES,
        lsh_attn_chunk_length=CHUNK,
        lsh_num_chunks_after=1,
    )
    return Hashed(models.modeling_reformer.LSHSelfAttention(config), dim)


def smyrf(dim: int, heads: int, seq_len: int) -> Smyrf:
    """Daras et al. 2020. Raises ValueError for a seq_len that clusters do not fill."""
    if seq_len % CLUSTER:
        raise ValueError(f"smyrf needs a multiple of {CLUSTER} tokens, got {seq_len}")
    return Smyrf(dim, heads)


def _package(name: str):
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} is not installed: pip install 'sparseflash[lra-peers]'"
        ) from error


PACKAGED: dict[str, Callable[[int, int, int], nn.Module]] = {
    function.__name__: function
    for function in (nystromformer, performer, linformer, reformer, smyrf)
}
