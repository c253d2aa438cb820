"""Masks whose blocks a tensor chooses, against the mask that it spells out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from masks import DynamicMask, lookup_table
from masks.lookup_table import PREFETCH
from tests.helpers.tables import decode

SEQ_LEN, BLOCKS = (70, 101), (16, 32)
NQ, NK = 5, 4
WITHIN = {
    "full": masks.full(),
    "causal": masks.causal(align="bottom-right"),
    "holes": masks.random(0.5) - masks.global_tokens(20),
    "heads": masks.stack([masks.butterfly(), masks.full(), masks.causal(align="top-left")]),
}


@pytest.mark.parametrize("leading", [(), (3,), (2, 1), (2, 3), (1, 3)])
@pytest.mark.parametrize("name", WITHIN)
def test_both_directions_hold_the_chosen_blocks(name, leading):
    support = WITHIN[name](SEQ_LEN, BLOCKS)
    blocks = torch.rand(*leading, NQ, NK) < 0.6
    mask = support.select(blocks)
    chosen = blocks.view((1,) * (2 - len(leading)) + tuple(blocks.shape))
    pairs = chosen.repeat_interleave(BLOCKS[0], 2).repeat_interleave(BLOCKS[1], 3)
    expected = pairs[..., : SEQ_LEN[0], : SEQ_LEN[1]] & support.to_dense()
    table = mask.table()
    assert (mask.num_batches, mask.num_heads) == tuple(expected.shape[:2])
    for rows, transposed in ((table.by_query, False), (table.by_key, True)):
        dense = decode(table, rows, transposed)
        assert torch.equal(dense[..., : SEQ_LEN[0], : SEQ_LEN[1]], expected)
        assert int(dense.sum()) == int(expected.sum()), "a bit outside the sequence is set"
    assert torch.equal(mask.to_dense(), expected)
    for b in range(mask.num_batches):
        assert torch.equal(mask.to_block_mask(b).to_dense().view_as(expected[b]), expected[b])
    densities = [mask.to_block_mask(b).density for b in range(mask.num_batches)]
    assert mask.density == pytest.approx(sum(densities) / len(densities))


def test_order_puts_long_rows_first():
    rows = DynamicMask.from_blocks(torch.rand(2, 3, 6, 9) < 0.4, 16).table().by_key
    count = rows.row_ptr[..., 1] + rows.row_ptr[..., 3]
    assert (count.gather(1, rows.schedule.long()).diff(dim=1) <= 0).all()
    assert (rows.max_blocks, rows.total_blocks, rows.imbalance) == (None, None, float("inf"))


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(0, 2**31))
def test_topk_keeps_the_highest_scores_that_are_possible(k, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, 3, NQ, NK, generator=generator)
    scores[0, 1, 2, 1:] = -torch.inf
    support = WITHIN["holes"](SEQ_LEN, BLOCKS)
    kept = support.select_topk(scores, k).to_blocks()
    possible = support.to_blocks() & (scores > -torch.inf)
    assert torch.equal(kept.sum(-1), possible.sum(-1).clamp(max=k))
    assert not (kept & ~possible).any()
    lowest = scores.masked_fill(~kept, 2.0).amin(-1)
    highest = scores.masked_fill(kept | ~possible, -1.0).amax(-1)
    assert (lowest > highest).all()


def test_lists_end_in_readable_entries_and_are_made_once():
    mask = DynamicMask.from_blocks(torch.rand(2, 3, 6, 9) < 0.4, 16)
    table = mask.table()
    for rows in (table.by_query, table.by_key):
        for entries in (rows.full_index, rows.partial_index, rows.partial_bit_tile):
            assert len(entries) == 2 * 3 * 6 * 9 + PREFETCH
    assert mask.table() is table


def test_more_blocks_than_a_table_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(lookup_table, "MAX_ENTRIES", 2 * 15)
    DynamicMask.from_blocks(torch.ones(2, 3, 5) > 0, 16)
    with pytest.raises(ValueError, match="blocks must be at most 30 in a table, got 45"):
        DynamicMask.from_blocks(torch.ones(3, 3, 5) > 0, 16)


def test_few_queries_leave_blocks_full():
    every = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    rows = masks.full()((1, 100), 16).select(every).table().by_query
    assert rows.row_ptr.tolist() == [[[0, 6, 6, 1]], [[7, 6, 13, 1]]]


def test_batch_elements_that_there_are_not():
    mask = DynamicMask.from_blocks(torch.ones(2, 1, 3, 3) > 0, 16)
    assert mask.to_block_mask(-1) == masks.full()(48, 16)
    with pytest.raises(IndexError, match="from -2 to 1 for 2 batch elements, got 2"):
        mask.to_block_mask(2)
    with pytest.raises(TypeError, match="batch_index must be an integer, got slice"):
        mask.to_block_mask(slice(1))


def test_how_far_blocks_fill_others_is_known_of_their_own_size_alone():
    mask = DynamicMask.from_topk(torch.rand(3, 3), 1, (128, 64))
    assert (mask.coverage([128, 64]), mask.coverage(128)) == (1.0, None)


def test_masks_of_scores_alone():
    scores = torch.rand(5, 7)
    assert DynamicMask.from_topk(scores, 9, 16).to_block_mask() == masks.full()((80, 112), 16)
    above = DynamicMask.from_threshold(scores, scores[2, 3], 16, (70, 112))
    assert torch.equal(above.to_blocks()[0, 0], scores > scores[2, 3])
    assert above.seq_len == DynamicMask.from_topk(scores, 2, 16, (70, 112)).seq_len == (70, 112)
    causal = masks.causal()((80, 80), 16)
    assert causal.select_threshold(scores[:, :5], 0.0).to_block_mask() == causal


def test_scores_that_are_no_number_are_never_among_the_highest():
    scores = torch.tensor([[torch.nan, 5.0, 3.0], [torch.nan, torch.nan, torch.nan]])
    blocks = DynamicMask.from_topk(scores, 2, 16).to_blocks()[0, 0]
    assert blocks.tolist() == [[False, True, True], [False, False, False]]
    assert DynamicMask.from_threshold(scores, 4.0, 16).to_blocks().sum() == 1


def test_scores_keep_their_graph_and_blocks_have_none():
    scores = torch.rand(2, 5, 7, requires_grad=True)
    for mask in (
        DynamicMask.from_topk(scores, 2, 16),
        DynamicMask.from_threshold(scores, 0.5, 16),
    ):
        assert mask.scores.requires_grad
        assert not mask.blocks.requires_grad
        assert mask.scores.shape == mask.blocks.shape == (1, 2, 5, 7)


def test_masks_move_with_their_support_blocks_and_scores():
    scores = torch.rand(2, 5, 7, dtype=torch.float64, requires_grad=True)
    mask = masks.local(9, align="top-left")((80, 112), 16).select_topk(scores, 2)
    there = mask.to("meta")
    assert mask.to("cpu") is mask
    held = (there, there.support, there.blocks, there.scores, there.table(), mask.table("meta"))
    assert {t.device.type for t in held} == {"meta"}
    assert there.scores.requires_grad
    assert there.scores.shape == mask.scores.shape


@pytest.mark.gpu
def test_scores_get_their_gradient_from_another_device():
    scores = torch.rand(3, 3, requires_grad=True)
    there = DynamicMask.from_topk(scores, 1, 16).to("cuda")
    torch.where(there.blocks, there.scores, 0).sum().backward()
    assert torch.equal(scores.grad.bool(), there.blocks[0, 0].cpu())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.select(torch.ones(4, 4)), "blocks must be a bool tensor, got torch.float32"),
        (lambda m: m.select(torch.ones(4, 5, dtype=torch.bool)), r"blocks must be \(4, 4\)"),
        (
            lambda m: m.select(torch.ones(1, 1, 1, 4, 4, dtype=torch.bool)),
            r"blocks must be \(4, 4\)",
        ),
        (lambda m: m.select([[True]]), "blocks must be a bool tensor, got list"),
        (
            lambda m: m.select_topk(torch.ones(4, 4, dtype=torch.int), 1),
            "scores must be a floating-point tensor, got torch.int32",
        ),
        (
            lambda m: m.select(torch.ones(4, 4) > 0, [1.0]),
            "scores must be a floating-point tensor",
        ),
        (
            lambda m: m.select_threshold(torch.ones(4, 4), "x"),
            "threshold must be a number .* got 'x'",
        ),
        (
            lambda m: m.select_threshold(torch.ones(4, 4), torch.ones(3)),
            r"threshold must broadcast to the scores, \(4, 4\), got \(3,\)",
        ),
        (
            lambda m: m.select_threshold(torch.ones(4, 4), torch.ones(2, 4, 4)),
            r"threshold must broadcast to the scores, \(4, 4\), got \(2, 4, 4\)",
        ),
        (lambda m: m.select_topk(torch.ones(4, 4), 1.5), "k must be an integer, got 1.5"),
        (lambda m: DynamicMask(None, torch.ones(4, 4) > 0), "support must be a BlockMask, got No"),
        (lambda m: DynamicMask(m, None), "blocks must be a bool tensor, got NoneType"),
        (lambda m: DynamicMask.from_blocks([[True]]), "blocks must be a tensor, got list"),
        (
            lambda m: DynamicMask.from_blocks(torch.ones(2, 2) > 0, 16, 100),
            r"blocks must be \(7, 7\)",
        ),
        (
            lambda m: DynamicMask.from_topk(torch.ones(4), 1),
            r"scores must have 2 to 4 dimensions, got \(4,\)",
        ),
        (
            lambda m: m.select(torch.ones(4, 4) > 0, torch.ones(2, 4, 4)),
            "scores must have the shape",
        ),
        (lambda m: m.select(torch.ones(0, 4, 4) > 0), r"blocks must be \(4, 4\)"),
        (
            lambda m: m.select(torch.ones(4, 4) > 0, torch.ones(4, 4, dtype=torch.int)),
            "scores must be a floating-point tensor, got torch.int32",
        ),
        (lambda m: m.select_topk(torch.ones(4, 4), 0), "k must be at least 1, got 0"),
        (
            lambda m: masks.stack([m, ~m]).select_threshold(torch.ones(3, 4, 4), 0),
            "1 or 2 heads, got 3",
        ),
        (lambda m: m.select(torch.ones(4, 4, device="meta") > 0), "blocks must be on cpu"),
        (
            lambda m: m.select(torch.ones(4, 4) > 0).table(block_size=(32, 16)),
            r"block_size must be \(16, 16\), got \(32, 16\)",
        ),
    ],
)
def test_bad_input_names_the_argument(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(masks.causal()(64, 16))
