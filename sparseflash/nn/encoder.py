"""A layer of a Transformer encoder with a sparsity pattern."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from masks import Pattern
from masks.arguments import check_sizes
from sparseflash.nn.attention import SparseAttention

ACTIVATIONS = {"relu": relu, "gelu": gelu}


class SparseEncoderLayer(nn.Module):
    """torch.nn.TransformerEncoderLayer with a sparsity pattern.

    x = norm1(x + attention(x)),  x = norm2(x + feedforward(x)); with norm_first the norms come
    before attention and feedforward.

    Tensors are (batch, seq, d_model). Parameters have torch's names, so a state dict of torch's
    layer loads. torch.nn.TransformerEncoder(layer, n, enable_nested_tensor=False) stacks layers.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, norm_first, bias: As
            in torch.nn.TransformerEncoderLayer.
        pattern: As in SparseAttention.
        device, dtype: Device and dtype of the parameters.
        **attention_options: Further arguments of SparseAttention.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Callable[[Tensor], Tensor] | str = relu,
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
        bias: bool = True,
        *,
        pattern: Pattern | str | Sequence[Pattern | str] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention_options,
    ):
        super().__init__()
        check_sizes(2**31 - 1, dim_feedforward=dim_feedforward)
        factory = {"device": device, "dtype": dtype}
        self.self_attn = SparseAttention(
            d_model, nhead, pattern, dropout=dropout, bias=bias, **factory, **attention_options
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, **factory)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **factory)
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **factory)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **factory)
        self.dropout = nn.Dropout(dropout)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.activation, self.norm_first = _activation(activation), norm_first

    def forward(
        self,
        src: Tensor,
        src_mask: None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        score_tensors: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The output of the layer.

        Args:
            src: (batch, seq, d_model).
            src_mask, is_causal: Must be None and False, since the pattern is the mask.
            src_key_padding_mask: bool (batch, seq), True at padding. Padding comes after all
                tokens.
            score_tensors: As in sparseflash.attention.

        Returns:
            (batch, seq, d_model).

        Raises:
            TypeError, ValueError: An argument is wrong; the message names it.
        """
        if src_mask is not None or is_causal:
            raise ValueError("src_mask must be None and is_causal False: the pattern is the mask")
        lengths = None
        if src_key_padding_mask is not None:
            padding = src_key_padding_mask
            got = tuple(padding.shape) if isinstance(padding, Tensor) else type(padding).__name__
            if got != tuple(src.shape[:2]):
                raise ValueError(
                    f"src_key_padding_mask must be {tuple(src.shape[:2])} like src, got {got}"
                )
            lengths = lengths_of(padding)
        if self.norm_first:
            src = src + self._attend(self.norm1(src), lengths, score_tensors)
            return src + self._feed_forward(self.norm2(src))
        src = self.norm1(src + self._attend(src, lengths, score_tensors))
        return self.norm2(src + self._feed_forward(src))

    def _attend(
        self, x: Tensor, lengths: Tensor | None, score_tensors: Sequence[Tensor] | None
    ) -> Tensor:
        out = self.self_attn(x, key_lengths=lengths, score_tensors=score_tensors)
        return self.dropout1(out)

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))


def _activation(activation: Callable[[Tensor], Tensor] | str) -> Callable[[Tensor], Tensor]:
    """The function itself, or the one with this name in torch.nn.TransformerEncoderLayer."""
    if callable(activation):
        return activation
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be a function or one of {list(ACTIVATIONS)}, got {activation!r}"
        )
    return ACTIVATIONS[activation]


def lengths_of(padding: Tensor) -> Tensor:
    """The number of tokens before the padding: int32 (batch,).

    Args:
        padding: bool (batch, seq), True at padding. Or float, 0 at tokens and -inf at padding, as
            TransformerEncoder converts it.

    Raises:
        TypeError: `padding` has another dtype.
        ValueError: A token comes after padding, or a float mask has other values.
    """
    if padding.dtype != torch.bool and not padding.is_floating_point():
        raise TypeError(
            f"src_key_padding_mask must be bool, True at padding, or float, got {padding.dtype}"
        )
    padded = padding if padding.dtype == torch.bool else padding == -torch.inf
    tokens = ~padding if padding.dtype == torch.bool else padding == 0
    lengths = tokens.sum(1)
    position = torch.arange(padding.shape[1], device=padding.device)
    is_valid = (tokens == (position < lengths[:, None])) & (tokens != padded)
    message = "src_key_padding_mask must have no token after padding, and be 0 or -inf if float"
    if torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(is_valid.all(), message)
    elif not is_valid.all():
        raise ValueError(message)
    return lengths.int()
