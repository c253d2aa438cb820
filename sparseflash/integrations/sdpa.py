"""Replaces torch's scaled_dot_product_attention by attention with a mask."""

from typing import Any

import torch
from torch import Tensor, broadcast_shapes
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import masks
from masks import BlockMask, Pattern
from masks._parse import as_pattern
from sparseflash._attention import attention
from sparseflash.backends.select import check_backend


class SdpaMode(TorchFunctionMode):
    """A context in which `_attend` replaces torch's scaled_dot_product_attention.

    Attributes:
        saw_attention: Whether torch's function was called in the context.
    """

    saw_attention = False

    def __torch_function__(self, func, types, args=(), kwargs: dict[str, Any] | None = None):
        if func is Tensor.unflatten:
            func = torch.unflatten  # the method calls super(), which is not traced here
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.saw_attention = True
        return self._attend(*args, **(kwargs or {}))

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """scaled_dot_product_attention; its arguments are torch's."""
        raise NotImplementedError


class replace_sdpa(SdpaMode):
    """A context in which torch's scaled_dot_product_attention attends by a mask.

    A BlockMask replaces the attention of calls with its lengths. A Pattern replaces that of calls
    with as many keys as queries. Tensors may have any number of dims. Other calls, such as
    cross-attention, are unchanged. Calls inside torch's own functions, such as
    torch.nn.MultiheadAttention, cannot be replaced; see nn.SparseAttention.from_torch.

        with sparseflash.replace_sdpa("local(256)"):
            out = model(x)

    Args:
        mask: A Pattern, its text as masks.parse reads it, or a BlockMask.
        backend: As in sparseflash.attention.

    Raises:
        TypeError, ValueError: `mask` has the wrong type or cannot be parsed, or no backend has the
            name `backend`. A replaced call also raises ValueError if it has an attn_mask, a
            dropout_p of 1 or a scale that is not above 0.
    """

    def __init__(self, mask: Pattern | BlockMask | str, *, backend: str = "auto"):
        super().__init__()
        if not isinstance(mask, Pattern | BlockMask | str):
            raise TypeError(
                f"mask must be a Pattern, its text or a BlockMask, got {type(mask).__name__}"
            )
        check_backend(backend)
        self.mask = mask if isinstance(mask, BlockMask) else as_pattern(mask)
        self.backend = backend

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """scaled_dot_product_attention; its arguments are torch's."""
        lengths = (*query.shape[-2:-1], *key.shape[-2:-1])
        own = self.mask.seq_len if isinstance(self.mask, BlockMask) else query.shape[-2:-1] * 2
        if lengths != own:
            options = {"scale": scale, "enable_gqa": enable_gqa}
            torch_arguments = (attn_mask, dropout_p, is_causal)
            return scaled_dot_product_attention(query, key, value, *torch_arguments, **options)
        if attn_mask is not None:
            raise ValueError(
                f"attn_mask must be None if attention is replaced, got {tuple(attn_mask.shape)}"
            )
        query, key, value, lead = _broadcast(query, key, value, enable_gqa)
        mask = self._causal() if is_causal else self.mask
        options = {"scale": scale, "dropout_p": dropout_p, "backend": self.backend}
        out = attention(query, key, value, mask, **options)
        return out.reshape(*lead, *out.shape[-2:])

    def _causal(self) -> Pattern | BlockMask:
        mask = self.mask
        if isinstance(mask, BlockMask):
            return mask & masks.causal()(mask.seq_len, mask.block_size, mask.device)
        return mask & masks.causal()


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """Broadcasts batch dims as torch does, and without enable_gqa also heads.

    Torch's attention takes any number of dims: the last one before tokens is that of heads.

    Returns:
        query, key and value, each (batch, heads, tokens, dim), and the dims of the output before
        tokens.

    Raises:
        ValueError: The tensors do not broadcast.
    """
    given = (query, key, value)
    dims = max(x.dim() for x in given)
    query, key, value = (x[(None,) * (max(dims, 4) - x.dim())] for x in given)
    heads = query.shape[-3], key.shape[-3]
    if not enable_gqa and len({*heads} - {1}) > 1:
        raise ValueError(f"enable_gqa must be True for query and key of {heads} heads")
    try:
        batch = broadcast_shapes(
            *(x.shape[: -3 if enable_gqa else -2] for x in (query, key, value))
        )
    except RuntimeError as error:
        shapes = [tuple(x.shape) for x in given]
        raise ValueError(f"query, key and value must broadcast, got {shapes}") from error
    query, key, value = (
        x.expand(*batch, *x.shape[len(batch) :]).flatten(0, -4) for x in (query, key, value)
    )
    lead = (*batch, query.shape[1]) if enable_gqa else batch
    return query, key, value, torch.Size(lead[len(lead) - dims + 2 :])
