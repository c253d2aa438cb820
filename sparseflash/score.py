"""Functions of one's own that change the scores of attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor


@dataclass(frozen=True, eq=False)
class ScoreFunction:
    """A change of scores, pair by pair: (score, batch, head, query, key) -> (f, df / dscore).

    Both results must be finite for any finite score and any pair, also one past the end of the
    sequence, and depend on nothing but the arguments and constants.

    Args:
        name: One that no other function has; attention takes the name as well as the object.
        torch: Of a floating-point tensor of scores and of integer tensors that broadcast to it;
            f has the shape of the scores. For the backend "cpu", and for the reference, which
            differentiates f by itself.
        triton: The same with the decorator triton.jit, of tiles: for the backends "triton" and
            "hopper"; None if there is none.

    Raises:
        TypeError: `name` is no text, or `torch` no function.
        ValueError: Another function has the name.

    Reference:
        Dong et al., "Flex Attention", 2024 (score_mod).
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
        """What `torch` makes of (score, batch, head, query, key).

        Raises:
            TypeError: That is not two values.
            ValueError: f has not the shape of the scores, or df / dscore does not broadcast to it.
        """
        result = self.torch(*pairs)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"score function {self.name!r} must return (f, df / dscore), got "
                f"{type(result).__name__}"
            )
        shape, (f, slope) = pairs[0].shape, result
        if f.shape != shape:
            raise ValueError(
                f"f of score function {self.name!r} must have the shape of score, {tuple(shape)}, "
                f"got {tuple(f.shape)}"
            )
        if isinstance(slope, Tensor) and not _broadcasts(slope.shape, shape):
            raise ValueError(
                f"df / dscore of score function {self.name!r} must broadcast to the shape of "
                f"score, {tuple(shape)}, got {tuple(slope.shape)}"
            )
        return result


def _broadcasts(shape: Size, to: Size) -> bool:
    aligned = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(n in (1, m) for n, m in aligned)


_functions: dict[str, ScoreFunction] = {}


def named(name: str) -> ScoreFunction:
    """The function with this name. Raises ValueError where there is none."""
    if name not in _functions:
        raise ValueError(f"score must be a ScoreFunction or the name of one, got {name!r}")
    return _functions[name]
