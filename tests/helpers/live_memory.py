"""The memory of one rank of context parallelism, counted without other ranks and without kernels.

Exchanges move nothing and attention computes nothing, but all of their tensors are allocated. So
the memory of a long sequence on many ranks is counted with heads of few dims in seconds.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparseflash.dispatch.call import Call
from sparseflash.distributed import ContextPlan, context_parallel_attention, fetch, passes, prepare


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of tensors of floating-point numbers that are made in the context."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def ignore(self, tensor: Tensor) -> None:
        """Does not count the memory of a tensor that was made before."""
        self._sizes[tensor.untyped_storage()._cdata] = 0

    def free(self, storage: int) -> None:
        """Counts the memory of a storage no longer."""
        self.now -= self._sizes.pop(storage, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, key)


def peak_in_shards(
    plan: ContextPlan, rank: int, heads: int = 4, kv_heads: int = 4, **options: Any
) -> tuple[float, float]:
    """The peaks of the forward pass and of both passes, over the bytes of the queries of a rank.

    Inputs and the gradient of out are not counted.
    """
    tokens, dims = len(plan.positions(rank)), 64
    shapes = [(1, count, tokens, dims) for count in (heads, kv_heads, kv_heads, heads)]
    *inputs, grad_out = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    inputs = [x.requires_grad_() for x in inputs]
    group = mock.Mock(rank=lambda: rank, size=lambda: plan.ranks)
    with _nothing_computed(), LiveMemory() as live:
        for tensor in (*inputs, grad_out):
            live.ignore(tensor)
        with mock.patch("sparseflash.distributed.attention.process_group_of", return_value=group):
            out = context_parallel_attention(*inputs, plan, check=False, **options)
        forward = live.peak
        grads = torch.autograd.grad(out, inputs, grad_out)
    del grads
    return forward / inputs[0].nbytes, live.peak / inputs[0].nbytes


@contextmanager
def _nothing_computed() -> Iterator[None]:
    """A context in which attention and exchanges only allocate what they return."""

    def forward(self, query, key, value):
        if self.results is not None:
            return self.results
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        return query.new_empty(*query.shape[:3], value.shape[3]), lse

    def backward(self, grad_out, grad_lse, saved, needs):
        grads = [
            (torch.empty_like(x) if given is None else given) if needed else None
            for x, given, needed in zip(saved[:3], self.gradients, needs, strict=False)
        ]
        return (*grads, None, None, None)

    def find_plan(*_):  # a Mock would keep the tensors that it was called with
        backend = SimpleNamespace(computes_in_place=lambda _: True)
        return SimpleNamespace(spec=SimpleNamespace(positions=False), backend=backend)

    with ExitStack() as stack:
        for target, name, replaced in (
            (Call, "forward", forward),
            (Call, "backward", backward),
            (dist, "all_to_all_single", lambda *_, **__: mock.Mock()),
            (prepare.Prepared, "check_backend", lambda _: None),
            (prepare, "find_plan", find_plan),
            (prepare, "_with_columns", lambda plan, _: plan),
            # On a GPU kernels merge, add and copy, and allocate nothing.
            (passes, "merge_in_place", lambda *_: None),
            (passes, "add_in_place", lambda *_: None),
            (passes, "copy_in_place", lambda *_: None),
            (fetch, "add_both_in_place", lambda *_: None),
            (fetch, "copy_both_in_place", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(target, name, replaced))
        yield
