"""Masks in blocks of other sizes."""

import torch
from hypothesis import given

from masks import BlockMask
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
