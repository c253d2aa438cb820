"""Plan and Call: the arguments of a backend besides query, key and value."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from einops import reduce
from torch import Tensor
from torch._C._dynamo import guards

from masks._core.grid import is_captured
from masks.lookup_table import LookupTable
from masks.registry import Cache
from sparseflash.dispatch.spec import AttentionSpec
from sparseflash.score import ScoreTensors

_guards: Any = guards  # whose stub lacks the functions that make tensors

if TYPE_CHECKING:
    from sparseflash.backends.base import Backend

Saved = tuple[Tensor, ...]  # query, key, value, out and lse
Needs = tuple[bool, ...]  # whether each of the gradients is needed
Gradients = tuple[Tensor | None, ...]  # of query, key, value, bias, blocks and score tensors


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The parts of a call that are equal for all calls with equal signatures.

    Args:
        spec: The properties of the calls.
        backend: The backend that computes them.
        table: The lookup table that the backend reads.
        cache: Objects that the backend stores for these calls, such as prepared launches.
        forward: The plan of the forward pass if it reads another table, else None.
        sums: The plan of the gradients of a bias and of score tensors if another backend computes
            them, else None. The spec of this plan is that of the whole call.
    """

    spec: AttentionSpec
    backend: "Backend"
    table: LookupTable
    cache: Cache = field(default_factory=Cache)
    forward: "Plan | None" = None
    sums: "Plan | None" = None


def empty_out(query: Tensor, value: Tensor) -> Tensor:
    """An uninitialized out, (batch, heads, q_len, value_dim), with the memory layout of query."""
    if query.shape[3] == value.shape[3]:
        return empty_like(query)
    return empty_like(query[..., :1].expand(-1, -1, -1, value.shape[3]))


def empty_like(example: Tensor) -> Tensor:
    """torch.empty_like, without its imports if the example is on the device meta.

    For such a tensor torch decides the strides in Python, and imports sympy before, for which the
    first call of a process would wait. The rule here is torch's: the result is dense, and its dims
    are in the order of the strides of the example.
    """
    if not example.is_meta:
        return torch.empty_like(example)
    if example.is_contiguous():
        return torch.empty(example.shape, dtype=example.dtype, device="meta")
    shape, strides = example.shape, example.stride()
    order = [*reversed(range(example.dim()))]  # dims, those with the smallest strides first
    for i in range(1, len(order)):
        moved = i
        for j in reversed(range(i)):
            inner, outer = order[j], order[moved]
            if 0 in (strides[inner], strides[outer]):
                continue  # a dim that is expanded is not moved
            if strides[inner] < strides[outer]:
                break
            if (strides[inner], shape[inner]) > (strides[outer], shape[outer]):
                order[j], order[moved], moved = outer, inner, j
    return torch.empty_permuted(shape, order[::-1], dtype=example.dtype, device="meta")


def empty_out_and_lse(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized out and lse, for calls whose lse is float32."""
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return empty_out(query, value), lse


# Shape, strides and dtype of an output: a plain tuple, which is unpacked in each call.
OutputLayout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def layouts_of(examples: Iterable[Tensor | None]) -> tuple[OutputLayout | None, ...]:
    """The layouts of outputs like these examples; None for None."""
    return tuple([None if x is None else (tuple(x.shape), x.stride(), x.dtype) for x in examples])


def empty_tensors(layouts: Iterable[OutputLayout | None], device: torch.device) -> list[Any]:
    """Uninitialized tensors on the CPU or the current GPU; None for a layout that is None.

    This takes less host time than torch.empty_like, because nothing is inferred or dispatched.
    Code that torch.compile generates allocates its tensors by the same functions.
    """
    on_cpu = device.index is None
    empty = _guards._empty_strided_cpu if on_cpu else _guards._empty_strided_cuda
    return [None if layout is None else empty(*layout) for layout in layouts]


Prepared = TypeVar("Prepared")


def prepare_once(
    plan: Plan, prepare: Callable[..., Prepared], inputs: tuple[Tensor, ...], *properties: int
) -> Prepared:
    """prepare(spec, block, *inputs, *properties), cached for inputs of equal strides.

    All contiguous inputs count as equal: nothing depends on the strides of their dims of size 1.

    Args:
        plan: The plan, in whose cache the result is stored.
        prepare: A function whose result is what calls share, such as layouts of their outputs. It
            gets the spec of the plan, the number of queries in a block of its table, inputs
            without data, and the properties.
        inputs: Tensors whose shapes and dtypes are the same in all calls of the plan.
        properties: Other values on which the result depends.
    """
    layouts = tuple([x.is_contiguous() or x.stride() for x in inputs])
    found = plan.cache.get((prepare, properties, layouts))
    if found is None:
        shapes, strides = tuple([x.shape for x in inputs]), tuple([x.stride() for x in inputs])
        block = plan.table.block_size[0]
        found = _prepare(prepare, plan.spec, block, properties, shapes, strides)
        plan.cache[prepare, properties, layouts] = found
    return found


@lru_cache(maxsize=4096)  # a DynamicMask is often new, and its plan with it
def _prepare(
    prepare: Callable[..., Any],
    spec: AttentionSpec,
    block: int,
    properties: tuple[int, ...],
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
) -> Any:
    return prepare(spec, block, *without_data(shapes, strides, spec.dtype), *properties)


def prepared_out_and_lse(plan: Plan, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """empty_out_and_lse of a call, whose layouts all calls of its plan share."""
    layouts = prepare_once(plan, _layouts_of_out_and_lse, (query, value))
    out, lse = empty_tensors(layouts, plan.spec.device)
    return out, lse


def _layouts_of_out_and_lse(
    _spec: AttentionSpec, _block: int, query: Tensor, value: Tensor
) -> tuple[OutputLayout | None, ...]:
    return layouts_of(empty_out_and_lse(query, value))


def without_data(
    shapes: Iterable[Sequence[int]], strides: Iterable[Sequence[int]], dtype: torch.dtype
) -> list[Tensor]:
    """Tensors on the device meta, with shapes and strides but no memory."""
    layouts = zip(shapes, strides, strict=True)
    return [torch.empty_strided(*x, dtype=dtype, device="meta") for x in layouts]


def empty_max_logits(query: Tensor) -> Tensor:
    """Uninitialized maximum logits, (batch, heads, q_len), with the dtype of lse."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape[:3], dtype=wide)


@dataclass(frozen=True, eq=False)
class Positions:
    """The positions of the tokens of a call that attends some blocks of a longer sequence.

    Args:
        query: int64 (nq,), the position of the first token of each block of queries.
        key: int64 (nk,), the position of the first token of each block of keys.
        seq_len: Length of the longer sequence, in tokens.
        heads: Number of all query heads, of which the call may have some.
        first_head: Index among them of the first one of the call.
    """

    query: Tensor
    key: Tensor
    seq_len: int
    heads: int = 1
    first_head: int = 0
    _with_heads: dict[tuple[int, int], "Positions"] = field(default_factory=dict, repr=False)
    _of_blocks: Tensor | None = field(default=None, repr=False)

    def with_heads(self, heads: int, first_head: int) -> "Positions":
        """The same positions for a call with other heads; the same object for equal ones."""
        key = heads, first_head
        if key not in self._with_heads:
            self._with_heads[key] = Positions(self.query, self.key, self.seq_len, *key)
        return self._with_heads[key]

    def of_blocks(self) -> Tensor:
        """seq_len, heads, first_head, positions of queries, positions of keys: int32
        (3 + nq + nk,), for kernels.
        """
        if self._of_blocks is not None:
            return self._of_blocks
        numbers = (self.seq_len, self.heads, self.first_head)
        first = [self.query.new_full((1,), number) for number in numbers]  # graphs may capture it
        made = torch.cat([*first, self.query, self.key]).int()
        # The memory of a tensor that is made in a CUDA graph has its values only after a replay.
        if not is_captured(self.query.device):
            object.__setattr__(self, "_of_blocks", made)
        return made

    def to(self, device: torch.device) -> "Positions":
        """The positions on another device."""
        moved = (self.query.to(device), self.key.to(device))
        return Positions(*moved, self.seq_len, self.heads, self.first_head)


NO_MEMORY = (None, None, None)  # Call.gradients of most calls, compared by identity


@dataclass(slots=True)
class Call:
    """A call without query, key and value.

    Args:
        plan: The plan of all calls with its signature.
        key_lengths: int32 (batch,), in tokens, on the device; None if no key is masked by it.
        seed: Seed of dropout.
        bias: float32 (1 or heads, q_len + k_len - 1), contiguous; float64 for float64 inputs. If
            there are positions, the lengths are those of the longer sequence.
        positions: Positions of the tokens in a longer sequence; None if the call attends a whole
            sequence, or does not depend on positions.
        max_logits: Contiguous tensor to which the forward pass writes the maximum logits, or None.
        score_tensors: The score tensors, or None.
        more: Keys and values of the last blocks of the table, if `key` and `value` have only the
            first ones. Then key lengths are None, and keys get no gradients.
        results: (out, lse) to which the forward pass writes instead of new tensors. Which block
            rows it writes, also of max_logits, depends on spec.skips_empty_rows alone, so calls
            for different rows can have the same results.
        gradients: Memory of the gradients of query, key and value, in which the backward pass
            returns those that are needed; None for a new tensor. The dims of a head are
            contiguous, as in `results`; other strides may be any.
        shared: A list in which a backward pass saves what the backward passes of other calls with
            the same query, out, lse and gradients of these need too; empty at first, or None.
    """

    plan: Plan
    key_lengths: Tensor | None = None
    seed: int = 0
    bias: Tensor | None = None
    positions: Positions | None = None
    max_logits: Tensor | None = None
    score_tensors: ScoreTensors | None = None
    more: tuple[Tensor, Tensor] | None = None
    results: tuple[Tensor, Tensor] | None = None
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = NO_MEMORY
    shared: list[Tensor] | None = None

    @property
    def spec(self) -> AttentionSpec:
        """The properties of the call."""
        return self.plan.spec

    @property
    def table(self) -> LookupTable:
        """The lookup table that the backend reads."""
        return self.plan.table

    def with_memory(
        self,
        more: tuple[Tensor, Tensor] | None,
        results: tuple[Tensor, Tensor] | None = None,
        max_logits: Tensor | None = None,
        gradients: tuple[Tensor | None, Tensor | None, Tensor | None] = NO_MEMORY,
        shared: list[Tensor] | None = None,
    ) -> "Call":
        """The same call with this memory, in less time than dataclasses.replace takes."""
        call = Call(*_values_of(self))
        call.more, call.results, call.max_logits = more, results, max_logits
        call.gradients, call.shared = gradients, shared
        return call

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of checked tensors; see Backend.forward."""
        if self._needs_device_switch():
            with torch.cuda.device(self.plan.spec.device):
                return self.forward(query, key, value)
        if self.plan.forward is not None:
            return replace(self, plan=self.plan.forward).forward(query, key, value)
        return self.plan.backend.forward(self, query, key, value)

    def backward(
        self, grad_out: Tensor | None, grad_lse: Tensor | None, saved: Saved, needs: Needs
    ) -> Gradients:
        """The gradients that `needs` selects; see Backend.backward.

        Args:
            grad_out: Gradient of out, None for zeros.
            grad_lse: Gradient of lse, None for zeros.
            saved: query, key, value, out and lse.
            needs: Whether each of the gradients is needed: of query, key, value, bias, block
                scores and score tensors.
        """
        if self._needs_device_switch():
            with torch.cuda.device(self.plan.spec.device):
                return self.backward(grad_out, grad_lse, saved, needs)
        if grad_out is None:
            grad_out = torch.zeros_like(saved[3])
        if self.plan.sums is not None and any(needs[3:]):
            grads = self._backward_of_two(self.plan.sums, grad_out, grad_lse, saved, needs)
        else:
            grads = self.plan.backend.backward(self, grad_out, grad_lse, saved, needs)
        if self.gradients is not NO_MEMORY:  # to which backends write, or not
            given = zip(grads[:3], self.gradients, strict=True)
            grads = (*(_written(*each) for each in given), *grads[3:])
        if grads[4] is not None:
            spec = self.spec
            of_masks = reduce(grads[4], "b (h g) i j -> b h i j", "sum", g=spec.mask_group)
            masks = (spec.mask_batch, spec.mask_heads // spec.mask_group)
            of_masks = of_masks.sum_to_size(*masks, *of_masks.shape[2:])
            return *grads[:4], of_masks, *grads[5:]
        return grads

    def _backward_of_two(
        self, sums: Plan, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, needs: Needs
    ) -> Gradients:
        """The gradients, where the plan `sums` computes those of a bias and of score tensors."""
        none, grads = (False,) * 3, (None,) * 3
        if any(needs[:3]):
            own = (*needs[:3], *none)
            grads = self.plan.backend.backward(self, grad_out, grad_lse, saved, own)[:3]
        call = replace(self, plan=sums, gradients=NO_MEMORY, shared=None)
        added = sums.backend.backward(call, grad_out, grad_lse, saved, (*none, *needs[3:]))
        return *grads, *added[3:]

    def _needs_device_switch(self) -> bool:
        """Whether the call is on another GPU than the current device of this thread."""
        index = self.plan.spec.device.index  # None on the CPU
        return index is not None and index != torch.cuda.current_device()


# Of all fields, in their order.
_values_of = attrgetter(*[each.name for each in fields(Call)])


def _written(gradient: Tensor | None, memory: Tensor | None) -> Tensor | None:
    """The memory with this gradient, or the gradient if there is no memory; None for None."""
    if gradient is None or memory is None or gradient is memory:
        return gradient
    return memory.copy_(gradient)
