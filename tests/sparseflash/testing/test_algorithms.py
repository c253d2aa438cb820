import math

import pytest
import torch

import masks
from sparseflash.io_model import attention
from sparseflash.reference import standard_attention
from sparseflash.testing import algorithms
from sparseflash.testing.algorithms import (
    SlowMemory,
    flash_backward,
    flash_forward,
    flash_forward_by_query,
    standard_backward,
    standard_forward,
    tile_sizes,
)

D, SCALE = 8, 0.3


@pytest.fixture
def inputs():
    return torch.randn(4, 48, D, generator=torch.Generator().manual_seed(0)).double().unbind()


def reference(query, key, value, grad_out, **options):
    """(out, lse, dQ, dK, dV) by autograd."""
    leaves = [x[None, None].clone().requires_grad_() for x in (query, key, value)]
    out, lse = standard_attention(*leaves, scale=SCALE, **options)
    grads = torch.autograd.grad(out, leaves, grad_out[None, None])
    return [x[0, 0].detach() for x in (out, lse, *grads)]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_standard_attention_is_the_reference(inputs):
    query, key, value, grad_out = inputs
    out, _, *grads = reference(*inputs)
    forward = standard_forward(query, key, value, SCALE)
    same(forward["O"], out)
    backward = standard_backward(query, key, value, forward["P"], grad_out, SCALE)
    for name, expected in zip("QKV", grads, strict=True):
        same(backward[f"d{name}"], expected)


MASKED = masks.local(9) | (masks.strided(2) & masks.causal())


@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        ({}, (4, 16)),
        ({}, (7, 11)),  # which do not divide the length
        ({}, (48, 48)),
        ({"mask": masks.causal()(48, block_size=16).to_dense()}, (5, 16)),
        ({"mask": masks.local(2)(48, block_size=16).to_dense().roll(20, 0)}, (4, 4)),
        ({"dropout_p": 0.4, "seed": 7}, (8, 12)),
        ({"mask": MASKED(48, block_size=16)}, (16, 16)),
        ({"mask": masks.random(0.3)(48, block_size=16), "dropout_p": 0.2, "seed": 3}, (16, 16)),
    ],
)
def test_flash_attention_is_the_reference(inputs, options, tiles):
    query, key, value, grad_out = inputs
    out, lse, *grads = reference(*inputs, **options)
    forward = flash_forward(query, key, value, tiles, scale=SCALE, **options)
    same(forward["O"], out)
    same(forward["m"] + forward["l"].log(), lse)
    backward = flash_backward(query, key, value, forward, grad_out, tiles, scale=SCALE, **options)
    for name, expected in zip("QKV", grads, strict=True):
        same(backward[f"d{name}"], expected)


def test_queries_without_a_key_have_zeros(inputs):
    query, key, value, grad_out = inputs
    mask = torch.ones(48, 48, dtype=torch.bool)
    mask[5], mask[30:] = False, False
    forward = flash_forward(query, key, value, (4, 16), mask=mask)
    assert torch.equal(forward["O"][~mask[:, 0]], torch.zeros(19, D).double())
    assert (forward["m"][~mask[:, 0]] == -math.inf).all()
    backward = flash_backward(query, key, value, forward, grad_out, (4, 16), mask=mask)
    assert not backward["dQ"][~mask[:, 0]].any()
    assert all(backward[f"d{name}"].isfinite().all() for name in "QKV")


@pytest.mark.parametrize("mask", [None, "causal"])
def test_induction_holds_after_every_block(inputs, mask):
    """After tile j of keys and tile i of queries, rows up to i have seen j + 1 tiles, others j."""
    query, key, value, _ = inputs
    rows, columns = 5, 11
    pairs = torch.ones(48, 48).bool()
    if mask:
        pairs = pairs.tril()
    scores = (SCALE * query @ key.T).masked_fill(~pairs, -math.inf)
    seen = []

    def check(j: int, i: int, memory: SlowMemory):
        seen.append((j, i))
        for low, high, tiles in ((0, (i + 1) * rows, j + 1), ((i + 1) * rows, 48, j)):
            keys = min(tiles * columns, 48)
            own = scores[low:high, :keys]
            attends = pairs[low:high, :keys].any(-1)
            m, row_sum, out = (memory[name][low:high] for name in ("m", "l", "O"))
            assert torch.equal(m == -math.inf, ~attends)
            assert not row_sum[~attends].any()
            assert not out[~attends].any()
            own, m, row_sum, out = own[attends], m[attends], row_sum[attends], out[attends]
            if len(own):
                same(m, own.amax(-1))
                same(row_sum, torch.exp(own - m[:, None]).sum(-1))
                same(out, own.softmax(-1) @ value[:keys])

    flash_forward(
        query,
        key,
        value,
        (rows, columns),
        scale=SCALE,
        mask=pairs if mask else None,
        after_block=check,
    )
    assert seen == [(j, i) for j in range(5) for i in range(10)]


@pytest.mark.parametrize(
    ("n", "d", "fast"), [(48, 8, 96), (64, 16, 64), (50, 8, 100), (30, 4, 16)]
)
def test_accesses_are_those_of_theorems_2_and_5(n, d, fast):
    query, key, value, grad_out = torch.randn(4, n, d).double().unbind()
    standard = standard_forward(query, key, value)
    assert standard.accesses == 4 * n * d + 4 * n**2
    backward = standard_backward(query, key, value, standard["P"], grad_out)
    assert backward.accesses == 8 * n * d + 7 * n**2
    tiles = tile_sizes(fast, d)
    t_c = math.ceil(n / math.ceil(fast / (4 * d)))
    flash = flash_forward(query, key, value, tiles)
    assert flash.accesses == 3 * n * d + 2 * n + t_c * (3 * n * d + 4 * n)
    assert flash.reads == 2 * n * d + t_c * (2 * n * d + 2 * n)
    recomputed = flash_backward(query, key, value, flash, grad_out, tiles)
    assert recomputed.accesses == 7 * n * d + t_c * (5 * n * d + 2 * n)


@pytest.mark.parametrize("pattern", [masks.butterfly(), masks.local(20), masks.random(0.2)])
def test_accesses_are_those_of_proposition_4(pattern):
    n, side = 256, 16
    mask = pattern(n, block_size=side)
    query, key, value, grad_out = torch.randn(4, n, D).double().unbind()
    forward = flash_forward(query, key, value, (side, side), mask=mask)
    s, t_c = mask.density, n // side
    assert forward.accesses == 3 * n * D + 2 * n + s * t_c * (3 * n * D + 4 * n)
    backward = flash_backward(query, key, value, forward, grad_out, (side, side), mask=mask)
    assert backward.accesses == 7 * n * D + s * t_c * (5 * n * D + 2 * n)


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [
        (None, (7, 11)),
        (masks.local(2)(48, block_size=16).to_dense().roll(20, 0), (4, 4)),
        (MASKED(48, block_size=16), (16, 16)),
    ],
)
def test_the_order_of_our_kernels_yields_the_same(inputs, mask, tiles):
    query, key, value, _ = inputs
    found = flash_forward_by_query(query, key, value, tiles, scale=SCALE, mask=mask)
    out, lse, *_ = reference(*inputs, mask=mask)
    same(found["O"], out)
    same(found["LSE"], lse)


def test_io_model_counts_what_the_algorithm_reads_and_writes():
    """Numbers of two bytes; LSE and an entry of the table for each block have four."""
    n, d, side = 1024, 16, 128
    mask = masks.random(0.3, seed=4)(n, block_size=side)
    inputs = torch.randn(3, n, d).unbind()
    accesses = flash_forward_by_query(*inputs, (side, side), mask=mask).accesses
    assert accesses == 2 * n * d + n + mask.density * (n // side) * 2 * n * d
    assert attention(mask, d).l2_bytes == 2 * accesses + 2 * n + 4 * mask.nnz_blocks


def test_lower_bound_is_met_where_fast_memory_holds_a_share_of_all_keys():
    """Proposition 3: with M = Theta(N d), N^2 d^2 / M is Theta(N d), and nobody reads three inputs
    and writes an output with less than 4 N d accesses. This takes a constant multiple."""
    for share in (0.25, 1, 4):
        ratios = []
        for n in (32, 64, 128):
            fast = int(share * n * D)
            accesses = flash_forward(*torch.randn(3, n, D), tile_sizes(fast, D)).accesses
            assert accesses >= 4 * n * D
            ratios.append(accesses / (n**2 * D**2 / fast))
        assert max(ratios) == pytest.approx(min(ratios), rel=1e-3)


def test_half_the_fast_memory_is_twice_the_accesses():
    n = 128
    few, more = (
        flash_forward(*torch.randn(3, n, D), tile_sizes(fast, D)).accesses for fast in (64, 128)
    )
    initial = 3 * n * D + 2 * n
    assert few - initial == 2 * (more - initial)


def test_tiles_fit_into_fast_memory():
    for d in (4, 16, 64):
        for fast in (d, 10 * d, 100 * d, 12345):
            rows, columns = tile_sizes(fast, d)
            assert rows == min(columns, d)
            assert 4 * d * (columns - 1) < fast <= 4 * d * columns
            assert 2 * (rows - 1) * d + 2 * (columns - 1) * d <= fast


def test_reads_are_copies_and_counted():
    memory = SlowMemory(Q=torch.zeros(4, 3))
    memory.read("Q", slice(1, 3)).add_(1)
    assert (memory.reads, memory.writes, memory["Q"].sum()) == (6, 0, 0)
    memory.write("Q", torch.ones(2, 3), slice(0, 2))
    assert (memory.accesses, memory["Q"].sum()) == (12, 6)


def test_bad_input_is_named(inputs):
    query, key, value, _ = inputs
    with pytest.raises(ValueError, match="at least head_dim, 8 elements, got 7"):
        tile_sizes(7, 8)
    with pytest.raises(ValueError, match=r"blocks like the tiles, \(16, 8\)"):
        flash_forward(query, key, value, (16, 8), mask=masks.full()(48, block_size=16))
    with pytest.raises(ValueError, match=r"mask must be \(48, 48\), got \(3, 3\)"):
        flash_forward(query, key, value, (4, 4), mask=torch.ones(3, 3).bool())
    with pytest.raises(ValueError, match=r"key and value \(k_len, head_dim\), got"):
        flash_forward(query, key[:8], value, (4, 4))
    with pytest.raises(TypeError, match="mask must be a bool tensor, got Pattern"):
        flash_forward(query, key, value, (4, 4), mask=masks.full())
    with pytest.raises(TypeError, match="tiles must be a sequence of integers, got 4"):
        flash_forward(query, key, value, 4)
    with pytest.raises(ValueError, match=r"tiles must be \(B_r, B_c\), got \(4,\)"):
        flash_forward(query, key, value, (4,))
    with pytest.raises(TypeError, match="key must be a floating-point tensor, got NoneType"):
        flash_forward(query, None, value, (4, 4))
    heads = masks.stack([masks.full(), masks.causal()])(48, block_size=16)
    with pytest.raises(ValueError, match="one head"):
        algorithms.flash_forward(query, key, value, (16, 16), mask=heads)
