"""Translates score functions that are written in torch to Triton.

A function is traced with its derivative on scalars. All operations are elementwise, so they also
apply to tiles.
"""

import linecache
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from operator import getitem
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import fx

from sparseflash.backends.triton_common.read_sums import add_read
from sparseflash.score import ARGUMENTS

Declared = tuple[tuple[type, int], ...]

TENSORS = ("floats", "integers", "layout")

# The expression in Triton for each operation of torch. {0}, {1}, ... are its arguments.
EXPRESSIONS = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "rsub": "({1} - {0})",
    "div": "({0} / {1})",
    "neg": "(-{0})", "square": "({0} * {0})", "reciprocal": "(1.0 / {0})",
    "abs": "tl.abs({0})", "sgn": "sign({0})", "sign": "sign({0})",
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})", "rsqrt": "(1.0 / tl.sqrt({0}))", "sin": "tl.sin({0})",
    "cos": "tl.cos({0})", "erf": "tl.erf({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
    "sigmoid": "(1.0 / (1.0 + tl.exp(-({0}))))", "tanh": "tanh({0})",
    "relu": "tl.maximum({0}, 0)", "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})", "clamp_min": "tl.maximum({0}, {1})",
    "clamp_max": "tl.minimum({0}, {1})", "where": "tl.where({0}, {1}, {2})",
    "masked_fill": "tl.where({1}, {2}, {0})", "floor_divide": "floor_divide({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "eq": "({0} == {1})", "ne": "({0} != {1})", "lt": "({0} < {1})", "le": "({0} <= {1})",
    "gt": "({0} > {1})", "ge": "({0} >= {1})",
    "bitwise_and": "({0} & {1})", "bitwise_or": "({0} | {1})", "bitwise_xor": "({0} ^ {1})",
    "logical_and": "(({0} != 0) & ({1} != 0))", "logical_or": "(({0} != 0) | ({1} != 0))",
    "logical_xor": "(({0} != 0) ^ ({1} != 0))",
    "bitwise_not": "(~{0})", "logical_not": "({0} == 0)",
}  # fmt: skip
# The expressions that differ where the result is of integers, or of floating-point numbers.
EXPRESSIONS_OF_INTEGERS = {
    "sgn": "(({0} > 0).to(tl.int32) - ({0} < 0).to(tl.int32))", "floor": "{0}", "ceil": "{0}",
}  # fmt: skip
EXPRESSIONS_OF_INTEGERS["sign"] = EXPRESSIONS_OF_INTEGERS["sgn"]
EXPRESSIONS_OF_FLOATS = {"floor_divide": "tl.floor(({0} - remainder({0}, {1})) / {1} + 0.5)"}
OF_FLOATS = {"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "sigmoid", "tanh"}
READ = "_read"  # the function of sparseflash.score that reads an entry of a score tensor
# Index of the argument with the value; None for 0.
CONSTANTS = {"full_like": 1, "full": 1, "scalar_tensor": 0, "_efficientzerotensor": None}
TYPES = {
    torch.float32: "tl.float32", torch.float64: "tl.float32", torch.int64: "tl.int32",
    torch.int32: "tl.int32", torch.bool: "tl.int1",
}  # fmt: skip


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    return sign(x) * ((1.0 - e) / (1.0 + e))


@triton.jit
def power(a, b):
    """a to the power of b: of a negative a, NaN unless b is an integer."""
    half = b * 0.5
    size = tl.where(b == 0.0, 1.0, tl.exp2(tl.log2(tl.abs(a)) * b))
    signed = tl.where(tl.floor(half) == half, size, -size)
    return tl.where(a < 0.0, tl.where(tl.floor(b) == b, signed, float("nan")), size)


@triton.jit
def remainder(a, b):
    """The remainder with the sign of the divisor, as torch computes it."""
    left = a % b
    return tl.where((left != 0) & ((left < 0) != (b < 0)), left + b, left)


@triton.jit
def floor_divide(a, b):
    return (a - remainder(a, b)) // b


@triton.jit
def nearest(index, size):
    """The nearest index that there is, of sizes from 1 on."""
    return tl.minimum(tl.maximum(index, 0), tl.load(size) - 1)


class UntranslatableError(ValueError):
    """A function has an operation that is not translated; the message names it."""


def triton_function(name: str, traced: fx.GraphModule, tensors: Declared = ()) -> Any:
    """The jit function of a traced function, (score, batch, head, query, key) -> (f, derivative).

    With score tensors, its last arguments are the fields of score_mods.ScorePointers.

    Args:
        name: Name of the score function.
        traced: Operations of aten on scalars.
        tensors: `tensors` of the ScoreFunction.

    Raises:
        UntranslatableError: The graph has an operation or a constant that is not translated.
    """
    return _jit(name, "score_function", triton_source(traced, tensors))


def triton_adder(
    name: str, traced: fx.GraphModule, numbers: Sequence[int], tensors: Declared
) -> Any:
    """The jit function that adds the summands of a tile to the gradients of score tensors.

    (score, batch, head, query, key, *ScorePointers, dS, ReadSums) -> None

    Args:
        name: Name of the score function.
        traced: df / dentry and the indices of each read, as operations of aten on scalars.
        numbers: The number of the tensor of each read.
        tensors: `tensors` of the ScoreFunction.

    Raises:
        UntranslatableError: The graph has an operation or a constant that is not translated.
    """
    lines, names, _, results = _translated(traced, tensors)
    begins, values = _begins(tensors), iter(results)
    for number in numbers:
        slope = names[next(values)]
        indices = [names[index] for index in islice(values, tensors[number][1])]
        lines.append(f"add_read(sums, {_offset(begins[number], indices)}, ds * ({slope}))")
    arguments = (*ARGUMENTS, *TENSORS, "ds", "sums")
    return _jit(name, "add_reads", _definition("add_reads", arguments, [*lines, "return"]))


def triton_source(traced: fx.GraphModule, tensors: Declared = ()) -> str:
    """The source of the function, with a line for each operation."""
    lines, names, of_score, (function, derivative) = _translated(traced, tensors)
    tile = "" if function in of_score else " + score * 0.0"
    lines.append(f"return {names[function]}{tile}, {names[derivative]}")
    arguments = (*ARGUMENTS, *(TENSORS if tensors else ()))
    return _definition("score_function", arguments, lines)


class _Translated(NamedTuple):
    """A translated graph.

    lines:    lines of the function
    names:    name or value of each node in them
    of_score: nodes that depend on the score, so that they are tiles
    results:  nodes that the function returns
    """

    lines: list[str]
    names: dict[fx.Node, Any]
    of_score: set[fx.Node]
    results: Any


def _translated(traced: fx.GraphModule, tensors: Declared) -> _Translated:
    lines, names, of_score, results = [], {}, set(), ()
    constants: dict[fx.Node, torch.Tensor] = {}
    kinds = ["floats" if kind is float else "integers" for kind, _ in tensors]
    placeholders = iter([*ARGUMENTS, *zip(kinds, _begins(tensors), strict=True)])
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            names[node] = next(placeholders)
            of_score |= {node} if names[node] == "score" else set()
        elif node.op == "get_attr":
            constants[node] = _constant(getattr(traced, node.target))
        elif node.op == "output":
            results = node.args[0]
        elif getattr(node.target, "__name__", "") == READ:
            names[node] = f"v{len(lines)}"
            lines.append(f"{names[node]} = {_read(node, names)}")
        elif _name_of(node.target) in CONSTANTS:
            constants[node] = _number(node)
        elif node.all_input_nodes and constants.keys() >= {*node.all_input_nodes}:
            constants[node] = node.target(*fx.map_arg(node.args, constants.get), **node.kwargs)
        else:
            names[node] = f"v{len(lines)}"
            numbers = [constants[x].item() if x in constants else x for x in node.args]
            lines.append(f"{names[node]} = {_expression(node, numbers, names)}")
            of_score |= {node} if of_score.intersection(node.all_input_nodes) else set()
        if node in constants:
            names[node] = _argument(constants[node].item(), {})
    return _Translated(lines, names, of_score, results)


def _definition(function: str, arguments: Iterable[str], lines: list[str]) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"def {function}({', '.join(arguments)}):\n{body}"


def _jit(name: str, function: str, source: str) -> Any:
    """The jit function that is defined by source text."""
    filename = f"<{function} of {name}>"
    # Triton reads the source of a function, which for compiled text only linecache can provide.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    space = {
        "__name__": f"sparseflash.score.{name}",
        **{"tl": tl, "sign": sign, "tanh": tanh, "power": power, "add_read": add_read},
        **{"remainder": remainder, "floor_divide": floor_divide, "nearest": nearest},
    }
    exec(compile(source, filename, "exec"), space)
    return triton.jit(space[function])


def _begins(tensors: Declared) -> list[int]:
    """The index in the layout at which the numbers of each tensor begin."""
    return [*accumulate((1 + dims for _, dims in tensors), initial=0)][:-1]


def _read(node: fx.Node, names: dict[fx.Node, Any]) -> str:
    """An entry of a score tensor."""
    arguments: Any = node.args
    stand_in, indices = arguments
    pointer, begin = names[stand_in]
    return f"tl.load({pointer} + {_offset(begin, [names[index] for index in indices])})"


def _offset(begin: int, indices: Iterable[str]) -> str:
    """The offset of an entry among all entries of its kind, as an expression.

    In the layout the sizes of a tensor follow its offset.
    """
    offset = "0"
    for size, index in enumerate(indices, begin + 1):
        entry = f"nearest({index}, layout + {size})"
        offset = entry if offset == "0" else f"({offset}) * tl.load(layout + {size}) + {entry}"
    return f"(tl.load(layout + {begin}) + {offset})"


def _expression(node: fx.Node, values: list[Any], names: dict[fx.Node, str]) -> str:
    """An operation on `values`: nodes, numbers or None."""
    arguments = [_argument(x, names) for x in values]
    options: dict[str, Any] = {name: x for name, x in node.kwargs.items() if x is not None}
    operation = _name_of(node.target)
    if operation in OF_FLOATS and not _is_float(values[0]):
        arguments[0] = f"{arguments[0]}.to(tl.float32)"
    if operation == "_to_copy":
        if options.get("dtype") not in TYPES:
            raise UntranslatableError(f"a conversion to {options.get('dtype')} is not translated")
        return f"{arguments[0]}.to({TYPES[options['dtype']]})"
    if operation in ("add", "sub", "rsub") and "alpha" in options:
        scaled = 0 if operation == "rsub" else 1
        whole = isinstance(values[scaled], fx.Node) and not _is_float(node)
        wide = ".to(tl.int64)" if whole else ""
        arguments[scaled] = f"({arguments[scaled]}{wide} * {options['alpha']!r})"
    if operation == "clamp":
        bounds = [None if x == "None" else x for x in (*arguments[1:], "None", "None")[:2]]
        least, most = options.get("min", bounds[0]), options.get("max", bounds[1])
        clamped = arguments[0] if least is None else f"tl.maximum({arguments[0]}, {least})"
        return clamped if most is None else f"tl.minimum({clamped}, {most})"
    if operation == "div" and "rounding_mode" in options:
        if options["rounding_mode"] != "floor":
            mode = options["rounding_mode"]
            raise UntranslatableError(f"division that rounds by {mode!r} is not translated")
        operation = "floor_divide"
    if _dtype_of(node) == torch.bool:
        operation = {"add": "bitwise_or", "mul": "bitwise_and"}.get(operation, operation)
    if not _is_float(node):
        arguments = _widened(operation, values, arguments)
    if operation == "pow":
        if not _is_float(node) and isinstance(values[1], fx.Node):
            base = "an integer" if isinstance(values[0], fx.Node) else values[0]
            raise UntranslatableError(f"a power of {base} is not translated, unless to a number")
        return _power(values, arguments)
    own = EXPRESSIONS_OF_FLOATS if _is_float(node) else EXPRESSIONS_OF_INTEGERS
    if operation not in EXPRESSIONS:
        raise UntranslatableError(f"the operation {operation} is not translated to Triton")
    return own.get(operation, EXPRESSIONS[operation]).format(*arguments)


def _widened(operation: str, values: list[Any], arguments: list[str]) -> list[str]:
    """The arguments, as integers of 64 bits in products and beside numbers of 2^30 or more."""
    largest = max((abs(x) for x in values if isinstance(x, int)), default=0)
    if largest < 2**30 and operation not in ("mul", "square", "pow"):
        return arguments
    pairs = zip(arguments, values, strict=True)
    return [
        f"{argument}.to(tl.int64)" if isinstance(x, fx.Node) and not _is_float(x) else argument
        for argument, x in pairs
    ]


def _number(node: fx.Node) -> torch.Tensor:
    """The constant that a node of CONSTANTS makes."""
    at: Any = CONSTANTS[_name_of(node.target)]
    number: Any = 0 if at is None else node.args[at]
    return torch.tensor(number, dtype=_dtype_of(node), device="cpu")


def _dtype_of(node: Any) -> torch.dtype:
    return node.meta["tensor_meta"].dtype


def _is_float(x: Any) -> bool:
    return _dtype_of(x).is_floating_point if isinstance(x, fx.Node) else isinstance(x, float)


def _power(values: list[Any], arguments: list[str]) -> str:
    base, exponent = values
    number = None if isinstance(exponent, fx.Node) else float(exponent)
    if number is not None and number in range(-8, 9):
        product = " * ".join([arguments[0]] * abs(int(number))) or "1.0"
        return f"({product})" if number >= 0 else f"(1.0 / ({product}))"
    if isinstance(base, fx.Node) and not _is_float(base):
        arguments[0] = f"{arguments[0]}.to(tl.float32)"
    if number == 0.5:
        return f"tl.sqrt({arguments[0]})"
    if isinstance(base, fx.Node) and number is None:
        return f"power({arguments[0]}, {arguments[1]}.to(tl.float32))"
    if isinstance(base, fx.Node) and number is not None and number.is_integer():
        sign = f"sign({arguments[0]})" if number % 2 else "1.0"
        return f"({sign} * tl.exp2(tl.log2(tl.abs({arguments[0]})) * {number}))"
    if isinstance(base, fx.Node):
        return f"tl.exp2(tl.log2({arguments[0]}) * {arguments[1]})"
    if base <= 0:
        raise UntranslatableError(f"a power of {base} is not translated")
    return f"tl.exp2({arguments[1]} * {math.log2(base)!r})"


def _argument(x: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(x, fx.Node):
        return names[x]
    if isinstance(x, float) and not math.isfinite(x):
        return f'float("{x}")'
    return repr(x)


def _constant(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise UntranslatableError(
            f"a tensor with more than one element must be a score tensor, got {got}"
        )
    return value.reshape(())


def _name_of(target: Any) -> str:
    if target is getitem or not isinstance(target, torch._ops.OpOverload):
        raise UntranslatableError(f"the operation {target} is not translated to Triton")
    return target.overloadpacket.__name__
