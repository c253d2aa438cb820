"""Gradients, saved tensors and compiled layers of ranks that share a sequence."""

import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import Unsupported
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sparseflash.distributed import ContextPlan, context_parallel_attention, make_plan
from tests.helpers.context_calls import (
    BATCH,
    DIMS,
    HEADS,
    KV_HEADS,
    LENGTH,
    WHOLE,
    difference,
    inputs,
    mask_of,
    plan_in_groups,
    plan_of,
)
from tests.helpers.in_place import in_place_on_cpus


class Layer(nn.Module):
    """Projections around attention over a shared sequence."""

    def __init__(self, plan: ContextPlan):
        super().__init__()
        self.plan, width = plan, HEADS * DIMS
        self.qkv = nn.Linear(width, width + 2 * KV_HEADS * DIMS, dtype=torch.float64)
        self.out = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (-1, DIMS)).transpose(1, 2)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        found = context_parallel_attention(query, key, value, self.plan, dropout_p=0.2, seed=3)
        return torch.tanh(x + self.out(found.transpose(1, 2).flatten(2)))


class Recomputed(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def refused_in_one_graph(rank: int) -> str:
    """The error of a layer that must be one graph."""
    plan = make_plan(mask_of("causal"), dist.get_world_size(), "zigzag")
    x = torch.zeros(BATCH, len(plan.positions(rank)), HEADS * DIMS, dtype=torch.float64)
    try:
        torch.compile(Layer(plan), fullgraph=True, backend="aot_eager")(x)
    except Unsupported as error:
        return str(error)
    return "nothing"


def sharded_errors(rank: int) -> dict[str, float]:
    """The differences of two compiled layers, which are recomputed and whose parameters are
    sharded (FSDP2), to the same ones as they are.
    """
    plan = make_plan(mask_of("window and sink"), dist.get_world_size(), "zigzag")
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(BATCH, LENGTH, HEADS * DIMS, generator=generator, dtype=torch.float64)
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for compiles in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(*(Recomputed(Layer(plan)) for _ in range(2)))
        for module in (*layers, layers):
            fully_shard(module, mesh=mesh)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # which gloo supports too
            if compiles and module is not layers:
                module.compile(backend="aot_eager")
        x = plan.shard(whole, rank, 1).requires_grad_()
        out = layers(x)
        out.square().sum().backward()
        found.append({"out": out.detach(), "x": x.grad})
        for name, parameter in layers.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            found[-1][name] = parameter.grad.full_tensor()
    eager, made = found
    return {name: difference(made[name], eager[name]) for name in eager}


def compiled_errors(rank: int) -> dict[str, float]:
    """The differences of two compiled layers to the same ones as they are; and, as "graphs", how
    many graphs were compiled.
    """
    torch.manual_seed(0)
    plan = make_plan(mask_of("window and sink"), dist.get_world_size(), "zigzag")
    layers = nn.Sequential(Layer(plan), Layer(plan))
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(BATCH, LENGTH, HEADS * DIMS, generator=generator, dtype=torch.float64)
    graphs = []

    def counting(graph, operands):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, operands)

    found = []
    for run in (layers, torch.compile(layers, backend=counting)):
        for _ in range(2):  # a second call compiles nothing
            layers.zero_grad()
            x = plan.shard(whole, rank, 1).requires_grad_()
            out = run(x)
            out.square().sum().backward()
            compiled = len(graphs)
        found.append({"out": out.detach(), "x": x.grad})
        found[-1] |= {name: p.grad for name, p in layers.named_parameters()}
        assert len(graphs) == compiled, "compiled again"
    eager, made = found
    return {name: difference(made[name], eager[name]) for name in eager} | {"graphs": len(graphs)}


def same_bits(rank: int, split: str) -> bool:
    """Whether two calls with dropout give the same bits."""
    plan = plan_of(mask_of("random"), dist.get_world_size(), "zigzag", split)
    found = []
    for _ in range(2):
        own = [plan.shard(x, rank, 2).requires_grad_() for x in inputs(torch.float32)[:3]]
        out = context_parallel_attention(*own, plan, dropout_p=0.2, seed=1)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in own)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def second_backward_pass(rank: int, mask_name: str, split: str) -> bool:
    """Whether two backward passes over one graph give the same bits."""
    with _computed(split):
        plan, own = _sharded(rank, mask_name, split)
        out = context_parallel_attention(*own, plan).square().sum()
        first = torch.autograd.grad(out, own, retain_graph=True)
        second = torch.autograd.grad(out, own)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _sharded(rank: int, mask_name: str, split: str) -> tuple[ContextPlan, list[Tensor]]:
    """A plan, and own query, key and value.

    In place there is one batch element. If the split also says "groups" there are two groups of
    heads, and if it says "shared rows" there are rows that ranks share.
    """
    if split.startswith("in place"):
        rows = (0, 6, 12) if "shared rows" in split else ()
        groups = 2 if "groups" in split else 1
        plan = plan_in_groups(mask_name, "contiguous", rows, groups)
        assert plan.head_groups(KV_HEADS) == plan.least_head_groups == groups
        tensors = [x[:1] for x in inputs(torch.float32, DIMS, WHOLE)[:3]]
    else:
        plan = plan_of(mask_of(mask_name), dist.get_world_size(), "contiguous", split)
        tensors = inputs(torch.float32)[:3]
    return plan, [plan.shard(x, rank, 2).requires_grad_() for x in tensors]


def _computed(split: str) -> AbstractContextManager[None]:
    """A context in which the backend of CPUs computes plans with this split as they are."""
    return in_place_on_cpus() if split.startswith("in place") else nullcontext()


def gradients_with_hooks(rank: int, hooks: str, split: str) -> list[bool]:
    """Whether gradients, and those of a second pass, have the bits that they have without hooks.

    The hooks are those of a user: what is saved is in arrays of numpy, in one buffer, or not
    at all (checkpointing).
    """
    with _computed(split):
        return _gradients_with_hooks(rank, hooks, split)


def _gradients_with_hooks(rank: int, hooks: str, split: str) -> list[bool]:
    plan, own = _sharded(rank, "causal", split)
    expected = torch.autograd.grad(context_parallel_attention(*own, plan).square().sum(), own)
    buffer, used = torch.zeros(1 << 20), [0]

    def packed(tensor: Tensor) -> Tensor:
        begin = used[0]
        used[0] += tensor.numel()
        buffer[begin : used[0]] = tensor.detach().flatten()
        return buffer[begin : used[0]].view(tensor.shape)

    if hooks == "checkpoint":
        out = checkpoint(context_parallel_attention, *own, plan, use_reentrant=False)
    elif hooks == "numpy":
        with saved_tensors_hooks(lambda x: x.detach().numpy(), torch.from_numpy):
            out = context_parallel_attention(*own, plan)
    else:
        with saved_tensors_hooks(packed, lambda x: x):
            out = context_parallel_attention(*own, plan)
    fetched = out.grad_fn.fetched  # pyright: ignore
    out = out.square().sum()
    passes_ = [torch.autograd.grad(out, own, retain_graph=True) for _ in range(2)]
    equal = [all(map(torch.equal, grads, expected)) for grads in passes_]
    return [*equal, fetched == []]


def freed_inputs(rank: int, split: str) -> list[bool]:
    """Whether query, key and value are freed before the backward pass if a checkpoint or a hook
    computes or copies them; and whether gradients are those of calls without it.
    """
    with _computed(split):
        plan, own = _sharded(rank, "causal", split)
        memory: list[Any] = []

        def call(*tensors: Tensor) -> Tensor:
            tensors = tuple(2 * x for x in tensors)
            memory[:] = [weakref.ref(x.untyped_storage()) for x in tensors]
            return context_parallel_attention(*tensors, plan)

        expected = torch.autograd.grad(call(*own).square().sum(), own)
        found = []
        for hooks in ("checkpoint", "copies"):
            if hooks == "checkpoint":
                out = checkpoint(call, *own, use_reentrant=False)
            else:
                with saved_tensors_hooks(lambda x: x.detach().clone().numpy(), torch.from_numpy):
                    out = call(*own)
            found.append(not any(each() for each in memory))
            grads = torch.autograd.grad(out.square().sum(), own)
            found.append(all(map(torch.equal, grads, expected)))
    return found


def memory_of_gradients(rank: int) -> list[float]:
    """For gradients of key and value: the memory that they keep over their own."""
    plan = make_plan(mask_of("butterfly"), dist.get_world_size(), "contiguous", split="rows")
    plan = replace(plan, groups=1)
    own = [plan.shard(x, rank, 2).requires_grad_() for x in inputs(torch.float32)[:3]]
    out = context_parallel_attention(*own, plan)
    grads = torch.autograd.grad(out.sum(), own[1:])
    return [x.untyped_storage().nbytes() / x.nbytes for x in grads]
