"""Faster operations on pairs: narrower integers, and numpy.

A function of tokens computes in int64. If ranges prove that all values fit, its operations have
the same results in int32 or int16, of which a vector register holds more. On a CPU numpy is
several times as fast as torch at comparisons and at division of integers by a number.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from masks._core.ranges import OF_INTEGERS, WIDTHS, Range, hull

_aten = torch.ops.aten
_EXACT = 2**24  # up to here integers are exact in float32, so torch and numpy agree
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
    """An operation whose integer arguments are converted to `dtype`."""

    call: Callable[..., Tensor]
    dtype: torch.dtype
    range: Range | None  # of the result; None for a comparison

    def __call__(self, *arguments: Any) -> Tensor:
        return self.call(*arguments)


def narrowed(
    operation: Any, arguments: list[Range | None], computed: torch.dtype = torch.int16
) -> Narrowed | None:
    """The operation in the fastest dtype, or None if no dtype holds all arguments and the result.

    Args:
        operation: An operation on int64.
        arguments: The range of each argument, None if it is unknown.
        computed: Widest dtype of arguments that are computed for every pair. Converting these
            takes longer than most operations.
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
    """A comparison of floating-point numbers by numpy; None for other operations."""
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    of_one_dtype = {a.dtype for a in tensors} in ({torch.float32}, {torch.float64})
    numbers = [a for a in arguments if not isinstance(a, Tensor)]
    if operation.overloadpacket not in _COMPARISONS or not of_one_dtype:
        return None
    if any(a.ndim == 0 for a in tensors) or any(abs(n) > _EXACT for n in numbers):
        return None
    return _BY_NUMPY[operation.overloadpacket]


def _by_numpy(function: Callable[..., np.ndarray]) -> Callable[..., Tensor]:
    """A numpy function as a function of tensors, without gradients."""

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
