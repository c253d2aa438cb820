"""Bugs planted into a module through its syntax tree.

A bug is addressed by function, call and occurrence, so neither the layout of the source nor its
comments matter. An address that matches no place or several is an error, and so is a change that
changes nothing: a bug is planted or the test fails.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """A call in a function.

    Args:
        function: Name of the function.
        callee: What is called, without what it is an attribute of.
        about: A name among its arguments, or of the object that it is a method of.
        nth: Which one, counted from 0; None where there is one.
    """

    function: str
    callee: str
    about: str = ""
    nth: int | None = None

    def within(self, tree: ast.Module) -> ast.Call:
        found = (node for node in _ordered(_function(tree, self.function)) if self.is_at(node))
        return _the_one(found, self.nth, self)

    def is_at(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or _name(node.func) != self.callee:
            return False
        parts = [*node.args, *node.keywords]
        if isinstance(node.func, ast.Attribute):
            parts.append(node.func.value)
        return not self.about or any(
            _name(inner) == self.about for part in parts for inner in ast.walk(part)
        )


@dataclass(frozen=True)
class Drop:
    """A statement that is a call, and no more, is left out."""

    call: Call

    def plant(self, tree: ast.Module) -> None:
        block, index = _path(tree.body, self.call.within(tree))[-1]
        if not isinstance(block[index], ast.Expr):
            raise LookupError(f"{self.call} has a result: without it nothing would run")
        block[index] = ast.Pass()


@dataclass(frozen=True)
class Move:
    """The statement with a call comes before the statement with another one."""

    call: Call
    before: Call

    def plant(self, tree: ast.Module) -> None:
        paths = (_path(tree.body, call.within(tree)) for call in (self.call, self.before))
        for (block, index), (other, earlier) in zip(*paths, strict=False):
            if block is not other:
                break
            if index != earlier:
                if index < earlier:
                    raise LookupError(f"{self.call} comes before {self.before} already")
                block.insert(earlier, block.pop(index))
                return
        raise LookupError(f"{self.call} and {self.before} have no statements of one block")


@dataclass(frozen=True)
class Argument:
    """An argument of a call, by position or name, is another expression."""

    call: Call
    which: int | str
    becomes: str

    def plant(self, tree: ast.Module) -> None:
        call, value = self.call.within(tree), _expression(self.becomes)
        if isinstance(self.which, int):
            call.args[self.which] = value
        else:
            others = [keyword for keyword in call.keywords if keyword.arg != self.which]
            call.keywords = [*others, ast.keyword(self.which, value)]


@dataclass(frozen=True)
class Replace:
    """An expression in a function is another one; both are compared as trees."""

    function: str
    expression: str
    becomes: str

    def plant(self, tree: ast.Module) -> None:
        wanted = ast.dump(_expression(self.expression))
        found = (
            (node, name, position)
            for node in _ordered(_function(tree, self.function))
            for name, field in ast.iter_fields(node)
            for position, value in enumerate(field if isinstance(field, list) else [field])
            if isinstance(value, ast.expr) and ast.dump(value) == wanted
        )
        node, name, position = _the_one(found, None, self)
        if isinstance(getattr(node, name), list):
            getattr(node, name)[position] = _expression(self.becomes)
        else:
            setattr(node, name, _expression(self.becomes))


@dataclass(frozen=True)
class Constant:
    """A constant of the module has another value."""

    name: str
    becomes: str

    def plant(self, tree: ast.Module) -> None:
        found = (
            node
            for node in tree.body
            if isinstance(node, ast.Assign) and [_name(x) for x in node.targets] == [self.name]
        )
        _the_one(found, None, self).value = _expression(self.becomes)


Bug = Drop | Move | Argument | Replace | Constant


def plant(source: str | bytes, bugs: Iterable[Bug]) -> ast.Module:
    """The tree of a module with bugs in it.

    Raises:
        LookupError: If an address matches no place or several, or a bug changes nothing.
    """
    tree = ast.parse(source)
    for bug in bugs:
        before = ast.dump(tree)
        bug.plant(tree)
        if ast.dump(tree) == before:
            raise LookupError(f"{bug} changes nothing")
    return ast.fix_missing_locations(tree)


def _expression(code: str) -> ast.expr:
    return ast.parse(code, mode="eval").body


def _name(node: ast.AST) -> str | None:
    """The last part of a dotted name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return _the_one((node for node in functions if node.name == name), None, f"function {name}")


def _ordered(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, in the order of the source."""
    for child in ast.iter_child_nodes(tree):
        yield child
        yield from _ordered(child)


def _the_one(found: Iterable, nth: int | None, what: object):
    places = list(found)
    if len(places) <= (nth or 0):
        raise LookupError(f"{what} is not there: {len(places)} places match")
    if nth is None and len(places) > 1:
        raise LookupError(f"{what} may be any of {len(places)} places")
    return places[nth or 0]


def _path(block: list[ast.stmt], target: ast.AST) -> list[tuple[list[ast.stmt], int]]:
    """The (block, index) of every statement around a node, outermost first."""
    for index, statement in enumerate(block):
        if any(node is target for node in ast.walk(statement)):
            inner = (getattr(statement, name, []) for name in ("body", "orelse", "finalbody"))
            around = next((path for b in inner if b and (path := _path(b, target))), [])
            return [(block, index), *around]
    return []
