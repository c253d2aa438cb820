"""Functions of one's own that change the scores of attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class ScoreFunction:
    """A change of scores, pair by pair: (score, batch, head, query, key) -> (f, df / dscore).

    name:   one that no other function has; attention takes the name as well as the object
    torch:  of tensors that broadcast, floating-point scores and integer places: for the backend
        "cpu", and for the reference, which differentiates f by itself
    triton: the same with the decorator triton.jit, of tiles: for the backend "triton"; None if
        there is none

    Both results must be finite for any finite score and any place, also one past the end of the
    sequence, and depend on nothing but the arguments and constants.
    Raises ValueError for a name that is taken, and TypeError for a name that is no text or a
    `torch` that is no function.
    Source: Dong et al., "Flex Attention", 2024 (score_mod).
    """

    name: str
    torch: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | float]]
    triton: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string, got {self.name!r}")
        if not callable(self.torch):
            raise TypeError(f"torch must be a function, got {self.torch!r}")
        if _functions.setdefault(self.name, self) is not self:
            raise ValueError(f"name must be new, got {self.name!r}, which another function has")

    def of_tensors(self, *pairs: Tensor) -> tuple[Tensor, Tensor | float]:
        """What `torch` makes of (score, batch, head, query, key). Raises TypeError where that is
        not two values.
        """
        result = self.torch(*pairs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"score function {self.name!r} must return (f, df / dscore), got "
                f"{type(result).__name__}"
            )
        return result


_functions: dict[str, ScoreFunction] = {}


def named(name: str) -> ScoreFunction:
    """The function with this name. Raises ValueError where there is none."""
    if name not in _functions:
        raise ValueError(f"score must be a ScoreFunction or the name of one, got {name!r}")
    return _functions[name]
