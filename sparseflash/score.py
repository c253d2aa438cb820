"""Functions of one's own that change the scores of attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

ARGUMENTS = ("score", "batch", "head", "query", "key")


@dataclass(frozen=True, eq=False)
class ScoreFunction:
    """A function of each score: (score, batch, head, query, key) -> (f, df / dscore).

    Both results must be finite for every finite score and every pair, including pairs past the end
    of the sequence. They may depend only on the arguments and on constants.

    Args:
        name: A name that no other function has. attention takes the name or the object.
        torch: The function for the backend "cpu" and for the reference, which differentiates f by
            itself. It gets a floating-point tensor of scores and integer tensors that broadcast
            to it; f has the shape of the scores.
        triton: The same function for the backends "triton" and "hopper", with the decorator
            triton.jit. It gets tiles. None if there is none. For "hopper" it must not make tiles
            of its own, by tl.full, tl.zeros, tl.arange and the like.
        tensors: (float or int, number of dims) of each score tensor: see from_torch.
        of_query: Whether f depends on the position of the query; from_torch determines this.
        reads: The derivatives of f by the entries that it reads, made by from_torch. Without them
            score tensors get no gradients.

    Raises:
        TypeError: `name` is no text, or `torch` no function.
        ValueError: Another function has the name.

    Reference:
        Dong et al., "Flex Attention", 2024 (score_mod).
    """

    name: str
    torch: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | float]]
    triton: Any = None
    tensors: tuple[tuple[type, int], ...] = ()
    of_query: bool = True
    reads: "ReadDerivatives | None" = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string, got {self.name!r}")
        if not callable(self.torch):
            raise TypeError(f"torch must be a function, got {self.torch!r}")
        if _functions.setdefault(self.name, self) is not self:
            raise ValueError(f"name must be new, got {self.name!r}, which another function has")

    @classmethod
    def from_torch(
        cls, name: str, function: Callable[..., Tensor], tensors: Sequence[type] = ()
    ) -> "ScoreFunction":
        """Makes a score function of f alone.

        f is differentiated automatically. If Triton is installed, f and its derivative are also
        translated to Triton.

        Args:
            name: A name that no other function has.
            function: (score, batch, head, query, key) -> f, with elementwise operations of torch:
                arithmetic, comparisons, torch.where, exponentials, powers, rounding. It is
                called once for each dtype, with tensors of one number.
            tensors: float or int for each score tensor, which is a tensor that the function reads
                (a captured buffer in FlexAttention). Calls pass these as score_tensors. The
                function gets them after `key` and indexes them by one integer for each dim, such
                as document[batch, query]; an index past either end reads the nearest entry. A
                function with score tensors may also mask a pair: torch.where(same, score, -inf).
                It is differentiated by the floating-point entries that it reads, too.

        Returns:
            The score function.

        Raises:
            TypeError: `name` is no text, f is not one number for each pair, or a tensor is
                neither float nor int or not indexed by integers.
            ValueError: Another function has the name, f asks for the value of a tensor, or has an
                operation that is not translated to Triton, which the message names.

        Reference:
            Dong et al., "Flex Attention", 2024 (score_mod).
        """
        if not callable(function):
            raise TypeError(f"function must be a function, got {function!r}")
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r}")
        if not isinstance(tensors, Sequence):
            raise TypeError(f"tensors must be a list of float or int, got {tensors!r}")
        kinds = tuple(tensors)
        if not all(kind in (float, int) for kind in kinds):
            raise TypeError(f"tensors must be float or int for each, got {kinds}")
        traced = _traced(name, function, torch.float32, kinds)
        declared = tuple(zip(kinds, _dims_of_reads(name, traced.graph), strict=True))
        evaluate = partial(_evaluate, name, function, kinds)
        derive = partial(_read_derivatives, name, function, kinds) if float in kinds else None
        of_query = bool([*traced.graph.nodes][ARGUMENTS.index("query")].users)
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
        return cls(name, evaluate, triton_function, declared, of_query, reads)

    def of_tensors(self, *pairs: Tensor) -> tuple[Tensor, Tensor | float]:
        """What `torch` makes of (score, batch, head, query, key) and the score tensors.

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
        shape, (f, derivative) = pairs[0].shape, result
        if f.shape != shape:
            raise ValueError(
                f"f of score function {self.name!r} must have the shape of score, {tuple(shape)}, "
                f"got {tuple(f.shape)}"
            )
        if isinstance(derivative, Tensor) and not _broadcasts(derivative.shape, shape):
            raise ValueError(
                f"df / dscore of score function {self.name!r} must broadcast to the shape of "
                f"score, {tuple(shape)}, got {tuple(derivative.shape)}"
            )
        return result


class ReadDerivatives(NamedTuple):
    """How a score function f depends on what it reads from score tensors.

    torch: of the arguments of f: for each read of floats the number of its tensor, the index of
        the entry in the flattened tensor and df / dentry, which broadcast to the scores
    triton: of the arguments of f in Triton, dS and read_sums.ReadSums: adds dS df / dentry of a
        tile to the sums of each entry; None if there is none
    """

    torch: Callable[..., list[tuple[int, Tensor, Tensor]]]
    triton: Any = None


class ScoreTensors:
    """The score tensors of a call, each contiguous, int64 or of the dtype of the scores."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tuple(tensors)

    @cached_property
    def flat(self) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """(all that are float, all that are int, where each begins and its sizes): (n,) each."""
        floats = [x.flatten() for x in self.tensors if x.is_floating_point()]
        integers = [x.flatten() for x in self.tensors if not x.is_floating_point()]
        kinds_and_shapes = tuple((x.is_floating_point(), x.shape) for x in self.tensors)
        layout = _layout(kinds_and_shapes, self.tensors[0].device)
        return _concatenated(floats), _concatenated(integers), layout

    def new_sums(self) -> Tensor:
        """Zeros for the gradients of all that are float, one after another."""
        floats = [x for x in self.tensors if x.is_floating_point()]
        return floats[0].new_zeros(sum(x.numel() for x in floats))

    def parts_of(self, sums: Tensor | None) -> list[Tensor | None]:
        """Of what new_sums made, the part of each tensor in its shape; None of integers, and
        everywhere where there are no sums.
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
    """int64: for each tensor its offset among those of its kind, then its sizes."""
    numbers, offsets = [], {True: 0, False: 0}
    for is_float, shape in kinds_and_shapes:
        numbers += [offsets[is_float], *shape]
        offsets[is_float] += shape.numel()
    return torch.tensor(numbers, device=device)


def checked_score_tensors(
    score: ScoreFunction | str | None, tensors: Sequence[Tensor], query: Tensor
) -> ScoreTensors | None:
    """The score tensors of a call as backends read them, None if there are none.

    Raises:
        TypeError, ValueError: They are not those that the score function reads.
    """
    function = named(score) if isinstance(score, str) else score
    declared = () if function is None else function.tensors
    if not isinstance(tensors, Sequence) or len(tensors) != len(declared):
        got = len(tensors) if isinstance(tensors, Sequence) else type(tensors).__name__
        if function is None:
            raise ValueError(f"score_tensors need a score function that reads them, got {got}")
        raise ValueError(
            f"score_tensors must be a list of the {len(declared)} tensors that score function "
            f"{function.name!r} reads, got {got}"
        )
    wide, checked = torch.promote_types(query.dtype, torch.float32), []
    for i, (x, (kind, dims)) in enumerate(zip(tensors, declared, strict=True)):
        name = f"score_tensors[{i}]"
        if not isinstance(x, Tensor) or x.is_complex() or x.is_floating_point() != (kind is float):
            got = getattr(x, "dtype", type(x).__name__)
            raise TypeError(f"{name} must be a tensor of {kind.__name__}, got {got}")
        if x.dim() != dims or x.numel() == 0 or x.device != query.device:
            raise ValueError(
                f"{name} must be of {dims} dims, none of them 0, on {query.device}, got "
                f"{tuple(x.shape)} on {x.device}"
            )
        if function and function.reads is None and torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient: score function {function.name!r} was "
                "differentiated by hand, and only ScoreFunction.from_torch differentiates by "
                "score tensors"
            )
        checked.append(x.to(wide if kind is float else torch.int64).contiguous())
    return ScoreTensors(checked) if checked else None


def want_gradients(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd will ask for the gradient of a score tensor; others are refused later."""
    if tensors.__class__ is tuple and not tensors:  # most calls: the rest takes longer
        return False
    if not (torch.is_grad_enabled() and isinstance(tensors, Sequence)):
        return False
    return any(getattr(x, "requires_grad", False) for x in tensors)


class _TracedScoreTensor:
    """A score tensor as a score function gets it.

    reads: where what is read of floats is recorded, to be differentiated by, and at which indices
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
    """What a trace has for _read: tensors of one number stand in for score tensors there."""
    return x.clone()


def _read(x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """x at indices that broadcast, each clamped to the entries that there are."""
    return x[tuple(_clamped(x.shape, indices, x.device))]


def _clamped(shape: torch.Size, indices: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [i.to(device).clamp(0, n - 1) for i, n in zip(indices, shape, strict=True)]


def _dims_of_reads(name: str, graph: fx.Graph) -> list[int]:
    """With how many integers each score tensor is indexed."""
    dims_of_tensors = []
    stand_ins = [node for node in graph.nodes if node.op == "placeholder"][5:]
    for i, stand_in in enumerate(stand_ins):
        dims = {len(node.args[1]) for node in stand_in.users}
        if len(dims) != 1:
            raise ValueError(
                f"score function {name!r} must index tensor {i} by one number of integers, got "
                f"{sorted(dims) or 'a tensor that it does not read'}"
            )
        dims_of_tensors += dims
    return dims_of_tensors


def _evaluate(
    name: str, function: Callable, kinds: tuple[type, ...], score: Tensor, *rest: Tensor
) -> tuple[Tensor, Tensor]:
    """(f, df / dscore) of tensors, by the operations that were traced."""
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


# Of single numbers they change nothing, and they would of tensors.
_COPIES = ("alias", "clone", "detach", "expand", "lift_fresh", "lift_fresh_copy", "view")


@lru_cache(maxsize=256)
def _traced(
    name: str, function: Callable, score_dtype: torch.dtype, kinds: tuple[type, ...] = ()
) -> fx.GraphModule:
    """(f, df / dscore) of single numbers, as operations that serve tensors of any shape."""

    def f_and_derivative(score: Tensor, *pair: Tensor) -> tuple[Tensor, Tensor]:
        score = score.detach().requires_grad_()
        f = _checked_result(function(score, *pair[:4], *map(_TracedScoreTensor, pair[4:])))
        if not f.requires_grad:
            return f, torch.zeros_like(score)
        (derivative,) = torch.autograd.grad(f, score, torch.ones_like(f))
        return f, derivative

    return _trace(name, f_and_derivative, score_dtype, kinds)


@lru_cache(maxsize=256)
def _traced_reads(
    name: str, function: Callable, score_dtype: torch.dtype, kinds: tuple[type, ...]
) -> tuple[list[int], fx.GraphModule]:
    """The number of the tensor of each read that f depends on, and, of single numbers, df / dentry
    and the indices of each of these reads, one after another.
    """
    numbers = []

    def read_derivatives(score: Tensor, *pair: Tensor) -> list[Tensor]:
        reads = [[] for _ in kinds]
        f = _checked_result(function(score, *pair[:4], *map(_TracedScoreTensor, pair[4:], reads)))
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
    """The result of a score function for single numbers, which is one."""
    if not isinstance(result, Tensor):
        raise TypeError(f"f must be a tensor, got {type(result).__name__}")
    if not result.is_floating_point():
        raise TypeError(f"f must be of a floating-point dtype, got {result.dtype}")
    if result.dim():
        raise TypeError(f"f must be one number for each pair, got {tuple(result.shape)}")
    return result


@lru_cache(maxsize=1)
def _decompositions() -> dict:
    """Of operations into simpler ones; Torch takes a tenth of a second to list them."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions().items())


def _trace(
    name: str, function: Callable, score_dtype: torch.dtype, kinds: tuple[type, ...]
) -> fx.GraphModule:
    """The operations of a function of single numbers: a score, its pair and what it reads."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes half a second

    dtypes = [torch.int64] * 4 + [score_dtype if kind is float else torch.int64 for kind in kinds]
    arguments = [torch.zeros((), dtype=dtype, device="cpu") for dtype in dtypes]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            score = torch.zeros((), dtype=score_dtype, device="cpu")
            module = make_fx(function, _decompositions())(score, *arguments)
    except TypeError as error:
        raise TypeError(f"score function {name!r} cannot be traced: {error}") from error
    except RuntimeError as error:
        raise ValueError(
            f"score function {name!r} cannot be traced. It may neither branch on its arguments "
            "(torch.where chooses) nor index tensors with them but those that it gets as "
            f"arguments (see tensors of ScoreFunction.from_torch): {error}"
        ) from error
    for node in module.graph.nodes:
        operation, _, overload = str(node.target).removeprefix("aten.").partition(".")
        if operation in _COPIES or operation == "copy_":
            node.replace_all_uses_with(node.args[operation == "copy_"])
            module.graph.erase_node(node)
        elif node.target == torch.ops.sparseflash.read.default:
            node.target = _read
        elif operation.endswith("_"):  # in place: later nodes read its result
            node.target = getattr(getattr(torch.ops.aten, operation[:-1]), overload)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    aligned = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(n in (1, m) for n, m in aligned)


_functions: dict[str, ScoreFunction] = {}


def named(name: str) -> ScoreFunction:
    """The function with this name. Raises ValueError where there is none."""
    if name not in _functions:
        raise ValueError(f"score must be a ScoreFunction or the name of one, got {name!r}")
    return _functions[name]
