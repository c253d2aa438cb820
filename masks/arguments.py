"""Checks of the arguments of patterns and masks."""

import inspect
import os
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from numpy import generic, ndarray
from torch import Tensor

INT64_MAX = 2**63 - 1


def check_integer(name: str, value: Any, least: int = -INT64_MAX, most: int = INT64_MAX) -> int:
    """An integer, Python's or numpy's, as an int.

    Raises:
        TypeError: It is anything else, a bool or a float too.
        ValueError: It is below `least` or above `most`.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    number = int(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


def check_sizes(most: int = INT64_MAX, **sizes: Any) -> None:
    """Checks integers from 1 to `most`, by the names of the arguments; see check_integer."""
    for name, size in sizes.items():
        check_integer(name, size, least=1, most=most)


def check_index(name: str, value: Any, count: int, of: str) -> int:
    """An index of one of `count` objects, called `of`; negative ones count from the last.

    Raises:
        TypeError: It is not an integer.
        IndexError: There is no such object.
    """
    index = check_integer(name, value)
    if not -count <= index < count:
        raise IndexError(
            f"{name} must be from {-count} to {count - 1} for {count} {of}, got {index}"
        )
    return index % count


def check_integers(name: str, values: Any, least: int = -INT64_MAX) -> list[int]:
    """A sequence, tensor or array of integers as a list; see check_integer for what it raises."""
    values = to_python(values)
    if not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence of integers, got {values!r}")
    return [check_integer(f"{name}[{i}]", value, least) for i, value in enumerate(values)]


def check_bool(name: str, value: Any) -> bool:
    """A bool. Raises TypeError for anything else, whose truth may not be what is meant."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return value


def check_floating(name: str, tensor: Any) -> None:
    """Raises TypeError for anything but a floating-point tensor."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(f"{name} must be a floating-point tensor, got {got}")


def check_dtype(name: str, tensor: Any, *dtypes: torch.dtype) -> None:
    """Raises TypeError for anything but a tensor of one of the dtypes."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in dtypes:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        article = "an" if known.startswith("i") else "a"
        raise TypeError(f"{name} must be {article} {known} tensor, got {got}")


def check_floating_dtype(name: str, dtype: Any) -> None:
    """Raises TypeError for anything but a floating-point dtype of torch."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating-point torch.dtype, got {dtype!r}")


def checked_device(device: Any) -> torch.device:
    """The device of an argument `device`, with its index: "cuda" is the current CUDA device.

    Raises:
        ValueError: torch knows no such device, or there is no CUDA device.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device must be one of torch, such as 'cpu', got {device!r}") from error
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} needs CUDA, and torch finds no CUDA device")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def check_memory(name: str, nbytes: int, less: str = "larger blocks take less") -> None:
    """Raises ValueError if a mask would need more memory than the machine has.

    Args:
        name: Name of the pattern or of the conversion, for the message.
        nbytes: Memory that it would need, in bytes.
        less: What takes less memory, the end of the message.
    """
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > limit:
        raise ValueError(
            f"{name} would take {nbytes / 2**30:,.1f} GiB at this length, more than the "
            f"{limit / 2**30:,.1f} GiB of this machine; {less}"
        )


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of the first shape can be expanded to the second one."""
    aligned = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(n in (1, m) for n, m in aligned)


def to_python(value: Any) -> Any:
    """Tensors, arrays and their numbers as values of Python."""
    if isinstance(value, (list, tuple, range)):
        return tuple(map(to_python, value))
    return value.tolist() if isinstance(value, (Tensor, ndarray, generic)) else value


def check_takes(name: str, function: Callable, parameters: Sequence[str], hint: str) -> None:
    """Raises TypeError unless a function can be called with these parameters, by position.

    Args:
        name: Name of the argument, for the message.
        function: The function.
        parameters: What its parameters are, for the message. Their names may be others.
        hint: The end of the message.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions that are written in C have none
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        got = f"{name_of_function(function)}{without_annotations(signature)}"
        raise TypeError(
            f"{name} must be a function of ({', '.join(parameters)}), got {got}; {hint}"
        ) from error


def name_of_function(function: Callable) -> str:
    """The name of a function, or that of the type of another object that can be called."""
    return getattr(function, "__name__", type(function).__name__)


def without_annotations(signature: inspect.Signature) -> inspect.Signature:
    """A signature without annotations, which would hide the names in a message."""
    parameters = [x.replace(annotation=x.empty) for x in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)
