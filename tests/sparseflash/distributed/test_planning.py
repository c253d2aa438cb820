"""What make_plan chooses, and what it refuses."""

import pytest
import torch

import masks
from sparseflash.distributed import make_plan
from sparseflash.distributed.assign import GROWING_CHUNKS, STRATEGIES

CAUSAL = masks.causal()(4096, 64)


def test_rows_of_global_tokens_are_shared_where_fetching_all_their_keys_takes_longer():
    pattern = masks.local(256) | masks.global_tokens([0, 5000])
    mask = pattern(65536, 128)
    plan, alone = make_plan(mask, 8), make_plan(mask, 8, shared_rows=())
    assert plan.shared.tolist() == [0, 5000 // 128]
    assert plan.report().imbalance < 1.02
    assert sum(plan.report().receive_bytes) * 7 < sum(alone.report().receive_bytes)
    assert plan.costs.blocks.sum() == alone.costs.blocks.sum() == mask.nnz_blocks
    assert not len(make_plan(masks.causal()(65536, 128), 8).shared)
    assert not len(make_plan(mask, 1).shared)


@pytest.mark.parametrize(
    ("pattern", "strategy", "share", "imbalance"),
    [  # of what an all-gather moves: by hand, for 8 ranks
        (masks.causal(), "contiguous", 0.5, 1.873),
        (masks.causal(), "zigzag", 0.75, 1.0),
        (masks.local((4095, 0)), "contiguous", 7 * 4096 / (8 * 57344), None),
        (masks.documents([8192] * 8), "zigzag by document", 1.0, 1.0),
        (masks.documents([4096] * 16), "zigzag by document", 1.0, 1.0),
        (masks.documents([1024] * 64), "zigzag by document", 0.0, 1.0),
    ],
)
def test_traffic_of_well_known_masks(pattern, strategy, share, imbalance):
    report = make_plan(pattern(65536, 128), 8, strategy).report()
    assert report.share == pytest.approx(share, rel=1e-3)
    if imbalance is not None:
        assert report.imbalance == pytest.approx(imbalance, rel=1e-3)


def test_each_strategy_balances_what_it_is_for():
    skewed = masks.documents([40960] + [128] * 192)(65536, 128)
    of = {name: make_plan(skewed, 8, name).report() for name in STRATEGIES}
    assert of["contiguous"].imbalance > 1.55
    assert of["zigzag by document"].imbalance < 1.01
    assert of["balanced chunks"].imbalance < 1.05
    assert of["contiguous with repair"].imbalance < 1.06
    assert all(max(report.tokens) - min(report.tokens) <= 9 * 128 for report in of.values())


def test_auto_takes_the_strategy_of_least_modelled_time():
    window, causal = masks.local((511, 0))(65536, 128), masks.causal()(65536, 128)
    assert make_plan(window, 8).strategy == "contiguous"
    assert make_plan(causal, 8).strategy == "zigzag"
    # Where fetching is so slow that nothing else counts, the least is fetched.
    assert make_plan(causal, 8, fetch_cost=1e4).strategy == "contiguous"


def test_graph_growing_in_halves_exchanges_few_blocks():
    """Half of a hypercube of odd dimension is a ball, of whose surface the other half needs one
    side: the blocks with 4 bits of 7.
    """
    mask = masks.butterfly()(128 * 64, 64)
    plan = make_plan(mask, 2)
    assert plan.strategy == "graph growing"
    bits = torch.tensor([number.bit_count() for number in range(128)])
    assert plan.owner.tolist() == (bits > 3).long().tolist()
    assert plan.costs.receive.tolist() == [35 * 64] * 2
    assert plan.report().imbalance == 1
    contiguous = make_plan(mask, 4, "contiguous").costs.traffic.sum()
    assert make_plan(mask, 4).costs.traffic.sum() < 0.7 * contiguous
    # Without links, and with all links, any half is as good.
    for pattern in (masks.full(), masks.documents([64] * 128)):
        plan = make_plan(pattern(128 * 64, 64), 3, "graph growing")
        assert sorted(plan.owner.bincount().tolist()) == [42, 43, 43]


def test_graph_growing_of_more_ranks_than_chunks_is_contiguous():
    mask = masks.local(20)(16 * (GROWING_CHUNKS + 100), 16)
    ranks = GROWING_CHUNKS + 50
    found, contiguous = (make_plan(mask, ranks, name) for name in ("graph growing", "contiguous"))
    assert found.owner.equal(contiguous.owner)


def test_auto_takes_contiguous_shards_if_others_save_little():
    random = masks.random(1 / 16, seed=0)(65536, 128)
    of = {name: make_plan(random, 8, name).costs.traffic.sum() for name in STRATEGIES}
    assert of["graph growing"] < of["contiguous"]
    assert make_plan(random, 8).strategy == "contiguous"


def test_auto_merges_only_where_waiting_and_copying_would_take_longer():
    window, full = masks.local((511, 0))(65536, 128), masks.full()(65536, 128)
    assert make_plan(window, 8).otherwise == ("rows", 1)
    # All rows wait for one block of keys: to copy own keys takes less than to read rows again.
    one_key = (masks.local(1024) | masks.global_tokens([0]))(65536, 128)
    assert make_plan(one_key, 2).otherwise == ("rows", 1)
    # All rows wait for as many keys as there are own ones, most of whose blocks need not wait.
    assert make_plan(masks.butterfly()(65536, 128), 2, "contiguous").otherwise == ("keys", 1)
    # Waiting rows are scattered: by rows queries are copied, and gradients of own keys are added.
    butterfly = masks.butterfly()(131072, 128)
    assert make_plan(butterfly, 4).otherwise == ("keys", 1)
    # A quarter of the heads have keys, so that less is copied.
    assert make_plan(butterfly, 4, fetch_cost=1.0).otherwise == ("rows", 1)
    # Half of the blocks are computed during an exchange that takes as long.
    assert make_plan(full, 2, fetch_cost=250.0).otherwise == ("keys", 1)
    assert make_plan(full, 2, round_tokens=128, split="keys").split == "keys"


def test_auto_computes_in_place_if_all_blocks_are_whole_and_heads_have_one_mask():
    window = masks.local((511, 0))
    assert make_plan(window(65536, 128), 8).split == "in place"
    assert make_plan(masks.butterfly()(131072, 128), 4).split == "in place"
    # In place nothing runs beside the exchange of the forward pass, because no row is ready. By
    # keys the blocks of own keys do, and all rows are merged once more.
    random = (masks.random(density, seed=0)(65536, 128) for density in (0.1, 0.17))
    assert [make_plan(x, 4, "contiguous").split for x in random] == ["in place", "keys"]
    for mask in (window(65530, 128), masks.stack([window, masks.local(64)])(65536, 128)):
        assert make_plan(mask, 8).split != "in place"
        with pytest.raises(
            ValueError,
            match='"rows" or "keys" if heads or batch elements have different masks or a',
        ):
            make_plan(mask, 8, split="in place")


def test_auto_computes_in_one_call_if_no_keys_are_exchanged():
    documents = masks.documents([2048, 2048])(4096, 128)
    for plan in (make_plan(documents, 2, "contiguous"), make_plan(masks.causal()(4096, 128), 1)):
        assert (plan.split, plan.groups, plan.num_rounds) == ("rows", 1, 0)


def test_equal_arguments_give_the_same_plan_and_equal_masks_equal_plans():
    plan = make_plan(CAUSAL, 4)
    assert make_plan(CAUSAL, 4) is plan
    assert make_plan(masks.causal()(4096, 64), 4).digest == plan.digest
    others = [make_plan(CAUSAL, 2), make_plan(CAUSAL, 4, "contiguous")]
    others += [
        make_plan(masks.local((4000, 0))(4096, 64), 4),
        make_plan(CAUSAL, 4, round_tokens=64),
    ]
    assert len({other.digest for other in [plan, *others]}) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((masks.causal(), 2), TypeError, "mask must be a BlockMask or a MaskBatch, got Pattern"),
        (
            (CAUSAL.select(CAUSAL.to_blocks()), 2),
            TypeError,
            r"DynamicMask; pass mask\.to_block_mask",
        ),
        ((masks.MaskBatch(masks.full()((64, 128), 16), 1), 2), ValueError, "as many queries as"),
        ((CAUSAL, 2, torch.zeros(4, 4)), TypeError, r"strategy\[0\] must be an integer, got \["),
        ((CAUSAL, 2, 0.01), TypeError, "strategy must be a sequence of integers, got 0.01"),
        ((masks.full()((64, 128), 16), 2), ValueError, "mask must have as many queries as keys"),
        ((CAUSAL, 0), ValueError, "ranks must be at least 1"),
        ((CAUSAL, 65), ValueError, "ranks must be at most the 64 units of the mask, got 65"),
        ((CAUSAL, 2, "ring"), ValueError, "strategy must be auto or one of"),
        ((CAUSAL, 2, [0, 1]), ValueError, "strategy must assign each of 64 units"),
        ((CAUSAL, 2, [0] * 64), ValueError, "and a unit to every rank"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        make_plan(*arguments)


def test_wrong_rounds_rows_splits_and_costs_are_named():
    with pytest.raises(ValueError, match="round_tokens must be at least 64"):
        make_plan(CAUSAL, 2, round_tokens=63)
    with pytest.raises(ValueError, match="shared_rows must be block rows from 0 to 63, ascending"):
        make_plan(CAUSAL, 2, shared_rows=[3, 64])
    with pytest.raises(
        ValueError, match='split must be "auto", "in place", "rows" or "keys", got 3'
    ):
        make_plan(CAUSAL, 2, split=3)
    with pytest.raises(ValueError, match='round_tokens must be None with split "rows", got 64'):
        make_plan(CAUSAL, 2, split="rows", round_tokens=64)
    for wrong in (0.0, "3", None, float("inf")):
        with pytest.raises(ValueError, match="fetch_cost must be a positive number, got"):
            make_plan(CAUSAL, 2, fetch_cost=wrong)
    with pytest.raises(TypeError, match="shared_rows must be a sequence of integers, got 3"):
        make_plan(CAUSAL, 2, shared_rows=3)
