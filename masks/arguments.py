"""Arguments of patterns and masks, checked as they come."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from numpy import generic, ndarray
from torch import Tensor


def whole(name: str, value: Any, least: int | None = None) -> int:
    """An integer, Python's or numpy's, as an int.

    Raises TypeError for anything else, bools and floats too, and ValueError below `least`.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def wholes(name: str, values: Any, least: int | None = None) -> list[int]:
    """A sequence, tensor or array of integers as a list; see whole for what it raises."""
    values = plain(values)
    if not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    return [whole(name, value, least) for value in values]


def check_floating(name: str, tensor: Any) -> None:
    """Raises TypeError for what is no floating-point tensor."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(f"{name} must be a floating-point tensor, got {got}")


def plain(value: Any) -> Any:
    """Tensors, arrays and their numbers as values of Python."""
    if isinstance(value, (list, tuple, range)):
        return tuple(map(plain, value))
    return value.tolist() if isinstance(value, (Tensor, ndarray, generic)) else value
