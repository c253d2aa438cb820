"""Few queries against many keys: the forward pass that splits the keys, against float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

import masks
import sparseflash
from masks.block_mask import BlockMask
from sparseflash.backends import triton as triton_backend
from sparseflash.backends.hopper import auto_skip
from sparseflash.backends.triton import decode, passes
from sparseflash.dispatch.spec import FEW_QUERIES
from sparseflash.reference import standard_attention
from sparseflash.testing import (
    STRIDES,
    assert_close_to_reference,
    check_attention,
    make_inputs,
    poisoned_empty,
)
from tests.helpers.calls import call_on
from tests.helpers.triton_calls import DEVICE, DTYPES, block_sparse, check, mixed_mask


def rows_of(q_len, k_len, block_size, num_masks=1):
    """mixed_mask with keys for the first query."""
    dense = mixed_mask(q_len, k_len, block_size, num_masks)
    dense[:, 0] = dense[:, -1]
    return dense


@pytest.fixture
def split(monkeypatch):
    """split(n): lets every call split its keys in n."""
    return lambda n: monkeypatch.setattr(decode, "fastest_splits", lambda *facts: n)


def check_forward(query, key, value, dense, block_size, **options):
    """(out, lse), held to the error budget; `dense` is bool (heads or 1, q_len, k_len)."""
    mask = BlockMask.from_dense(dense if len(dense) > 1 else dense[0], block_size)
    results = block_sparse(query, key, value, mask, **options)
    dense = dense.to(query.device)
    references = (
        standard_attention(
            *(x.to(dtype) for x in (query, key, value)), dense, dtype=dtype, **options
        )
        for dtype in (torch.float64, query.dtype)
    )
    for name, ours, exact, eager in zip(("out", "lse"), results, *references, strict=True):
        assert_close_to_reference(ours, exact, eager, dtype=query.dtype, name=name)
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_masks", "q_len", "k_len", "head_dim", "block_size"),
    [
        (1, 1, 1, 1, 130, 16, (16, 16)),
        (4, 2, 1, 1, 100, 24, (32, 16)),
        (6, 2, 1, 3, 70, 16, (128, 32)),
        (4, 1, 4, 2, 60, 16, (16, 32)),
        (6, 1, 1, 16, 70, 16, (16, 64)),
    ],
)
def test_heads_that_share_keys(
    dtype, heads, kv_heads, num_masks, q_len, k_len, head_dim, block_size
):
    inputs = make_inputs(
        1, heads, q_len, k_len, head_dim, kv_heads=kv_heads, dtype=dtype, device=DEVICE
    )
    check_forward(*inputs[:3], rows_of(q_len, k_len, block_size, num_masks), block_size)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_any_number_of_splits_of_padded_keys(split, splits):
    split(splits)
    lengths = torch.tensor([0, 1, 75], device=DEVICE)
    query, key, value, _ = make_inputs(3, 2, 2, 90, 16, kv_heads=1, device=DEVICE)
    dense = rows_of(2, 90, (16, 16))
    dense[..., 16:48] = dense[..., 64:80] = True  # full blocks, of which a length clips the last
    padding = torch.arange(90, device=DEVICE)[:, None] >= lengths[:, None, None, None]
    expected = check_forward(query, key, value, dense, (16, 16), key_lengths=lengths)
    assert expected[0][0].count_nonzero() == 0
    assert expected[1][0].isneginf().all()
    key, value = (x.masked_fill(padding, float("nan")) for x in (key, value))
    mask = BlockMask.from_dense(dense[0], (16, 16))
    results = block_sparse(query, key, value, mask, key_lengths=lengths)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


def test_gradients(split):
    split(3)
    inputs = make_inputs(1, 2, 2, 50, 16, kv_heads=1, device=DEVICE)
    check(inputs, rows_of(2, 50, (16, 16)), (16, 16))


@triton.jit
def faded_of_triton(score, batch, head, query, key):
    slope = 1.0 / (1.0 + head + batch)
    return score * slope - 0.1 * tl.abs(query - key), slope


FADED = sparseflash.ScoreFunction(
    "faded",
    lambda score, batch, head, query, key: (
        score / (1.0 + head + batch) - 0.1 * (query - key).abs(),
        1.0 / (1.0 + head + batch),
    ),
    faded_of_triton,
)


@pytest.mark.parametrize("leading", [(2, 4), (2, 1), (4,), ()])
def test_chosen_blocks_and_a_score_function(leading):
    query, key, value, _ = make_inputs(2, 4, 3, 60, 16, kv_heads=2, device=DEVICE)
    support = masks.causal(align="bottom-right")((3, 60), 16, DEVICE)
    mask = support.select_topk(torch.rand(*leading, 1, 4, device=DEVICE), 2)

    def attend(q, k, v):
        chosen = {"score": FADED, "backend": "triton"}
        return sparseflash.attention(q, k, v, mask, return_lse=True, **chosen)

    with poisoned_empty():
        check_attention(attend, query, key, value, mask, score=FADED)


@pytest.mark.parametrize("splits", [1, 3])
def test_dropout_and_scores_of_each_head(split, splits):
    split(splits)
    query, key, value, _ = make_inputs(1, 4, 3, 50, 16, kv_heads=2, device=DEVICE)
    mask = (masks.causal(align="bottom-right") & masks.random(0.6))((3, 50), 16, DEVICE)
    options = {
        "bias": torch.randn(4, 3 + 50 - 1, device=DEVICE),
        "softcap": 2.0,
        "dropout_p": 0.3,
        "seed": 5,
        "sinks": torch.randn(4, device=DEVICE),
    }

    def attend(q, k, v):
        return sparseflash.attention(q, k, v, mask, return_lse=True, backend="triton", **options)

    with poisoned_empty():
        check_attention(attend, query, key, value, mask, **options)


def test_scores_far_apart_keep_their_precision(split):
    split(4)
    inputs = make_inputs(1, 1, 1, 128, 16, device=DEVICE, scale=50.0)
    check_forward(*inputs[:3], torch.ones(1, 1, 128, dtype=torch.bool), (16, 16))


def test_a_mask_without_blocks():
    mask = BlockMask.from_dense(torch.zeros(1, 64, dtype=torch.bool), 16)
    out, lse = block_sparse(*make_inputs(1, 2, 1, 64, 16, device=DEVICE)[:3], mask)
    assert out.count_nonzero() == 0
    assert lse.isneginf().all()


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides):
    inputs = make_inputs(
        2, 4, 5, 40, 24, kv_heads=2, dtype=torch.float16, device=DEVICE, strides=strides
    )
    check_forward(*inputs[:3], rows_of(5, 40, (16, 16)), (16, 16))


def test_the_keys_are_split_where_programs_are_few():
    splits = partial(decode.fastest_splits, block_k=128, resident_programs=264)
    assert splits(64, 512) == 4
    assert splits(8, 512) == 32
    assert splits(264, 512) == 1
    assert splits(1, 1 << 16) == decode.MAX_SPLITS
    assert splits(8, 1) == splits(8, 0) == 1


def test_few_queries_are_decoded_and_more_are_not(monkeypatch):
    taken = []
    for module in (decode, passes):
        monkeypatch.setattr(module, "forward", lambda *_, m=module: taken.append(m))
    key = torch.empty(1, 1, 64, 16, device=DEVICE)
    for q_len in (FEW_QUERIES, FEW_QUERIES + 1):
        mask = masks.full()((q_len, 64), 16, DEVICE)
        call = call_on(triton_backend, key[:, :, :q_len], key, mask)
        triton_backend.forward(call, key[:, :, :q_len], key, key)
        assert bool(auto_skip(replace(call.spec, head_dim=128), mask)) == (q_len == FEW_QUERIES)
    assert taken == [decode, passes]


def test_explain_says_in_how_many_splits(split):
    split(8)
    query, key, value, _ = make_inputs(1, 1, 1, 1000, 16, device=DEVICE)
    found = sparseflash.explain(query, key, value, backend="triton")
    assert found.configuration["forward"].startswith("decoding in 8 splits of the keys, Config(")


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (16, 1)])
def test_long_caches(q_len, head_dim, heads, kv_heads):
    lengths = torch.tensor([5000, 8192, 77], device=DEVICE)
    query, key, value, _ = make_inputs(
        *(3, heads, q_len, 8192, head_dim), kv_heads=kv_heads, dtype=torch.bfloat16, device=DEVICE
    )
    for pattern in (masks.full(), masks.causal(align="bottom-right") & masks.random(0.3)):
        mask = pattern((q_len, 8192), 128, DEVICE)
        for options in ({}, {"key_lengths": lengths}):

            def attend(q, k, v, mask=mask, options=options):
                return sparseflash.attention(q, k, v, mask, return_lse=True, **options)

            check_attention(attend, query, key, value, mask, **options)


@pytest.mark.gpu
def test_a_graph_replays_what_was_captured():
    query, key, value, _ = make_inputs(
        2, 8, 1, 4096, 128, kv_heads=2, dtype=torch.bfloat16, device=DEVICE
    )
    lengths = torch.tensor([4096, 4096], device=DEVICE, dtype=torch.int32)

    def attend():
        return sparseflash.attention(query, key, value, key_lengths=lengths)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for length in (100, 3000):
        lengths.fill_(length)
        graph.replay()
        assert torch.equal(out, attend())
