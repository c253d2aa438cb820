"""Block masks against equal dense tensors."""

import itertools
import os

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

import masks
from masks import BlockMask
from masks._core.grid import Grid
from tests.helpers.dense_masks import block_sizes, dense_masks


def test_tables_are_compiled_once_and_coverage_computed_once(monkeypatch):
    mask, computed = masks.local(9)(300, 16), []
    monkeypatch.setattr(
        "masks._core.reblock.coverage", lambda *arguments: computed.append(1) or 0.5
    )
    assert [mask.coverage((128, 128)), mask.coverage((128, 128))] == [0.5, 0.5]
    assert computed == [1]
    assert mask.table() is mask.table(block_size=(16, 16))
    assert mask.table() is not mask.table(block_size=(128, 128))
    assert mask.table(block_size=(128, 128)) is mask.table(block_size=(128, 128))
    assert mask.table("cpu", [128, 128]) is mask.table(block_size=128)
    assert mask.coverage([128, 128]) == mask.coverage(128) == 0.5


@pytest.mark.parametrize(
    ("convert", "made_of"),
    [
        *((name, lambda mask: mask) for name in ("to_dense", "to_blocks", "to_scipy")),
        *(
            (name, lambda mask: masks.MaskBatch.from_masks([mask]))
            for name in ("to_dense", "to_blocks")
        ),
        ("to_dense", lambda mask: mask.select(mask.to_blocks())),
    ],
)
def test_matrices_larger_than_the_machine_are_refused(convert, made_of, monkeypatch):
    small, large = (made_of(masks.causal()(tokens, 16)) for tokens in (256, 16 * 1024))
    monkeypatch.setattr(os, "sysconf", lambda _: 2**9)  # 256 KiB
    getattr(small, convert)()
    with pytest.raises(
        ValueError, match=rf"{convert} would take .* GiB at this length, more than"
    ):
        getattr(large, convert)()


def test_masks_and_tables_move():
    mask = (masks.local(9) | masks.random(0.5))(300, 16)
    there = mask.to("meta")
    stored = there.block_set
    assert mask.to("cpu") is mask
    tensors = [stored.partial, stored.partial_bit_tile, stored.bit_tiles, *stored.full]
    assert {t.device.type for t in (there, *tensors)} == {"meta"}
    assert mask.table("meta").by_key.row_ptr.device.type == "meta"
    assert mask.table().by_key.row_ptr.device.type == "cpu"


@given(dense_masks(), block_sizes, st.integers(0, 2**31))
def test_algebra_commutes_with_to_dense(a, block_size, seed):
    b = torch.rand(a.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    b |= masks.causal(align="top-left")(tuple(a.shape), block_size).to_dense()
    x, y = (BlockMask.from_dense(t, block_size) for t in (a, b))
    for ours, dense in ((x & y, a & b), (x | y, a | b), (x - y, a & ~b), (x ^ y, a ^ b), (~x, ~a)):
        assert torch.equal(ours.to_dense(), dense)
        assert ours == BlockMask.from_dense(dense, block_size)


def test_blocks_round_trip_and_figures():
    blocks = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.bool)
    mask = BlockMask.from_blocks(blocks, (16, 32), (30, 70))
    assert torch.equal(mask.to_blocks(), blocks)
    assert (mask.nnz_blocks, mask.density, mask.partial_blocks) == (3, 0.5, 0)
    assert mask.blocks_per_row().tolist() == [[2, 1]]
    assert (mask.shape, mask.block_size, mask.num_heads) == ((30, 70), (16, 32), 1)


HEADS = torch.tensor([[[1, 0, 1], [0, 0, 1]], [[0, 0, 0], [1, 1, 0]], [[1, 0, 1], [0, 0, 1]]])


@pytest.mark.parametrize(
    "given",
    [
        HEADS.bool(),
        HEADS,
        HEADS.to(torch.uint8),
        HEADS.numpy(),
        HEADS.numpy().astype(bool),
        HEADS.numpy().astype("uint16"),
        HEADS.tolist(),
        HEADS.bool().tolist(),
    ],
)
def test_blocks_of_any_form_become_full_blocks(given):
    mask = BlockMask.from_blocks(given, 16, (30, 40))
    assert isinstance(mask, BlockMask)
    assert (mask.seq_len, mask.num_heads, mask.num_masks) == ((30, 40), 3, 2)
    assert torch.equal(mask.to_blocks(), HEADS.bool())
    assert mask.partial_blocks == 0
    expected = HEADS.bool().repeat_interleave(16, 1).repeat_interleave(16, 2)[:, :30, :40]
    assert torch.equal(mask.to_dense(), expected)
    one = BlockMask.from_blocks(given[0], 16, (30, 40))
    assert one == mask.head(0)


@pytest.mark.parametrize("of", [scipy.sparse.csr_array, scipy.sparse.coo_matrix])
@pytest.mark.parametrize("dtype", [bool, "int8"])
def test_blocks_of_a_sparse_matrix(of, dtype):
    mask = BlockMask.from_blocks(of(HEADS[0].numpy().astype(dtype)), 32)
    assert torch.equal(mask.to_blocks(), HEADS[0].bool())
    assert mask.seq_len == (64, 96)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            torch.ones(2, 2),
            TypeError,
            "blocks must be bool or the integers 0 and 1, got torch.float32",
        ),
        (scipy.sparse.eye_array(3), TypeError, "blocks must be bool or .* got torch.float64"),
        ("ab", TypeError, "blocks must be a tensor, an array, nested lists .* got str"),
        (None, TypeError, "blocks must be a tensor, an array, nested lists .* got NoneType"),
        ([[1, 0], [1]], ValueError, "blocks must have rows of one length"),
        ([[1, 2], [0, 1]], ValueError, "blocks must be 0 or 1, got 0 to 2"),
        ([[-1, 0]], ValueError, "blocks must be 0 or 1, got -1 to 0"),
        (
            [1, 0],
            ValueError,
            r"blocks must be \(nq, nk\) or \(heads, nq, nk\) and not empty, got \(2,\)",
        ),
        (torch.ones(0, 2) > 0, ValueError, r"blocks must be .* and not empty, got \(0, 2\)"),
        (torch.ones(2, 3, 4, 4) > 0, ValueError, r"\(2, 3, 4, 4\).* see DynamicMask.from_blocks"),
    ],
)
def test_blocks_of_other_forms_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        BlockMask.from_blocks(given, 16)


def test_stack_shares_equal_heads():
    local, again = masks.local(9)(100, 16), masks.local(9)(100, 16)
    mask = masks.stack([local, masks.butterfly()(100, 16), again])
    assert mask.num_heads == 3
    assert mask.num_masks == 2
    assert mask.shape == (3, 100, 100)
    assert torch.equal(mask.to_dense()[2], local.to_dense())
    assert mask.density == pytest.approx((2 * local.density + mask.head(1).density) / 3)
    assert mask.head(1) == masks.butterfly()(100, 16)


def test_heads_that_there_are_not():
    with pytest.raises(IndexError, match="index must be from -1 to 0 for 1 heads, got 1"):
        masks.full()(64).head(1)
    with pytest.raises(TypeError, match=r"index must be an integer, got \(0, 0\)"):
        masks.full()(64).head((0, 0))


def test_a_head_has_a_table_of_its_own():
    both = masks.stack([masks.local(9), masks.local(9)])(100, 16)
    assert both.table().head_to_mask.shape == (1, 2)
    assert both.head(1).table().head_to_mask.shape == (1, 1)


@pytest.mark.parametrize("name", ["full", "local", "heads", "empty"])
def test_equal_masks_have_equal_hashes(name):
    mask = {
        "full": masks.full()(100, 16),
        "local": (masks.local(30) & masks.causal())(100, 16),
        "heads": masks.stack([masks.local(3), masks.causal(), masks.local(3)])(100, (16, 32)),
        "empty": masks.BlockMask.from_dense(torch.zeros(100, 100, dtype=torch.bool), 16),
    }[name]
    assert hash(BlockMask.from_dense(mask.to_dense(), mask.block_size)) == hash(mask)


def test_masks_that_differ_in_a_pair_have_other_hashes(monkeypatch):
    distinct = [masks.local(i)(64, 16) for i in range(40)]
    monkeypatch.setattr(BlockMask, "__eq__", lambda *_: pytest.fail("hashes are equal"))
    assert masks.stack(distinct).num_masks == 40


def test_heads_broadcast_in_the_algebra():
    one = masks.causal()(90, 32)
    many = masks.stack([masks.local(5)(90, 32), masks.random(0.5)(90, 32)])
    assert torch.equal((many & one).to_dense(), many.to_dense() & one.to_dense())
    assert torch.equal((one - many).to_dense(), one.to_dense() & ~many.to_dense())


def heads(number):
    return masks.stack([masks.local(n) for n in range(number)])(64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.full()(0), "seq_len must be at least 1"),
        (lambda: masks.full()(64, 48), "block_size must have sides in"),
        (lambda: masks.full()(64.0), "seq_len must be an int"),
        (lambda: masks.full()(64).table(block_size=(64, 48)), "block_size must have sides in"),
        (lambda: masks.full()(64).coverage("64"), "block_size must be an integer, got '64'"),
        (lambda: BlockMask.from_dense(torch.ones(4, 4)), "dense must be a bool tensor"),
        (lambda: BlockMask.from_dense(torch.ones(4, dtype=torch.bool)), "dense must be"),
        (
            lambda: BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), 16, 100),
            r"blocks must be \(7, 7\) .*, got \(2, 2\)$",
        ),
        (lambda: masks.full()(64).crop(65, 64), "q_len must be at most 64, got 65"),
        (lambda: masks.DynamicMask.from_topk(torch.rand(2, 2), 0), "k must be at least 1"),
        (lambda: masks.full()(64).crop(0, 64), "q_len must be at least 1, got 0"),
        (lambda: masks.full()(64).crop(64, 65), "k_len must be at most 64, got 65"),
        (lambda: masks.full()(64).slice_queries(5, 65), "end must be at most 64, got 65"),
        (lambda: masks.full()(64).slice_queries(5, 5), "end must be at least 6, got 5"),
        (lambda: masks.full()(64).slice_queries(-1, 5), "begin must be at least 0, got -1"),
        (lambda: masks.full()(64) & masks.full()(65), "masks must share lengths"),
        (lambda: masks.full()(64, 16) | masks.full()(64, 32), "masks must share .* block size"),
        (lambda: heads(2) ^ heads(3), "masks must have the same heads, or 1, got 2 and 3"),
        (lambda: masks.stack([heads(2), heads(2)]), "masks must have one head each"),
        (
            lambda: masks.stack([masks.full()(64, 16), masks.full()(64, 32)]),
            "masks must have one head each and equal lengths",
        ),
        (lambda: BlockMask.from_dense(torch.ones(0, 4, dtype=torch.bool)), "not empty"),
        (lambda: BlockMask.from_scipy([[1]]), "scipy.sparse"),
        (lambda: BlockMask.from_scipy(scipy.sparse.coo_array(np.ones(3))), "2 dimensions, got 1"),
        (
            lambda: BlockMask.from_dense(torch.eye(20).bool().to_sparse(), 16),
            "dense must not be sparse, got torch.sparse_coo: see masks.interop.from_torch",
        ),
        (lambda: BlockMask(torch.ones(2, 2) > 0), "block_set must be a BlockSet, .* got Tensor"),
        (lambda: masks.stack([]), "masks must have at least 1 entry"),
        (
            lambda: masks.stack([masks.full(), masks.full()(64)]),
            "patterns only or block masks only",
        ),
        (lambda: masks.full()(64, device="gpu"), "device must be one of torch, .* got 'gpu'"),
        (lambda: masks.full()(64).to(1.5), "device must be one of torch, .* got 1.5"),
        (lambda: masks.full()(64, device="meta"), "device must hold data, got 'meta'"),
    ],
)
def test_bad_input_names_the_argument(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_equality_sees_one_element():
    dense = torch.ones(100, 100, dtype=torch.bool)
    other = dense.clone()
    other[99, 99] = False
    a, b = (BlockMask.from_dense(t, 32) for t in (dense, other))
    assert a == masks.full()(100, 32)
    assert a != b
    assert a != masks.stack([a, a])
    assert len({a, masks.full()(100, 32)}) == 1


@pytest.mark.parametrize("block_size", list(itertools.product((16, 512), repeat=2)))
def test_largest_and_smallest_blocks(block_size):
    mask = masks.local(37)(1100, block_size)
    assert mask == BlockMask.from_dense(mask.to_dense(), block_size)


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    grid = Grid.of(100, 16, "cuda")
    assert grid.device == torch.device("cuda", 3)
    assert Grid.of(100, 16, "cuda:1").device == torch.device("cuda", 1)
    assert Grid.of(100, 16).device == torch.device("cpu")
