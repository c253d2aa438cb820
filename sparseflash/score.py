"""Score functions: elementwise functions of the user that are applied to the scores S."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from itertools import islice
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from masks.arguments import broadcasts, check_takes

ARGUMENTS = ("score", "batch", "head", "query", "key")


@dataclass(frozen=True, eq=False, repr=False)
class ScoreFunction:
    """A function of each score: (score, batch, head, query, key) -> (f, df / dscore).

    Attention replaces S by f(S, batch, head, query, key). Both results must be finite for every
    finite score and every pair, including pairs past the end of the sequence. They may depend only
    on the arguments and on constants. `from_torch` makes a ScoreFunction from f alone.

    Args:
        name: A unique name. `attention` accepts the name or the object.
        torch: The function for the backend "cpu". It gets a floating-point tensor of scores and
            integer tensors that broadcast to it. f has the shape of the scores. The reference
            also calls it, and differentiates f itself.
        triton: The same function for the backends "triton" and "hopper", with the decorator
            triton.jit; its arguments are tiles. None if there is none. For "hopper" it must not
            construct tiles (tl.full, tl.zeros, tl.arange and the like).
        tensors: (float or int, number of dims) of each score tensor; see from_torch.
        of_batch: Whether f depends on the batch element. from_torch determines it.
        of_query: Whether f depends on the position of the query. from_torch determines it.
        reads: The derivatives of f by the entries of score tensors that it reads. from_torch
            makes them. Without them score tensors get no gradients.
        indexed_by: For each dim of each score tensor, those of ARGUMENTS by which f indexes it
            directly. from_torch determines them, so that a score tensor of too few entries is
            refused. Without them any size is allowed.
        source: The operations of f and of its derivative, from from_torch.

    Raises:
        TypeError: `name` is not a string, or `torch` is not callable.
        ValueError: Another score function has this name.

    Reference:
        Dong et al., "Flex Attention", 2024 (score_mod).
    """

    name: str
    torch: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | float]]
    triton: Any = None
    tensors: tuple[tuple[type, int], ...] = ()
    of_query: bool = True
    reads: "ReadDerivatives | None" = None
    of_batch: bool = True
    indexed_by: tuple[tuple[tuple[str, ...], ...], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string, got {self.name!r}")
        if not callable(self.torch):
            raise TypeError(f"torch must be a function, got {self.torch!r}")
        if _functions.setdefault(self.name, self) is not self:
            raise ValueError(
                f"name must be unique, got {self.name!r}, the name of another function"
            )

    @classmethod
    def from_torch(
        cls, name: str, function: Callable[..., Tensor], tensors: Sequence[type] = ()
    ) -> "ScoreFunction":
        """Makes a score function from f alone.

        f is differentiated automatically. If Triton is installed, f and its derivative are also
        translated to Triton.

        Args:
            name: A unique name. If it is that of a function with the same operations, such as
                one that a notebook has made before, that one is returned.
            function: (score, batch, head, query, key) -> f, with elementwise operations of torch:
                arithmetic, comparisons, torch.where, exponentials, powers, rounding. It is
                traced once for each dtype, with scalar tensors. Numbers, and tensors of one
                number, that it reads from outside are constants.
            tensors: float or int for each score tensor. A score tensor is a tensor that the
                function reads (a captured buffer in FlexAttention); a call passes it in
                score_tensors. The function gets score tensors after `key` and indexes them by
                one integer for each dim, such as document[batch, query]. A dim that is indexed by
                an argument itself has at least as many entries as there are batch elements, heads,
                queries or keys, or one entry for all of them. A computed index past either end
                reads the nearest entry. A function with score tensors may also mask a pair:
                torch.where(same, score, -inf). It is also differentiated by the floating-point
                entries that it reads.

        Returns:
            The score function.

        Raises:
            TypeError: `name` is not a string, f does not take these arguments or does not return
                one number for each pair, or a score tensor is neither float nor int, or is not
                indexed by integers.
            ValueError: Another score function has this name, f reads the value of a tensor on the
                host, f reads a tensor from outside that requires a gradient, or f has an operation
                that is not translated to Triton. The message names it.

        Reference:
            Dong et al., "Flex Attention", 2024 (score_mod).
        """
        if not callable(function):
            raise TypeError(f"function must be callable, got {function!r}")
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r}")
        if not isinstance(tensors, Sequence):
            raise TypeError(f"tensors must be a list of float or int, got {tensors!r}")
        kinds = tuple(tensors)
        if not all(kind in (float, int) for kind in kinds):
            raise TypeError(f"tensors must be float or int for each, got {kinds}")
        parameters = (*ARGUMENTS, *(f"tensor {i}" for i in range(len(kinds))))
        check_takes("function", function, parameters, "see ScoreFunction.from_torch")
        traced = _traced(name, function, torch.float32, kinds)
        indexed_by = _indices_of_reads(name, traced.graph)
        declared = tuple((kind, len(own)) for kind, own in zip(kinds, indexed_by, strict=True))
        source, known = _source(traced), _functions.get(name)
        if known is not None and (known.source, known.tensors) == (source, declared):
            return known
        evaluate = partial(_evaluate, name, function, kinds)
        derive = partial(_read_derivatives, name, function, kinds) if float in kinds else None
        nodes = [*traced.graph.nodes]
        depends = {f"of_{x}": bool(nodes[ARGUMENTS.index(x)].users) for x in ("query", "batch")}
        triton_function = add_reads = None
        if find_spec("triton") is not None:
            from sparseflash.backends.triton_common import score_source

            try:
                triton_function = score_source.triton_function(name, traced, declared)
                if derive is not None:
                    numbers, traced_reads = _traced_reads(name, function, torch.float32, kinds)
                    add_reads = score_source.triton_adder(name, traced_reads, numbers, declared)
            except ValueError as error:
                raise ValueError(f"score function {name!r}: {error}") from error
        reads = derive and ReadDerivatives(derive, add_reads)
        return cls(
            name,
            evaluate,
            triton_function,
            declared,
            reads=reads,
            indexed_by=indexed_by,
            source=source,
            **depends,
        )

    def evaluate(self, *arguments: Tensor) -> tuple[Tensor, Tensor | float]:
        """Evaluates `torch`.

        Args:
            *arguments: score, batch, head, query, key and the score tensors.

        Returns:
            (f, df / dscore).

        Raises:
            TypeError: `torch` does not return two values.
            ValueError: f does not have the shape of score, or df / dscore does not broadcast to
                this shape.
        """
        result = self.torch(*arguments)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"score function {self.name!r} must return (f, df / dscore), got "
                f"{type(result).__name__}"
            )
        shape, (f, derivative) = arguments[0].shape, result
        if f.shape != shape:
            raise ValueError(
                f"f of score function {self.name!r} must have the shape of score, {tuple(shape)}, "
                f"got {tuple(f.shape)}"
            )
        if isinstance(derivative, Tensor) and not broadcasts(derivative.shape, shape):
            raise ValueError(
                f"df / dscore of score function {self.name!r} must broadcast to the shape of "
                f"score, {tuple(shape)}, got {tuple(derivative.shape)}"
            )
        return result

    def __repr__(self) -> str:
        return (
            f"ScoreFunction(name={self.name!r}, has_triton={self.triton is not None}, "
            f"tensors={self.tensors}, of_batch={self.of_batch}, of_query={self.of_query})"
        )


class ReadDerivatives(NamedTuple):
    """The derivatives of a score function f by the entries of score tensors that it reads.

    Args:
        torch: A function of the arguments of f. For each read of a floating-point tensor it
            returns the number of the tensor, the index of the entry in the flattened tensor, and
            df / dentry; both broadcast to the scores.
        triton: A function of the arguments of f in Triton, dS and read_sums.ReadSums. It adds
            dS df / dentry of a tile to the sum of each entry. None if there is none.
    """

    torch: Callable[..., list[tuple[int, Tensor, Tensor]]]
    triton: Any = None


class ScoreTensors:
    """The score tensors of a call: each contiguous, and int64 or in the dtype of the scores."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tuple(tensors)

    @cached_property
    def flat(self) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """(floating-point entries, integer entries, offsets and sizes): each (n,), or None."""
        floats = [x.flatten() for x in self.tensors if x.is_floating_point()]
        integers = [x.flatten() for x in self.tensors if not x.is_floating_point()]
        kinds_and_shapes = tuple((x.is_floating_point(), x.shape) for x in self.tensors)
        layout = _layout(kinds_and_shapes, self.tensors[0].device)
        return _concatenated(floats), _concatenated(integers), layout

    def zero_gradient(self) -> Tensor:
        """Zeros (n,) for the gradients of all floating-point tensors, one after another."""
        floats = [x for x in self.tensors if x.is_floating_point()]
        return floats[0].new_zeros(sum(x.numel() for x in floats))

    def split_gradient(self, sums: Tensor | None) -> list[Tensor | None]:
        """Splits a tensor like that of zero_gradient into the gradient of each score tensor.

        Returns:
            A view in the shape of each floating-point tensor; None for integer tensors, and for
            all of them if `sums` is None.
        """
        parts, begin = [], 0
        for x in self.tensors:
            part = None
            if sums is not None and x.is_floating_point():
                part = sums[begin : begin + x.numel()].view(x.shape)
                begin += x.numel()
            parts.append(part)
        return parts


def _concatenated(tensors: list[Tensor]) -> Tensor | None:
    if len(tensors) > 1:
        return torch.cat(tensors)
    return tensors[0] if tensors else None


@lru_cache(maxsize=256)
def _layout(kinds_and_shapes: tuple[tuple[bool, torch.Size], ...], device: torch.device) -> Tensor:
    """int64 (n,): for each tensor its offset among the tensors of its kind, then its sizes."""
    numbers, offsets = [], {True: 0, False: 0}
    for is_float, shape in kinds_and_shapes:
        numbers += [offsets[is_float], *shape]
        offsets[is_float] += shape.numel()
    return torch.tensor(numbers, device=device)


def checked_score_tensors(
    score: ScoreFunction | str | None,
    tensors: Sequence[Tensor] | None,
    query: Tensor,
    seq_len: tuple[int, int],
    padded: bool,
    heads: int | None = None,
) -> ScoreTensors | None:
    """The score tensors of a call as backends read them; None if there are none.

    Args:
        score: The score function of the call, its name, or None.
        tensors: The argument score_tensors; None is the same as no tensors.
        query: The query of the call, which sets dtype and device.
        seq_len: Number of queries and of keys.
        padded: Whether there are key lengths, past which no entry of a score tensor counts.
        heads: Number of all heads, if the query has some of them.

    Raises:
        TypeError, ValueError: `tensors` are not those that the score function declares.
    """
    if tensors is None:
        if score is None:
            return None  # of most calls, in less time than the checks below take
        tensors = ()
    function = find_score_function(score) if isinstance(score, str) else score
    declared = () if function is None else function.tensors
    if not isinstance(tensors, Sequence) or len(tensors) != len(declared):
        got = len(tensors) if isinstance(tensors, Sequence) else type(tensors).__name__
        if function is None:
            raise ValueError(f"score_tensors must be empty without a score function, got {got}")
        raise ValueError(
            f"score_tensors must be a list of the {len(declared)} tensors that score function "
            f"{function.name!r} reads, got {got}"
        )
    sizes: dict[str, int] = dict(zip(ARGUMENTS[1:], (*query.shape[:2], *seq_len), strict=True))
    sizes["head"] = sizes["head"] if heads is None else heads
    sizes["key"] = 0 if padded else sizes["key"]
    wide, checked = torch.promote_types(query.dtype, torch.float32), []
    for i, (x, (kind, dims)) in enumerate(zip(tensors, declared, strict=True)):
        name = f"score_tensors[{i}]"
        if not isinstance(x, Tensor) or x.is_complex() or x.is_floating_point() != (kind is float):
            got = getattr(x, "dtype", type(x).__name__)
            raise TypeError(f"{name} must be a tensor of {kind.__name__}, got {got}")
        if x.dim() != dims or x.numel() == 0 or x.device != query.device:
            raise ValueError(
                f"{name} must have {dims} dims, none of size 0, on {query.device}, got "
                f"{tuple(x.shape)} on {x.device}"
            )
        if function and function.indexed_by:
            _check_sizes(name, x, function.name, function.indexed_by[i], sizes)
        if function and function.reads is None and torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient: score function {function.name!r} was "
                "differentiated by hand, and only ScoreFunction.from_torch differentiates by "
                "score tensors"
            )
        checked.append(x.to(wide if kind is float else torch.int64).contiguous())
    return ScoreTensors(checked) if checked else None


def _check_sizes(
    name: str,
    tensor: Tensor,
    function: str,
    indexed_by: tuple[tuple[str, ...], ...],
    sizes: Mapping[str, int],
) -> None:
    """Raises ValueError if a dim has too few entries for the arguments that index it."""
    for dim, arguments in enumerate(indexed_by):
        for argument in arguments:
            if tensor.shape[dim] < sizes[argument] and tensor.shape[dim] != 1:
                raise ValueError(
                    f"{name} must have at least {sizes[argument]} entries in dim {dim}, or 1 for "
                    f"all, because score function {function!r} indexes it by {argument}, got "
                    f"{tuple(tensor.shape)}"
                )


def any_requires_grad(tensors: Sequence[Tensor] | None) -> bool:
    """Whether any score tensor requires a gradient. Wrong arguments are refused elsewhere."""
    if tensors is None:  # most calls; the checks below take longer
        return False
    if not (torch.is_grad_enabled() and isinstance(tensors, Sequence)):
        return False
    return any(getattr(x, "requires_grad", False) for x in tensors)


class _TracedScoreTensor:
    """What a score function gets in place of a score tensor while it is traced.

    Args:
        stand_in: A scalar of the dtype of the score tensor.
        reads: A list to which reads of a floating-point tensor are appended: the entry, as a
            leaf by which f can be differentiated, and its indices.
    """

    def __init__(self, stand_in: Tensor, reads: list[tuple[Tensor, list[Tensor]]] | None = None):
        self._stand_in, self._reads = stand_in, reads

    def __getitem__(self, indices: Any) -> Tensor:
        checked = []
        for index in indices if isinstance(indices, tuple) else (indices,):
            if isinstance(index, int) and not isinstance(index, bool):
                index = torch.full((), index, dtype=torch.int64, device="cpu")
            if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
                got = getattr(index, "dtype", type(index).__name__)
                raise TypeError(f"a score tensor must be indexed by integers, got {got}")
            checked.append(index)
        entry = torch.ops.sparseflash.read(self._stand_in, checked)
        if self._reads is not None and entry.is_floating_point():
            entry = entry.detach().requires_grad_()
            self._reads.append((entry, checked))
        return entry


@torch.library.custom_op(
    "sparseflash::read", mutates_args=(), schema="(Tensor x, Tensor[] i) -> Tensor"
)
def _traced_read(x: Tensor, i: list[Tensor]) -> Tensor:
    """Replaces _read in a trace, in which scalars replace score tensors."""
    return x.clone()


def _read(x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """x[indices], where indices broadcast and each is clamped to the range of its dim."""
    return x[tuple(_clamped(x.shape, indices, x.device))]


def _clamped(shape: torch.Size, indices: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [i.to(device).clamp(0, n - 1) for i, n in zip(indices, shape, strict=True)]


def _indices_of_reads(name: str, graph: fx.Graph) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """ScoreFunction.indexed_by.

    Raises:
        ValueError: A score tensor is not read, or with different numbers of indices.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    arguments = dict(zip(placeholders, ARGUMENTS, strict=False))
    of_tensors = []
    for i, stand_in in enumerate(placeholders[len(ARGUMENTS) :]):
        reads = [node.args[1] for node in stand_in.users]
        dims = {len(indices) for indices in reads}
        if len(dims) != 1:
            raise ValueError(
                f"score function {name!r} must read tensor {i}, always with as many indices, got "
                f"{sorted(dims) or 'no read'}"
            )
        of_dims = (set(of_dim) & arguments.keys() for of_dim in zip(*reads, strict=True))
        of_tensors.append(tuple(tuple(sorted(arguments[x] for x in own)) for own in of_dims))
    return tuple(of_tensors)


def _evaluate(
    name: str, function: Callable, kinds: tuple[type, ...], score: Tensor, *rest: Tensor
) -> tuple[Tensor, Tensor]:
    """(f, df / dscore) of tensors, computed by the traced operations."""
    f, derivative = _traced(name, function, score.dtype, kinds)(score, *rest)
    return f.expand(score.shape), derivative


def _read_derivatives(
    name: str, function: Callable, kinds: tuple[type, ...], score: Tensor, *rest: Tensor
) -> list[tuple[int, Tensor, Tensor]]:
    """See ReadDerivatives.torch."""
    numbers, module = _traced_reads(name, function, score.dtype, kinds)
    results, reads = iter(module(score, *rest)), []
    for number in numbers:
        shape, derivative, flat_index = rest[4 + number].shape, next(results), 0
        indices = [*islice(results, len(shape))]
        for n, index in zip(shape, _clamped(shape, indices, score.device), strict=True):
            flat_index = flat_index * n + index
        reads.append((number, flat_index, derivative))
    return reads


# torch traces in one thread at a time; a function that calls another one may trace that too.
_tracing = RLock()
# These operations do not change a scalar, but would fail on, or change, a tensor.
_COPIES = ("alias", "clone", "detach", "expand", "lift_fresh", "lift_fresh_copy", "view")


@lru_cache(maxsize=256)
def _traced(
    name: str, function: Callable, score_dtype: torch.dtype, kinds: tuple[type, ...] = ()
) -> fx.GraphModule:
    """(f, df / dscore), traced with scalars, as operations that also apply to tensors."""

    def f_and_derivative(score: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        score = score.detach().requires_grad_()
        f = _checked_result(function(score, *rest[:4], *map(_TracedScoreTensor, rest[4:])))
        if not f.requires_grad:
            return f, torch.zeros_like(score)
        (derivative,) = torch.autograd.grad(f, score, torch.ones_like(f))
        return f, derivative

    return _trace(name, f_and_derivative, score_dtype, kinds)


def _source(traced: fx.GraphModule) -> str:
    """The operations of a traced function, with the values of its constants."""
    names = [node.target for node in traced.graph.nodes if node.op == "get_attr"]
    constants = [f"{name} = {getattr(traced, name).tolist()}" for name in dict.fromkeys(names)]
    return "\n".join([traced.code, *constants])


@lru_cache(maxsize=256)
def _traced_reads(
    name: str, function: Callable, score_dtype: torch.dtype, kinds: tuple[type, ...]
) -> tuple[list[int], fx.GraphModule]:
    """The reads of score tensors on which f depends.

    Returns:
        For each read the number of its tensor, and a traced function of scalars that returns
        df / dentry and the indices of each read, one after another.
    """
    numbers = []

    def read_derivatives(score: Tensor, *rest: Tensor) -> list[Tensor]:
        reads = [[] for _ in kinds]
        f = _checked_result(function(score, *rest[:4], *map(_TracedScoreTensor, rest[4:], reads)))
        all_reads = [(number, *read) for number, own in enumerate(reads) for read in own]
        if not f.requires_grad:
            return []
        entries = [entry for _, entry, _ in all_reads]
        derivatives = torch.autograd.grad(f, entries, torch.ones_like(f), allow_unused=True)
        results = []
        for (number, _, indices), derivative in zip(all_reads, derivatives, strict=True):
            if derivative is not None:
                numbers.append(number)
                results += [derivative, *indices]
        return results

    module = _trace(name, read_derivatives, score_dtype, kinds)
    return numbers, module


def _checked_result(result: Any) -> Tensor:
    """Checks that a score function returns a floating-point scalar for scalars."""
    if not isinstance(result, Tensor):
        raise TypeError(f"f must be a tensor, got {type(result).__name__}")
    if not result.is_floating_point():
        raise TypeError(f"f must have a floating-point dtype, got {result.dtype}")
    if result.dim():
        raise TypeError(f"f must be one number for each pair, got {tuple(result.shape)}")
    return result


@lru_cache(maxsize=1)
def _decompositions() -> dict:
    """Decompositions of operations into simpler ones. Torch takes 0.1 s to list them."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions().items())


def _trace(
    name: str, function: Callable, score_dtype: torch.dtype, kinds: tuple[type, ...]
) -> fx.GraphModule:
    """Traces a function of scalars: score, batch, head, query, key and score tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes half a second

    dtypes = [torch.int64] * 4 + [score_dtype if kind is float else torch.int64 for kind in kinds]
    arguments = [torch.zeros((), dtype=dtype, device="cpu") for dtype in dtypes]
    try:
        with _tracing, torch.inference_mode(False), torch.enable_grad():
            score = torch.zeros((), dtype=score_dtype, device="cpu")
            module = make_fx(function, _decompositions())(score, *arguments)
    except TypeError as error:
        raise TypeError(f"score function {name!r} cannot be traced: {error}") from error
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"score function {name!r} cannot be traced. Its arguments are scalars: it must not "
            "branch on them (use torch.where), and with them it may index only tensors that it "
            f"gets as arguments (see tensors of ScoreFunction.from_torch): {error}"
        ) from error
    for attribute in {node.target for node in module.graph.nodes if node.op == "get_attr"}:
        constant = getattr(module, attribute)
        if constant.requires_grad:
            raise ValueError(
                f"score function {name!r} must not read a tensor from outside that requires a "
                "gradient, which it would not get: make it a score tensor (see tensors of "
                "ScoreFunction.from_torch)"
            )
        # Copied, because the kernels have its present value, too.
        delattr(module, attribute)
        setattr(module, attribute, constant.clone())
    for node in module.graph.nodes:
        operation, _, overload = str(node.target).removeprefix("aten.").partition(".")
        if operation in _COPIES or operation == "copy_":
            node.replace_all_uses_with(node.args[operation == "copy_"])
            module.graph.erase_node(node)
        elif node.target == torch.ops.sparseflash.read.default:
            node.target = _read
        elif operation.endswith("_") and not operation.startswith("__"):
            # In place: later nodes read its result.
            node.target = getattr(getattr(torch.ops.aten, operation[:-1]), overload)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


_functions: dict[str, ScoreFunction] = {}


def find_score_function(name: str) -> ScoreFunction:
    """The score function with this name. Raises ValueError if there is none."""
    if name not in _functions:
        raise ValueError(f"score must be a ScoreFunction or the name of one, got {name!r}")
    return _functions[name]
