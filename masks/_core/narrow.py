"""Operations on every pair in the narrowest integers that hold their values, and by numpy.

A function of tokens computes in int64. Where ranges prove that no value is changed, its
operations are as exact in int32 or int16, of which a vector register holds more. On a CPU, numpy
compares numbers and divides integers by a number several times as fast as torch.
"""

from collections.abc import Callable
from operator import lshift, rshift
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_aten = torch.ops.aten
_WIDTHS = (torch.int16, torch.int32, torch.int64)
_EXACT = 2**24  # the numbers of torch and of numpy are rounded alike to float32 at least to here


class Range(NamedTuple):
    """The least and the largest value that an integer may have."""

    least: int
    largest: int

    def dtype(self) -> torch.dtype | None:
        """The narrowest that holds both; None if int64 does not."""
        for dtype in _WIDTHS:
            limits = torch.iinfo(dtype)
            if limits.min <= self.least and self.largest <= limits.max:
                return dtype
        return None


def range_of(values: Tensor) -> Range | None:
    """The range of the values of a tensor of int64; None of another one."""
    if values.dtype != torch.int64 or values.numel() == 0:
        return None
    return Range(*(int(end) for end in torch.aminmax(values)))


def _hull(*numbers: int) -> Range:
    return Range(min(numbers), max(numbers))


def _product(x: Range, y: Range) -> Range:
    return _hull(*(a * b for a in x for b in y))


def _bits(x: Range, y: Range) -> Range:
    """Of `or` and `xor`: as many bits as the longer has, and a sign if one has."""
    ends = 1 << max((~n if n < 0 else n).bit_length() for n in (*x, *y))
    return Range(-ends if min(x.least, y.least) < 0 else 0, ends - 1)


def _common_bits(x: Range, y: Range) -> Range:
    """Of `and`: what is not negative bounds it."""
    limits = [each.largest for each in (x, y) if each.least >= 0]
    return Range(0, min(limits)) if limits else _bits(x, y)


def _magnitude(x: Range) -> Range:
    ends = abs(x.least), abs(x.largest)
    return Range(0 if x.least <= 0 <= x.largest else min(ends), max(ends))


def _quotient(x: Range, y: Range) -> Range | None:
    return _hull(*(n // y.least for n in x)) if _divides(y) else None


def _remainder(_: Range, y: Range) -> Range | None:
    return _hull(0, y.least - (1 if y.least > 0 else -1)) if _divides(y) else None


def _divides(y: Range) -> bool:
    return y.least == y.largest and y.least not in (0, -1)


def _shifted(x: Range, y: Range, shift: Callable[[int, int], int]) -> Range | None:
    by = y.least
    return Range(*(shift(n, by) for n in x)) if by == y.largest and 0 <= by < 63 else None


def _left(x: Range, y: Range) -> Range | None:
    return _shifted(x, y, lshift)


def _right(x: Range, y: Range) -> Range | None:
    return _shifted(x, y, rshift)


def _clamped(x: Range, least: Range, largest: Range | None = None) -> Range:
    return Range(*(min(max(n, least.least), largest.least if largest else n) for n in x))


_RANGES: dict[Any, Callable[..., Range | None]] = {
    _aten.add: lambda x, y: Range(x.least + y.least, x.largest + y.largest),
    _aten.sub: lambda x, y: Range(x.least - y.largest, x.largest - y.least),
    _aten.rsub: lambda x, y: Range(y.least - x.largest, y.largest - x.least),
    _aten.neg: lambda x: Range(-x.largest, -x.least),
    _aten.abs: _magnitude,
    _aten.mul: _product,
    _aten.minimum: lambda x, y: Range(*map(min, x, y)),
    _aten.maximum: lambda x, y: Range(*map(max, x, y)),
    _aten.bitwise_and: _common_bits,
    _aten.bitwise_or: _bits,
    _aten.bitwise_xor: _bits,
    _aten.bitwise_not: lambda x: Range(~x.largest, ~x.least),
    _aten.floor_divide: _quotient,
    _aten.remainder: _remainder,
    _aten.pow: lambda x, y: _product(m := _magnitude(x), m) if y == (2, 2) else None,
    _aten.clamp: _clamped,
    _aten.__lshift__: _left,
    _aten.__rshift__: _right,
    _aten.bitwise_left_shift: _left,
    _aten.bitwise_right_shift: _right,
}
_DIVISIONS = (_aten.floor_divide, _aten.remainder)
_SHIFTS = {packet for packet, rule in _RANGES.items() if rule in (_left, _right)}
_COMPARISONS = {
    _aten.eq: np.equal,
    _aten.ne: np.not_equal,
    _aten.lt: np.less,
    _aten.le: np.less_equal,
    _aten.gt: np.greater,
    _aten.ge: np.greater_equal,
}


class Narrowed(NamedTuple):
    """An operation that takes its integers in `dtype`, whichever they were recorded in."""

    call: Callable[..., Tensor]
    dtype: torch.dtype
    range: Range | None  # of its result; None of a comparison

    def __call__(self, *arguments: Any) -> Tensor:
        return self.call(*arguments)


def narrowed(
    operation: Any, arguments: list[Range | None], computed: torch.dtype = torch.int16
) -> Narrowed | None:
    """An operation on int64, whose arguments have these ranges, in the fastest dtype.

    None where it is not proved that one holds every argument and the result.

    Args:
        operation: The operation.
        arguments: The range of each.
        computed: Widest dtype of arguments that are computed for every pair: to convert them
            takes longer than most operations take.
    """
    packet, known = operation.overloadpacket, [each for each in arguments if each is not None]
    if len(known) < len(arguments) or packet not in {**_RANGES, **_COMPARISONS}:
        return None
    found = None if packet in _COMPARISONS else _RANGES[packet](*known)
    if found is None and packet not in _COMPARISONS:
        return None
    held = [*known, *([found] if found else [])]
    if packet in _SHIFTS:  # by fewer bits than the dtype has
        held.append(Range(0, 1 << known[1].least))
    dtype = _hull(*(end for each in held for end in each)).dtype()
    if dtype is None:
        return None
    if packet not in _DIVISIONS:
        dtype = max(dtype, computed, key=_WIDTHS.index)
    return Narrowed(_BY_NUMPY.get(packet, operation), dtype, found)


def compared(operation: Any, arguments: tuple) -> Callable[..., Tensor] | None:
    """A comparison of floating-point numbers, by numpy; None of what is no such comparison."""
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    of_one_dtype = {a.dtype for a in tensors} in ({torch.float32}, {torch.float64})
    numbers = [a for a in arguments if not isinstance(a, Tensor)]
    if operation.overloadpacket not in _COMPARISONS or not of_one_dtype:
        return None
    if any(a.ndim == 0 for a in tensors) or any(abs(n) > _EXACT for n in numbers):
        return None
    return _BY_NUMPY[operation.overloadpacket]


def _by_numpy(function: Callable[..., np.ndarray]) -> Callable[..., Tensor]:
    def call(*arguments: Any) -> Tensor:
        arrays = [a.numpy() if isinstance(a, Tensor) else a for a in arguments]
        return torch.from_numpy(function(*arrays))

    return call


_floor_divided = _by_numpy(np.floor_divide)


def _remainders(value: Any, divisor: Any) -> Tensor:
    return value - _floor_divided(value, divisor).mul_(divisor)  # right if the product wraps, too


_BY_NUMPY = {
    **{packet: _by_numpy(function) for packet, function in _COMPARISONS.items()},
    _aten.floor_divide: _floor_divided,
    _aten.remainder: _remainders,
}
