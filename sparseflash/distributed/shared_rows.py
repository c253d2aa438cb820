"""Rows that attend so much that all ranks share them: each rank attends its own keys.

Their owners send the queries to all ranks, which send back O and LSE over their own keys; owners
merge. Backward, owners send dO, O and LSE, and get back a dQ from every rank, which they add up.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparseflash.dispatch.call import Call
from sparseflash.distributed.part import SharedRows
from sparseflash.distributed.prepare import Prepared
from sparseflash.distributed.transport import Exchange
from sparseflash.merge import merge_attention

WHAT = "rows that ranks share"


class SharedForward:
    """The forward pass of the shared rows, begun when the object is made."""

    def __init__(self, prepared: Prepared, rows: SharedRows, query: Tensor):
        self._prepared, self._rows = prepared, rows
        self.call: Call | None = None
        self._sent = _to_all(prepared, rows, query[:, :, rows.own])
        self._answer: Exchange | None = None

    def attend(self, key: Tensor, value: Tensor) -> None:
        """Attends own keys, and sends the result to the owners."""
        self.query = _of_all(self._rows, self._sent)
        self.call = self._prepared.call_of_shared(self.query, key, value)
        out, lse = self.call.forward(self.query, key, value)
        results = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)
        self._answer = _to_owners(self._prepared, self._rows, results)

    def merge_into(self, out: Tensor, lse: Tensor) -> None:
        """Writes the own ones of the rows."""
        assert self._answer is not None, "attend comes first"
        parts = _of_every_rank(self._rows, self._answer)
        results = merge_attention(parts[..., :-1].unbind(), parts[..., -1].unbind())
        out[:, :, self._rows.own], lse[:, :, self._rows.own] = (
            x.to(like.dtype) for x, like in zip(results, (out, lse), strict=True)
        )


class SharedBackward:
    """The backward pass of the shared rows, begun when the object is made."""

    def __init__(
        self,
        prepared: Prepared,
        rows: SharedRows,
        saved: tuple[Tensor, Tensor],
        grads: tuple[Tensor | None, Tensor | None],
    ):
        self._prepared, self._rows = prepared, rows
        (out, lse), (grad_out, grad_lse) = saved, grads

        def own(tensor: Tensor | None, like: Tensor) -> Tensor:
            chosen = torch.zeros_like(like) if tensor is None else tensor
            chosen = chosen[:, :, rows.own].to(lse.dtype)
            return chosen if chosen.dim() == 4 else chosen.unsqueeze(-1)

        packed = [own(out, out), own(grad_out, out), own(lse, lse), own(grad_lse, lse)]
        self._dtype = out.dtype
        self._sent = _to_all(prepared, rows, torch.cat(packed, -1))

    def run(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor, needs: tuple[bool, ...]
    ) -> tuple[tuple[Tensor | None, ...], Callable[[], Tensor | None]]:
        """The gradients of query, key, value, bias and block scores of this rank's keys; and a
        function that gives the sum over ranks of the first, of the own ones of the rows.
        """
        packed = _of_all(self._rows, self._sent)
        dims = value.shape[3]
        out, grad_out, lse, grad_lse = packed.split([dims, dims, 1, 1], -1)
        saved = (query, key, value, out.to(self._dtype).contiguous(), _column(lse))
        grad = grad_out.to(self._dtype).contiguous()
        grads = call.backward(grad, _column(grad_lse), saved, needs)
        if grads[0] is None:
            return grads, lambda: None
        answer = _to_owners(self._prepared, self._rows, grads[0].to(lse.dtype))
        return grads, lambda: _of_every_rank(self._rows, answer).sum(0)


def _column(tensor: Tensor) -> Tensor:
    return tensor.squeeze(-1).contiguous()


def _to_all(prepared: Prepared, rows: SharedRows, own: Tensor) -> Exchange:
    """Sends (batch, heads, own ones of the rows, dims) to all ranks."""
    packed = own.permute(2, 0, 1, 3).repeat(len(rows.tokens), 1, 1, 1)
    splits = [own.shape[2]] * len(rows.tokens)
    return Exchange(prepared.group, packed, splits, rows.tokens, WHAT)


def _of_all(rows: SharedRows, exchange: Exchange) -> Tensor:
    """(batch, heads, tokens of all rows, dims), in the order of the sequence."""
    return exchange.wait()[rows.order].permute(1, 2, 0, 3).contiguous()


def _to_owners(prepared: Prepared, rows: SharedRows, results: Tensor) -> Exchange:
    """Sends what was found of (batch, heads, tokens of all rows, dims) to the owners."""
    packed = torch.empty_like(results.permute(2, 0, 1, 3), memory_format=torch.contiguous_format)
    packed[rows.order] = results.permute(2, 0, 1, 3)
    splits = [rows.own_tokens] * len(rows.tokens)
    return Exchange(prepared.group, packed, rows.tokens, splits, WHAT)


def _of_every_rank(rows: SharedRows, exchange: Exchange) -> Tensor:
    """(ranks, batch, heads, own ones of the rows, dims): what every rank found."""
    results = exchange.wait().unflatten(0, (len(rows.tokens), rows.own_tokens))
    return results.permute(0, 2, 3, 1, 4)
