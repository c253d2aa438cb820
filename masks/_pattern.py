"""Pattern: a sparsity pattern as an idea, before any sequence length."""

import hashlib
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple, ParamSpec, overload

import torch

from masks import block_mask
from masks._core.grid import Grid
from masks.arguments import to_python
from masks.block_mask import BlockMask, untraced
from masks.predicates import from_block_predicate, from_predicate
from masks.registry import Handled

P = ParamSpec("P")
DEFAULT_SIZE = (128, 128)


@dataclass(frozen=True, eq=False)
class Pattern(Handled):
    """A named sparsity pattern without a length: `pattern(seq_len, block_size)` is its BlockMask.

    `a & b`, `a | b`, `a - b`, `a ^ b` and `~a` are patterns again.

    Attributes:
        name: How it is shown.
        build: Makes the mask on a grid.
        recipe: How the pattern came about, or None for one of a function. A pattern with a recipe
            can be saved, and equals every pattern with the same one.
        block_size: Tokens of its blocks unless others are asked for; see with_block_size.
    """

    name: str
    build: Callable[[Grid], BlockMask]
    recipe: "Recipe | None" = field(default=None, repr=False)
    block_size: tuple[int, int] = DEFAULT_SIZE
    _identity: str = field(init=False, repr=False)

    def __call__(
        self,
        seq_len: int | tuple[int, int],
        block_size: int | tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """The mask at one length.

        Args:
            seq_len: Tokens, an int or (q_len, k_len).
            block_size: Tokens, an int or (bq, bk); by default the pattern's own.
            device: On which the mask is made; the CPU by default.

        Raises:
            TypeError: A length or a side is no integer.
            ValueError: A length is below 1, or a side other than 16, 32, 64, 128, 256 or 512.
        """
        size = self.block_size if block_size is None else block_size
        with untraced():
            return self.build(Grid.of(seq_len, size, device))

    def with_block_size(self, block_size: int | tuple[int, int]) -> "Pattern":
        """The same pattern with another default block size, which attention and modules use.

        Args:
            block_size: Tokens of a block, one number or (bq, bk).
        """
        size = Grid.of(1, block_size).block_size
        recipe = Recipe("with_block_size", {"pattern": self, "block_size": size})
        return replace(self, recipe=recipe, block_size=size)

    def __and__(self, other: "Pattern") -> "Pattern":
        return self._with("&", operator.and_, other)

    def __or__(self, other: "Pattern") -> "Pattern":
        return self._with("|", operator.or_, other)

    def __sub__(self, other: "Pattern") -> "Pattern":
        return self._with("-", operator.sub, other)

    def __xor__(self, other: "Pattern") -> "Pattern":
        return self._with("^", operator.xor, other)

    def __invert__(self) -> "Pattern":
        recipe = Recipe("~", {"of": self})
        build = _Operation(lambda mask: ~mask, (self,))
        return Pattern(f"~{self.name}", build, recipe, self.block_size)

    def _with(self, sign: str, rule, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        name = f"({self.name} {sign} {other.name})"
        recipe = Recipe(sign, {"left": self, "right": other})
        size = _common_block_size([self, other])
        return Pattern(name, _Operation(rule, (self, other)), recipe, size)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Digests of the parts, not the parts: patterns may be nested deeper than Python recurses.
        made_by = self.handle if self.recipe is None else _digestible(self.recipe)
        digest = hashlib.sha256(repr((made_by, self.block_size)).encode()).hexdigest()
        self.__dict__["_identity"] = digest

    def __reduce__(self):
        package = import_module("masks")  # its JSON is a layer above this one
        return package.from_json, (package.to_json(self),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        bq, bk = self.block_size
        own = "" if self.block_size == DEFAULT_SIZE else f".with_block_size(({bq}, {bk}))"
        return f"{self.name}{own}"


@dataclass(frozen=True)
class _Operation:
    """How the mask of a pattern is made of those of one or two others."""

    rule: Callable[..., BlockMask]
    operands: tuple[Pattern, ...]

    def __call__(self, grid: Grid) -> BlockMask:
        # Patterns may be nested deeper than Python recurses: an operation waits for its operands.
        pending: list[Any] = [self]
        operands: list[BlockMask] = []
        while pending:
            match pending.pop():
                case _Operation() as step:
                    builds = [pattern.build for pattern in reversed(step.operands)]
                    pending += [(step.rule, len(builds)), *builds]
                case (rule, count):
                    operands[-count:] = [rule(*operands[-count:])]
                case build:
                    operands.append(build(grid))
        return operands[0]


def _digestible(value: Any) -> Any:
    """A recipe or a part of one in values whose repr says all about them."""
    if isinstance(value, Pattern):
        return f"pattern {value._identity}"
    if isinstance(value, dict):
        return {name: _digestible(part) for name, part in value.items()}
    return [_digestible(part) for part in value] if isinstance(value, (list, tuple)) else value


class Recipe(NamedTuple):
    """How a pattern came about: a function of BUILTIN or an operation, with its arguments."""

    maker: str
    arguments: dict[str, Any]


BUILTIN: dict[str, Callable[..., Pattern]] = {}


def builtin(
    **resolve: Callable[[Any], Any],
) -> Callable[[Callable[P, Pattern]], Callable[P, Pattern]]:
    """Decorator of a function that makes patterns: `parse` knows it by its name, and what it makes
    can be saved.

    Args:
        resolve: For arguments that may name something else, a function that finds it. It is called
            once, before the argument is used and recorded.
    """

    def decorate(make: Callable[P, Pattern]) -> Callable[P, Pattern]:
        signature = inspect.signature(make)

        @wraps(make)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> Pattern:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, find in resolve.items():
                bound.arguments[name] = find(bound.arguments[name])
            arguments = {name: to_python(value) for name, value in bound.arguments.items()}
            pattern = make(*bound.args, **bound.kwargs)
            return replace(pattern, recipe=Recipe(make.__name__, arguments))

        BUILTIN[make.__name__] = recorded
        return recorded

    return decorate


def pattern(attends: Callable) -> Pattern:
    """Decorator: the pattern of a vectorised function of token indices, (q, k) -> bool.

    Compiled strip by strip, never through an N x N array, on all cores of a CPU. Of elementwise
    functions what depends on the query, the key, the distance or another sum a q + b k of small
    factors alone is computed once for each of these, and a row that queries share, such as those
    with one value of q // 1000 or q % 64, once for all of them; every other operation for every
    pair: 0.1 ns for bools and 1 ns for integers, on one core. So 64K tokens take seconds and 1M
    minutes; on a GPU with `device="cuda"` far less.

    It is called without gradients and without autocast, so that the mask is the same at any length
    and wherever it is made.

    Args:
        attends: A function of q, int64 (n, 1), and k, int64 (1, k_len), on the device where the
            mask is wanted. It returns a bool tensor that broadcasts to (n, k_len), and does not
            change its arguments.

    Raises:
        TypeError: `attends` is no function.
    """
    return _of_function(attends, from_predicate)


def block_pattern(attends: Callable) -> Pattern:
    """Decorator: the pattern of a vectorised function of block indices, (i, j) -> bool; its blocks
    are full.

    Args:
        attends: A function of i, int64 (n, 1), and j, int64 (1, nk). It returns a bool tensor that
            broadcasts to (n, nk), and does not change its arguments.

    Raises:
        TypeError: `attends` is no function.
    """
    return _of_function(attends, from_block_predicate)


def _of_function(attends: Callable, build: Callable[[Grid, str, Callable], BlockMask]) -> Pattern:
    if isinstance(attends, Pattern) or not callable(attends):
        raise TypeError(f"attends must be a function of (q, k), got {attends!r}")
    name = getattr(attends, "__name__", type(attends).__name__)
    return Pattern(name, lambda grid: build(grid, name, attends))


@overload
def stack(masks: Sequence[Pattern]) -> Pattern: ...
@overload
def stack(masks: Sequence[BlockMask]) -> BlockMask: ...
def stack(masks):
    """A mask for each head: a Pattern from patterns, a BlockMask from block masks.

    Heads with equal masks share storage.

    Args:
        masks: One pattern or one block mask for each head; head h gets masks[h].

    Raises:
        TypeError: `masks` is no list, or a mixture.
        ValueError: It is empty.
    """
    if not isinstance(masks, Sequence):
        raise TypeError(f"stack takes a list of masks, one for each head, got {masks!r}")
    if not masks:
        raise ValueError("stack needs at least one mask, got none")
    if all(isinstance(m, BlockMask) for m in masks):
        return block_mask.stack(masks)
    if not all(isinstance(m, Pattern) for m in masks):
        raise TypeError(
            "stack takes patterns only or block masks only, got "
            f"{[type(m).__name__ for m in masks]}"
        )
    distinct = list(dict.fromkeys(masks))

    def build(grid: Grid) -> BlockMask:
        built = {m: m.build(grid) for m in distinct}
        return block_mask.stack([built[m] for m in masks])

    name = f"stack({', '.join(m.name for m in masks)})"
    recipe = Recipe("stack", {"masks": list(masks)})
    return Pattern(name, build, recipe, _common_block_size(masks))


def _common_block_size(patterns: Sequence[Pattern]) -> tuple[int, int]:
    sizes = {p.block_size for p in patterns}
    if len(sizes) > 1:
        raise ValueError(f"patterns must share their block size, got {sorted(sizes)}")
    return sizes.pop()
