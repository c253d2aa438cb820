"""Attention layers of other packages, approximate ones: `pip install 'sparseflash[lra-peers]'`."""

from collections.abc import Callable
from importlib import import_module

from torch import Tensor, nn

LANDMARKS = 64
PROJECTED = 256


class Masked(nn.Module):
    """A layer that is told which tokens of x (batch, tokens, dim) are inside, bool (batch, tokens)
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


def _package(name: str):
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} is not installed: pip install 'sparseflash[lra-peers]'"
        ) from error


PACKAGED: dict[str, Callable[[int, int, int], Masked]] = {
    function.__name__: function for function in (nystromformer, performer, linformer)
}
