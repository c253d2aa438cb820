"""Operations on every pair in the narrowest integers that hold their values, and by numpy.

A function of tokens computes in int64. Where ranges prove that no value is changed, its
operations are as exact in int32 or int16, of which a vector register holds more. On a CPU, numpy
compares numbers and divides integers by a number several times as fast as torch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from masks._core.ranges import OF_INTEGERS, WIDTHS, Range, hull

_aten = torch.ops.aten
_EXACT = 2**24  # the numbers of torch and of numpy are rounded alike to float32 at least to here
_DIVISIONS = (_aten.floor_divide, _aten.remainder)
_SHIFTS = (
    *(_aten.__lshift__, _aten.__rshift__),
    *(_aten.bitwise_left_shift, _aten.bitwise_right_shift),
)
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
    packet, operands = (
        operation.overloadpacket,
        [operand for operand in arguments if operand is not None],
    )
    if len(operands) < len(arguments) or packet not in {**OF_INTEGERS, **_COMPARISONS}:
        return None
    result = None if packet in _COMPARISONS else OF_INTEGERS[packet](*operands)
    if result is None and packet not in _COMPARISONS:
        return None
    operands_and_result = [*operands, *([result] if result else [])]
    if packet in _SHIFTS:  # by fewer bits than the dtype has
        operands_and_result.append(Range(0, 1 << operands[1].least))
    dtype = hull(*(end for operand in operands_and_result for end in operand)).dtype()
    if dtype is None:
        return None
    if packet not in _DIVISIONS:
        dtype = max(dtype, computed, key=WIDTHS.index)
    return Narrowed(_BY_NUMPY.get(packet, operation), dtype, result)


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
    """A function of tensors that need no gradient, as none of a mask does."""

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
