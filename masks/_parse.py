"""Parses patterns written as text: "local(256) & causal()", or "my_patterns.py:name"."""

import ast
import operator
import runpy
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from masks._pattern import BUILTIN, Pattern

# Errors that Python raises if a text or the contents of a file are not a pattern, or too deep.
UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
_HINTS = {  # for what others than patterns say which pairs attend
    "function": ", of which masks.pattern makes one",
    "BlockMask": ", which has one length: pass the Pattern that made it",
}
_OPERATORS = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Sub: operator.sub,
}


def parse(text: str) -> Pattern:
    """Reads a pattern from text, such as "local(64) & causal()".

    Args:
        text: Calls of built-in patterns with literal arguments, combined by & | ^ - ~ and
            parentheses. A bare name is a call without arguments: "butterfly" is butterfly(). Or
            path.py:name for a pattern of a Python file, which is run. No other code is run.

    Returns:
        The pattern.

    Raises:
        TypeError: `text` is not a string.
        ValueError: `text` cannot be parsed; the message lists the known patterns.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a string, got {type(text).__name__}")
    if text.endswith(".py"):
        raise ValueError(f"pattern {text!r} must name a pattern of the file, as {text}:NAME")
    path, _, name = text.rpartition(".py:")
    if path and name.isidentifier():
        return _from_file(Path(f"{path}.py"), name)
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(
            f"pattern {shortened(text)} cannot be read: {error.msg}; it {_allowed()}"
        ) from error
    except UNREADABLE as error:
        raise ValueError(
            f"pattern {shortened(text)} cannot be read: {error or 'too many levels'}"
        ) from error


def shortened(value: Any) -> str:
    """The repr of a value, shortened for a message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def as_pattern(pattern: Pattern | str) -> Pattern:
    """A pattern, parsed if it is given as text. Raises TypeError for other types."""
    if isinstance(pattern, str):
        return parse(pattern)
    if not isinstance(pattern, Pattern):
        kind = type(pattern).__name__
        raise TypeError(f"pattern must be a Pattern or its text, got {kind}{_HINTS.get(kind, '')}")
    return pattern


def optional_pattern(pattern: Pattern | str | None) -> Pattern | None:
    """as_pattern, or None for None."""
    return None if pattern is None else as_pattern(pattern)


def _evaluate(node: ast.expr) -> Pattern:
    match node:
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.UnaryOp(ast.Invert(), operand):
            return ~_evaluate(operand)
        case ast.Name(name):
            return call_builtin(name)
        case ast.Call(ast.Name(name), args, keywords):
            named = {str(k.arg): _literal(k.value) for k in keywords}
            if len(named) < len(keywords):
                raise ValueError(f"an argument of {name} is given twice")
            return call_builtin(name, *map(_literal, args), **named)
    raise ValueError(f"{shortened(ast.unparse(node))} {_allowed()}")


def _allowed() -> str:
    """What a pattern may be written with, for messages."""
    return f"must be built of {sorted(_makers())} with & | ^ - ~"


def _literal(node: ast.expr):
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(
            f"arguments of patterns must be literals, got {shortened(ast.unparse(node))}"
        ) from None


def call_builtin(maker: str, /, *args: Any, **kwargs: Any) -> Pattern:
    """The built-in pattern `maker` with arguments that were read from a text or a file.

    An argument that names a Python file would run code in the process that reads it, so it is
    refused. Raises ValueError for such an argument and for an unknown maker.
    """
    makers = _makers()
    if maker not in makers:
        raise ValueError(f"unknown pattern {maker!r}; known: {sorted(makers)}")
    for value in (*args, *kwargs.values()):
        if isinstance(value, str) and names_file(value):
            raise ValueError(
                f"arguments of {maker} must not name a Python file, got {value!r}: reading a "
                "pattern runs no code"
            )
    return makers[maker](*args, **kwargs)


def _makers() -> dict[str, Callable[..., Pattern]]:
    """The built-in patterns by name; imports them first."""
    import_module("masks.patterns")  # a layer above this one
    return BUILTIN


def names_file(text: str) -> bool:
    """Whether parsing a text may run a Python file; text that was read from a file must not."""
    return ".py:" in text


def run_file(path: Path) -> dict[str, Any]:
    """Runs a Python file; returns its names. Raises ValueError if the file does not exist."""
    if not path.is_file():
        raise ValueError(f"file {path} does not exist")
    try:
        return runpy.run_path(str(path))
    except SyntaxError as error:
        raise ValueError(f"file {path} is not valid Python: {error}") from error


def defined_in(path: Path, name: str) -> Any:
    """Runs a Python file; returns the value of `name`. Raises ValueError if either is missing."""
    defined = run_file(path)
    if name not in defined:
        raise ValueError(f"{path} defines no {name!r}")
    return defined[name]


def _from_file(path: Path, name: str) -> Pattern:
    value = defined_in(path, name)
    if not isinstance(value, Pattern):
        hint = ", which has to be called first" if callable(value) else ""
        raise ValueError(f"{path}:{name} must be a Pattern, got a {type(value).__name__}{hint}")
    return value
