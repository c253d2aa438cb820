"""Calls in place on CPUs, whose backend does not compute them: keys and results are copied."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from sparseflash.backends import cpu
from sparseflash.backends.cpu import unattended
from sparseflash.dispatch.call import Call, Gradients, Needs, Saved


@contextmanager
def in_place_on_cpus() -> Iterator[None]:
    """A context in which the backend of CPUs computes in place."""
    with mock.patch.multiple(
        cpu, forward=forward, backward=backward, computes_in_place=lambda _: True
    ):
        yield


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.base."""
    if call.more is not None:
        key, value = _joined(call.more, key, value)
    results, max_logits = call.results, call.max_logits
    if results is None:
        return unattended.forward(call, query, key, value)
    written = results
    if max_logits is not None:
        written = (*results, max_logits)
        call = replace(call, max_logits=torch.empty_like(max_logits))
    found = unattended.forward(call, query, key, value)
    if call.max_logits is not None:
        found = (*found, call.max_logits)
    rows = call.table.by_query.without_empty_rows.schedule[0].long().sort().values
    side, q_len = call.table.block_size[0], query.shape[2]
    tokens = (rows.unsqueeze(1) * side + torch.arange(side)).flatten()
    tokens = tokens[tokens < q_len]
    for result, each in zip(written, found, strict=True):
        result[:, :, tokens] = each[:, :, tokens]
    return results


def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, needs: Needs
) -> Gradients:
    """The gradients of one call; see sparseflash.backends.base."""
    if call.more is not None:
        query, key, value, *results = saved
        saved = (query, *_joined(call.more, key, value), *results)
    return unattended.backward(call, grad_out, grad_lse, saved, needs)


def _joined(more: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> list[Tensor]:
    return [torch.cat(both, 2) for both in zip((key, value), more, strict=True)]
