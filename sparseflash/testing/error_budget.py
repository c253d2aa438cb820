"""Inputs with all kinds of strides, poisoned memory, and the error budget, for tests of attention.

The error budget has no tolerance to tune: the error of a kernel may be about twice the error of
materialised attention in the same dtype, both relative to float64 on the same inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch._C._dynamo import guards

from sparseflash.testing.reference import standard_attention

STRIDES = ("contiguous", "bshd", "sliced", "expanded", "strided_last")

# Factor by which the error of a kernel may exceed that of materialised attention.
_FACTOR = 2
# Additional roundings of results in their dtype, and of sums in float32. The backward pass
# subtracts rowsum(dO * O) of rounded numbers, while materialised attention subtracts its own
# products. With few keys these cancel exactly, so its error is too small for a bound.
_RESULT_ROUNDINGS = 2
_SUM_ROUNDINGS = 32


def make_inputs(
    batch: int,
    heads: int,
    q_len: int,
    k_len: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    strides: str = "contiguous",
    seed: int = 0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normally distributed (query, key, value, grad_out).

    Args:
        batch, heads, q_len, k_len, head_dim: Sizes of query and key.
        value_dim: Head dim of value and grad_out; by default head_dim.
        kv_heads: Number of heads of key and value; by default heads.
        dtype, device: Dtype and device of the tensors.
        strides: "contiguous", (batch, heads, seq, head_dim) in this order; "bshd", a transposed
            view of (batch, seq, heads, head_dim); "sliced", a window of a larger tensor in every
            dimension; "expanded", one batch element with stride 0 over the batch; or
            "strided_last", every second number of the last dimension.
        seed: Seed of the random numbers.
        scale: Standard deviation of the random numbers.

    Returns:
        The four tensors.

    Raises:
        ValueError: `strides` has another value.
    """
    generator = torch.Generator(device).manual_seed(seed)
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    of_queries, of_keys = (heads, q_len), (kv_heads, k_len)
    shapes = [(*of_queries, head_dim), (*of_keys, head_dim), (*of_keys, value_dim)]
    shapes.append((*of_queries, value_dim))
    query, key, value, grad_out = (
        _with_strides(strides, (batch, *shape), generator, dtype, scale) for shape in shapes
    )
    return query, key, value, grad_out


def _with_strides(strides, shape, generator, dtype, scale) -> Tensor:
    def normal(*size: int) -> Tensor:
        return (torch.randn(size, generator=generator, device=generator.device) * scale).to(dtype)

    batch, heads, seq, dim = shape
    match strides:
        case "contiguous":
            return normal(*shape)
        case "bshd":
            return normal(batch, seq, heads, dim).transpose(1, 2)
        case "sliced":
            return normal(batch + 1, heads + 1, seq + 3, dim + 5)[1:, :-1, 2:-1, 3:-2]
        case "expanded":
            return normal(1, heads, seq, dim).expand(shape)
        case "strided_last":
            return normal(batch, heads, seq, 2 * dim)[..., ::2]
    raise ValueError(f"strides must be one of {STRIDES}, got {strides!r}")


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """A context that fills uninitialised tensors with NaN or the largest integer.

    So a result that depends on uninitialised memory is wrong.
    """
    functions = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
        (Tensor, "new_empty_strided"),
        (guards, "_empty_strided_cpu"),
        (guards, "_empty_strided_cuda"),
    ]
    with ExitStack() as stack:
        for owner, name in functions:
            poisoned = _poisoned(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, poisoned))
        yield


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        with torch.no_grad():
            return tensor.fill_(_poison(tensor.dtype))

    return poisoned


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def error_budget(reference: Tensor, eager: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The error budget of a kernel: largest absolute error, and relative Frobenius error.

    2 error(eager) + 2 eps(dtype) + 32 eps(float32)

    For the first error roundings are relative to the largest entry of the reference, for the
    second error to its norm.

    Args:
        reference: The float64 result.
        eager: The result of materialised attention in `dtype`.
        dtype: Dtype of the kernel's inputs.

    Returns:
        (largest absolute error, relative Frobenius error).
    """
    largest, relative = _errors(eager, reference)
    rounding = _RESULT_ROUNDINGS * torch.finfo(dtype).eps
    rounding += _SUM_ROUNDINGS * torch.finfo(torch.float32).eps
    finite = reference[reference.isfinite()]
    magnitude = float(finite.abs().max()) if finite.numel() else 0.0
    return _FACTOR * largest + rounding * magnitude, _FACTOR * relative + rounding


def assert_close_to_reference(
    actual: Tensor, reference: Tensor, eager: Tensor, *, dtype: torch.dtype, name: str = "result"
):
    """Checks that the error of a result is within the error budget.

    The result must have infinities at the same positions as the reference, and no NaN.

    Args:
        actual: The result to be checked.
        reference: The result in float64.
        eager: The result of materialised attention in `dtype`.
        dtype: Dtype of the inputs: float32 or narrower, because the reference is float64.
        name: Name of the result, for the message.

    Raises:
        AssertionError: The error exceeds the budget.
    """
    assert actual.shape == reference.shape, f"{name}: shape {actual.shape}, not {reference.shape}"
    assert not actual.isnan().any(), f"{name}: {int(actual.isnan().sum())} NaN"
    infinite = reference.isinf()
    same = torch.equal(actual.isinf(), infinite)
    same = same and torch.equal(actual[infinite].double(), reference[infinite])
    assert same, f"{name}: infinities at other positions than in the reference"
    norms = ("largest absolute", "relative Frobenius")
    budgets = error_budget(reference, eager, dtype)
    for norm, error, budget in zip(norms, _errors(actual, reference), budgets, strict=True):
        assert error <= budget, f"{name}: {norm} error {error:.3g}, the budget is {budget:.3g}"


def _errors(actual: Tensor, reference: Tensor) -> tuple[float, float]:
    """(largest absolute, relative Frobenius) error over the finite entries of the reference."""
    finite = reference.isfinite()
    difference = (actual.double() - reference)[finite]
    if difference.numel() == 0:
        return 0.0, 0.0
    norm = float(reference[finite].norm())
    return float(difference.abs().max()), float(difference.norm()) / norm if norm else 0.0


def check_attention(
    attention_fn: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask=None,
    *,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    **options,
) -> dict[str, Tensor]:
    """Checks out, lse, dq, dk and dv of an attention function against the error budget.

    Args:
        attention_fn: (query, key, value) -> (out, lse), with this mask and these options.
        query, key, value: The arguments of attention_fn.
        mask: As in standard_attention.
        grad_out, grad_lse: Gradients of the results, random by default.
        **options: Options of standard_attention.

    Returns:
        The results by name.

    Raises:
        AssertionError: The error of a result exceeds its budget; the message names the result.
    """
    generator = torch.Generator(query.device).manual_seed(1)
    random = partial(torch.randn, generator=generator, device=query.device)
    if grad_out is None:
        grad_out = random((*query.shape[:3], value.shape[3])).to(query.dtype)
    grad_lse = random(query.shape[:3]) if grad_lse is None else grad_lse

    def standard(dtype: torch.dtype) -> dict[str, Tensor]:
        attend = partial(standard_attention, mask=mask, dtype=dtype, **options)
        inputs = (x.to(dtype) for x in (query, key, value))
        return _results(attend, inputs, grad_out, grad_lse)

    actual = _results(attention_fn, (query, key, value), grad_out, grad_lse)
    reference, eager = standard(torch.float64), standard(query.dtype)
    assert actual["out"].dtype == query.dtype, f"out: {actual['out'].dtype}, not {query.dtype}"
    for name, result in actual.items():
        assert_close_to_reference(
            result, reference[name], eager[name], dtype=query.dtype, name=name
        )
    return actual


def _results(attend, inputs, grad_out: Tensor, grad_lse: Tensor) -> dict[str, Tensor]:
    """out, lse and the gradients of the inputs, from the gradients of out and lse."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out, lse = attend(*inputs)
    assert out.shape == grad_out.shape, f"out: shape {out.shape}, not {grad_out.shape}"
    assert lse.shape == grad_lse.shape, f"lse: shape {lse.shape}, not {grad_lse.shape}"
    grads = grad_out.to(out.dtype), grad_lse.to(lse.dtype)
    dq, dk, dv = torch.autograd.grad((out, lse), inputs, grads)
    return {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
