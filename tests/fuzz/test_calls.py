"""Attention of any shape, strides, dtype, mask, options and size of scores, against float64.

A few cases of short sequences without a GPU; thousands, of 1 to 4097 tokens, with one.
"""

import itertools
import random
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import sparseflash
from masks import BlockMask, DynamicMask, MaskBatch
from sparseflash.backends.cpu import plan
from sparseflash.reference import standard_attention
from sparseflash.testing import (
    STRIDES,
    assert_close_to_reference,
    check_attention,
    make_inputs,
    poisoned_empty,
)

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
LONGEST = 4097 if HAS_GPU else 70
MAX_SCORES = 2**25  # of a call: in float64, what is computed of them takes up to 6 GB
# Cases of every combination of a backend, a shape and a dtype: in a short run and in a long one.
CASES = (
    {"triton": (20, 200), "hopper": (20, 200)} if HAS_GPU else {"cpu": (20, 75), "triton": (1, 2)}
)
# Those that a kernel is compiled for: few, as compilation takes longer than many cases.
SMALL = [(16, (16, 16)), (40, (32, 64))]
SHAPES = {
    "cpu": SMALL,
    "triton": SMALL + ([(64, (64, 128)), (128, (128, 128)), (128, (64, 64))] if HAS_GPU else []),
    "hopper": [(128, (128, 128)), (128, (64, 64)), (64, (128, 128)), (64, (64, 64))],
}
DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.float16, torch.bfloat16),
    "triton": (torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])),
    "hopper": (torch.float16, torch.bfloat16),
}
# Chances of empty, partial and full blocks.
CHANCES = [(1, 1, 1), (8, 1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0)]


class Case(NamedTuple):
    """One call: query, key, value and grad_out, the mask, the options that change the result, and
    whether equal calls must give equal bits.
    """

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]
    mask: BlockMask | MaskBatch | DynamicMask
    options: dict[str, Any]
    deterministic: bool


@pytest.fixture(autouse=True)
def blocks_as_they_are(request, monkeypatch):
    """Of one shape: on a CPU all calls of this size are small, and read in larger blocks."""
    if request.node.callspec.params.get("head_dim") == SMALL[0][0]:
        monkeypatch.setattr(plan, "START_PAIRS", 0)


def some_length(rng: random.Random) -> int:
    return rng.choice((rng.randint(1, 65), rng.randint(1, LONGEST), LONGEST))


def generator(rng: random.Random) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(rng.randrange(2**31))


def some_pairs(
    rng: random.Random, num_masks: int, q_len: int, k_len: int, block_size: tuple[int, int]
) -> Tensor:
    """bool (num_masks, q_len, k_len): full, empty and random blocks, and empty rows and columns
    of blocks, of queries and of keys.
    """
    grid = [-(-n // b) for n, b in zip((q_len, k_len), block_size, strict=True)]
    chances = torch.tensor(rng.choice(CHANCES), device=DEVICE).float()
    kind = torch.multinomial(
        chances, num_masks * grid[0] * grid[1], True, generator=generator(rng)
    )
    kind = kind.view(num_masks, *grid)
    for axis, size in ((1, grid[0]), (2, grid[1])):
        if rng.random() < 0.5:
            kind.index_fill_(axis, torch.tensor([rng.randrange(size)], device=DEVICE), 0)
    kind = kind.repeat_interleave(block_size[0], 1).repeat_interleave(block_size[1], 2)
    kind = kind[:, :q_len, :k_len]
    some = torch.rand(kind.shape, generator=generator(rng), device=DEVICE) < rng.uniform(
        0.01, 0.99
    )
    dense = (kind == 2) | ((kind == 1) & some)
    if rng.random() < 0.5:
        dense[:, rng.randrange(q_len)] = False
    if rng.random() < 0.5:
        dense[:, :, rng.randrange(k_len)] = False
    return dense


def some_mask(
    rng: random.Random, batch: int, all_heads: tuple[int, ...], *sizes: Any
) -> BlockMask | MaskBatch | DynamicMask:
    """A mask of one of the numbers of heads: of all batch elements, of each, or of the device.

    sizes: q_len, k_len and block size
    """
    *_, block_size = sizes

    def of_heads(heads: int) -> BlockMask:
        dense = some_pairs(rng, heads, *sizes)
        return BlockMask.from_dense(dense if len(dense) > 1 else dense[0], block_size)

    kind = rng.choice(("static", "static", "batch", "dynamic", "dynamic"))
    heads = rng.choice(all_heads)
    if kind == "batch":
        return MaskBatch.from_masks([of_heads(rng.choice((1, heads))) for _ in range(batch)])
    mask = of_heads(heads)
    if kind == "static":
        return mask
    selecting = heads if heads > 1 else rng.choice(all_heads)
    shape = (rng.choice((1, batch)), selecting, mask.grid.nq, mask.grid.nk)
    return mask.select(torch.rand(shape, generator=generator(rng), device=DEVICE) < 0.7)


def some_case(
    head_dim: int, block_size: tuple[int, int], dtype: torch.dtype, rng: random.Random
) -> Case:
    kv_heads, batch = rng.randint(1, 3), rng.randint(1, 2)
    heads = kv_heads * rng.randint(1, 2)
    q_len = some_length(rng)
    k_len = min(some_length(rng), MAX_SCORES // (batch * heads * q_len))
    inputs = make_inputs(
        *(batch, heads, q_len, k_len, head_dim),
        kv_heads=kv_heads,
        # On a GPU each width of values is another kernel.
        value_dim=head_dim if HAS_GPU else rng.choice((head_dim, 24)),
        dtype=dtype,
        device=DEVICE,
        strides=rng.choice(STRIDES),
        seed=rng.randrange(2**31),
    )
    mask = some_mask(rng, batch, (1, kv_heads, heads), q_len, k_len, block_size)
    options = {}
    if rng.random() < 0.5:
        lengths = torch.tensor([rng.randint(0, k_len) for _ in range(batch)])
        options["key_lengths"] = lengths.to(DEVICE)
    if rng.random() < 0.5:
        options |= {"dropout_p": 0.3, "seed": rng.randrange(2**40)}
    return Case(inputs, mask, options, deterministic=rng.random() < 0.5)


def check_call(backend: str, case: Case) -> None:
    (query, key, value, grad_out), mask, options, deterministic = case

    def attend(q, k, v):
        chosen = {"mask": mask, "backend": backend, "deterministic": deterministic}
        return sparseflash.attention(q, k, v, return_lse=True, **chosen, **options)

    # Of a query with one key the gradient is that of the LSE alone: were it small, what is left of
    # dO V^T - rowsum(dO * O) would be all that is measured.
    grad_lse = torch.full(query.shape[:3], 3.0, device=DEVICE)
    grads = {"grad_out": grad_out, "grad_lse": grad_lse}
    check_attention(attend, query, key, value, mask, **grads, **options)


@triton.jit
def bent_of_triton(score, batch, head, query, key):
    slope = 1.0 / (1.0 + head)
    near = (query - key + batch) % 3 == 0
    return tl.where(near, score * slope, score), tl.where(near, slope, 1.0)


def bent_of_torch(score, batch, head, query, key):
    near, slope = (query - key + batch) % 3 == 0, 1.0 / (1.0 + head)
    return torch.where(near, score * slope, score), torch.where(near, slope, 1.0)


BENT = sparseflash.ScoreFunction("bent where near", bent_of_torch, bent_of_triton)


def with_table(score, batch, head, query, key, table):
    return score + table[head, (query - key) % 9]


WITH_TABLE = sparseflash.ScoreFunction.from_torch("with a table", with_table, (float,))
# What kernels are compiled for on a GPU: few, again. "table" is a score function that reads one.
COMPILED = [("scale", "sinks", "softcap"), ("score", "bias"), ("table",)]
OTHERS = ("bias", "sinks", "table")  # what has a gradient beside query, key and value


def more_options(rng: random.Random, case: Case) -> dict[str, Any]:
    """Every other option that a call may have, each in half of the cases."""
    query, key, *_ = case.inputs
    _, heads, q_len, head_dim = query.shape

    def normal(*size):
        return torch.randn(size, generator=generator(rng), device=DEVICE)

    every = {
        "scale": rng.uniform(0.2, 2) * head_dim**-0.5,
        "sinks": normal(rng.choice((1, heads))),
        "softcap": rng.uniform(0.5, 20),
        "score": BENT,
        "table": normal(heads, 9),
        "bias": normal(rng.choice((1, heads)), q_len + key.shape[2] - 1),
    }
    names = rng.choice(COMPILED) if HAS_GPU else [name for name in every if rng.random() < 0.5]
    if "table" in names:
        every["score"] = WITH_TABLE
        names = ["score", *names]
    return {name: every[name] for name in names}


def check_options(rng: random.Random, backend: str, case: Case) -> None:
    """Results, and the gradients of some inputs in some results."""
    *inputs, grad_out = case.inputs
    options = case.options | more_options(rng, case)
    leaves = dict(zip(("query", "key", "value"), inputs, strict=True))
    leaves |= {name: options.pop(name) for name in OTHERS if name in options}
    without = ("bias", "table") if backend == "hopper" else ()  # it has no kernels for these
    differentiable = [name for name in leaves if name not in without]
    wanted = rng.sample(differentiable, rng.randint(1, len(differentiable)))
    random_lse = torch.randn(grad_out.shape[:3], generator=generator(rng), device=DEVICE)
    grads = (grad_out, random_lse)
    used = rng.choice(((0,), (1,), (0, 1)))

    def results(attend, dtype) -> dict[str, Tensor]:
        given = {name: x.detach() for name, x in leaves.items()}
        given |= {name: given[name].to(dtype) for name in ("query", "key", "value")}
        for name in wanted:
            given[name].requires_grad_()
        called = dict(given)
        if "table" in called:
            called["score_tensors"] = [called.pop("table")]
        found = attend(**called, **options)
        # The sum of all wanted inputs, times 0: what no result depends on has a gradient of zeros.
        total = sum(given[name].double().sum() * 0 for name in wanted)
        total += sum((found[i].double() * grads[i]).nan_to_num(neginf=0).sum() for i in used)
        made = torch.autograd.grad(total, [given[name] for name in wanted])
        out, lse = (x.detach() for x in found)
        return {"out": out, "lse": lse} | dict(zip(wanted, made, strict=True))

    dtype, ours = grad_out.dtype, {"return_lse": True, "backend": backend}
    ours["deterministic"] = case.deterministic
    with poisoned_empty():
        actual = results(partial(sparseflash.attention, mask=case.mask, **ours), dtype)
    reference, eager = (
        results(partial(standard_attention, mask=case.mask, dtype=of), of)
        for of in (torch.float64, dtype)
    )
    for name in set(OTHERS).intersection(wanted):
        # In float32, and a sum over queries that may cancel: its error is that of the terms.
        terms = grad_out.double().abs() * actual["out"].double().abs()
        eps = max(torch.finfo(of).eps for of in (dtype, torch.float32))
        rounding = 8 * eps * float(terms.sum() + grads[1].double().abs().sum())
        assert float((actual.pop(name) - reference[name]).abs().max()) <= rounding, name
    for name, result in actual.items():
        other = {"query": leaves["key"], "key": leaves["query"]}.get(name)
        if other is not None and not reference[name].any():
            # No query has two keys: in dO V^T - rowsum(dO * O) equal terms cancel, and what is
            # left is their rounding, in the dtype of inputs where dropout scales O.
            terms = (grad_out.double() * actual["out"].double()).abs().sum()
            rounded = (
                dtype if options.get("dropout_p") else torch.promote_types(dtype, torch.float)
            )
            scale = options.get("scale", inputs[0].shape[3] ** -0.5) * torch.finfo(rounded).eps
            assert float(result.abs().max()) <= 8 * scale * terms * other.abs().max(), name
        else:
            assert_close_to_reference(result, reference[name], eager[name], dtype=dtype, name=name)


def check_extreme(size: float, backend: str, case: Case) -> None:
    """Scores of up to ten thousand or next to nothing: no NaN, and the rows that one key rules.

    Rounding moves such scores by more than 1, so that only what they decide is compared.
    """
    (query, key, value, grad_out), mask, options, deterministic = case
    options = {name: x for name, x in options.items() if name == "key_lengths"}
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    query, key, _ = leaves
    ours = {"backend": backend, "return_lse": True, "deterministic": deterministic}
    attend = partial(sparseflash.attention, mask=mask, **ours)
    scale = size / float(query.detach().norm(dim=-1).amax() * key.detach().norm(dim=-1).amax())
    out, lse = attend(*leaves, scale=scale, **options)
    assert (lse[lse > -torch.inf].abs() <= size + 9).all()
    grads = torch.autograd.grad(out, leaves, grad_out)
    assert all(x.isfinite().all() for x in (out, *grads))
    scores = (
        scale
        * query.double()
        @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    )
    allowed = mask.to_dense()
    if allowed.dim() > 2 and allowed.shape[-3] == key.shape[1]:
        allowed = allowed.repeat_interleave(query.shape[1] // key.shape[1], -3)
    allowed = allowed.expand(scores.shape)
    if "key_lengths" in options:
        tokens = torch.arange(key.shape[2], device=DEVICE)
        allowed = allowed & (tokens < options["key_lengths"].view(-1, 1, 1, 1))
    lse64 = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    error = size * 8 * torch.finfo(torch.float32).eps * query.shape[-1] ** 0.5 + 1e-5
    has_key = allowed.any(-1)
    assert torch.equal(lse.isneginf(), ~has_key)
    assert ((lse.double() - lse64)[has_key].abs() <= error * 10).all()
    assert (out[~has_key] == 0).all()


COMBINATIONS = [
    (backend, head_dim, block_size, dtype)
    for backend in CASES
    for (head_dim, block_size), dtype in itertools.product(SHAPES[backend], DTYPES[backend])
]
EVERY_OPTION = [
    (backend, head_dim, block_size, dtype)
    for backend, head_dim, block_size, dtype in COMBINATIONS
    if not HAS_GPU
    or (head_dim, dtype) == (40, torch.float32)
    or (backend, dtype) == ("hopper", torch.bfloat16)
]
SHORT_AND_LONG = [pytest.param(0, id="short"), pytest.param(1, id="long", marks=pytest.mark.slow)]


@pytest.mark.parametrize("run", SHORT_AND_LONG)
@pytest.mark.parametrize(("backend", "head_dim", "block_size", "dtype"), COMBINATIONS)
def test_calls(fuzz, backend, head_dim, block_size, dtype, run):
    make = partial(some_case, head_dim, block_size, dtype)
    fuzz(lambda rng: check_call(backend, make(rng)), CASES[backend][run])


@pytest.mark.parametrize("run", SHORT_AND_LONG)
@pytest.mark.parametrize(("backend", "head_dim", "block_size", "dtype"), EVERY_OPTION)
def test_every_option(fuzz, backend, head_dim, block_size, dtype, run):
    make = partial(some_case, head_dim, block_size, dtype)
    fuzz(lambda rng: check_options(rng, backend, make(rng)), CASES[backend][run])


# The kernel of dK and dV gives padded keys a weight that may overflow, and drops it at the end.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("run", SHORT_AND_LONG)
@pytest.mark.parametrize("size", [1e-4, 1e4])
@pytest.mark.parametrize("backend", CASES)
def test_huge_and_tiny_scores(fuzz, backend, size, run):
    make = partial(some_case, *SHAPES[backend][0], torch.float16)
    fuzz(lambda rng: check_extreme(size, backend, make(rng)), CASES[backend][run])
