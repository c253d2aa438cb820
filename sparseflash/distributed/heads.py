"""Heads divided among the ranks of a node, the sequence sharded over nodes.

The ranks of one row of a mesh share one shard of the sequence. Each starts with a part of the
tokens of the shard and all heads. An all-to-all gives it all tokens of the shard and a part of
the heads, for which it computes attention. Another all-to-all returns the result.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sparseflash.distributed.exchange import exchanged
from sparseflash.distributed.part import Heads


@dataclass(frozen=True)
class HeadSharing:
    """The ranks among which the heads of one shard are divided.

    Attributes:
        group: The process group of these ranks.
        tokens: Number of tokens of the shard with which each rank starts.
    """

    group: ProcessGroup
    tokens: tuple[int, ...]

    @staticmethod
    def of(group: ProcessGroup, shard: int) -> "HeadSharing":
        """The ranks of a group, which start with equal parts of `shard` tokens.

        If the parts cannot be equal, the first ranks have one token more.
        """
        each, more = divmod(shard, group.size())
        return HeadSharing(group, tuple(each + (rank < more) for rank in range(group.size())))

    @property
    def heads(self) -> Heads:
        """The heads that this rank computes."""
        return Heads(self.group.rank(), len(self.tokens))

    @property
    def own(self) -> int:
        """Number of tokens with which this rank starts."""
        return self.tokens[self.group.rank()]

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError if the heads cannot be divided or the tokens are not `own`."""
        if tensor.shape[1] % len(self.tokens):
            raise ValueError(
                f"{name} must have a multiple of {len(self.tokens)} heads, to be divided among as "
                f"many ranks, got {tuple(tensor.shape)}"
            )
        if tensor.shape[2] != self.own:
            raise ValueError(
                f"{name} must have {self.own} tokens in dim 2, the part of this rank of a shard "
                f"with {sum(self.tokens)}, got {tuple(tensor.shape)}"
            )

    def of_own_heads(self, tensor: Tensor | None) -> Tensor | None:
        """The rows of a tensor (1 or heads, ...) that belong to the heads of this rank."""
        if tensor is None or len(tensor) == 1:
            return tensor
        return tensor[self.heads.of(len(tensor))]

    def by_heads(self, tensor: Tensor) -> Tensor:
        """Exchanges (batch, heads, own tokens, dims) to (batch, own heads, all tokens, dims)."""
        return cast(Tensor, _Swap.apply(tensor, self, True))

    def by_tokens(self, tensor: Tensor) -> Tensor:
        """The inverse of by_heads."""
        return cast(Tensor, _Swap.apply(tensor, self, False))


class _Swap(torch.autograd.Function):
    """by_heads or by_tokens; each is the backward of the other."""

    @staticmethod
    def forward(ctx, tensor: Tensor, sharing: HeadSharing, by_heads: bool):
        ctx.sharing, ctx.by_heads = sharing, by_heads
        return _to_heads(tensor, sharing) if by_heads else _to_tokens(tensor, sharing)

    @staticmethod
    def backward(ctx, grad):
        return _Swap.apply(grad, ctx.sharing, not ctx.by_heads), None, None


def _to_heads(tensor: Tensor, sharing: HeadSharing) -> Tensor:
    ranks = len(sharing.tokens)
    rows = tensor.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1).contiguous()
    splits = ([sharing.own] * ranks, list(sharing.tokens))
    return exchanged(sharing.group, rows, *splits, "heads").wait().permute(1, 2, 0, 3)


def _to_tokens(tensor: Tensor, sharing: HeadSharing) -> Tensor:
    ranks = len(sharing.tokens)
    rows = tensor.permute(2, 0, 1, 3).contiguous()
    splits = (list(sharing.tokens), [sharing.own] * ranks)
    came = exchanged(sharing.group, rows, *splits, "heads").wait()
    return came.unflatten(0, (ranks, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
