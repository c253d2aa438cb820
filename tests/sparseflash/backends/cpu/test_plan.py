"""Which blocks a call reads, which products it starts, and what it does not copy."""

from functools import partial
from itertools import permutations, product

import pytest
import torch

import masks
import sparseflash
from masks import BlockMask
from sparseflash.backends import cpu
from sparseflash.backends.cpu import few_queries, plan
from sparseflash.backends.cpu.workspace import Workspace
from sparseflash.testing import STRIDES, make_inputs
from tests.helpers.calls import plan_of, spec_of
from tests.helpers.cpu_calls import (
    attention_with,
    check,
    dense_mask,
    operations,
    refuse_keys,
)


def test_decoding_copies_no_keys(monkeypatch):
    query, key, value, _ = make_inputs(1, 8, 1, 3000, 16, kv_heads=2)
    monkeypatch.setattr(Workspace, "take", refuse_keys(Workspace.take))
    monkeypatch.setattr(few_queries, "forward", lambda *_: None)
    attention_with(BlockMask.from_dense(torch.ones(1, 3000, dtype=torch.bool), 128))(
        query, key, value
    )


@pytest.mark.parametrize(
    ("pattern", "seq_len", "own", "read"),
    [
        (masks.causal(), 32, (16, 16), (32, 32)),
        (masks.causal(), 128, (16, 16), (128, 128)),
        (masks.causal(), 128, (16, 64), (128, 128)),
        (masks.causal(), 120, (128, 128), (128, 128)),
        (masks.causal(), 33, (128, 128), (128, 64)),
        (masks.causal(), 5, (128, 128), (128, 16)),
        (masks.causal(), 2048, (64, 64), (64, 64)),
        (masks.full(), 128, (16, 16), (16, 16)),
        (masks.local(16), 1024, (16, 16), (16, 16)),
    ],
    ids=str,
)
def test_small_calls_start_few_products(pattern, seq_len, own, read):
    mask = pattern(seq_len, own)
    query = torch.randn(1, 4, seq_len, 16)
    of_call = plan_of(query, query, query, mask)
    assert of_call.table.block_size == read
    assert len(list(plan.chunks(of_call))) <= max(3, seq_len // read[0])
    tiles = sparseflash.explain(query, query, query, mask).configuration.get("tiles", "")
    how = "merged" if read > own else "split"
    assert tiles == (f"{read}, {how} from blocks of {own}" if read != own else "")


@pytest.mark.parametrize(("seq_len", "block_size"), [(16, 16), (32, 16), (64, 128), (128, 128)])
def test_small_calls_start_few_operations_of_torch(seq_len, block_size):
    """Each takes some microseconds, which is most of the time of a small call."""
    mask = masks.causal()(seq_len, block_size)
    leaves = [torch.randn(1, 4, seq_len, 16).requires_grad_() for _ in range(3)]
    with torch.no_grad():
        attend = partial(sparseflash.attention, *leaves, mask)
        attend()
        assert operations(attend) <= 45
    out = sparseflash.attention(*leaves, mask)
    assert operations(partial(torch.autograd.grad, out, leaves, torch.randn_like(out))) <= 90


def test_blocks_at_equal_steps_are_not_copied(monkeypatch):
    """The same rows of all heads are at equal steps, so that each product reads them in place."""
    mask, leaves = masks.causal()(256, 128), torch.randn(3, 1, 4, 256, 64).unbind()
    of_call = plan_of(*leaves, mask)
    assert of_call.table.block_size == (128, 128)
    rows = [chunk.strided_queries for chunk in plan.chunks(of_call)]
    # The row with all keys is the first one: it writes the sums over keys that others add to.
    assert [(row.first, row.step, row.count) for row in rows] == [(1, 2, 1), (0, 2, 1)]
    assert plan.layout_of(of_call).all_keys
    sparseflash.attention(*leaves, mask)
    for name in ("index_select", "index_copy_"):
        monkeypatch.setattr(torch.Tensor, name, None)
    monkeypatch.setattr(Workspace, "take", refuse_keys(Workspace.take))
    sparseflash.attention(*leaves, mask)


@pytest.mark.parametrize("pattern", ["causal", "local", "documents", "no keys"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_blocks_at_equal_steps_of_grouped_heads(pattern, kv_heads):
    dense = dense_mask(pattern, 96, 96)
    for strides in STRIDES:
        check(dense, make_inputs(2, 4, 96, 96, 8, kv_heads=kv_heads, strides=strides), 16)


def masks_of_few_blocks():
    """Small masks of blocks: rows in any order, and rows of consecutive blocks at any step."""
    for order in permutations(range(3)):
        yield torch.eye(3, dtype=torch.bool)[list(order)]
    row, column = torch.arange(3).view(-1, 1), torch.arange(5)
    for width, step, first in product((1, 2, 3), (-2, -1, 0, 1, 2), (0, 2, 4)):
        begin = first + step * row
        yield (column >= begin) & (column < begin + width)
    for seed in range(20):
        yield torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) < 0.5


@pytest.mark.parametrize("side", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2)])
def test_rows_of_blocks_in_any_order(heads, kv_heads, side):
    for blocks in masks_of_few_blocks():
        dense = blocks.repeat_interleave(side, 0).repeat_interleave(side, 1)
        check(dense, make_inputs(1, heads, *dense.shape, 8, kv_heads=kv_heads), side)


def test_a_row_of_few_queries_is_not_divided():
    query, (key, value) = torch.randn(1, 4, 1, 64), torch.randn(2, 1, 4, 4096, 64)
    (chunk,) = plan.chunks(plan_of(query, key, value, masks.full()((1, 4096))))
    assert chunk.width == 4096


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        (masks.local(16), (64, 64)),
        (masks.dilated(16, 4), (64, 64)),
        (masks.local(600), (128, 128)),
        (masks.causal(), (128, 128)),
        (masks.butterfly(), (128, 128)),
    ],
    ids=str,
)
def test_narrow_patterns_are_read_in_smaller_blocks(pattern, read):
    mask = pattern(2048)
    query, key, value, grad_out = make_inputs(1, 4, 2048, 2048, 16)
    assert plan_of(query, key, value, mask).table.block_size == read
    tiles = sparseflash.explain(query, key, value, mask).configuration.get("tiles", "")
    assert tiles == (f"{read}, split from blocks of (128, 128)" if read != (128, 128) else "")
    found = gradients_of(sparseflash.attention, query, key, value, grad_out, mask)
    bias = torch.zeros(2048, 2048).masked_fill(~mask.to_dense(), float("-inf"))
    expected = gradients_of(
        torch.nn.functional.scaled_dot_product_attention, query, key, value, grad_out, bias
    )
    for name, one, other in zip(("out", "dQ", "dK", "dV"), found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


def test_smaller_blocks_are_counted_once_per_mask(monkeypatch):
    mask = masks.local(16)(2048)
    plan_of(*(x := torch.randn(3, 1, 4, 2048, 16)), mask)
    monkeypatch.setattr(plan, "computed_pairs", None)
    assert plan_of(*x.repeat(1, 2, 1, 1, 1), mask).table.block_size == (64, 64)


def gradients_of(attend, query, key, value, grad_out, mask):
    """Out and the gradients of query, key and value."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = attend(*leaves, mask)
    return out, *torch.autograd.grad(out, leaves, grad_out)


def test_blocks_that_only_the_device_or_another_sequence_knows_stay_as_they_are():
    query, mask = torch.randn(1, 1, 64, 16), masks.causal()(64, 16)
    chosen = mask.select(torch.ones(1, 1, 4, 4, dtype=torch.bool))
    assert cpu.block_size_for(spec_of(query, query, chosen), chosen) == (16, 16)
    part = spec_of(query, query, mask, bias=True, positions=True)
    assert cpu.block_size_for(part, mask) == (16, 16)
    assert cpu.block_size_for(spec_of(query, query, mask, bias=True), mask) == (64, 64)
