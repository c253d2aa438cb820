"""Masks in blocks of other sizes."""

import pytest
import torch
from hypothesis import given

import masks
from masks import BlockMask
from masks._core.reblock import reblock
from tests.helpers.dense_masks import block_sizes, dense_masks


@given(dense_masks(), block_sizes, block_sizes)
def test_reblock(dense, block_size, other):
    mask = BlockMask.from_dense(dense, block_size).reblock(other)
    assert mask == BlockMask.from_dense(dense, other)
    assert torch.equal(mask.to_dense(), dense)


@given(dense_masks(heads=True), block_sizes, block_sizes)
def test_tables_of_other_blocks_and_how_far_blocks_fill_them(dense, block_size, other):
    mask = BlockMask.from_dense(dense, block_size)
    table, expected = mask.table(block_size=other), BlockMask.from_dense(dense, other)
    assert table.block_size == other
    assert torch.equal(table.by_query.row_ptr, expected.table().by_query.row_ptr)
    assert torch.equal(table.bit_tiles, expected.table().bit_tiles)
    parts = BlockMask.from_dense(dense, tuple(map(min, block_size, other)))
    covered = parts.nnz_blocks * parts.grid.bq * parts.grid.bk
    touched = expected.nnz_blocks * expected.grid.bq * expected.grid.bk
    if mask.num_masks == mask.num_heads:
        assert mask.coverage(other) == (covered / touched if covered else 1.0)


@given(dense_masks(), block_sizes)
def test_tables_may_have_rows_of_192_queries(dense, block_size):
    dense = dense.repeat(3, 2)
    mask = BlockMask.from_dense(dense, block_size)
    parts = BlockMask(reblock(mask.block_set, (192, 128)))
    assert torch.equal(parts.to_dense(), dense)
    assert parts.reblock(128) == BlockMask.from_dense(dense, 128)
    assert mask.table(block_size=(192, 128)).block_size == (192, 128)
    with pytest.raises(ValueError, match="sides in"):
        mask.reblock((192, 128))


def test_coverage_counts_what_blocks_leave_empty_of_192_queries():
    mask = masks.causal()(1024, block_size=256)
    parts = 6 * 8 + 4 * 6  # of 64 x 128, of the full and of the partial blocks
    touched = 2 + 3 + 5 + 6 + 8 + 8
    assert mask.coverage((192, 128)) == parts * 64 * 128 / (touched * 192 * 128)
