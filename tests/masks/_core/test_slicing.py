"""Parts of masks against parts of tensors."""

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
