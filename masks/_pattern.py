"""Pattern: a sparsity pattern for every sequence length."""

import hashlib
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple, ParamSpec, overload

import torch

from masks import block_mask
from masks._core.grid import Grid
from masks._core.tracing import untraced
from masks.arguments import check_takes, name_of_function, to_python, without_annotations
from masks.block_mask import BlockMask
from masks.predicates import from_block_predicate, from_predicate
from masks.registry import OF_DEFAULT_SIZE, Handled

P = ParamSpec("P")
DEFAULT_SIZE = (128, 128)
MAX_NAME = 2**16  # most characters of a name; that of p = (p & a) | p grows twofold in each step


@dataclass(frozen=True, eq=False)
class Pattern(Handled):
    """A named sparsity pattern without a length: `pattern(seq_len, block_size)` is its BlockMask.

    `a & b`, `a | b`, `a - b`, `a ^ b` and `~a` are patterns too. A pattern of tokens takes the
    block size of the other one, unless with_block_size gave it one of its own; all other operands
    must have the same.

    Attributes:
        name: The name that is printed.
        build: A function that makes the mask on a grid.
        recipe: The expression that made the pattern; None for a pattern of a Python function. A
            pattern with a recipe can be saved, and patterns with equal recipes are equal.
        block_size: Default block size (bq, bk), in tokens; see with_block_size.
        of_tokens: Whether the same pairs attend in blocks of every size.
    """

    name: str
    build: Callable[[Grid], BlockMask]
    recipe: "Recipe | None" = field(default=None, repr=False)
    block_size: tuple[int, int] = DEFAULT_SIZE
    of_tokens: bool = False
    _identity: str = field(init=False, repr=False)
    _has_own_size: bool = field(init=False, repr=False)

    def __call__(
        self,
        seq_len: int | tuple[int, int],
        block_size: int | tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Compiles the pattern for one sequence length.

        Args:
            seq_len: Length in tokens, an int or (q_len, k_len).
            block_size: Block size in tokens, an int or (bq, bk); by default that of the pattern.
            device: Device of the mask; the CPU by default.

        Returns:
            The block mask.

        Raises:
            TypeError: A length or a side is not an integer.
            ValueError: A length is below 1, or a side other than 16, 32, 64, 128, 256 or 512.
        """
        size = self.block_size if block_size is None else block_size
        with untraced():
            mask = self.build(Grid.of(seq_len, size, device))
        if block_size is None and size == DEFAULT_SIZE and not self._has_own_size:
            mask.cache[OF_DEFAULT_SIZE] = True
        return mask

    def with_block_size(self, block_size: int | tuple[int, int]) -> "Pattern":
        """The same pattern with another default block size, which attention and modules use.

        Args:
            block_size: Block size in tokens, one number or (bq, bk).

        Returns:
            A pattern.

        Raises:
            TypeError, ValueError: As in a call of the pattern.
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
        name = _within_limit(f"~{self.name}")
        return Pattern(name, build, recipe, self.block_size, self.of_tokens)

    def _after(self, other: object) -> "Pattern":
        """The error of `other & self` and the like; Python asks the other operand first."""
        if isinstance(other, BlockMask):
            raise TypeError(
                "operands must be two patterns or two block masks, got a Pattern and a BlockMask: "
                "call the pattern with mask.seq_len and mask.block_size"
            )
        return NotImplemented

    __rand__ = __ror__ = __rsub__ = __rxor__ = _after

    def _with(self, sign: str, rule, other: "Pattern") -> "Pattern":
        if not isinstance(other, Pattern):
            return self._after(other)
        if sign in ("&", "|") and self == other:
            return self
        name = _within_limit(f"({self.name} {sign} {other.name})")
        recipe = Recipe(sign, {"left": self, "right": other})
        return _of_parts(name, _Operation(rule, (self, other)), recipe, (self, other))

    def __post_init__(self) -> None:
        super().__post_init__()
        # Digests of the parts, not the parts: patterns may be nested deeper than Python recurses.
        made_by = self.handle if self.recipe is None else _digestible(self.recipe)
        digest = hashlib.sha256(repr((made_by, self.block_size)).encode()).hexdigest()
        self.__dict__["_identity"] = digest
        self.__dict__["_has_own_size"] = self.recipe is not None and _of_own_size(self.recipe)

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


def _within_limit(name: str) -> str:
    """The name, without its middle if it is too long."""
    half = MAX_NAME // 2
    return name if len(name) <= MAX_NAME else f"{name[:half]} ... {name[-half:]}"


@dataclass(frozen=True)
class _Operation:
    """Makes the mask of a pattern from the masks of one or two operands."""

    rule: Callable[..., BlockMask]
    operands: tuple[Pattern, ...]

    def __call__(self, grid: Grid) -> BlockMask:
        # Patterns may be nested deeper than Python's recursion limit, so this uses a stack. An
        # operand of several operations is built once: otherwise p = (p & a) | p, repeated, would
        # take exponential time.
        uses, shared = self._uses(), {}
        pending: list[Any] = [self]
        operands: list[BlockMask] = []
        while pending:
            match pending.pop():
                case (step, count):
                    result = step.rule(*operands[-count:])
                    del operands[-count:]
                case build if id(build) in shared:
                    operands.append(shared[id(build)])
                    continue
                case _Operation() as step:
                    builds = [pattern.build for pattern in reversed(step.operands)]
                    pending += [(step, len(builds)), *builds]
                    continue
                case step:
                    result = step(grid)
            operands.append(result)
            if uses[id(step)] > 1:
                shared[id(step)] = result
        return operands[0]

    def _uses(self) -> Counter[int]:
        """How often each operation or built pattern below this one is an operand, by its id."""
        uses: Counter[int] = Counter()
        pending: list[_Operation] = [self]
        while pending:
            for operand in pending.pop().operands:
                uses[id(operand.build)] += 1
                if isinstance(operand.build, _Operation) and uses[id(operand.build)] == 1:
                    pending.append(operand.build)
        return uses


def _digestible(value: Any) -> Any:
    """A recipe or a part of one, in values that are equal if their repr is."""
    if isinstance(value, Pattern):
        return f"pattern {value._identity}"
    if isinstance(value, dict):
        return {name: _digestible(part) for name, part in value.items()}
    return [_digestible(part) for part in value] if isinstance(value, (list, tuple)) else value


class Recipe(NamedTuple):
    """The function of BUILTIN or the operation that made a pattern, with its arguments."""

    maker: str
    arguments: dict[str, Any]


def _of_own_size(recipe: Recipe) -> bool:
    """Whether the block size of a pattern, or of a part of it, was given by with_block_size."""
    if recipe.maker == "with_block_size":
        return True
    values = recipe.arguments.values()
    parts = [part for x in values for part in (x if isinstance(x, (list, tuple)) else (x,))]
    return any(isinstance(part, Pattern) and part._has_own_size for part in parts)


BUILTIN: dict[str, Callable[..., Pattern]] = {}


def builtin(
    **resolve: Callable[[Any], Any],
) -> Callable[[Callable[P, Pattern]], Callable[P, Pattern]]:
    """Decorator for functions that make patterns: `parse` finds them by name, and their patterns
    can be saved.

    Args:
        resolve: For arguments that may be names, a function that resolves the name. It is called
            once, before the argument is used and recorded.
    """

    def decorate(make: Callable[P, Pattern]) -> Callable[P, Pattern]:
        signature = inspect.signature(make)

        @wraps(make)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> Pattern:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(
                    f"{make.__name__} takes {without_annotations(signature)}: {error}"
                ) from None
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
    """Decorator that makes a pattern from a vectorised function of token indices.

    The function is evaluated in strips of queries on all cores of a CPU; no N x N array is made.
    In elementwise functions, an expression of the query, the key, the distance, or another sum
    a q + b k with small factors is computed once for each of its values. Rows that are equal for
    several queries, such as those with one value of q // 1000 or q % 64, are computed once. Every
    other operation is computed for each pair, in 0.1 ns for bools and 1 ns for integers on one
    core. So 64K tokens take seconds and 1M tokens minutes, and much less with `device="cuda"`.

    The function is called without gradients and without autocast, so that the mask does not depend
    on where it is made.

    Args:
        attends: A function of q, int64 (n, 1), and k, int64 (1, k_len), on the device of the mask.
            It returns a bool tensor that broadcasts to (n, k_len), true where query q attends key
            k, and does not change its arguments.

    Returns:
        The pattern.

    Raises:
        TypeError: `attends` is not a function of two arguments.

    Reference:
        Dong et al. 2024, Flex Attention (mask_mod).
    """
    return _of_function(attends, ("q", "k"), from_predicate, of_tokens=True)


def block_pattern(attends: Callable) -> Pattern:
    """Decorator that makes a pattern of full blocks from a vectorised function of block indices.

    Args:
        attends: A function of block rows i, int64 (n, 1), and block columns j, int64 (1, nk). It
            returns a bool tensor that broadcasts to (n, nk), true for full blocks, and does not
            change its arguments.

    Returns:
        The pattern.

    Raises:
        TypeError: `attends` is not a function of two arguments.

    Reference:
        Dong et al. 2024, Flex Attention (mask_mod).
    """
    return _of_function(attends, ("i", "j"), from_block_predicate, of_tokens=False)


def _of_function(
    attends: Callable,
    indices: tuple[str, str],
    build: Callable[[Grid, str, Callable], BlockMask],
    of_tokens: bool,
) -> Pattern:
    if isinstance(attends, Pattern) or not callable(attends):
        raise TypeError(f"attends must be a function of ({', '.join(indices)}), got {attends!r}")
    hint = "for a mask of each head or batch element see masks.stack and masks.MaskBatch"
    check_takes("attends", attends, indices, hint)
    name = name_of_function(attends)

    def build_named(grid: Grid) -> BlockMask:
        try:
            return build(grid, name, attends)
        except IndexError as error:
            raise IndexError(
                f"pattern {name} must index tensors within their sizes, also at the lengths "
                f"{grid.seq_len}: {error}"
            ) from error

    return Pattern(name, build_named, of_tokens=of_tokens)


@overload
def stack(masks: Sequence[Pattern]) -> Pattern: ...
@overload
def stack(masks: Sequence[BlockMask]) -> BlockMask: ...
def stack(masks):
    """A mask for each head: a Pattern from patterns, a BlockMask from block masks.

    Heads with equal masks share storage.

    Args:
        masks: One pattern or one block mask for each head; head h gets masks[h].

    Returns:
        A Pattern or a BlockMask with as many heads as `masks` has entries.

    Raises:
        TypeError: `masks` is not a list, or mixes patterns and block masks.
        ValueError: `masks` is empty, or its entries differ in block size, lengths or device. Of
            patterns, block sizes may differ as in `a & b`.
    """
    if not isinstance(masks, Sequence):
        raise TypeError(f"masks must be a list with one for each head, got {masks!r}")
    if not masks:
        raise ValueError("masks must have at least 1 entry, got none")
    if all(isinstance(m, BlockMask) for m in masks):
        return block_mask.stack(masks)
    if not all(isinstance(m, Pattern) for m in masks):
        raise TypeError(
            "masks must be patterns only or block masks only, got "
            f"{[type(m).__name__ for m in masks]}"
        )
    distinct = list(dict.fromkeys(masks))

    def build(grid: Grid) -> BlockMask:
        built = {m: m.build(grid) for m in distinct}
        return block_mask.stack([built[m] for m in masks])

    name = _within_limit(f"stack({', '.join(m.name for m in masks)})")
    recipe = Recipe("stack", {"masks": list(masks)})
    return _of_parts(name, build, recipe, masks)


def _of_parts(
    name: str, build: Callable[[Grid], BlockMask], recipe: Recipe, parts: Sequence[Pattern]
) -> Pattern:
    """The pattern that is made of others, in their common block size."""
    # A pattern of tokens attends the same pairs in the blocks of the others.
    fixed = [part for part in parts if part._has_own_size or not part.of_tokens]
    sizes = {part.block_size for part in fixed or parts}
    if len(sizes) > 1:
        raise ValueError(
            f"patterns must share their block size, got {sorted(sizes)}; call with_block_size of "
            "the combined pattern"
        )
    of_tokens = all(part.of_tokens for part in parts)
    return Pattern(name, build, recipe, sizes.pop(), of_tokens)
