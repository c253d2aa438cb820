"""Masks of dense and scipy matrices, and back."""

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings

from masks import BlockMask
from masks._core import convert
from masks._core.grid import Grid
from tests.helpers.dense_masks import block_sizes, dense_masks


@given(dense_masks(heads=True), block_sizes)
def test_dense_round_trip(dense, block_size):
    mask = BlockMask.from_dense(dense, block_size)
    assert torch.equal(mask.to_dense(), dense.squeeze(0))


@given(dense_masks(), block_sizes)
@settings(max_examples=30)
def test_scipy_round_trip(dense, block_size):
    mask = BlockMask.from_dense(dense, block_size)
    for matrix in (scipy.sparse.csr_array(dense.numpy()), scipy.sparse.coo_array(dense.numpy())):
        assert BlockMask.from_scipy(matrix, block_size) == mask
    padded = mask.to_scipy()
    assert padded.sum() == dense.sum()
    assert (padded.toarray()[: dense.shape[0], : dense.shape[1]] == dense.numpy()).all()
    unclipped = BlockMask.from_scipy(padded, block_size)
    assert unclipped.crop(*dense.shape) == mask


def test_scipy_blocks_may_be_stored_in_any_order_twice_and_with_any_numbers():
    blocks = np.zeros((3, 16, 16))
    blocks[0, 2, 3], blocks[1], blocks[2, 5, 5] = -1.0, 1.0, 2.0
    matrix = scipy.sparse.bsr_array((blocks, [1, 0, 1], [0, 3]), shape=(16, 32))
    mask = BlockMask.from_scipy(matrix, 16)
    assert (mask.to_dense().numpy() == (matrix.toarray() != 0)).all()
    assert matrix.indices.tolist() == [1, 0, 1], "the caller's matrix was changed"


def test_a_mask_is_read_in_strips(monkeypatch):
    monkeypatch.setattr(convert, "STRIP", 2 * 16 * 90)
    dense = torch.rand(2, 10, 6).lt(0.7).repeat_interleave(16, 1).repeat_interleave(15, 2)
    dense[:, ::7, ::5] = True
    dense, rows = dense[:, :150], []

    def pairs(mask, queries):
        rows.append(queries.stop - queries.start)
        return dense[mask, queries]

    mask = BlockMask(convert.from_strips(Grid.of((150, 90), 16), pairs, (0, 1)))
    assert torch.equal(mask.to_dense(), dense)
    assert rows == 2 * [32, 32, 32, 32, 22]


@pytest.mark.parametrize("held", [(1, 1), (3, 4), (64, 1024)])
def test_equal_bit_tiles_of_many_strips_are_held_once(held, monkeypatch):
    for name, most in zip(("STRIP", "STRIPS_HELD", "TILES_HELD"), (1, *held), strict=True):
        monkeypatch.setattr(convert, name, most)
    counts, assemble = [], convert.assemble

    def counted(*arguments):
        counts.append(len(arguments[4]))
        return assemble(*arguments)

    monkeypatch.setattr(convert, "assemble", counted)
    equal = torch.arange(1024).remainder(24).lt(7).expand(1024, 1024)
    for dense, tiles in ((equal, 2), (torch.rand(1024, 1024) < 0.3, 64 * 64)):
        mask = BlockMask(convert.from_strips(Grid.of(1024, 16), lambda _, rows: dense[rows]))  # noqa: B023
        assert torch.equal(mask.to_dense(), dense)
        assert counts.pop() == mask.num_bit_tiles == tiles
