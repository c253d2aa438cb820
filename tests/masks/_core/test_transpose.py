"""Transposed masks against transposed tensors."""

import pytest
import torch
from hypothesis import given

import masks
from masks import BlockMask
from masks._core import transpose
from tests.helpers.dense_masks import block_sizes, dense_masks


@given(dense_masks(), block_sizes)
def test_transpose(dense, block_size):
    mask = BlockMask.from_dense(dense, block_size)
    assert torch.equal(mask.T.to_dense(), dense.T)
    assert BlockMask.from_dense(dense.T, block_size[::-1]) == mask.T


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_many_and_few_runs_have_equal_transposes(share, monkeypatch):
    monkeypatch.setattr(transpose, "DENSE_SHARE", share)
    mask = masks.stack([masks.random(0.4), masks.butterfly(), masks.full()])(300, (16, 32))
    assert torch.equal(mask.T.to_dense(), mask.to_dense().mT)
