"""Plan and Call: what a backend gets beside query, key and value."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from einops import reduce
from torch import Tensor
from torch._C._dynamo import guards

from masks.lookup_table import LookupTable
from masks.registry import Cache
from sparseflash.dispatch.spec import AttentionSpec
from sparseflash.score import ScoreTensors

_guards: Any = guards  # whose stub lacks the functions that make tensors

if TYPE_CHECKING:
    from sparseflash.backends.base import Backend

Saved = tuple[Tensor, ...]  # query, key, value, out and lse
Needs = tuple[bool, ...]  # whether each of the gradients is wanted
Gradients = tuple[Tensor | None, ...]  # of query, key, value, bias, blocks and score tensors


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Calls with equal signatures pass the same checks and share all of this.

    Args:
        spec: The facts of the calls.
        backend: The one that serves them.
        table: The lookup table that it reads.
        cache: What the backend prepares for these calls.
        forward: The plan of their forward pass if another backend runs it: one that is faster and
            cannot compute all gradients. Otherwise None.
    """

    spec: AttentionSpec
    backend: "Backend"
    table: LookupTable
    cache: Cache = field(default_factory=Cache)
    forward: "Plan | None" = None


def empty_out(query: Tensor, value: Tensor) -> Tensor:
    """A new tensor for the result: (batch, heads, q_len, value_dim), its axes in memory in the
    order of those of query.
    """
    if query.shape[3] == value.shape[3]:
        return torch.empty_like(query)
    return torch.empty_like(query[..., :1].expand(-1, -1, -1, value.shape[3]))


def empty_out_and_lse(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """New tensors for both results of a call whose lse is float32."""
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return empty_out(query, value), lse


class OutputLayout(NamedTuple):
    """What tensors have in common that are made anew in each call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, example: Tensor) -> Self:
        return cls(tuple(example.shape), example.stride(), example.dtype)


def empty_tensors(layouts: Iterable[OutputLayout | None], device: torch.device) -> list[Any]:
    """Uninitialized tensors, None for None, on a device; if that is a GPU, on the current one.

    It takes less host time than torch.empty_like, since nothing is inferred or dispatched. Code
    from torch.compile makes its tensors by the same functions.
    """
    on_cpu = device.index is None
    empty = _guards._empty_strided_cpu if on_cpu else _guards._empty_strided_cuda
    return [None if layout is None else empty(*layout) for layout in layouts]


Examples = Callable[..., Iterable[Tensor | None]]


def new_outputs(
    plan: Plan, examples: Examples, inputs: tuple[Tensor, ...], *properties: int
) -> list[Any]:
    """Uninitialized tensors with the layouts of examples(*inputs, *properties), None for None.

    Args:
        plan: Where the layouts are stored, for inputs of equal strides.
        examples: Of its inputs, which have no data, it knows shapes, strides and dtypes.
        inputs: Tensors whose shapes and dtypes are the same in all calls of the plan.
        properties: What else the layouts depend on.
    """
    strides = tuple([x.stride() for x in inputs])
    layouts = plan.cache.get((examples, properties, strides))
    if layouts is None:
        shapes = tuple([x.shape for x in inputs])
        layouts = _layouts(examples, properties, shapes, strides, inputs[0].dtype)
        plan.cache[examples, properties, strides] = layouts
    return empty_tensors(layouts, plan.spec.device)


@lru_cache(maxsize=4096)  # a DynamicMask is often new, and its plan with it
def _layouts(
    examples: Examples,
    properties: tuple[int, ...],
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
) -> list[OutputLayout | None]:
    outputs = examples(*without_data(shapes, strides, dtype), *properties)
    return [None if x is None else OutputLayout.of(x) for x in outputs]


def without_data(
    shapes: Iterable[Sequence[int]], strides: Iterable[Sequence[int]], dtype: torch.dtype
) -> list[Tensor]:
    """Tensors that have shapes and strides, but no memory."""
    layouts = zip(shapes, strides, strict=True)
    return [torch.empty_strided(*x, dtype=dtype, device="meta") for x in layouts]


def empty_max_logits(query: Tensor) -> Tensor:
    """A new tensor for the maximum logits: float32 (float64 for float64 inputs), (batch, heads,
    q_len).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape[:3], dtype=wide)


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of a call's tokens in a longer sequence, of which it attends some blocks.

    Args:
        query: int64 (nq,), the position of the first token of each block of queries.
        key: int64 (nk,), likewise of keys.
        seq_len: Tokens of the longer sequence.
    """

    query: Tensor
    key: Tensor
    seq_len: int

    @cached_property
    def of_blocks(self) -> Tensor:
        """int32 (1 + nq + nk,) as kernels read them: seq_len, then those of queries and keys."""
        first = self.query.new_full((1,), self.seq_len)
        return torch.cat([first, self.query, self.key]).int()

    def to(self, device: torch.device) -> "Positions":
        """The same on a device."""
        return Positions(self.query.to(device), self.key.to(device), self.seq_len)


@dataclass(slots=True)
class Call:
    """Everything about a call but query, key and value.

    Args:
        plan: What it shares with all calls of its signature.
        key_lengths: int32 (batch,) on the device; None if all keys count.
        seed: Seed of dropout.
        bias: float32 (1 or heads, q_len + k_len - 1), contiguous; float64 for float64 inputs.
        positions: Positions of its tokens in a longer sequence, to which its bias then belongs;
            None where the call is of a whole sequence, or does not depend on them.
        max_logits: Where its forward pass writes the maximum logits, like lse; None if nowhere.
        score_tensors: What its score function reads; None if that is nothing.
    """

    plan: Plan
    key_lengths: Tensor | None = None
    seed: int = 0
    bias: Tensor | None = None
    positions: Positions | None = None
    max_logits: Tensor | None = None
    score_tensors: ScoreTensors | None = None

    @property
    def spec(self) -> AttentionSpec:
        """The facts of the call."""
        return self.plan.spec

    @property
    def table(self) -> LookupTable:
        """The lookup table that its backend reads."""
        return self.plan.table

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of checked tensors: see Backend.forward."""
        if self._needs_device_switch():
            with torch.cuda.device(self.plan.spec.device):
                return self.forward(query, key, value)
        if self.plan.forward is not None:
            return replace(self, plan=self.plan.forward).forward(query, key, value)
        return self.plan.backend.forward(self, query, key, value)

    def backward(
        self, grad_out: Tensor | None, grad_lse: Tensor | None, saved: Saved, needs: Needs
    ) -> Gradients:
        """The gradients of query, key, value, bias, block scores and score tensors, None where
        `needs` says no.

        Args:
            grad_out: Gradient of out, None for zeros.
            grad_lse: Gradient of lse, None for zeros.
            saved: query, key, value, out and lse.
            needs: Whether each of the gradients is wanted.
        """
        if self._needs_device_switch():
            with torch.cuda.device(self.plan.spec.device):
                return self.backward(grad_out, grad_lse, saved, needs)
        if grad_out is None:
            grad_out = torch.zeros_like(saved[3])
        grads = self.plan.backend.backward(self, grad_out, grad_lse, saved, needs)
        if grads[4] is not None:
            spec = self.spec
            of_masks = reduce(grads[4], "b (h g) i j -> b h i j", "sum", g=spec.mask_group)
            masks = (spec.mask_batch, spec.mask_heads // spec.mask_group)
            of_masks = of_masks.sum_to_size(*masks, *of_masks.shape[2:])
            return *grads[:4], of_masks, *grads[5:]
        return grads

    def _needs_device_switch(self) -> bool:
        """Whether the device of the call is not the one on which this thread launches kernels."""
        index = self.plan.spec.device.index  # None on the CPU
        return index is not None and index != torch.cuda.current_device()
