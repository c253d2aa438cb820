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
        run = partial(_run, name, function, kinds)
        derive = partial(_derive, name, function, kinds) if float in kinds else None
        of_query = bool([*traced.graph.nodes][ARGUMENTS.index("query")].users)
        jitted = adder = None
        if find_spec("triton") is not None:
            from sparseflash.backends.triton_common import score_source

            try:
                jitted = score_source.triton_function(name, traced, declared)
                if derive is not None:
                    numbers, of_reads = _traced_reads(name, function, torch.float32, kinds)
                    adder = score_source.triton_adder(name, of_reads, numbers, declared)
            except ValueError as error:
                raise ValueError(f"score function {name!r}: {error}") from error
        reads = derive and ReadDerivatives(derive, adder)
        return cls(name, run, jitted, declared, of_query, reads)

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
        facts = tuple((x.is_floating_point(), x.shape) for x in self.tensors)
        layout = _layout(facts, self.tensors[0].device)
        return _joined(floats), _joined(integers), layout

    def new_sums(self) -> Tensor:
        """Zeros for the gradients of all that are float, one after another."""
        found = [x for x in self.tensors if x.is_floating_point()]
        return found[0].new_zeros(sum(x.numel() for x in found))

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


def _joined(tensors: list[Tensor]) -> Tensor | None:
    if len(tensors) > 1:
        return torch.cat(tensors)
    return tensors[0] if tensors else None


@lru_cache(maxsize=256)
def _layout(facts: tuple[tuple[bool, torch.Size], ...], where: torch.device) -> Tensor:
    """int64: for each tensor its offset among those of its kind, then its sizes."""
    numbers, used = [], {True: 0, False: 0}
    for is_float, shape in facts:
        numbers += [used[is_float], *shape]
        used[is_float] += shape.numel()
    return torch.tensor(numbers, device=where)


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
    wide, found = torch.promote_types(query.dtype, torch.float32), []
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
        found.append(x.to(wide if kind is float else torch.int64).contiguous())
    return ScoreTensors(found) if found else None


def want_gradients(tensors: Sequence[Tensor]) -> bool:
    """Whether autograd will ask for the gradient of a score tensor; others are refused later."""
    if tensors.__class__ is tuple and not tensors:  # most calls: the rest takes longer
        return False
    if not (torch.is_grad_enabled() and isinstance(tensors, Sequence)):
        return False
    return any(getattr(x, "requires_grad", False) for x in tensors)


class _Indexed:
    """A score tensor as a score function gets it.

    reads: where what is read of floats is recorded, to be differentiated by, and at which indices
    """

    def __init__(self, stand_in: Tensor, reads: list[tuple[Tensor, list[Tensor]]] | None = None):
        self._stand_in, self._reads = stand_in, reads

    def __getitem__(self, indices: Any) -> Tensor:
        found = []
        for index in indices if isinstance(indices, tuple) else (indices,):
            if isinstance(index, int) and not isinstance(index, bool):
                index = torch.full((), index, dtype=torch.int64, device="cpu")
            if not isinstance(index, Tensor) or index.dtype not in (torch.int32, torch.int64):
                got = getattr(index, "dtype", type(index).__name__)
                raise TypeError(f"a score tensor must be indexed by integers, got {got}")
            found.append(index)
        entry = torch.ops.sparseflash.read(self._stand_in, found)
        if self._reads is not None and entry.is_floating_point():
            entry = entry.detach().requires_grad_()
            self._reads.append((entry, found))
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


def _clamped(shape: torch.Size, indices: Sequence[Tensor], where: torch.device) -> list[Tensor]:
    return [i.to(where).clamp(0, n - 1) for i, n in zip(indices, shape, strict=True)]


def _dims_of_reads(name: str, graph: fx.Graph) -> list[int]:
    """With how many integers each score tensor is indexed."""
    found = []
    stand_ins = [node for node in graph.nodes if node.op == "placeholder"][5:]
    for i, stand_in in enumerate(stand_ins):
        dims = {len(node.args[1]) for node in stand_in.users}
        if len(dims) != 1:
            raise ValueError(
                f"score function {name!r} must index tensor {i} by one number of integers, got "
                f"{sorted(dims) or 'a tensor that it does not read'}"
            )
        found += dims
    return found


def _run(
    name: str, function: Callable, kinds: tuple[type, ...], score: Tensor, *rest: Tensor
) -> tuple[Tensor, Tensor]:
    """(f, df / dscore) of tensors, by the operations that were traced."""
    changed, slope = _traced(name, function, score.dtype, kinds)(score, *rest)
    return changed.expand(score.shape), slope


def _derive(
    name: str, function: Callable, kinds: tuple[type, ...], score: Tensor, *rest: Tensor
) -> list[tuple[int, Tensor, Tensor]]:
    """See ReadDerivatives.torch."""
    numbers, module = _traced_reads(name, function, score.dtype, kinds)
    results, found = iter(module(score, *rest)), []
    for number in numbers:
        shape, slope, entry = rest[4 + number].shape, next(results), 0
        indices = [*islice(results, len(shape))]
        for n, index in zip(shape, _clamped(shape, indices, score.device), strict=True):
            entry = entry * n + index
        found.append((number, entry, slope))
    return found


# Of single numbers they change nothing, and they would of tensors.
_COPIES = ("alias", "clone", "detach", "expand", "lift_fresh", "lift_fresh_copy", "view")


@lru_cache(maxsize=256)
def _traced(
    name: str, function: Callable, score_dtype: torch.dtype, kinds: tuple[type, ...] = ()
) -> fx.GraphModule:
    """(f, df / dscore) of single numbers, as operations that serve tensors of any shape."""

    def both(score: Tensor, *pair: Tensor) -> tuple[Tensor, Tensor]:
        score = score.detach().requires_grad_()
        changed = _changed(function(score, *pair[:4], *map(_Indexed, pair[4:])))
        if not changed.requires_grad:
            return changed, torch.zeros_like(score)
        (slope,) = torch.autograd.grad(changed, score, torch.ones_like(changed))
        return changed, slope

    return _trace(name, both, score_dtype, kinds)


@lru_cache(maxsize=256)
def _traced_reads(
    name: str, function: Callable, score_dtype: torch.dtype, kinds: tuple[type, ...]
) -> tuple[list[int], fx.GraphModule]:
    """The number of the tensor of each read that f depends on, and, of single numbers, df / dentry
    and the indices of each of these reads, one after another.
    """
    numbers = []

    def of_reads(score: Tensor, *pair: Tensor) -> list[Tensor]:
        reads = [[] for _ in kinds]
        changed = _changed(function(score, *pair[:4], *map(_Indexed, pair[4:], reads)))
        listed = [(number, *read) for number, of_one in enumerate(reads) for read in of_one]
        if not changed.requires_grad:
            return []
        entries = [entry for _, entry, _ in listed]
        slopes = torch.autograd.grad(changed, entries, torch.ones_like(changed), allow_unused=True)
        results = []
        for (number, _, indices), slope in zip(listed, slopes, strict=True):
            if slope is not None:
                numbers.append(number)
                results += [slope, *indices]
        return results

    module = _trace(name, of_reads, score_dtype, kinds)
    return numbers, module


def _changed(result: Any) -> Tensor:
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
    name: str, of_numbers: Callable, score_dtype: torch.dtype, kinds: tuple[type, ...]
) -> fx.GraphModule:
    """The operations of a function of single numbers: a score, its pair and what it reads."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes half a second

    dtypes = [torch.int64] * 4 + [score_dtype if kind is float else torch.int64 for kind in kinds]
    pair = [torch.zeros((), dtype=each, device="cpu") for each in dtypes]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            score = torch.zeros((), dtype=score_dtype, device="cpu")
            module = make_fx(of_numbers, _decompositions())(score, *pair)
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
