"""Calls in place on CPUs, whose backend does not compute them: keys and results are copied."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    found = unattended.forward(call, query, key, value)
    if call.results is None:
        return found
    rows = call.table.by_query.without_empty_rows.schedule[0].long().sort().values
    side, q_len = call.table.block_size[0], query.shape[2]
    tokens = (rows.unsqueeze(1) * side + torch.arange(side)).flatten()
    tokens = tokens[tokens < q_len]
    for result, each in zip(call.results, found, strict=True):
        result[:, :, tokens] = each[:, :, tokens]
    return call.results


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
