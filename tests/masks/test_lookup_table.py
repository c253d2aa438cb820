"""The table that kernels read, decoded and compared with the mask."""

import sys
from dataclasses import fields

import pytest
import torch

import masks
from masks._core.bit_tiles import unpack
from masks.lookup_table import PREFETCH
from tests.helpers.tables import decode

PATTERNS = {
    "full": masks.full(),
    "causal": masks.causal(align="bottom-right"),
    "local": masks.local((20, 3), align="top-left"),
    "strided": masks.strided(3, align="top-left"),
    "butterfly": masks.butterfly(),
    "random": masks.random(0.4),
    "complement": ~masks.local(11, align="top-left"),
    "heads": masks.stack([masks.random(0.3), masks.full(), masks.random(0.3)]),
}


@pytest.mark.parametrize("block_size", [(16, 16), (32, 16), (16, 64)])
@pytest.mark.parametrize("seq_len", [(96, 128), (100, 75), (1, 17)])
@pytest.mark.parametrize("name", PATTERNS)
def test_both_directions_hold_the_mask(name, seq_len, block_size):
    mask = PATTERNS[name](seq_len, block_size)
    table = mask.table()
    expected = mask.to_dense().view(-1, *seq_len)
    for rows, transposed in ((table.by_query, False), (table.by_key, True)):
        dense = decode(table, rows, transposed)[0]
        assert torch.equal(dense[:, : seq_len[0], : seq_len[1]], expected)
        assert int(dense.sum()) == int(expected.sum()), "a bit outside the sequence is set"


@pytest.mark.parametrize("seq_len", [(96, 128), (1000, 750)])
@pytest.mark.parametrize("name", [*PATTERNS, "global tokens", "far", "band"])
def test_parts_make_the_same_mask_and_table(name, seq_len, monkeypatch):
    scattered = {
        "global tokens": masks.global_tokens([3, 90, 400]),
        "far": masks.dilated(7, 90, align="top-left"),
        "band": masks.dilated(70, 3, align="bottom-right"),
    }
    pattern = (PATTERNS | scattered)[name]
    whole = pattern(seq_len, 16)
    table = whole.table()
    ours = [module for name, module in sys.modules.items() if name.startswith("masks.")]
    modules = [module for module in ours if hasattr(module, "CHUNK")]
    assert len(modules) > 3
    for module in modules:
        monkeypatch.setattr(module, "CHUNK", 5)
    parts = pattern(seq_len, 16)
    assert parts == whole
    for rows in ("by_query", "by_key"):
        found, expected = getattr(parts.table(), rows), getattr(table, rows)
        for field in fields(found):
            a, b = getattr(found, field.name), getattr(expected, field.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name


def test_few_queries_leave_blocks_full():
    rows = masks.full()((1, 100), (16, 16)).table().by_query
    assert rows.row_ptr.tolist() == [[[0, 6, 0, 1]]]


@pytest.mark.parametrize("block_size", [(16, 16), (32, 16), (16, 64)])
def test_the_bank_by_key_holds_the_transposed_tiles(block_size):
    for pattern in PATTERNS.values():
        table = pattern((100, 75), block_size).table()
        by_query = unpack(table.bit_tiles, block_size[1])
        assert torch.equal(unpack(table.bit_tiles_by_key, block_size[0]), by_query.mT)


@pytest.mark.parametrize("name", PATTERNS)
def test_schedule_puts_long_rows_first(name):
    rows = PATTERNS[name]((300, 300), 16).table().by_query
    count = rows.row_ptr[..., 1] + rows.row_ptr[..., 3]
    ordered = count.gather(1, rows.schedule.long())
    assert (ordered.diff(dim=1) <= 0).all()
    assert torch.equal(
        rows.schedule.sort(dim=1).values,
        torch.arange(rows.num_rows).expand_as(rows.schedule).int(),
    )
    assert (rows.max_blocks, rows.total_blocks) == (int(count.max()), int(count.sum()))


def test_rows_without_blocks_may_be_left_out_of_the_schedule():
    mask = masks.pattern(lambda q, k: (q // 32 % 3 == 1) & (k < 60 + q))(300, 16)
    rows = mask.table().by_query
    count = (rows.row_ptr[..., 1] + rows.row_ptr[..., 3]).flatten()
    fewer = rows.without_empty_rows
    assert sorted(fewer.schedule.flatten().tolist()) == count.nonzero().flatten().tolist()
    assert torch.equal(fewer.schedule, rows.schedule[:, : fewer.num_scheduled_rows])
    assert fewer.num_scheduled_rows < fewer.num_rows == rows.num_scheduled_rows
    assert fewer.imbalance < rows.imbalance
    assert fewer is rows.without_empty_rows


def test_all_rows_stay_in_schedules_that_must_have_one_length():
    some = masks.pattern(lambda q, k: (q < 100) & (k < 100))
    nothing = (masks.full() - masks.full())(300, 16)
    selected = masks.full()(300, 16).select(torch.zeros(19, 19) > 0)
    for mask in (masks.stack([masks.full(), some])(300, 16), nothing, selected):
        rows = mask.table().by_query
        assert rows.without_empty_rows is rows


def test_lists_end_in_readable_entries():
    table = (masks.butterfly() & masks.causal())(256, 16).table()
    for rows in (table.by_query, table.by_key):
        fulls, partials = (int(rows.row_ptr[..., n].sum()) for n in (1, 3))
        assert len(rows.full_index) >= PREFETCH + fulls > PREFETCH
        assert len(rows.partial_index) == len(rows.partial_bit_tile) == partials + PREFETCH


def test_a_million_tokens_stay_small():
    for pattern, megabytes in ((masks.butterfly(), 2), (masks.causal(), 1), (masks.full(), 1)):
        assert pattern(1 << 20).table().nbytes < megabytes * 1e6, pattern


def test_lists_that_32_bits_cannot_number_are_refused(monkeypatch):
    mask = masks.random(0.5)(256, 16)
    monkeypatch.setattr("masks.lookup_table.MAX_ENTRIES", mask.nnz_blocks - 1)
    with pytest.raises(ValueError, match=f"blocks must be at most .* got {mask.nnz_blocks}"):
        mask.table()


def test_whether_rows_list_partial_blocks():
    assert not masks.full()(64, 16).table().by_query.has_partial
    assert masks.full()((64, 60), 16).table().by_query.has_partial
    assert not masks.full()((64, 60), 16).table().by_key.has_partial
    assert masks.causal()(64, 16).table().by_key.has_partial


def test_columns_may_lie_in_another_order():
    """Entries of rows are renamed, and rows of keys are moved."""
    mask = (masks.random(0.6, seed=1) & masks.pattern(lambda q, k: k < 70 + q))(128, 16)
    table, order = mask.table(), torch.tensor([3, 0, 7, 1, 2, 6, 5, 4])
    found = table.with_columns(order)
    for name in ("full_index", "partial_index"):
        before, after = (getattr(x.by_query, name) for x in (table, found))
        assert torch.equal(after.long(), order[before.long()])
    assert torch.equal(found.by_query.row_ptr, table.by_query.row_ptr)
    assert torch.equal(found.by_key.row_ptr[:, order], table.by_key.row_ptr)
    count = (found.by_key.row_ptr[..., 1] + found.by_key.row_ptr[..., 3]).flatten()
    assert (count[found.by_key.schedule.flatten().long()].diff() <= 0).all()
    assert count.unique().numel() > 1


def test_reprs_are_short():
    mask = masks.stack([masks.causal(), masks.full()])(1000, 128)
    table = mask.table()
    assert repr(table) == (
        "LookupTable(seq_len=(1000, 1000), block_size=(128, 128), masks=2, total_blocks=100, "
        f"bit_tiles=5, nbytes={table.nbytes}, device=cpu)"
    )
    assert repr(table.by_query) == (
        "BlockLists(masks=2, rows=8, total_blocks=100, max_blocks=8, device=cpu)"
    )
    selected = masks.full()(1000, 128).select(torch.ones(8, 8, dtype=torch.bool)).table()
    assert "total_blocks=None" in repr(selected)
    assert "max_blocks=None" in repr(selected.by_key)
