"""Parts of masks against parts of tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from masks import BlockMask
from tests.helpers.dense_masks import block_sizes, dense_masks


@given(dense_masks(), block_sizes, st.data())
def test_crop(dense, block_size, data):
    q_len, k_len = (data.draw(st.integers(1, n)) for n in dense.shape)
    cropped = BlockMask.from_dense(dense, block_size).crop(q_len, k_len)
    assert cropped == BlockMask.from_dense(dense[:q_len, :k_len], block_size)
    assert torch.equal(cropped.to_dense(), dense[:q_len, :k_len])


@given(dense_masks(), block_sizes, st.data())
def test_rows(dense, block_size, data):
    end = data.draw(st.integers(1, dense.shape[0]))
    begin = data.draw(st.integers(0, end - 1))
    two = torch.stack([dense, ~dense])
    rows = BlockMask.from_dense(two, block_size).slice_queries(begin, end)
    assert rows == BlockMask.from_dense(two[:, begin:end], block_size)
    assert torch.equal(rows.to_dense(), two[:, begin:end])


@given(dense_masks(), block_sizes, st.data())
def test_blocks_taken(dense, block_size, data):
    two = BlockMask.from_dense(torch.stack([dense, ~dense]), block_size)
    counts, sides = (two.grid.nq, two.grid.nk), two.block_size
    chosen = [sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))) for n in counts]
    queries, keys = (
        torch.cat([torch.arange(n, dtype=torch.int64)[i * side : (i + 1) * side] for i in numbers])
        for n, side, numbers in zip(dense.shape, sides, chosen, strict=True)
    )
    taken = two.take_blocks(*map(torch.tensor, chosen))
    expected = torch.stack([dense, ~dense])[:, queries][:, :, keys]
    assert taken == BlockMask.from_dense(expected, block_size)
    assert torch.equal(taken.to_dense(), expected)


@given(dense_masks(), block_sizes, st.data())
def test_rows_kept(dense, block_size, data):
    two = BlockMask.from_dense(torch.stack([dense, ~dense]), block_size)
    rows = sorted(data.draw(st.sets(st.integers(0, two.grid.nq - 1), min_size=1)))
    queries = torch.arange(len(dense)) // two.grid.bq
    expected = two.to_dense() & torch.isin(queries, torch.tensor(rows)).unsqueeze(1)
    kept = two.keep_rows(torch.tensor(rows))
    assert kept == BlockMask.from_dense(expected, block_size)
    assert torch.equal(kept.to_dense(), expected)


@pytest.mark.parametrize("rows", [[], [1, 0], [0, 0], [-1, 0], [0, 4]])
def test_blocks_that_are_not_there_or_out_of_order_are_refused(rows):
    mask = BlockMask.from_dense(torch.ones(64, 64, dtype=torch.bool), 16)
    with pytest.raises(ValueError, match="rows must be ascending from 0 to 3"):
        mask.take_blocks(torch.tensor(rows, dtype=torch.int64), torch.arange(4))
    with pytest.raises(ValueError, match="rows must be ascending from 0 to 3"):
        mask.keep_rows(torch.tensor(rows, dtype=torch.int64))
    with pytest.raises(TypeError, match="columns must be a one-dimensional int64 tensor"):
        mask.take_blocks(torch.arange(4), torch.arange(4.0))
