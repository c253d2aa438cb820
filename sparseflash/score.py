"""Functions of one's own that change the scores of attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from typing import Any

from torch import (
    Size,
    Tensor,
    autograd,
    cat,
    device,
    dtype,
    enable_grad,
    float32,
    full,
    fx,
    inference_mode,
    int32,
    int64,
    is_grad_enabled,
    library,
    ones_like,
    ops,
    promote_types,
    tensor,
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
        tensors: float or int, and the dims, of each score tensor: see from_torch.

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
        """The score function of f alone, which is differentiated and, where Triton is installed,
        translated to it.

        Args:
            name: One that no other function has.
            function: (score, batch, head, query, key) -> f, in operations of torch on each pair by
                itself: arithmetic, comparisons, torch.where, exponentials, powers, rounding. It is
                called once for each dtype, with tensors of one number.
            tensors: float or int for each score tensor: a tensor that the function reads, as those
                of FlexAttention read captured buffers. Calls pass these as score_tensors. The
                function gets them after `key`, to be indexed by one integer for each dim, such as
                document[batch, query]; an index past either end reads the nearest entry. A
                function with score tensors may also mask a pair: torch.where(same, score, -inf).

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
        kinds = tuple(tensors)
        if not all(kind in (float, int) for kind in kinds):
            raise TypeError(f"tensors must be float or int for each, got {kinds}")
        traced = _traced(name, function, float32, kinds)
        declared = tuple(zip(kinds, _dims_of_reads(name, traced.graph), strict=True))
        run = partial(_run, name, function, kinds)
        if find_spec("triton") is None:
            return cls(name, run, tensors=declared)
        from sparseflash.backends.triton_common.score_source import triton_function

        try:
            jitted = triton_function(name, traced.graph, partial(getattr, traced), declared)
        except ValueError as error:
            raise ValueError(f"score function {name!r}: {error}") from error
        return cls(name, run, jitted, declared)

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


def _joined(tensors: list[Tensor]) -> Tensor | None:
    if len(tensors) > 1:
        return cat(tensors)
    return tensors[0] if tensors else None


@lru_cache(maxsize=256)
def _layout(facts: tuple[tuple[bool, Size], ...], where: device) -> Tensor:
    """int64: the place of each tensor among those of its kind, then its sizes."""
    numbers, used = [], {True: 0, False: 0}
    for is_float, shape in facts:
        numbers += [used[is_float], *shape]
        used[is_float] += shape.numel()
    return tensor(numbers, device=where)


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
        raise ValueError(
            f"score_tensors must be a list of the {len(declared)} tensors that score function "
            f"{function and function.name!r} reads, got {got}"
        )
    wide, found = promote_types(query.dtype, float32), []
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
        if is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient, which no score tensor has: detach it, or "
                "pass a bias, which has one"
            )
        found.append(x.detach().to(wide if kind is float else int64).contiguous())
    return ScoreTensors(found) if found else None


class _Indexed:
    """A score tensor as a score function gets it."""

    def __init__(self, stand_in: Tensor):
        self._stand_in = stand_in

    def __getitem__(self, indices: Any) -> Tensor:
        found = []
        for index in indices if isinstance(indices, tuple) else (indices,):
            if isinstance(index, int) and not isinstance(index, bool):
                index = full((), index, dtype=int64, device="cpu")
            if not isinstance(index, Tensor) or index.dtype not in (int32, int64):
                got = getattr(index, "dtype", type(index).__name__)
                raise TypeError(f"a score tensor must be indexed by integers, got {got}")
            found.append(index)
        return ops.sparseflash.read(self._stand_in, found)


@library.custom_op("sparseflash::read", mutates_args=(), schema="(Tensor x, Tensor[] i) -> Tensor")
def _traced_read(x: Tensor, i: list[Tensor]) -> Tensor:
    """What a trace has for _read: tensors of one number stand in for score tensors there."""
    return x.clone()


def _read(x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """x at indices that broadcast, each clamped to the entries that there are."""
    at = zip(indices, x.shape, strict=True)
    return x[tuple(i.to(x.device).clamp(0, n - 1) for i, n in at)]


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


# Of single numbers they change nothing, and they would of tensors.
_COPIES = ("alias", "clone", "detach", "expand", "lift_fresh", "lift_fresh_copy", "view")


@lru_cache(maxsize=256)
def _traced(
    name: str, function: Callable, score_dtype: dtype, kinds: tuple[type, ...] = ()
) -> fx.GraphModule:
    """(f, df / dscore) of single numbers, as operations that serve tensors of any shape."""
    from torch._decomp import core_aten_decompositions  # these take half a second
    from torch.fx.experimental.proxy_tensor import make_fx

    def both(score: Tensor, *pair: Tensor) -> tuple[Tensor, Tensor]:
        score = score.detach().requires_grad_()
        changed = function(score, *pair[:4], *map(_Indexed, pair[4:]))
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

    dtypes = [int64] * 4 + [score_dtype if kind is float else int64 for kind in kinds]
    pair = [zeros((), dtype=each, device="cpu") for each in dtypes]
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
        elif node.target == ops.sparseflash.read.default:
            node.target = _read
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
