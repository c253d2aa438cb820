"""Ranges of integers, and of what operations make of them.

The ends are numbers, or arrays of int64 with the ranges of many tiles of pairs. Those of a
condition are 0 and 1.
"""

from collections.abc import Callable
from functools import reduce
from operator import and_, lshift, or_, rshift
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_aten = torch.ops.aten
WIDTHS = (torch.int16, torch.int32, torch.int64)


class Range(NamedTuple):
    """The least and the largest value that an integer may have."""

    least: Any
    largest: Any

    def dtype(self) -> torch.dtype | None:
        """The narrowest that holds both numbers; None if int64 does not."""
        for dtype in WIDTHS:
            limits = torch.iinfo(dtype)
            if limits.min <= self.least and self.largest <= limits.max:
                return dtype
        return None


def range_of(values: Tensor) -> Range | None:
    """The range of the values of a tensor of int64; None of another one."""
    if values.dtype != torch.int64 or values.numel() == 0:
        return None
    return Range(*(int(end) for end in torch.aminmax(values)))


def range_of_number(number: Any) -> Range | None:
    """The range of an int of Python; None of other objects and of what int64 does not hold."""
    held = type(number) is int and Range(number, number).dtype()
    return Range(number, number) if held else None


class Spans(NamedTuple):
    """So many consecutive keys from each of `first` on.

    Args:
        first: int64 (spans,), ascending.
        width: Number of keys of a span.
        consecutive: Whether each span begins where the one before it ends.
    """

    first: Tensor
    width: int
    consecutive: bool = False

    @property
    def numel(self) -> int:
        """Number of keys of all spans."""
        return len(self.first) * self.width

    @classmethod
    def of(cls, first: Tensor, width: int) -> "Spans":
        """The spans, of which it is found whether they are consecutive."""
        return cls(first, width, bool((first.diff() == width).all()))


def ranges_of_spans(values: Tensor, span: int) -> Range:
    """The ranges of so many consecutive values each; the last may have fewer."""
    padded = torch.cat([values, values[-1:].expand(-len(values) % span)]).view(-1, span)
    return Range(*(ends.numpy() for ends in padded.aminmax(dim=1)))


def hull(*numbers: Any) -> Range:
    """From the least of these numbers to the largest."""
    if not any(isinstance(n, np.ndarray) for n in numbers):
        return Range(min(numbers), max(numbers))
    return Range(reduce(np.minimum, numbers), reduce(np.maximum, numbers))


def _product(x: Range, y: Range) -> Range:
    return hull(*(a * b for a in x for b in y))


def _magnitude(x: Range) -> Range:
    return Range(hull(x.least, -x.largest, 0).largest, hull(-x.least, x.largest).largest)


def square(x: Range, *_: Range) -> Range:
    """The range of the product of a number with itself."""
    return _product(m := _magnitude(x), m)


def _power(x: Range, y: Range) -> Range | None:
    return square(x) if y == (2, 2) else None


def _known_bits(x: Range) -> tuple[Any, Any]:
    """(the bits that are set in all of a range, those that are set in any): those above the first
    in which its ends differ are equal.
    """
    differ = _ones_below(x.least ^ x.largest)
    return x.least & ~differ, x.least | differ


def _ones_below(n: Any) -> Any:
    """Ones from the highest bit of a number on; only ones if it is negative."""
    for shift in (1, 2, 4, 8, 16, 32):
        n = n | n >> shift
    return n


def _of_bits(x: Range, y: Range, in_all: Any, in_any: Any) -> Range:
    """The range of a bitwise result with these bits."""
    # Bits above those of all ends are copies of the sign, which is all that may set them.
    copies = ~_ones_below(reduce(or_, (n ^ n >> 63 for n in (*x, *y))))
    copies = copies & (in_all ^ in_any) >> 63
    return Range(in_all | copies, in_any & ~copies)


def _and(x: Range, y: Range) -> Range:
    return _of_bits(x, y, *map(and_, _known_bits(x), _known_bits(y)))


def _or(x: Range, y: Range) -> Range:
    return _of_bits(x, y, *map(or_, _known_bits(x), _known_bits(y)))


def _xor(x: Range, y: Range) -> Range:
    (all_x, any_x), (all_y, any_y) = map(_known_bits, (x, y))
    return _of_bits(x, y, all_x & ~any_y | all_y & ~any_x, any_x & ~all_y | any_y & ~all_x)


def _quotient(x: Range, y: Range) -> Range | None:
    return hull(*(n // y.least for n in x)) if _divides(y) else None


def _remainder(x: Range, y: Range) -> Range | None:
    if not _divides(y):
        return None
    divisor = y.least
    whole = hull(0, divisor - (1 if divisor > 0 else -1))
    same = x.least // divisor == x.largest // divisor  # quotient: the remainder grows with x
    ends = zip(x, whole, strict=True)
    return Range(*(same * (n % divisor) + (1 - same) * end for n, end in ends))


def _divides(y: Range) -> bool:
    return type(y.least) is int and y.least == y.largest and y.least not in (0, -1)


def _shifted(x: Range, y: Range, shift: Callable[[Any, int], Any]) -> Range | None:
    by = y.least
    return Range(*(shift(n, by) for n in x)) if by == y.largest and 0 <= by < 63 else None


def _left(x: Range, y: Range) -> Range | None:
    return _shifted(x, y, lshift)


def _right(x: Range, y: Range) -> Range | None:
    return _shifted(x, y, rshift)


def _minimum(x: Range, y: Range) -> Range:
    return Range(*(hull(*ends).least for ends in zip(x, y, strict=True)))


def _maximum(x: Range, y: Range) -> Range:
    return Range(*(hull(*ends).largest for ends in zip(x, y, strict=True)))


def _clamped(x: Range, least: Range, largest: Range | None = None) -> Range:
    raised = _maximum(x, least)
    return _minimum(raised, largest) if largest else raised


def _less(x: Range, y: Range) -> Range:
    return Range((x.largest < y.least) * 1, (x.least < y.largest) * 1)


def _equal(x: Range, y: Range) -> Range:
    one = (x.largest <= y.least) & (y.largest <= x.least)
    return Range(one * 1, ((x.least <= y.largest) & (y.least <= x.largest)) * 1)


def _not(x: Range) -> Range:
    return Range(1 - x.largest, 1 - x.least)


def _chosen(_: Range, x: Range, y: Range) -> Range:
    return hull(*x, *y)


OF_INTEGERS: dict[Any, Callable[..., Range | None]] = {
    _aten.add: lambda x, y: Range(x.least + y.least, x.largest + y.largest),
    _aten.sub: lambda x, y: Range(x.least - y.largest, x.largest - y.least),
    _aten.rsub: lambda x, y: Range(y.least - x.largest, y.largest - x.least),
    _aten.neg: lambda x: Range(-x.largest, -x.least),
    _aten.abs: _magnitude,
    _aten.mul: _product,
    _aten.minimum: _minimum,
    _aten.maximum: _maximum,
    _aten.bitwise_and: _and,
    _aten.bitwise_or: _or,
    _aten.bitwise_xor: _xor,
    _aten.bitwise_not: lambda x: Range(~x.largest, ~x.least),
    _aten.floor_divide: _quotient,
    _aten.remainder: _remainder,
    _aten.pow: _power,
    _aten.clamp: _clamped,
    _aten.where: _chosen,
    _aten.__lshift__: _left,
    _aten.__rshift__: _right,
    _aten.bitwise_left_shift: _left,
    _aten.bitwise_right_shift: _right,
}
OF_CONDITIONS: dict[Any, Callable[..., Range]] = {
    _aten.lt: _less,
    _aten.le: lambda x, y: _not(_less(y, x)),
    _aten.gt: lambda x, y: _less(y, x),
    _aten.ge: lambda x, y: _not(_less(x, y)),
    _aten.eq: _equal,
    _aten.ne: lambda x, y: _not(_equal(x, y)),
    _aten.bitwise_and: _and,
    _aten.bitwise_or: _or,
    _aten.bitwise_xor: _xor,
    _aten.bitwise_not: _not,
    _aten.where: _chosen,
}
RULES = {torch.int64: OF_INTEGERS, torch.bool: OF_CONDITIONS}  # by the dtype of the result
