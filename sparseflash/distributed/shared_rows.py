"""Shared rows: rows with so many blocks that each rank computes their attention to its own keys.

The owner of a row sends its queries to all ranks. Each rank returns O, LSE and, if they are asked
for, the maximum logits over its own keys, and the owner merges them. In the backward pass the
owner sends dO, O and LSE, and adds the dQ that all ranks return.

A call for few rows has few work tiles. So the own keys are divided into chunks, which are batch
elements of the call: views of the same memory. The results of chunks are merged too.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from masks import BlockMask
from sparseflash.dispatch.call import Call
from sparseflash.distributed.exchange import Exchange, exchanged
from sparseflash.distributed.part import SharedRows, in_chunks, repeated
from sparseflash.distributed.prepare import Prepared
from sparseflash.merge import merge_attention

WHAT = "shared rows"
PARTS = 4  # of a backward pass, if all chunks of own keys have one mask


class SharedForward:
    """The forward pass of shared rows; the constructor starts sending the queries."""

    def __init__(self, prepared: Prepared, rows: SharedRows, query: Tensor):
        self._prepared, self._rows = prepared, rows
        self.call: Call | None = None
        self._sent = _to_all(prepared, rows, query[:, :, rows.own])
        self._answer: Exchange | None = None

    def attend(self, key: Tensor, value: Tensor) -> None:
        """Computes attention to own keys, and sends the result to the owners."""
        self.query, chunks = _of_all(self._rows, self._sent), self._prepared.chunks
        tensors = (repeated(self.query, chunks), *(in_chunks(x, chunks) for x in (key, value)))
        self.call = self._prepared.call_of_shared(*tensors)
        out, *of_rows = self._prepared.forward(self.call, *tensors)
        if chunks > 1:
            out, *of_rows = _merged(*(x.unsqueeze(1) for x in (out, *of_rows)))
        packed = [out.to(of_rows[0].dtype), *(x.unsqueeze(-1) for x in of_rows)]
        self._answer = _to_owners(self._prepared, self._rows, torch.cat(packed, -1))

    def merge_into(self, results: Sequence[Tensor]) -> None:
        """Merges the results of all ranks for own rows, and writes them into those of all rows."""
        assert self._answer is not None, "attend was not called"
        parts = _of_every_rank(self._rows, self._answer)
        dims = results[0].shape[3]
        merged = _merged(parts[..., :dims], *parts[..., dims:].unbind(-1))
        for x, own in zip(results, merged, strict=True):
            x[:, :, self._rows.own] = own.to(x.dtype)


class SharedBackward:
    """The backward pass of shared rows; the constructor starts sending dO, O and LSE."""

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
        self,
        call: Call,
        tensors: tuple[Tensor, Tensor, Tensor],
        needs: tuple[bool, ...],
        totals: Sequence[Tensor | None],
    ) -> tuple[tuple[Tensor | None, ...], Callable[[], Tensor | None]]:
        """Computes the gradients of shared rows over the keys of this rank.

        Args:
            call: The call of the forward pass.
            tensors: The queries of shared rows, and own keys and values.
            needs: Whether each of the gradients is needed.
            totals: The gradients of own keys and values, to which those of shared rows are added.

        Returns:
            The gradients of bias, block scores and score tensors; and a function that waits for
            the dQ of own rows, summed over ranks.
        """
        (query, *both), chunks = tensors, self._prepared.chunks
        packed = _of_all(self._rows, self._sent)
        dims = both[1].shape[3]
        out, grad_out, lse, grad_lse = packed.split([dims, dims, 1, 1], -1)
        out, grad_out = (x.to(self._dtype).contiguous() for x in (out, grad_out))
        of_rows = (query, out, grad_out, _column(lse), _column(grad_lse))
        keys, dq = [in_chunks(x, chunks) for x in both], []
        sums, parts = [None if x is None else in_chunks(x, chunks) for x in totals], self._parts()
        for these in parts:
            # Without chunks the first dim is that of batch elements.
            count = 1 if chunks == 1 else these.stop - these.start
            query, out, grad_out, lse, grad_lse = (repeated(x, count) for x in of_rows)
            saved = (query, *(x[these] for x in keys), out, lse)
            if len(parts) > 1:
                call = self._prepared.call_of_shared(*saved[:3])
            grad_query, *of_keys, bias, blocks, reads = call.backward(
                grad_out, grad_lse, saved, needs
            )
            for total, grad in zip(sums, of_keys, strict=True):
                if total is not None and grad is not None:
                    total[these].add_(grad)
            del of_keys, grad  # not beside those of the next part
            if grad_query is not None:
                wide = grad_query.to(lse.dtype)
                dq.append(wide.sum(0, keepdim=True) if chunks > 1 else wide)
        others = bias, blocks, reads
        if not dq:
            return others, lambda: None
        answer = _to_owners(self._prepared, self._rows, sum(dq[1:], start=dq[0]))
        return others, lambda: _of_every_rank(self._rows, answer).sum(0)

    def _parts(self) -> list[slice]:
        """The chunks of own keys that are computed together: gradients of keys and values of a
        part are in memory at a time.
        """
        chunks = self._prepared.chunks
        if chunks % PARTS or not isinstance(self._rows.mask_of_chunks, BlockMask):
            return [slice(None) if chunks == 1 else slice(0, chunks)]
        each = chunks // PARTS
        return [slice(begin, begin + each) for begin in range(0, chunks, each)]


def _merged(outs: Tensor, lses: Tensor, *max_logits: Tensor) -> tuple[Tensor, ...]:
    """The results over all keys of results over some keys, which are the first dim."""
    merged = merge_attention(outs.unbind(), lses.unbind())
    return *merged, *(x.amax(0) for x in max_logits)


def _column(tensor: Tensor) -> Tensor:
    return tensor.squeeze(-1).contiguous()


def _to_all(prepared: Prepared, rows: SharedRows, own: Tensor) -> Exchange:
    """Sends (batch, heads, tokens of own rows, dims) to all ranks."""
    packed = own.permute(2, 0, 1, 3).repeat(len(rows.tokens), 1, 1, 1)
    splits = [own.shape[2]] * len(rows.tokens)
    return exchanged(prepared.group, packed, splits, rows.tokens, WHAT)


def _of_all(rows: SharedRows, exchange: Exchange) -> Tensor:
    """(batch, heads, tokens of all rows, dims), in the order of the sequence."""
    return exchange.wait()[rows.order].permute(1, 2, 0, 3).contiguous()


def _to_owners(prepared: Prepared, rows: SharedRows, results: Tensor) -> Exchange:
    """Sends results (batch, heads, tokens of all rows, dims) to the owners of the rows."""
    packed = torch.empty_like(results.permute(2, 0, 1, 3), memory_format=torch.contiguous_format)
    packed[rows.order] = results.permute(2, 0, 1, 3)
    splits = [rows.own_tokens] * len(rows.tokens)
    return exchanged(prepared.group, packed, rows.tokens, splits, WHAT)


def _of_every_rank(rows: SharedRows, exchange: Exchange) -> Tensor:
    """(ranks, batch, heads, tokens of own rows, dims): the results of every rank."""
    results = exchange.wait().unflatten(0, (len(rows.tokens), rows.own_tokens))
    return results.permute(0, 2, 3, 1, 4)
