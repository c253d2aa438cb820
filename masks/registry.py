"""Handles by which compiled graphs find masks, and caches that are stored with masks."""

from dataclasses import fields
from functools import cached_property
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

MAX_ENTRIES = 1024
OF_DEFAULT_SIZE = "of default size"  # key in the cache of a mask whose block size was not given

_objects: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = count()


class Cache(dict):
    """A dict of at most `most` entries, emptied when full. Its copies and pickles are empty."""

    def __init__(self, most: int = MAX_ENTRIES):
        super().__init__()
        self.most = most

    def __setitem__(self, key, value):
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)

    def __reduce__(self):
        return Cache, (self.most,)


class Caching:
    """A base class of objects with a cache."""

    @cached_property
    def cache(self) -> Cache:
        """Values that other modules store with this object, each under its own keys."""
        return Cache()

    @cached_property
    def tables(self) -> dict[Any, Any]:
        """Tables, coverages and context plans of this object, which live as long as it does."""
        return {}


class Handled:
    """An immutable dataclass with a `handle`, a string by which `find` returns the object.

    Compiled graphs hold tensors, numbers and strings, so they refer to a mask by its handle. A
    handle is valid in one process, as long as the object exists. Copies are the object itself;
    pickles contain only the fields.
    """

    handle: str

    def __post_init__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            # Without fullgraph=True, torch then makes the mask between its graphs. Nothing of
            # `self` is read before, because torch would guard an object that is not complete.
            raise RuntimeError("masks must be made once, outside of the compiled function")
        object.__setattr__(self, "handle", f"{type(self).__name__}-{next(_numbers)}")
        _objects[self.handle] = self

    def __bool__(self) -> bool:
        # Otherwise `a and b` would silently be b.
        raise TypeError(
            f"a {type(self).__name__} has no truth value: combine masks with & | - ^ ~, not with "
            "and, or, not"
        )

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __getstate__(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        Handled.__post_init__(self)


def find(handle: str) -> Any:
    """The Pattern or BlockMask with this handle.

    Raises:
        LookupError: The mask was deleted or is in another process.
    """
    mask = _objects.get(handle)
    if mask is None:
        raise LookupError(
            f"no mask has the handle {handle!r}: it was deleted, or is from another process"
        )
    return mask
