"""Score functions written in torch, as Triton functions of the same operations.

A function is traced, with its derivative, on single numbers: every operation is elementwise, so
the same ones serve a tile.
"""

import linecache
import math
from collections.abc import Callable
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
import triton
import triton.language as tl
from torch import fx

ARGUMENTS = ("score", "batch", "head", "query", "key")
TENSORS = ("floats", "integers", "layout")

# What each operation of torch is in Triton. {0}, {1}, ... are its arguments.
EXPRESSIONS = {
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "rsub": "({1} - {0})",
    "neg": "(-{0})", "square": "({0} * {0})", "reciprocal": "(1.0 / {0})",
    "abs": "tl.abs({0})", "sgn": "sign({0})", "sign": "sign({0})",
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log2": "tl.log2({0})",
    "sqrt": "tl.sqrt({0})", "rsqrt": "(1.0 / tl.sqrt({0}))", "sin": "tl.sin({0})",
    "cos": "tl.cos({0})", "erf": "tl.erf({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})",
    "sigmoid": "(1.0 / (1.0 + tl.exp(-({0}))))", "tanh": "tanh({0})",
    "relu": "tl.maximum({0}, 0.0)", "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})", "clamp_min": "tl.maximum({0}, {1})",
    "clamp_max": "tl.minimum({0}, {1})", "where": "tl.where({0}, {1}, {2})",
    "masked_fill": "tl.where({1}, {2}, {0})", "floor_divide": "floor_divide({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "eq": "({0} == {1})", "ne": "({0} != {1})", "lt": "({0} < {1})", "le": "({0} <= {1})",
    "gt": "({0} > {1})", "ge": "({0} >= {1})",
    "bitwise_and": "({0} & {1})", "bitwise_or": "({0} | {1})", "bitwise_xor": "({0} ^ {1})",
    "logical_and": "({0} & {1})", "logical_or": "({0} | {1})", "logical_xor": "({0} ^ {1})",
    "bitwise_not": "(~{0})", "logical_not": "({0} == 0)",
}  # fmt: skip
OF_FLOATS = {"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "sigmoid", "tanh"}
READ = "_read"  # of sparseflash.score: an entry of a score tensor
CONSTANTS = {"full_like": 1, "full": 1, "scalar_tensor": 0}  # where the number is
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
def remainder(a, b):
    """That of the sign of the divisor, as torch's."""
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


def triton_function(
    name: str,
    graph: fx.Graph,
    constants: Callable[[str], Any],
    tensors: tuple[tuple[type, int], ...] = (),
) -> Any:
    """The jit function of a traced function, (score, batch, head, query, key) -> (f, derivative).

    With score tensors its last arguments are the pointers of score_mods.ScorePointers.

    Args:
        name: Of the score function.
        graph: Of operations of aten on single numbers.
        constants: The value of an attribute of the graph.
        tensors: Those of the ScoreFunction.

    Raises:
        UntranslatableError: The graph has an operation or a constant that is not translated.
    """
    source = triton_source(graph, constants, tensors)
    filename = f"<score function {name}>"
    # Triton reads the source of a function; nothing else keeps that of one made of a text.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    space = {
        "__name__": f"sparseflash.score.{name}",
        **{"tl": tl, "sign": sign, "tanh": tanh},
        **{"remainder": remainder, "floor_divide": floor_divide, "nearest": nearest},
    }
    exec(compile(source, filename, "exec"), space)
    return triton.jit(space["score_function"])


def triton_source(
    graph: fx.Graph,
    constants: Callable[[str], Any],
    tensors: tuple[tuple[type, int], ...] = (),
) -> str:
    """The definition of the function, one line an operation."""
    lines, names, of_score = [], {}, set()
    begins = accumulate([1 + dims for _, dims in tensors], initial=0)
    kinds = ["floats" if kind is float else "integers" for kind, _ in tensors]
    placeholders = iter([*ARGUMENTS, *zip(kinds, begins, strict=False)])
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = next(placeholders)
            of_score |= {node} if names[node] == "score" else set()
        elif node.op == "get_attr":
            names[node] = _constant(constants(node.target), node.target)
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == READ:
            names[node] = f"v{len(lines)}"
            lines.append(f"{names[node]} = {_read(node, names)}")
        elif node.op == "call_function" and _name_of(node.target) in CONSTANTS:
            names[node] = _number(node)
        elif node.op == "call_function":
            names[node] = f"v{len(lines)}"
            lines.append(f"{names[node]} = {_expression(node, names)}")
            of_score |= {node} if of_score.intersection(node.all_input_nodes) else set()
        elif node.op == "output":
            function, derivative = node.args[0]
            tile = "" if function in of_score else " + score * 0.0"
            lines.append(f"return {names[function]}{tile}, {names[derivative]}")
    body = "".join(f"    {line}\n" for line in lines)
    arguments = [*ARGUMENTS, *(TENSORS if tensors else ())]
    return f"def score_function({', '.join(arguments)}):\n{body}"


def _read(node: fx.Node, names: dict[fx.Node, Any]) -> str:
    """An entry of a score tensor, whose sizes follow its place in the layout."""
    arguments: Any = node.args
    stand_in, indices = arguments
    pointer, begin = names[stand_in]
    place = "0"
    for size, index in enumerate(indices, begin + 1):
        entry = f"nearest({names[index]}, layout + {size})"
        place = entry if place == "0" else f"({place}) * tl.load(layout + {size}) + {entry}"
    return f"tl.load({pointer} + (tl.load(layout + {begin}) + {place}))"


def _expression(node: fx.Node, names: dict[fx.Node, str]) -> str:
    arguments = [_argument(x, names) for x in node.args]
    options = {name: x for name, x in node.kwargs.items() if x is not None}
    operation = _name_of(node.target)
    if operation in OF_FLOATS and not _dtype_of(node.args[0]).is_floating_point:
        arguments[0] = f"{arguments[0]}.to(tl.float32)"
    if operation == "_to_copy":
        dtype = options.get("dtype")
        return f"{arguments[0]}.to({TYPES[dtype]})" if dtype in TYPES else arguments[0]
    if operation in ("add", "sub", "rsub") and "alpha" in options:
        scaled = 0 if operation == "rsub" else 1
        arguments[scaled] = f"({arguments[scaled]} * {options['alpha']!r})"
    if operation == "clamp":
        bounds = [None if x == "None" else x for x in (*arguments[1:], "None", "None")[:2]]
        least, most = options.get("min", bounds[0]), options.get("max", bounds[1])
        clamped = arguments[0] if least is None else f"tl.maximum({arguments[0]}, {least})"
        return clamped if most is None else f"tl.minimum({clamped}, {most})"
    if operation == "div":
        mode = options.get("rounding_mode")
        if mode not in (None, "floor"):
            raise UntranslatableError(f"division that rounds by {mode!r} is not translated")
        form = "({0} / {1})" if mode is None else EXPRESSIONS["floor_divide"]
        return form.format(*arguments)
    if operation == "pow":
        return _power(node, arguments)
    if operation not in EXPRESSIONS:
        raise UntranslatableError(f"the operation {operation} is not translated to Triton")
    return EXPRESSIONS[operation].format(*arguments)


def _number(node: fx.Node) -> str:
    number: Any = node.args[CONSTANTS[_name_of(node.target)]]
    return _argument(float(number) if _dtype_of(node).is_floating_point else number, {})


def _dtype_of(node: Any) -> torch.dtype:
    return node.meta["tensor_meta"].dtype


def _power(node: fx.Node, arguments: list[str]) -> str:
    base: Any = node.args[0]
    exponent: Any = node.args[1]
    if not isinstance(exponent, fx.Node) and float(exponent) in range(-8, 9):
        product = " * ".join([arguments[0]] * abs(int(exponent))) or "1.0"
        return f"({product})" if exponent >= 0 else f"(1.0 / ({product}))"
    if exponent == 0.5:
        return f"tl.sqrt({arguments[0]})"
    if isinstance(base, (int, float)) and base > 0:
        return f"tl.exp2({arguments[1]} * {math.log2(base)!r})"
    return f"tl.exp2(tl.log2({arguments[0]}) * {arguments[1]})"


def _argument(x: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(x, fx.Node):
        return names[x]
    if isinstance(x, float) and not math.isfinite(x):
        return f'float("{x}")'
    return repr(x)


def _constant(value: Any, name: str) -> str:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise UntranslatableError(f"a tensor of more than one number is not translated, got {got}")
    return _argument(value.item(), {})


def _name_of(target: Any) -> str:
    if target is getitem or not isinstance(target, torch._ops.OpOverload):
        raise UntranslatableError(f"the operation {target} is not translated to Triton")
    return target.overloadpacket.__name__
