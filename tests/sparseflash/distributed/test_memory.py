"""The memory of a rank, in shards of queries: by the model of the design page, and as counted."""

from dataclasses import replace

import pytest

import masks
from sparseflash.distributed import make_plan
from tests.helpers.live_memory import peak_in_shards

BLOCK, BLOCKS = 16, 1024  # of the sequence
LSE = 0.1  # of a shard: that of heads of 64 dims, and of parts


def butterfly(ranks, strategy="contiguous", split="keys", **options):
    return make_plan(
        masks.butterfly()(BLOCK * BLOCKS, BLOCK), ranks, strategy, split=split, **options
    )


def test_one_rank_has_out_and_gradients():
    assert peak_in_shards(butterfly(1), 0)[1] == pytest.approx(4, abs=LSE)


@pytest.mark.parametrize(("ranks", "shards"), [(2, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_by_keys_what_is_sent_and_received_is_what_grows(ranks, shards, kv_heads):
    """out, own gradients, dQ of received keys, and for each shard that a rank receives and sends
    two tensors sent and two received.
    """
    plan, share = butterfly(ranks), kv_heads / 4
    assert plan.costs.traffic.sum(1).tolist() == [BLOCK * BLOCKS // ranks * shards] * ranks
    forward, both = peak_in_shards(plan, 0, kv_heads=kv_heads)
    # The result and, while it is computed, keys and values that are sent and received; or this
    # result, that of the round, and received keys and values.
    assert forward <= max(1 + 4 * shards * share, 2 + 2 * shards * share) + LSE
    assert both <= 3 + 2 * share + 4 * shards * share + LSE


@pytest.mark.parametrize("strategy", ["contiguous", "graph growing"])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_in_place_a_rank_has_one_result_and_one_gradient_of_queries(kv_heads, strategy):
    """On two ranks; in the backward pass also two tensors that are sent and two received."""
    plan, share = butterfly(2, strategy, "in place"), kv_heads / 4
    received = int(plan.costs.receive[0]) / (BLOCK * BLOCKS / 2)
    forward, both = peak_in_shards(plan, 0, kv_heads=kv_heads)
    assert forward <= 1 + 4 * share * received + LSE
    assert both <= 2 + 2 * share + 4 * share * received + LSE


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_gradients_of_keys_of_shared_rows_are_computed_part_by_part(kv_heads):
    """Those of a quarter of the own keys are in memory beside all others."""
    mask = masks.local(64) | masks.global_tokens(list(range(BLOCK)))
    options = {"split": "in place", "shared_rows": [0]}
    plan = make_plan(mask(BLOCK * BLOCKS, BLOCK), 2, "contiguous", **options)
    share = kv_heads / 4
    for rank in range(2):
        _, both = peak_in_shards(plan, rank, kv_heads=kv_heads)
        few = 0.3  # results of shared rows over chunks of keys, and keys that are exchanged
        assert both <= 2 + 2 * share + 2 * share / 4 + few + LSE


@pytest.mark.parametrize("groups", [2, 4, 8])
@pytest.mark.parametrize("query_heads", [1, 4])
def test_in_place_in_groups_of_heads_memory_does_not_grow_with_received_keys(groups, query_heads):
    """Of two groups at most, keys and values are in memory that are sent or received, and of one
    the gradients.
    """
    received = int(butterfly(2, "graph growing", "in place").costs.receive[0])
    blocks = received // BLOCK
    limit = BLOCK * -(-blocks // groups)
    plan = butterfly(2, "graph growing", "in place", round_tokens=limit)
    assert plan.head_groups(8) == groups
    share, of_group = 1 / query_heads, received / (BLOCK * BLOCKS / 2) / groups / query_heads
    forward, both = peak_in_shards(plan, 0, heads=8 * query_heads, kv_heads=8)
    assert forward <= 1 + 6 * of_group + LSE
    assert both <= 2 + 2 * share + 6 * of_group + LSE
    if groups == 8:  # close to half of what one rank needs for the same sequence
        alone = peak_in_shards(butterfly(1), 0, heads=8 * query_heads, kv_heads=8)[1]
        assert both <= 0.55 * 2 * alone


@pytest.mark.parametrize("per_shard", [4, 8, 16])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_in_rounds_memory_does_not_grow_with_received_keys(per_shard, kv_heads):
    """At most two rounds of keys, and of gradients that are sent and received, are in memory."""
    plan = butterfly(2, round_tokens=BLOCK * BLOCKS // 2 // per_shard)
    assert plan.num_rounds == per_shard > 3
    forward, both = peak_in_shards(plan, 0, kv_heads=kv_heads)
    share = kv_heads / 4
    # O and dQ of all rounds are in float32, those of one round are not.
    assert forward <= 3 + 4 * share / per_shard + LSE
    assert both <= 4 + 2 * share + 12 * share / per_shard + LSE


@pytest.mark.parametrize(("ranks", "forward", "both"), [(4, 4.25, 9.75), (8, 4.75, 11.25)])
def test_in_rounds_what_is_sent_is_not_limited(ranks, forward, both):
    """In some rounds the first rank sends 2 or 3 times what it receives, packed."""
    plan = butterfly(ranks, round_tokens=BLOCK * BLOCKS // ranks // 4)
    assert plan.num_rounds >= 4
    assert peak_in_shards(plan, 0) == pytest.approx((forward, both), abs=LSE)


@pytest.mark.parametrize(("ranks", "most"), [(2, 8.3), (4, 15.2), (8, 19.8)])
def test_by_rows_only_own_parts_of_gradients_are_held(ranks, most):
    plan = replace(butterfly(ranks, "graph growing", "rows"), groups=4)
    assert max(peak_in_shards(plan, rank)[1] for rank in range(ranks)) <= most
