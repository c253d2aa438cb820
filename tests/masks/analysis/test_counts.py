import pytest
import torch

import masks
from masks import BlockMask
from masks.analysis.counts import attended_pairs, computed_pairs, keys_per_query


@pytest.mark.parametrize("size", [16, (16, 64)])
def test_counts_are_those_of_the_dense_masks(size):
    dense = torch.rand(3, 90, 130) < 0.01
    dense[:, :40, :70] = True
    dense[2] = dense[0]
    mask = BlockMask.from_dense(dense, size)
    assert torch.equal(keys_per_query(mask), dense.sum(2))
    assert attended_pairs(mask) == int(dense.sum())
    bq, bk = mask.block_size
    in_blocks = mask.to_blocks().repeat_interleave(bq, 1).repeat_interleave(bk, 2)
    assert computed_pairs(mask) == int(in_blocks[:, :90, :130].sum())


def test_keys_past_the_end_of_full_blocks_do_not_count():
    mask = masks.full()((40, 50), 16)
    assert (keys_per_query(mask) == 50).all()
    assert computed_pairs(mask) == 40 * 50
