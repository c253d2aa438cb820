"""Names by which compiled graphs, which hold tensors, numbers and text, refer to masks."""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

_alive: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = count()


class Handled:
    """An immutable object with a `handle`, a text that finds it again while it lives.

    A handle means nothing to another process. Copies are the object itself.
    """

    handle: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", f"{type(self).__name__}-{next(_numbers)}")
        _alive[self.handle] = self

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        Handled.__post_init__(self)


def find(handle: str) -> Any:
    """The Pattern or BlockMask with this handle. Raises LookupError when it is gone."""
    found = _alive.get(handle)
    if found is None:
        raise LookupError(f"no mask has the handle {handle!r}: it is gone, or of another process")
    return found
