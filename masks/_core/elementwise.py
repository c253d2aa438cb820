"""Functions of (query, key) that torch computes elementwise: recorded once, then replayed.

What such a function computes on its way depends on the query alone, on the key alone, on the
distance q - k alone, or on the pair. Only the last is computed for every pair: of the others there
are as many values as tokens.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

CONSTANT, QUERY, KEY, DISTANCE, PAIR = range(5)  # what a value depends on

_aten = torch.ops.aten
_SHIFTS = (_aten.add.Tensor, _aten.sub.Tensor)
MAX_SHIFT = 2**62  # beyond, a shifted token may wrap around, and its order says nothing
# Operations that give for (q + n, k + n) what they give for (q, k).
_OF_DISTANCE = (_aten.sub, _aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge)
_POINTWISE = (_aten.floor_divide.default, _aten._to_copy.default)  # without torch's tag


class _Step(NamedTuple):
    """An operation that was recorded."""

    operation: Any
    arguments: tuple
    options: dict[str, Any]
    result: Any


class _Recorder(TorchDispatchMode):
    """Records every operation of torch while it is active."""

    supports_higher_order_operators = True  # torch.cond and the like, else refused

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import torch._dynamo, which takes a second

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.steps.append(_Step(func, args, kwargs or {}, result))
        return result


class ElementwiseFunction:
    """A function of q, int64 (q_len, 1), and k, int64 (1, k_len), recorded by `record`.

    Values are stored by the id of the recorded tensor, to which the steps hold a reference.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        self.function = function
        self.steps: list[_Step] = []
        self.depends: dict[int, int] = {}
        self.shifted: dict[int, int] = {}  # of values q + n and k + n: a bound of |n|
        self.values: dict[int, Tensor] = {}

    def record(self, q: Tensor, k: Tensor) -> Any:
        """The function of a few queries and all keys."""
        if not _dynamo_is_loaded():
            self.function(q, k)  # torch.cond and the like load it
        with _one_at_a_time, _eager(), _Recorder() as recorder:
            self.answer = self.function(q, k)
        self.sample, self.steps = (q, k), recorder.steps
        return self.answer

    def prepare(self, q: Tensor, k: Tensor) -> bool:
        """Computes for all queries and keys what does not depend on the pair.

        Returns:
            Whether every step is a function of the pair alone. If not, the function itself has to
            be called for every pair.
        """
        self.q_len, self.k_len = len(q), k.shape[1]
        sample_q, sample_k = map(id, self.sample)
        self.depends = {sample_q: QUERY, sample_k: KEY}
        self.shifted = {sample_q: 0, sample_k: 0}
        if not all(map(self._is_elementwise, self.steps)):
            return False
        if self.depends.get(id(self.answer), CONSTANT) == CONSTANT:
            return False
        pairwise = self._steps_of(PAIR)
        used = {id(t) for step in pairwise for t in _inputs(step)} | {id(self.answer)}
        tokens = {sample_q: q, sample_k: k}
        self._replay(tokens, self._steps_of(QUERY, KEY))
        # With key 0 the distance is the query: such pairs give a value for each distance.
        distance = torch.arange(self.q_len - 1, -self.k_len, -1, device=q.device)
        distances = {sample_q: distance, sample_k: torch.zeros_like(distance[:1])}
        shifts = [step for step in self.steps if id(step.result) in self.shifted]
        self._replay(distances, [*shifts, *self._steps_of(DISTANCE)])
        self.values = {i: value for i, value in (distances | tokens).items() if i in used}
        return True

    def _steps_of(self, *kinds: int) -> list[_Step]:
        """The steps whose results depend on these."""
        return [step for step in self.steps if self.depends[id(step.result)] in kinds]

    def pair_bytes(self) -> int:
        """Bytes of the largest value that is computed for every pair."""
        return max((step.result.itemsize for step in self._steps_of(PAIR)), default=1)

    def pairs(self, begin: int, end: int) -> Tensor:
        """Its values, which broadcast to (end - begin, k_len), of the queries from `begin` to
        before `end`.
        """
        values = {}
        for i, value in self.values.items():
            if self.depends[i] == DISTANCE:
                # Entry n is of the distance q_len - 1 - n: the next query begins an entry earlier.
                shape = (end - begin, self.k_len)
                up = value.as_strided(shape, (1, 1), self.q_len - end)
                reverse = torch.arange(end - begin - 1, -1, -1, device=value.device)
                values[i] = up.index_select(0, reverse)  # flip is slower
            else:
                values[i] = value[begin:end] if self.depends[i] == QUERY else value
        self._replay(values, self._steps_of(PAIR))
        return values[id(self.answer)]

    def _is_elementwise(self, step: _Step) -> bool:
        """Finds what the result of a step depends on, if it is a function of the pair alone."""
        if not isinstance(step.operation, OpOverload):  # torch.cond and the like
            return False
        tags, tensors = step.operation.tags, _inputs(step)
        if step.operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
            return False
        if not isinstance(step.result, Tensor):
            return False
        known = [self.depends.get(id(t), CONSTANT) for t in tensors]
        depends = set(known) - {CONSTANT}
        if step.operation is _aten.index.Tensor:
            table, *indices = tensors
            of_tokens = known[0] == CONSTANT and CONSTANT not in known[1:]
            integers = not any(index.dtype == torch.bool for index in indices)
            elementwise = of_tokens and integers and table.ndim == len(indices)
        else:
            numbers = not any(
                t.ndim for t, kind in zip(tensors, known, strict=True) if kind == CONSTANT
            )
            is_number = not depends and step.result.ndim == 0
            pointwise = torch.Tag.pointwise in tags or step.operation in _POINTWISE
            elementwise = numbers and (pointwise or is_number)
        if not elementwise:
            return False
        shifts = all(id(t) in self.shifted for t in tensors) and not step.options
        if len(depends) < 2:
            self.depends[id(step.result)] = max(depends, default=CONSTANT)
        elif shifts and step.operation.overloadpacket in _OF_DISTANCE:
            self.depends[id(step.result)] = DISTANCE
        else:
            self.depends[id(step.result)] = PAIR
        if shifts and step.operation in _SHIFTS and isinstance(step.arguments[1], int):
            token, n = step.arguments
            shift = self.shifted[id(token)] + abs(n)
            if shift <= MAX_SHIFT:
                self.shifted[id(step.result)] = shift
        return True

    def _replay(self, values: dict[int, Tensor], steps: list[_Step]) -> None:
        """Adds the results of these steps to `values`."""
        for step in steps:
            arguments = self._replaced(step.arguments, values)
            options = self._replaced(step.options, values)
            values[id(step.result)] = step.operation(*arguments, **options)

    def _replaced(self, argument: Any, values: dict[int, Tensor]) -> Any:
        if isinstance(argument, Tensor) and self.depends.get(id(argument), CONSTANT) != CONSTANT:
            return values[id(argument)]
        if isinstance(argument, dict):
            return {name: self._replaced(value, values) for name, value in argument.items()}
        if isinstance(argument, (list, tuple)):
            return [self._replaced(value, values) for value in argument]
        return argument


_one_at_a_time = RLock()  # the stance of the compiler is that of all threads


def _dynamo_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def _eager() -> AbstractContextManager:
    """Keeps torch.cond and the like from compiling, which fails under a dispatch mode."""
    if _dynamo_is_loaded() and not torch.compiler.is_compiling():
        with suppress(RuntimeError):  # in a function that is being compiled
            return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _inputs(step: _Step) -> list[Tensor]:
    """The tensors among the arguments of a step and in the lists among them."""
    arguments = [*step.arguments, *step.options.values()]
    flat = [a for item in arguments for a in (item if isinstance(item, (list, tuple)) else [item])]
    return [argument for argument in flat if isinstance(argument, Tensor)]
