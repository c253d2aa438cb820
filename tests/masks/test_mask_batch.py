"""Masks of each batch element in one table."""

import pytest
import torch

import masks
from masks import BlockMask, MaskBatch
from masks.registry import find

LENGTHS, BLOCKS = (50, 75), (16, 32)
LOCAL = masks.local(9, align="top-left")(LENGTHS, BLOCKS)
FULL = masks.full()(LENGTHS, BLOCKS)
HEADS = masks.stack([masks.butterfly(), masks.random(0.5)])(LENGTHS, BLOCKS)


def test_each_element_has_its_mask():
    batch = MaskBatch.from_masks([LOCAL, FULL, LOCAL])
    assert (batch.num_batches, batch.num_heads, batch.seq_len) == (3, 1, LENGTHS)
    assert [batch[b] for b in range(-3, 3)] == [LOCAL, FULL, LOCAL] * 2
    dense = torch.stack([m.to_dense() for m in (LOCAL, FULL, LOCAL)])
    assert torch.equal(batch.to_dense(), dense.unsqueeze(1))
    assert batch.to_blocks().shape == (3, 1, 4, 3)
    assert batch.density == pytest.approx((2 * LOCAL.density + 1) / 3)
    with pytest.raises(IndexError, match="batch_index must be from -3 to 2 for 3 masks, got 3"):
        batch[3]


def test_equal_masks_are_stored_once_and_a_mask_of_one_head_serves_all():
    batch = MaskBatch.from_masks([HEADS, LOCAL, HEADS])
    table = batch.table()
    assert table.head_to_mask.tolist() == [[0, 1], [2, 2], [0, 1]]
    assert table.by_query.row_ptr.shape[0] == 3
    assert batch.table() is table
    assert batch.to(torch.device("cpu")) is batch
    assert find(batch.handle) is batch
    assert batch[1].to_dense().shape == (2, *LENGTHS)


def test_batches_of_equal_masks_are_equal(tmp_path):
    batch, other = MaskBatch.from_masks([HEADS, LOCAL]), MaskBatch.from_masks([LOCAL, HEADS])
    assert batch == MaskBatch.from_masks([HEADS, LOCAL]) != other
    assert hash(batch) == hash(MaskBatch.from_masks([HEADS, LOCAL]))
    assert MaskBatch(batch.stacked, 1) != batch != batch.stacked
    masks.save(batch.stacked, tmp_path / "stacked")
    stacked = masks.load(tmp_path / "stacked")
    assert isinstance(stacked, BlockMask)
    assert MaskBatch(stacked, 2) == batch


@pytest.mark.parametrize("mask", [LOCAL, HEADS])
def test_keys_of_each_element(mask):
    keys = torch.rand(4, LENGTHS[1]) < 0.5
    keys[3] = keys[1]
    batch = MaskBatch.with_keys(mask, keys)
    expected = mask.to_dense().view(1, -1, *LENGTHS) & keys[:, None, None]
    assert torch.equal(batch.to_dense(), expected)
    assert batch.stacked.num_masks == 3 * mask.num_masks
    again = MaskBatch.with_keys(batch, keys.flip(0))
    assert torch.equal(again.to_dense(), expected & keys.flip(0)[:, None, None])
    with pytest.raises(ValueError, match=r"keys must be \(4, 75\), got \(2, 75\)"):
        MaskBatch.with_keys(batch, keys[:2])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MaskBatch.from_masks([]), ValueError, "masks must have at least 1 entry"),
        (lambda: MaskBatch.from_masks(LOCAL), TypeError, "list of block masks"),
        (lambda: MaskBatch.from_masks([masks.full()]), TypeError, "list of block masks"),
        (
            lambda: MaskBatch.from_masks([LOCAL, masks.full()(LENGTHS, 16)]),
            ValueError,
            "masks must share lengths, block size, device and heads, got BlockMask",
        ),
        (
            lambda: MaskBatch.from_masks([HEADS, masks.stack([HEADS.head(0)] * 3)]),
            ValueError,
            "masks must share .* heads, got",
        ),
        (lambda: MaskBatch.with_keys(LOCAL, torch.ones(2, 75)), TypeError, "keys must be a bool"),
        (
            lambda: MaskBatch.with_keys(LOCAL, torch.ones(2, 50).bool()),
            ValueError,
            r"keys must be \(batch, 75\), got \(2, 50\)",
        ),
        (
            lambda: MaskBatch.with_keys(LOCAL, torch.ones(LENGTHS[1]).bool()),
            ValueError,
            r"keys must be \(batch, 75\), got \(75,\)",
        ),
        (
            lambda: MaskBatch.with_keys(LOCAL, torch.ones(0, LENGTHS[1]).bool()),
            ValueError,
            r"keys must be \(batch, 75\), got \(0, 75\)",
        ),
        (lambda: MaskBatch(LOCAL, 3), ValueError, "num_batches must divide the 1 heads"),
        (lambda: MaskBatch(LOCAL, 0), ValueError, "num_batches must be at least 1, got 0"),
        (lambda: MaskBatch(LOCAL, 1.0), TypeError, "num_batches must be an integer, got 1.0"),
        (lambda: MaskBatch([LOCAL], 1), TypeError, "stacked must be a BlockMask, got list"),
        (
            lambda: masks.save(MaskBatch(LOCAL, 1), "never"),
            TypeError,
            "a Pattern or a BlockMask, got MaskBatch; save its stacked",
        ),
        (
            lambda: MaskBatch.from_masks([LOCAL] * 2)[0:2],
            TypeError,
            r"batch_index must be an integer, got slice\(0, 2",
        ),
    ],
)
def test_what_makes_no_batch_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_batch_of_masks_with_blocks_of_other_sizes_is_read_in_those():
    batch = MaskBatch.from_masks([LOCAL, FULL])
    table = batch.table(block_size=(64, 64))
    assert table.head_to_mask.tolist() == [[0], [1]]
    assert table.block_size == (64, 64)
    assert batch.coverage((64, 64)) == BlockMask.coverage(batch.stacked, (64, 64))
