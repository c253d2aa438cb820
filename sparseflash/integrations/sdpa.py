"""torch's own attention replaced: what calls scaled_dot_product_attention attends sparsely."""

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import masks
from masks import BlockMask, Pattern
from masks._parse import as_pattern
from sparseflash._attention import attention


class replace_sdpa(TorchFunctionMode):
    """A context in which torch's scaled_dot_product_attention attends by a mask.

    Calls of the lengths of a BlockMask attend by it, and by a Pattern those with as many keys as
    queries. Other calls, such as those of cross-attention, run as they are. Calls within torch's
    own functions are not seen, such as those of torch.nn.MultiheadAttention; see
    nn.SparseAttention.from_torch.

        with sparseflash.replace_sdpa("local(256)"):
            out = model(x)

    Args:
        mask: A Pattern, its text as masks.parse reads it, or a BlockMask.
        backend: As in sparseflash.attention.

    Raises:
        TypeError, ValueError: The mask is none. Calls raise ValueError for an attn_mask.
    """

    def __init__(self, mask: Pattern | BlockMask | str, *, backend: str = "auto"):
        super().__init__()
        self.mask = mask if isinstance(mask, BlockMask) else as_pattern(mask)
        self.backend = backend

    def __torch_function__(self, func, types, args=(), kwargs: dict[str, Any] | None = None):
        attend = self._attend if func is scaled_dot_product_attention else func
        return attend(*args, **(kwargs or {}))

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
        """The arguments are those of torch's function."""
        lengths = (query.shape[-2], key.shape[-2])
        own = self.mask.seq_len if isinstance(self.mask, BlockMask) else (lengths[0], lengths[0])
        if lengths != own or query.dim() != 4:
            options = {"scale": scale, "enable_gqa": enable_gqa}
            rest = (attn_mask, dropout_p, is_causal)
            return scaled_dot_product_attention(query, key, value, *rest, **options)
        if attn_mask is not None:
            raise ValueError(
                f"attn_mask must be None where attention is replaced, got {tuple(attn_mask.shape)}"
            )
        mask = self._causal() if is_causal else self.mask
        options = {"scale": scale, "dropout_p": dropout_p, "backend": self.backend}
        return attention(query, key, value, mask, **options)

    def _causal(self) -> Pattern | BlockMask:
        causal = masks.causal().with_block_size(self.mask.block_size)
        if isinstance(self.mask, BlockMask):
            return self.mask & causal(self.mask.seq_len, device=self.mask.device)
        return self.mask & causal
