"""Elementwise functions of (query, key): recorded once with torch, then replayed faster.

An intermediate value of such a function depends on the query alone, on the key alone, on one sum
a q + b k alone (such as the distance), or on the pair. Only values of pairs are computed for every
pair; the others are tabulated, with about as many values as there are tokens. If queries share
rows of pairs, such as the queries of one document, each distinct row is computed once. Where the
ranges of values decide all pairs of some queries and keys, none of these is computed.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from math import gcd
from operator import add, attrgetter, neg, sub
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from masks._core.narrow import Narrowed, compared, narrowed
from masks._core.packed import OPERATIONS, PackedFunction, PackedQueries, PackedRows
from masks._core.ranges import (
    RULES,
    Range,
    Spans,
    range_of,
    range_of_number,
    ranges_of_spans,
    square,
)
from masks._core.recording import Step, inputs_of, record

# What a value depends on: (a, b), without a common divisor, for the sum a q + b k; a set for the
# key and the values of the query with these ids; None (PAIR) for the pair.
Dependence = tuple[int, int] | frozenset[int] | None
Sum = tuple[int, ...]  # (a, b, c) is a q + b k + c
CONSTANT, QUERY, KEY, PAIR = (0, 0), (1, 0), (0, 1), None

# Beyond these bounds a sum may wrap around, and a comparison is not one of the difference.
MAX_FACTOR, MAX_OFFSET = 2**16, 2**61
MAX_SUMS = 2**22  # most values of a q + b k that are tabulated
MAX_SHARED_VALUES = 2**26  # most values of shared rows that are tabulated
MIN_QUERIES_PER_ROW = 4  # least mean number of queries that share a row
PAIRS_AT_ONCE = 2**18

_aten = torch.ops.aten
_COMPARISONS = (_aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge)
_REMAINDER = _aten.remainder.Scalar
_POINTWISE = (_aten.floor_divide.default, _aten._to_copy.default)  # without torch's tag


def _product(x: Sum, y: Sum) -> Sum | None:
    if y[:2] == CONSTANT:
        x, y = y, x
    return tuple(x[2] * n for n in y) if x[:2] == CONSTANT else None


_SUM_RULES: dict[Any, Callable[..., Sum | None]] = {
    _aten.add.Tensor: lambda x, y: tuple(map(add, x, y)),
    _aten.sub.Tensor: lambda x, y: tuple(map(sub, x, y)),
    _aten.rsub.Scalar: lambda x, y: tuple(map(sub, y, x)),
    _aten.neg.default: lambda x: tuple(map(neg, x)),
    _aten.mul.Tensor: _product,
}


_LOW_BIT_OPERATIONS = (
    *(_aten.add, _aten.sub, _aten.rsub, _aten.neg, _aten.mul),
    *(_aten.bitwise_and, _aten.bitwise_or, _aten.bitwise_xor, _aten.bitwise_not),
)


def _without_overflow(total: Sum | None) -> Sum | None:
    """The sum, or None if it may wrap around for some tokens."""
    if total is None:
        return None
    *factors, offset = total
    return total if max(map(abs, factors)) <= MAX_FACTOR and abs(offset) <= MAX_OFFSET else None


class ElementwiseFunction:
    """A function of q, int64 (q_len, 1), and k, int64 (1, k_len), recorded by `record`.

    Values are identified by the id of the recorded tensor; the steps hold a reference to it.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        self.function = function
        self.steps: list[Step] = []
        self.dependences: dict[int, Dependence] = {}
        self.sums: dict[int, Sum] = {}
        self.step_of: dict[int, Step] = {}  # the step that computes each value
        self.bounds: dict[int, Range | None] = {}  # ranges of values for any tokens
        self.values: dict[int, Tensor] = {}  # tabulated values
        self.pair_steps: list[tuple[Step, set[int]]] = []  # and the values that each reads last
        # For values that are tabulated in one row: the beginning of the row of each query in it.
        self.row_begins: dict[Dependence, Tensor] = {}
        self.token_values: dict[int, Tensor] = {}  # values of the query or the key, as integers
        self.ranges: dict[int, Range | None] = {}  # of values for all tokens
        self.range_steps: list[Step] = []  # steps whose results have narrower ranges in a tile

    def record(self, q: Tensor, k: Tensor) -> Any:
        """Calls the function for a few queries and all keys, and records it."""
        self.output, self.steps = record(self.function, q, k)
        self.sample_tokens = q, k
        return self.output

    def prepare(self, q: Tensor, k: Tensor) -> bool:
        """Tabulates all values that do not depend on the pair.

        Returns:
            Whether every step is elementwise. If not, the function itself must be called for every
            pair.
        """
        self.q, self.k = q, k
        sample_q, sample_k = map(id, self.sample_tokens)
        self.dependences = {sample_q: QUERY, sample_k: KEY}
        self.sums = {sample_q: (*QUERY, 0), sample_k: (*KEY, 0)}
        self.bounds = {sample_q: Range(0, len(q) - 1), sample_k: Range(0, k.numel() - 1)}
        recorded, self.steps = self.steps, []
        for step in itertools.chain.from_iterable(map(self._with_reduced_arguments, recorded)):
            self.steps.append(step)
            if not self._is_elementwise(step):
                return False
            self._add_step(step)
        self._drop_unread_steps()
        if self.dependences.get(id(self.output), CONSTANT) == CONSTANT:
            return False
        for dependence in {*self.dependences.values()} - {CONSTANT}:
            if isinstance(dependence, tuple):
                self._tabulate_sums(*dependence)
        self._find_ranges()
        self._tabulate_shared_rows()
        if k.device.type == "cpu":
            self._clip_terms()
            self._narrow()
        read_later = {id(self.output)}
        for step in reversed(self._steps_of(PAIR)):
            inputs = {id(t) for t in inputs_of(step)}
            self.pair_steps.insert(0, (step, inputs - read_later))
            read_later |= inputs
        self.values = {i: value for i, value in self.values.items() if i in read_later}
        return True

    def _drop_unread_steps(self) -> None:
        read, steps = {id(self.output)}, []
        for step in reversed(self.steps):
            if id(step.result) in read:
                steps.insert(0, step)
                read |= {id(t) for t in inputs_of(step)}
        self.steps = steps

    def pair_bytes(self) -> int:
        """The most bytes of a value that is computed or copied for every pair."""
        copied = [
            value for i, value in self.values.items() if self.dependences[i] in self.row_begins
        ]
        sizes = [value.itemsize for value in copied]
        for step in self._steps_of(PAIR):
            of_integers = isinstance(step.operation, Narrowed)
            sizes.append((step.operation.dtype if of_integers else step.result).itemsize)
        return max(sizes, default=1)

    def packed(self, width: int) -> PackedFunction | None:
        """The function for eight pairs at a time; None if pairs need more than bitwise operations.

        Args:
            width: Number of keys, rounded up to whole spans.
        """
        steps = [step for step, _ in self.pair_steps]
        read = {id(self.output): self.output} | {id(t): t for s in steps for t in inputs_of(s)}
        known = self.values.keys() | {id(step.result) for step in steps}
        if self.k.device.type != "cpu" or any(t.dtype != torch.bool for t in read.values()):
            return None
        if read.keys() - known or any(s.operation not in OPERATIONS or s.options for s in steps):
            return None
        values = {}
        for i, value in self.values.items():
            if self.dependences[i] == QUERY:
                values[i] = PackedQueries(value)
            else:
                begins = self.row_begins.get(self.dependences[i], self.k.new_zeros(1))
                values[i] = PackedRows(value, begins, width)
        operations = [
            (OPERATIONS[s.operation], [*map(id, s.arguments)], id(s.result)) for s in steps
        ]
        return PackedFunction(values, operations, id(self.output))

    def _find_ranges(self) -> None:
        """Finds the ranges of values for all tokens, and the steps that may have narrower ones."""
        for i, value in self.values.items():
            if self.dependences[i] in (QUERY, KEY) and value.dtype in RULES:
                integers = value.flatten().long()
                self.ranges[i] = bounds = range_of(integers)
                if bounds and bounds.least < bounds.largest:
                    self.token_values[i] = integers
        for step in self._steps_of_both():
            bounds = _range_of_result(step, self.ranges)
            if bounds and bounds.least < bounds.largest:
                self.range_steps.append(step)
            if bounds is None and step.result.dtype == torch.bool:
                bounds = Range(0, 1)
            self.ranges[id(step.result)] = bounds

    def decisions(self, span: int) -> Callable[[slice], Range] | None:
        """A function that decides by ranges whether pairs attend, or None if it never can.

        Args:
            span: Number of keys of a span.

        Returns:
            A function from a slice of queries to (whether all, whether any) of their pairs with
            each span of keys attend; (0, 1) if ranges do not decide it.
        """
        output = id(self.output)
        varying = {*self.token_values, *(id(step.result) for step in self.range_steps)}
        known = output in varying or self.ranges.get(output) != (0, 1)
        if self.k.device.type != "cpu" or not known:
            return None
        keys = {
            i: ranges_of_spans(value, span)
            for i, value in self.token_values.items()
            if self.dependences[i] == KEY
        }

        def decide(queries: slice) -> Range:
            ranges: dict[int, Any] = self.ranges | keys
            for i in self.token_values.keys() - keys:
                ranges[i] = range_of(self.token_values[i][queries])
            for step in self.range_steps:
                rule = cast(Callable, _rule_of_ranges(step))  # there was a range for all tokens
                ranges[id(step.result)] = rule(*_ranges_of(step.arguments, ranges))
            return ranges[output]

        return decide

    def _clip_terms(self) -> None:
        """Clips the terms of a sum that is only compared with a number, so that it can be narrow.

        If no term is negative, a term above the number makes the sum larger than the number,
        whether it is exact or not.
        """
        steps = {id(step.result): step for step in self._steps_of(PAIR)}
        reads = Counter(id(t) for step in steps.values() for t in inputs_of(step))
        reads[id(self.output)] += 1
        for step in steps.values():
            total, number = step.arguments if len(step.arguments) == 2 else (None, None)
            if step.operation.overloadpacket not in _COMPARISONS or type(number) is not int:
                continue
            source = steps.get(id(total))
            if source is None or source.operation != _aten.add.Tensor or source.options:
                continue
            terms = [id(t) for t in source.arguments if reads[id(t)] == 1 and id(t) in self.values]
            bounds = [range_of(self.values[i]) for i in terms]
            known = [b for b in bounds if b is not None and b.least >= 0]
            if reads[id(total)] > 1 or len(known) < 2 or sum(b.largest for b in known) >= 2**63:
                continue
            for i, b in zip(terms, known, strict=True):
                if b.largest > number + 1:
                    self.values[i] = self.values[i].clamp(max=max(number, -1) + 1)

    def _narrow(self) -> None:
        """Replaces steps of pairs by faster operations with the same results."""
        ranges = {i: range_of(value) for i, value in self.values.items()}
        computed: dict[int, torch.dtype] = {}  # of narrowed values
        dtypes: dict[int, set[torch.dtype]] = {}  # in which values are read
        for n, step in enumerate(self.steps):
            if self.dependences[id(step.result)] != PAIR:
                continue
            replacement = None
            if not step.options:
                known = _ranges_of(step.arguments, ranges)
                widths = [computed[id(a)] for a in step.arguments if id(a) in computed]
                widest = max(widths, key=attrgetter("itemsize"), default=torch.int16)
                replacement = narrowed(step.operation, known, widest)
                replacement = replacement or compared(step.operation, step.arguments)
            if isinstance(replacement, Narrowed) and replacement.range is not None:
                ranges[id(step.result)] = replacement.range
                computed[id(step.result)] = replacement.dtype
            for t in inputs_of(step):
                dtype = replacement.dtype if isinstance(replacement, Narrowed) else t.dtype
                dtypes.setdefault(id(t), set()).add(dtype)
            if replacement is not None:
                self.steps[n] = step._replace(operation=replacement)
        for i, read_in in dtypes.items():
            if i in self.values:
                widest = max(read_in, key=attrgetter("itemsize"))
                self.values[i] = self.values[i].to(widest)

    def pairs(self, queries: slice, keys: Spans | None = None) -> Tensor:
        """The function for some queries and some or all keys; it broadcasts to (queries, keys)."""
        values = {i: self._value(i, queries, keys) for i in self.values}
        for step, read_last in self.pair_steps:
            self._replay(values, [step])
            for i in read_last & values.keys():
                del values[i]  # so that the next value reuses its memory, which is in the cache
        return values[id(self.output)]

    def _value(self, i: int, queries: slice | Tensor, keys: Spans | None = None) -> Tensor:
        """A tabulated value of some queries and keys; it broadcasts to (queries, keys)."""
        value, dependence = self.values[i], self.dependences[i]
        if dependence == QUERY:
            return value[queries]
        if dependence == KEY and keys is None:
            return value
        begins = self.row_begins[dependence][queries] if dependence != KEY else self.k.new_zeros(1)
        width = self.k.numel()
        if keys is None or keys.consecutive:
            first, width = (0, width) if keys is None else (int(keys.first[0]), keys.numel)
            rows = _rows_at_equal_steps(value, begins, first, width)
            if rows is not None:
                return rows
        if keys is not None:
            begins, width = begins[:, None] + keys.first, keys.width
        rows = value.as_strided((value.numel() - width + 1, width), (1, 1))
        return rows.index_select(0, begins.flatten()).view(
            -1, width if keys is None else keys.numel
        )

    def _steps_of(self, dependence: Dependence) -> list[Step]:
        """The steps whose results have this dependence."""
        return [step for step in self.steps if self.dependences[id(step.result)] == dependence]

    def _steps_of_both(self) -> list[Step]:
        """The steps whose results depend on the query and on the key."""
        return [s for s in self.steps if self.dependences[id(s.result)] not in (QUERY, KEY)]

    def _read_by(self, steps: list[Step]) -> set[int]:
        """The ids of what these steps read, and of the output."""
        return {id(t) for step in steps for t in inputs_of(step)} | {id(self.output)}

    def _is_elementwise(self, step: Step) -> bool:
        """Whether a step is elementwise. If so, finds the dependence of its result."""
        if not isinstance(step.operation, OpOverload):  # torch.cond and the like
            return False
        tags, tensors = step.operation.tags, inputs_of(step)
        if step.operation._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags:
            return False
        if not isinstance(step.result, Tensor):
            return False
        of_inputs = [self.dependences.get(id(t), CONSTANT) for t in tensors]
        dependences = set(of_inputs) - {CONSTANT}
        if step.operation is _aten.index.Tensor:
            table, *indices = tensors
            of_tokens = of_inputs[0] == CONSTANT and CONSTANT not in of_inputs[1:]
            integers = not any(index.dtype == torch.bool for index in indices)
            elementwise = of_tokens and integers and table.ndim == len(indices)
        else:
            numbers = not any(
                t.ndim for t, kind in zip(tensors, of_inputs, strict=True) if kind == CONSTANT
            )
            is_number = not dependences and step.result.ndim == 0
            pointwise = torch.Tag.pointwise in tags or step.operation in _POINTWISE
            elementwise = numbers and (pointwise or is_number)
        if elementwise:
            self.dependences[id(step.result)] = self._dependence(step, dependences)
        return elementwise

    def _dependence(self, step: Step, dependences: set[Dependence]) -> Dependence:
        """The dependence of the result of an elementwise step, from those of its arguments."""
        terms = [self._sum_of(argument) for argument in step.arguments]
        total = None
        if None not in terms and not step.options and len(terms) <= 2:
            if step.operation.overloadpacket in _COMPARISONS:
                total = _SUM_RULES[_aten.sub.Tensor](*terms)
            elif step.operation in _SUM_RULES and step.result.dtype == torch.int64:
                total = _without_overflow(_SUM_RULES[step.operation](*terms))
                if total is not None:
                    self.sums[id(step.result)] = total
        if total is None or total[:2] == CONSTANT:
            return PAIR if len(dependences) > 1 else next(iter(dependences), CONSTANT)
        a, b, _ = total
        divisor = gcd(a, b) * (-1 if (b, a) < CONSTANT else 1)
        a, b = a // divisor, b // divisor
        is_small = abs(a) * self.q.numel() + b * self.k.numel() <= MAX_SUMS or max(abs(a), b) == 1
        return (a, b) if is_small else PAIR

    def _with_reduced_arguments(self, step: Step) -> list[Step]:
        """The step, after steps that reduce its argument modulo the same number, if that is valid.

        It applies to a remainder, or the lowest bits, of sums and products (or bitwise operations)
        of pairs. These are computed from the remainders of their operands. There are few distinct
        remainders, so queries share rows.
        """
        modulus = _modulus(step)
        if modulus is None or self.dependences.get(id(step.arguments[0]), CONSTANT) is not PAIR:
            return [step]
        value = step.arguments[0]
        parts = self._pair_steps_of(value)
        # The lowest bits of these operations depend only on the lowest bits, also with overflow.
        of_bits = abs(modulus) & (abs(modulus) - 1) == 0
        for part in parts:
            known = part.operation in _SUM_RULES and self.bounds[id(part.result)] is not None
            if not known and not (
                of_bits and part.operation.overloadpacket in _LOW_BIT_OPERATIONS
            ):
                return [step]
            if part.options or {t.dtype for t in (part.result, *inputs_of(part))} != {torch.int64}:
                return [step]
        steps: list[Step] = []
        smaller: dict[int, Tensor] = {}

        def make(operation: Any, *arguments: Any) -> Tensor:
            steps.append(Step(operation, arguments, {}, operation(*arguments)))
            self._add_step(steps[-1])
            return steps[-1].result

        def reduced(argument: Any) -> Any:
            if isinstance(argument, Tensor) and id(argument) not in smaller:
                smaller[id(argument)] = make(_REMAINDER, argument, modulus)
            return smaller.get(id(argument), argument)

        for part in parts:
            smaller[id(part.result)] = make(part.operation, *map(reduced, part.arguments))
        if not of_bits and any(self.bounds[id(made.result)] is None for made in steps):
            return [step]
        return [*steps, step._replace(arguments=(reduced(value), *step.arguments[1:]))]

    def _add_step(self, step: Step) -> None:
        self.step_of[id(step.result)] = step
        self.bounds[id(step.result)] = _range_of_result(step, self.bounds)

    def _pair_steps_of(self, value: Tensor) -> list[Step]:
        """The steps of pairs from which a value is computed, in their order."""
        steps, read = [], {id(value)}
        for i, step in reversed(self.step_of.items()):
            if i in read and self.dependences.get(i, CONSTANT) is PAIR:
                steps.insert(0, step)
                read |= {id(t) for t in inputs_of(step)}
        return steps

    def _sum_of(self, argument: Any) -> Sum | None:
        return (*CONSTANT, argument) if type(argument) is int else self.sums.get(id(argument))

    def _tabulate_sums(self, a: int, b: int) -> None:
        """Tabulates values that depend on a q + b k alone and that other steps read."""
        dependence = a, b
        sums = self.q if dependence == QUERY else self.k
        if a and b:
            sums, self.row_begins[dependence] = self._sums_of_tokens(a, b)
        # Tokens (not of the sequence) with these sums.
        query_factor = pow(a, -1, b) if b else 1
        key_factor = (1 - a * query_factor) // b if b else 0
        values = {
            id(t): n * sums
            for t, n in zip(self.sample_tokens, (query_factor, key_factor), strict=True)
        }
        results = [(step, id(step.result)) for step in self.steps]
        steps_of_sums = [
            s for s, i in results if i in self.sums or self.dependences[i] == dependence
        ]
        self._replay(values, steps_of_sums)
        used = self._read_by(self._steps_of(PAIR) if a and b else self._steps_of_both())
        stored = {i for i in used & values.keys() if self.dependences[i] == dependence}
        self.values |= {i: values[i].contiguous() for i in stored}

    def _sums_of_tokens(self, a: int, b: int) -> tuple[Tensor, Tensor]:
        """(sums a q + b k in one row, index of the sum of each query with key 0)."""
        query_terms = a * self.q.flatten()
        row, column = query_terms % b, query_terms // b
        least = int(column.min())
        columns = int(column.max()) - least + self.k.numel()
        begins = row * columns + column - least
        column = torch.arange(least, least + columns, device=begins.device)
        sums = (column * b + torch.arange(b, device=begins.device)[:, None]).flatten()
        # Sums that no tokens have are set to 0: a function may fail for them, but not for 0.
        edges = torch.zeros(len(sums) + 1, dtype=torch.int64, device=begins.device)
        edges.index_add_(0, begins, torch.ones_like(begins))
        edges.index_add_(0, begins + self.k.numel(), -torch.ones_like(begins))
        return sums.where(edges.cumsum(0)[:-1] > 0, 0), begins

    def _tabulate_shared_rows(self) -> None:
        """Tabulates rows of pairs that many queries share and that other steps read."""
        queries = {}
        for step in self._steps_of(PAIR):
            dependence = self._query_values_of(step)
            if dependence and dependence not in queries:
                queries[dependence] = self._shared_queries(dependence)
            if dependence and queries[dependence] is not None:
                self.dependences[id(step.result)] = dependence
        shared = {
            dependence: shared_queries
            for dependence, shared_queries in queries.items()
            if shared_queries is not None
        }
        for dependence in sorted(shared, key=len):  # fewer values first: others read them
            steps = self._steps_of(dependence)
            others = [s for s in self.steps if self.dependences[id(s.result)] != dependence]
            stored = {id(step.result) for step in steps} & self._read_by(others)
            read = self._read_by(steps) & self.values.keys()
            parts = []
            for part in shared[dependence].split(max(1, PAIRS_AT_ONCE // self.k.numel())):
                values = {i: self._value(i, part) for i in read}
                self._replay(values, steps)
                parts.append([values[i] for i in stored])
            tables = [torch.cat(rows).flatten() for rows in zip(*parts, strict=True)]
            self.values |= dict(zip(stored, tables, strict=True))

    def _query_values_of(self, step: Step) -> frozenset[int] | None:
        """The values of the query through which a step of pairs depends on it, or None."""
        query_values = set()
        for tensor in inputs_of(step):
            dependence = self.dependences.get(id(tensor), CONSTANT)
            if dependence == QUERY:
                query_values.add(id(tensor))
            elif isinstance(dependence, frozenset):
                query_values |= dependence
            elif dependence not in (KEY, CONSTANT):
                return None
        return frozenset(query_values)

    def _shared_queries(self, dependence: frozenset[int]) -> Tensor | None:
        """One query for each distinct combination of values; None if too few queries share one."""
        row = torch.zeros_like(self.q.flatten())
        for i in dependence:
            _, number = torch.unique(self.values[i].flatten(), return_inverse=True)
            _, row = torch.unique(row * len(row) + number, return_inverse=True)
        count, queries = int(row.max()) + 1, self.q.flatten()
        if count * MIN_QUERIES_PER_ROW > len(row) or count * self.k.numel() > MAX_SHARED_VALUES:
            return None
        self.row_begins[dependence] = row * self.k.numel()
        return torch.empty_like(queries[:count]).scatter_(0, row, queries)

    def _replay(self, values: dict[int, Tensor], steps: list[Step]) -> None:
        """Runs steps, and adds their results to `values`."""
        for step in steps:
            dtype = step.operation.dtype if isinstance(step.operation, Narrowed) else None
            arguments = self._replaced(step.arguments, values, dtype)
            options = self._replaced(step.options, values, dtype)
            values[id(step.result)] = step.operation(*arguments, **options)

    def _replaced(
        self, argument: Any, values: dict[int, Tensor], dtype: torch.dtype | None
    ) -> Any:
        """The argument with its tensors replaced by their values, in `dtype` or as recorded."""
        if (
            isinstance(argument, Tensor)
            and self.dependences.get(id(argument), CONSTANT) != CONSTANT
        ):
            value, dtype = values[id(argument)], dtype or argument.dtype
            return value if value.dtype == dtype else value.to(dtype)
        if isinstance(argument, dict):
            return {name: self._replaced(v, values, dtype) for name, v in argument.items()}
        if isinstance(argument, (list, tuple)):
            return [self._replaced(item, values, dtype) for item in argument]
        return argument


def _rows_at_equal_steps(value: Tensor, begins: Tensor, first: int, width: int) -> Tensor | None:
    """The rows as a view, one row if all are the same; None on a GPU or if there is none.

    Args:
        value: Values of all rows.
        begins: int64 (rows,), where each row begins in `value`.
        first: First key.
        width: Number of keys.
    """
    if begins.is_cuda:
        return None
    begin = begins.numpy()
    step = int(begin[1] - begin[0]) if len(begin) > 1 else 0
    if step < 0 or (begin[1:] - begin[:-1] != step).any():
        return None
    return value.as_strided((len(begin) if step else 1, width), (step, 1), int(begin[0]) + first)


def _modulus(step: Step) -> int | None:
    """The modulus of a remainder, or of a bitwise `and` that keeps the lowest bits, else None."""
    number = step.arguments[1] if len(step.arguments) == 2 else None
    if not isinstance(number, int) or number == 0:
        return None
    if step.operation is _REMAINDER:
        return number
    is_and = step.operation is _aten.bitwise_and.Scalar and 0 < number < MAX_OFFSET
    return 1 << number.bit_length() if is_and else None


def _rule_of_ranges(step: Step) -> Callable[..., Any] | None:
    """The function from the ranges of the arguments of a step to that of its result, or None."""
    packet = step.operation.overloadpacket
    if packet is _aten.mul and step.arguments[0] is step.arguments[1]:
        return square if step.result.dtype == torch.int64 else None
    return RULES.get(step.result.dtype, {}).get(packet)


def _range_of_result(step: Step, ranges: dict[int, Range | None]) -> Range | None:
    """The range of the result of a step; None if it is unknown or may wrap around."""
    rule = _rule_of_ranges(step)
    inputs = _ranges_of(step.arguments, ranges)
    result = rule(*inputs) if rule and not step.options and None not in inputs else None
    return result if result and result.dtype() else None


def _ranges_of(arguments: tuple, ranges: dict[int, Range | None]) -> list[Range | None]:
    return [range_of_number(a) or ranges.get(id(a)) for a in arguments]
