"""Attention of any shape, strides, dtype, mask and size of scores, against float64.

A few cases of short sequences without a GPU; two thousand, of 1 to 4097 tokens, with one.
"""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sparseflash
from masks import BlockMask
from sparseflash.testing import STRIDES, check_attention, make_inputs

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
LONGEST = 4097 if HAS_GPU else 70
EXAMPLES = {"triton": 180, "hopper": 180} if HAS_GPU else {"cpu": 10, "triton": 2}
# Those that a kernel is compiled for: few, as compilation takes longer than many cases.
SHAPES = [(16, (16, 16)), (40, (32, 64))]
if HAS_GPU:
    SHAPES += [(64, (64, 128)), (128, (128, 128)), (128, (64, 64))]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]

lengths = st.one_of(st.integers(1, 65), st.integers(1, LONGEST), st.just(LONGEST))


@st.composite
def masks_of_blocks(draw, heads: int, q_len: int, k_len: int, block_size: tuple[int, int]):
    """bool (1 or heads, q_len, k_len): full, empty and random blocks, and empty rows and columns
    of blocks, of queries and of keys.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    grid = [-(-n // b) for n, b in zip((q_len, k_len), block_size, strict=True)]
    chances = draw(st.sampled_from([(1, 1, 1), (8, 1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0)]))
    layers = draw(st.sampled_from([1, heads]))
    kind = torch.multinomial(
        torch.tensor(chances).float(), layers * grid[0] * grid[1], True, generator=generator
    ).view(layers, *grid)
    for axis, size in ((1, grid[0]), (2, grid[1])):
        if draw(st.booleans()):
            kind.index_fill_(axis, torch.tensor([draw(st.integers(0, size - 1))]), 0)
    kind = kind.repeat_interleave(block_size[0], 1).repeat_interleave(block_size[1], 2)
    kind = kind[:, :q_len, :k_len]
    dense = (kind == 2) | (
        (kind == 1) & (torch.rand(kind.shape, generator=generator) < draw(st.floats(0.01, 0.99)))
    )
    if draw(st.booleans()):
        dense[:, draw(st.integers(0, q_len - 1))] = False
    if draw(st.booleans()):
        dense[:, :, draw(st.integers(0, k_len - 1))] = False
    return dense


@st.composite
def calls(draw, head_dim: int, block_size: tuple[int, int], dtype: torch.dtype, plain: bool):
    """(inputs, mask, options) of one call."""
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 2))
    q_len, k_len = draw(lengths), draw(lengths)
    inputs = make_inputs(
        *(draw(st.integers(1, 2)), heads, q_len, k_len, head_dim),
        kv_heads=kv_heads,
        dtype=dtype,
        device=DEVICE,
        strides=draw(st.sampled_from(STRIDES[:3] if plain else STRIDES)),
        seed=draw(st.integers(0, 2**31)),
    )
    dense = draw(masks_of_blocks(heads, q_len, k_len, block_size))
    mask = BlockMask.from_dense(dense if len(dense) > 1 else dense[0], block_size).to(DEVICE)
    if draw(st.booleans()):
        layers = (1 if plain else draw(st.sampled_from([1, len(inputs[0])])), heads)
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        chances = torch.rand(*layers, mask.grid.nq, mask.grid.nk, generator=generator)
        mask = mask.select(chances.to(DEVICE) < 0.7)
    options = {}
    if draw(st.booleans()):
        length = torch.tensor([draw(st.integers(0, k_len)) for _ in range(len(inputs[0]))])
        options["key_lengths"] = length.to(DEVICE)
    if not plain and draw(st.booleans()):
        options |= {"dropout_p": 0.3, "seed": draw(st.integers(0, 2**40))}
    return inputs, mask, options


def hold(backend, call):
    (query, key, value, grad_out), mask, options = call

    def attend(q, k, v):
        chosen = {"mask": mask, "backend": backend}
        return sparseflash.attention(q, k, v, return_lse=True, **chosen, **options)

    # Of a query with one key the gradient is that of the LSE alone: were it small, what is left of
    # dO V^T - rowsum(dO * O) would be all that is measured.
    grad_lse = torch.full(query.shape[:3], 3.0, device=DEVICE)
    grads = {"grad_out": grad_out, "grad_lse": grad_lse}
    check_attention(attend, query, key, value, mask, **grads, **options)


def fuzz(backend, head_dim, block_size, dtype, check):
    """Calls `check` with many calls that the backend can serve."""
    plain = backend == "hopper"

    @settings(
        max_examples=EXAMPLES[backend],
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),  # shrinking would take longer than all cases
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(calls(head_dim, block_size, dtype, plain))
    def every_call(call):
        check(backend, call)

    every_call()


COMBINATIONS = [
    (backend, head_dim, block_size, dtype)
    for backend, (head_dim, block_size), dtype in itertools.product(EXAMPLES, SHAPES, DTYPES)
    if backend != "hopper" or (head_dim == 128 and dtype != torch.float32)
]


@pytest.mark.parametrize(("backend", "head_dim", "block_size", "dtype"), COMBINATIONS)
def test_calls(backend, head_dim, block_size, dtype):
    fuzz(backend, head_dim, block_size, dtype, hold)


def hold_extreme(size, backend, call):
    """Scores of up to ten thousand or next to nothing: no NaN, and the rows that one key rules.

    Rounding moves such scores by more than 1, so that only what they decide is compared.
    """
    (query, key, value, grad_out), mask, options = call
    options = {name: x for name, x in options.items() if name == "key_lengths"}
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    query, key, _ = leaves
    attend = partial(sparseflash.attention, mask=mask, backend=backend, return_lse=True)
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
    allowed = mask.to_dense().expand(scores.shape)
    if "key_lengths" in options:
        places = torch.arange(key.shape[2], device=DEVICE)
        allowed = allowed & (places < options["key_lengths"].view(-1, 1, 1, 1))
    lse64 = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    error = size * 8 * torch.finfo(torch.float32).eps * query.shape[-1] ** 0.5 + 1e-5
    has_key = allowed.any(-1)
    assert torch.equal(lse.isneginf(), ~has_key)
    assert ((lse.double() - lse64)[has_key].abs() <= error * 10).all()
    assert (out[~has_key] == 0).all()


# The kernel of dK and dV gives padded keys a weight that may overflow, and drops it at the end.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("size", [1e-4, 1e4])
@pytest.mark.parametrize("backend", EXAMPLES)
def test_huge_and_tiny_scores(backend, size):
    head_dim, block_size = SHAPES[3] if backend == "hopper" else SHAPES[0]
    fuzz(backend, head_dim, block_size, torch.float16, partial(hold_extreme, size))
