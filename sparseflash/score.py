"""Functions of one's own that change the scores of attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

from torch import (
    Size,
    Tensor,
    autograd,
    dtype,
    enable_grad,
    float32,
    fx,
    inference_mode,
    int64,
    ones_like,
    ops,
    zeros,
    zeros_like,
)


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
            "hopper"; None if there is none. "hopper" takes none that makes tiles of its own, by
            tl.full, tl.zeros, tl.arange and the like.

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

    @classmethod
    def from_torch(
        cls, name: str, function: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    ) -> "ScoreFunction":
        """The score function of f alone, which is differentiated and, where Triton is installed,
        translated to it.

        Args:
            name: One that no other function has.
            function: (score, batch, head, query, key) -> f, in operations of torch on each pair by
                itself: arithmetic, comparisons, torch.where, exponentials, powers, rounding. It is
                called once for each dtype, with tensors of one number.

        Raises:
            TypeError: `name` is no text, or f is not one number for each pair.
            ValueError: Another function has the name, f asks for the value of a tensor, or has an
                operation that is not translated to Triton, which the message names.

        Reference:
            Dong et al., "Flex Attention", 2024 (score_mod).
        """
        if not callable(function):
            raise TypeError(f"function must be a function, got {function!r}")
        traced = _traced(name, function, float32)
        if find_spec("triton") is None:
            return cls(name, partial(_run, name, function))
        from sparseflash.backends.triton_common.score_source import triton_function

        try:
            jitted = triton_function(name, traced.graph, partial(getattr, traced))
        except ValueError as error:
            raise ValueError(f"score function {name!r}: {error}") from error
        return cls(name, partial(_run, name, function), jitted)

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


def _run(name: str, function: Callable, score: Tensor, *pair: Tensor) -> tuple[Tensor, Tensor]:
    """(f, df / dscore) of tensors, by the operations that were traced."""
    changed, slope = _traced(name, function, score.dtype)(score, *pair)
    return changed.expand(score.shape), slope


# Of single numbers they change nothing, and they would of tensors.
_COPIES = ("alias", "clone", "detach", "expand", "lift_fresh", "lift_fresh_copy", "view")


@lru_cache(maxsize=256)
def _traced(name: str, function: Callable, score_dtype: dtype) -> fx.GraphModule:
    """(f, df / dscore) of single numbers, as operations that serve tensors of any shape."""
    from torch._decomp import core_aten_decompositions  # these take half a second
    from torch.fx.experimental.proxy_tensor import make_fx

    def both(score: Tensor, *pair: Tensor) -> tuple[Tensor, Tensor]:
        score = score.detach().requires_grad_()
        changed = function(score, *pair)
        if not isinstance(changed, Tensor):
            raise TypeError(f"f must be a tensor, got {type(changed).__name__}")
        if not changed.is_floating_point():
            raise TypeError(f"f must be of a floating-point dtype, got {changed.dtype}")
        if changed.dim():
            raise TypeError(f"f must be one number for each pair, got {tuple(changed.shape)}")
        if not changed.requires_grad:
            return changed, zeros_like(score)
        (slope,) = autograd.grad(changed, score, ones_like(changed))
        return changed, slope

    pair = [zeros((), dtype=int64, device="cpu") for _ in range(4)]
    try:
        with inference_mode(False), enable_grad():
            score = zeros((), dtype=score_dtype, device="cpu")
            simple: Any = core_aten_decompositions()
            module = make_fx(both, simple)(score, *pair)
    except TypeError as error:
        raise TypeError(f"score function {name!r} cannot be traced: {error}") from error
    except RuntimeError as error:
        raise ValueError(
            f"score function {name!r} cannot be traced. It may neither branch on its arguments "
            f"(torch.where chooses) nor index tensors with them: {error}"
        ) from error
    for node in module.graph.nodes:
        operation, _, overload = str(node.target).removeprefix("aten.").partition(".")
        if operation in _COPIES or operation == "copy_":
            node.replace_all_uses_with(node.args[operation == "copy_"])
            module.graph.erase_node(node)
        elif operation.endswith("_"):  # in place: later nodes read its result
            node.target = getattr(getattr(ops.aten, operation[:-1]), overload)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _broadcasts(shape: Size, to: Size) -> bool:
    aligned = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(n in (1, m) for n, m in aligned)


_functions: dict[str, ScoreFunction] = {}


def named(name: str) -> ScoreFunction:
    """The function with this name. Raises ValueError where there is none."""
    if name not in _functions:
        raise ValueError(f"score must be a ScoreFunction or the name of one, got {name!r}")
    return _functions[name]
