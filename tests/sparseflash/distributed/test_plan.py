"""Context plans against dense masks: who owns what, who fetches what, and what is refused."""

import pickle
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from masks import BlockMask
from sparseflash.distributed import ContextPlan, make_plan
from sparseflash.distributed.assign import STRATEGIES
from sparseflash.distributed.model import can_be_in_place, divide_blocks
from sparseflash.distributed.part import count
from tests.helpers.dense_masks import SIDES, dense_masks

CAUSAL = masks.causal()(4096, 64)


def test_pickles_carry_only_the_fields():
    plan = make_plan(CAUSAL, 4)
    plan.cache["unpicklable"] = lambda: None
    again = pickle.loads(pickle.dumps(plan))
    assert set(vars(again)) == {field.name for field in fields(plan)}
    assert again.digest == plan.digest
    assert again.costs.traffic.equal(plan.costs.traffic)


@st.composite
def plans(draw):
    """A dense mask of one or more heads, and a plan of it."""
    dense = draw(dense_masks(heads=True))
    length = min(dense.shape[1:])
    dense = dense[:, :length, :length]
    mask = BlockMask.from_dense(dense, draw(st.tuples(*[st.sampled_from(SIDES[:3])] * 2)))
    units = -(-length // max(mask.block_size))
    ranks = draw(st.integers(1, min(units, 5)))
    strategy = draw(st.sampled_from([*STRATEGIES, "auto", "shuffled"]))
    if strategy == "shuffled":
        owner = list(range(ranks)) + [
            draw(st.integers(0, ranks - 1)) for _ in range(units - ranks)
        ]
        strategy = draw(st.permutations(owner))
    rounds = draw(st.sampled_from([None, mask.grid.bk, 3 * mask.grid.bk]))
    splits = ["rows", "keys"] if rounds is None else ["keys"]
    if len(dense) == 1 and length % max(mask.block_size) == 0:
        splits.append("in place")
    split = draw(st.sampled_from(splits))
    shared = sorted(draw(st.sets(st.integers(0, mask.grid.nq - 1), max_size=2)))
    options = {"round_tokens": rounds, "split": split, "shared_rows": shared}
    return dense, make_plan(mask, ranks, strategy, **options)


@settings(max_examples=40)
@given(plans())
def test_parts_hold_every_pair_of_the_mask_once(drawn):
    dense, plan = drawn
    found = torch.zeros(dense.shape, dtype=torch.int64)
    for rank in range(plan.ranks):
        part, own = plan.part(rank), plan.positions(rank)
        if part.mask is not None:
            found[:, own.unsqueeze(1), own] += part.mask.to_dense().view(-1, len(own), len(own))
        if part.shared is not None:
            first = part.shared.positions.query.unsqueeze(1)
            queries = (first + torch.arange(plan.mask.grid.bq)).flatten()
            queries = queries[queries < plan.seq_len]
            pairs = part.shared.mask.to_dense().view(-1, len(queries), len(own))
            found[:, queries.unsqueeze(1), own] += pairs
        for each in part.rounds:
            if each.mask is not None:
                queries, keys = own[each.queries], _tokens(each.columns, plan)
                assert each.attended == len(keys)
                pairs = each.mask.to_dense().view(-1, len(queries), len(keys))
                found[:, queries.unsqueeze(1), keys] += pairs
    assert torch.equal(found, dense.long())


@settings(max_examples=40)
@given(plans())
def test_ranks_receive_the_key_blocks_that_they_attend_and_do_not_own(drawn):
    _, plan = drawn
    g, blocks = (
        plan.mask.grid,
        plan.mask.to_blocks().view(-1, plan.mask.grid.nq, plan.mask.grid.nk),
    )
    owner_of_token = torch.empty(plan.seq_len, dtype=torch.int64)
    for rank in range(plan.ranks):
        owner_of_token[plan.positions(rank)] = rank
    expected = torch.zeros(plan.ranks, plan.ranks, dtype=torch.int64)
    for rank in range(plan.ranks):
        rows = owner_of_token[:: g.bq] == rank
        rows[plan.shared] = False  # each rank attends its own keys for these
        needed = blocks[:, rows].any(0).any(0).repeat_interleave(g.bk)[: plan.seq_len]
        senders = owner_of_token[needed & (owner_of_token != rank)]
        expected[rank] = torch.bincount(senders, minlength=plan.ranks)
    assert torch.equal(plan.costs.traffic, expected)
    assert plan.costs.blocks.sum() == plan.mask.nnz_blocks


@settings(max_examples=40)
@given(plans())
def test_what_one_rank_sends_another_receives(drawn):
    _, plan = drawn
    parts = [plan.part(rank) for rank in range(plan.ranks)]
    moved = torch.zeros(plan.ranks, plan.ranks, dtype=torch.int64)
    for number in range(plan.num_rounds):
        rounds = [part.rounds[number] for part in parts]
        received = torch.tensor([each.splits.receive for each in rounds])
        sent = torch.tensor([each.splits.send for each in rounds])
        assert torch.equal(received, sent.T)
        if plan.round_tokens is not None:
            # In place they are those of all heads, which are received in groups.
            groups = plan.least_head_groups if plan.split == "in place" else 1
            assert received.sum(1).max() <= groups * plan.round_tokens
        moved += received
        sent_positions = [
            [plan.positions(rank)[tokens] for tokens in each.send]
            for rank, each in enumerate(rounds)
        ]
        for rank, each in enumerate(rounds):
            attended = torch.empty(each.attended, dtype=torch.int64)
            attended[each.received_at] = torch.cat([sent[rank] for sent in sent_positions])
            attended[each.own_at] = plan.positions(rank)[each.own]
            if (masks_in_place := parts[rank].in_place) is not None:  # in the order of arrival
                order = masks_in_place.received_order
                attended = attended.view(-1, plan.mask.grid.bk)[order].flatten()
            assert attended.tolist() == _tokens(each.columns, plan).tolist()
    assert torch.equal(moved, plan.costs.traffic)


@settings(max_examples=40)
@given(plans())
def test_shards_put_together_are_the_whole(drawn):
    _, plan = drawn
    whole = torch.arange(2 * plan.seq_len).view(2, -1)
    shards = [plan.shard(whole, rank, dim=1) for rank in range(plan.ranks)]
    assert torch.equal(plan.unshard(shards, dim=1), whole)
    for rank, shard in enumerate(shards):
        assert shard.shape[1] > 0
        assert torch.equal(shard[0], plan.positions(rank))
        assert plan.mask_of(rank).seq_len == (shard.shape[1], plan.seq_len)


@settings(max_examples=20)
@given(plans())
def test_shared_rows_of_all_ranks_come_in_the_order_of_the_sequence(drawn):
    _, plan = drawn
    parts = [plan.part(rank).shared for rank in range(plan.ranks)]
    if not len(plan.shared):
        assert parts == [None] * plan.ranks
        return
    arrived = torch.cat(
        [plan.positions(rank)[part.own] for rank, part in enumerate(parts)]  # pyright: ignore
    )
    tokens = plan.shared.unsqueeze(1) * plan.mask.grid.bq + torch.arange(plan.mask.grid.bq)
    for part in parts:
        assert arrived[part.order].tolist() == tokens[tokens < plan.seq_len].tolist()
        assert part.tokens == [each.own_tokens for each in parts]


def first_head(x: torch.Tensor) -> torch.Tensor:
    """The last two dims of the first head, if there is a dim of heads."""
    return x.flatten(0, -3)[0] if x.dim() > 2 else x


@settings(max_examples=30)
@given(plans())
def test_in_place_rows_attend_their_pairs_once_where_keys_lie(drawn):
    dense, plan = drawn
    if not can_be_in_place(plan.workload):
        return
    plan = replace(plan, split="in place", round_tokens=None)
    parts = [plan.part(rank) for rank in range(plan.ranks)]
    for rank, part in enumerate(parts):
        own, found = plan.positions(rank), torch.zeros(dense.shape[1:], dtype=torch.int64)
        lying = [own]
        for number, each in enumerate(part.rounds):
            sent = [other.rounds[number].send[rank] for other in parts]
            lying += [plan.positions(r)[tokens] for r, tokens in enumerate(sent)]
            assert count(each.own) == 0
        keys = torch.cat(lying)
        for_rows = part.in_place
        assert for_rows is not None
        # Key block j of the masks lies at order[j].
        tokens = keys.view(-1, plan.mask.grid.bk)[for_rows.order].flatten()
        pairs = {}
        for name in ("every", "ready", "waiting"):
            mask, own_only = getattr(for_rows, name), name == "ready"
            pairs[name] = torch.zeros_like(found)
            if mask is not None:
                columns = own if own_only else tokens
                pairs[name][own.unsqueeze(1), columns] += first_head(mask.to_dense())
        assert torch.equal(pairs["every"], pairs["ready"] + pairs["waiting"])
        expected = torch.zeros_like(found)
        whole = first_head(plan.workload.mask.to_dense())
        expected[own] = whole[own].long()
        assert torch.equal(pairs["every"], expected)
        empty = ~first_head(plan.workload.mask.to_blocks()).any(1)[part.rows]
        empty &= ~torch.isin(part.rows, plan.shared)
        assert for_rows.has_empty_rows == bool(empty.any())


def test_a_plan_in_place_has_another_one_for_calls_that_are_not():
    plan = make_plan(masks.butterfly()(16384, 128), 2, split="in place")
    assert plan.not_in_place.split == plan.otherwise[0] != "in place"
    assert plan.not_in_place.digest != plan.digest
    assert torch.equal(plan.not_in_place.owner, plan.owner)
    assert plan.part(0).in_place is not None
    assert plan.not_in_place.part(0).in_place is None


def test_received_keys_that_nearly_all_rows_attend_are_heavy():
    """Those of a few global tokens are; those of many fill the multiprocessors, as others do."""
    near = masks.local(512)

    def plan_with(tokens):
        mask = (near | masks.global_tokens(list(range(tokens))))(65536, 128)
        return make_plan(mask, 2, "contiguous", split="in place")

    first, second = (plan_with(128).part(rank).in_place for rank in range(2))
    assert first.heavy is None
    assert (second.heavy.tokens, second.heavy.chunks) == (slice(0, 128), 16)
    assert second.heavy.mask == masks.full()((32768 // 16, 128), 128)
    part = plan_with(1024).part(1)
    assert part.in_place.heavy is None
    assert part.in_place.light == part.rounds[0].mask
    for pattern in (near, masks.butterfly()):
        plan = make_plan(pattern(65536, 128), 2, split="in place")
        assert all(plan.part(rank).in_place.heavy is None for rank in range(2))


def test_keys_of_several_ranks_that_would_be_mixed_are_exchanged_in_pairs_of_ranks():
    butterfly, full = masks.butterfly()(4096, 64), masks.full()(4096, 64)
    plan = make_plan(butterfly, 4, "zigzag", split="keys")
    assert plan.num_rounds == 3
    for rank in range(4):
        rounds = plan.part(rank).rounds
        assert all(each.arrives_in_order for each in rounds)
        senders = [[n for n, count in enumerate(each.splits.receive) if count] for each in rounds]
        assert all(each in ([], [rank ^ n]) for each, n in zip(senders, (1, 2, 3), strict=True))
        received = [
            sum(splits) for splits in zip(*(x.splits.receive for x in rounds), strict=True)
        ]
        assert received == plan.traffic()[rank].tolist()
    # Three ranks have pairs too, of which one rank is left out in each round.
    assert make_plan(full, 3, "zigzag", split="keys").num_rounds == 3
    # Each round merges all rows: of many rounds one that puts keys in order takes less time.
    assert make_plan(full, 8, "zigzag", split="keys").num_rounds == 1
    assert make_plan(full, 4, "zigzag", split="rows").num_rounds == 1
    # The keys of contiguous shards arrive in the order of the sequence.
    plan = make_plan(butterfly, 4, "contiguous", split="keys")
    assert plan.num_rounds == 1
    assert all(plan.part(rank).rounds[0].arrives_in_order for rank in range(4))


def test_only_rows_that_attend_are_merged():
    """All rows are in the mask of a round if many that are not consecutive attend its keys."""
    plan = make_plan(masks.butterfly()(16384, 64), 2, "graph growing", split="keys")
    (each,) = plan.part(0).rounds
    waiting = int(divide_blocks(plan.assignment).waiting_rows[0])
    assert len(each.rows) == 128
    assert 64 * waiting == len(each.attending) < count(each.queries)
    assert each.attending_at is each.attending
    window = make_plan(masks.local((100, 0))(4096, 64), 2, "contiguous", split="keys").part(1)
    (each,) = window.rounds
    assert each.attending == each.queries == each.attending_at == slice(0, 128)


def test_keys_of_ranks_that_are_mixed_arrive_in_rounds():
    """So that they need not be put in the order of the sequence."""
    owner = [0, 1, 2, 3] * 16
    plan = make_plan(masks.random(0.3, seed=1)(4096, 64), 4, owner, split="keys")
    for rank in range(4):
        for each in plan.part(rank).rounds:
            assert isinstance(each.received_at, slice)
            assert sum(count > 0 for count in each.splits.receive) <= 1


def test_masks_of_heads_are_fetched_by_each_head():
    far = masks.random(0.5, seed=1)
    mask = masks.stack([masks.local(64), masks.local(64), far, far])(4096, 64)
    by_head, together = (
        make_plan(mask, 4, "contiguous", split=split).report(kv_heads=2)
        for split in ("rows", "keys")
    )
    alone = make_plan(far(4096, 64), 4, "contiguous").report(kv_heads=1)
    window = make_plan(masks.local(64)(4096, 64), 4, "contiguous").report(kv_heads=1)
    pairs = zip(alone.receive_bytes, window.receive_bytes, strict=True)
    assert by_head.receive_bytes == [sum(pair) for pair in pairs]
    assert together.receive_bytes == [2 * received for received in alone.receive_bytes]


def test_a_saved_plan_comes_back(tmp_path):
    mask = masks.stack([masks.causal(), masks.local(70)])(1000, 64)
    plan = make_plan(mask, 3, round_tokens=200, shared_rows=[2, 5])
    plan.save(tmp_path / "plan.safetensors")
    loaded = ContextPlan.load(tmp_path / "plan.safetensors")
    assert (loaded.digest, loaded.strategy) == (plan.digest, plan.strategy)
    assert masks.load(tmp_path / "plan.safetensors") == plan.mask
    masks.save(CAUSAL, tmp_path / "mask.safetensors")
    with pytest.raises(ValueError, match="contains no valid context plan"):
        ContextPlan.load(tmp_path / "mask.safetensors")


def test_a_saved_plan_with_a_mask_for_each_batch_element_comes_back(tmp_path):
    batch, path = masks.MaskBatch.from_masks([CAUSAL, CAUSAL.T]), tmp_path / "plan.safetensors"
    plan = make_plan(batch, 2)
    assert make_plan(batch, 2) is plan
    assert plan.mask == CAUSAL | CAUSAL.T
    assert plan.digest != make_plan(plan.mask, 2, [*plan.owner], split=plan.split).digest
    plan.save(path)
    loaded = ContextPlan.load(path)
    assert (loaded.digest, loaded.mask, loaded.batch) == (plan.digest, plan.mask, batch)
    assert pickle.loads(pickle.dumps(plan)).digest == plan.digest
    assert masks.load(path) == batch.stacked
    assert "MaskBatch(num_batches=2" in repr(plan)


def test_a_saved_plan_in_place_comes_back(tmp_path):
    path = tmp_path / "plan.safetensors"
    plan = make_plan(masks.butterfly()(4096, 64), 2, "contiguous", split="in place")
    plan = replace(plan, otherwise=("rows", 4))
    plan.save(path)
    loaded = ContextPlan.load(path)
    assert (loaded.digest, loaded.otherwise) == (plan.digest, plan.otherwise)
    assert loaded.not_in_place.digest == plan.not_in_place.digest


def test_a_saved_plan_that_cannot_be_in_place_is_named(tmp_path):
    path = tmp_path / "plan.safetensors"
    plan = make_plan(masks.butterfly()(4096, 64), 2, "contiguous", split="in place")
    replace(plan, otherwise=("in place", 1)).save(path)
    with pytest.raises(ValueError, match=r"otherwise must be one of .*, got .'in place', 1"):
        ContextPlan.load(path)
    clipped = make_plan(masks.butterfly()(4090, 64), 2, "contiguous", split="rows")
    replace(clipped, split="in place", groups=1).save(path)
    with pytest.raises(
        ValueError, match=r"split and groups must be one of .*, got .'in place', 1"
    ):
        ContextPlan.load(path)


def test_a_saved_plan_in_place_with_limited_memory_comes_back(tmp_path):
    """By rows memory is not limited: calls that are not computed in place would be wrong."""
    path = tmp_path / "plan.safetensors"
    options = {"split": "in place", "round_tokens": 512}
    plan = make_plan(masks.butterfly()(4096, 64), 2, "contiguous", **options)
    plan.save(path)
    loaded = ContextPlan.load(path)
    assert (loaded.digest, loaded.head_groups(8)) == (plan.digest, plan.head_groups(8))
    assert "split='in place', groups=4, rounds=1, round_tokens=512" in repr(loaded)
    assert loaded.not_in_place.digest == plan.not_in_place.digest
    replace(plan, otherwise=("rows", 1)).save(path)
    with pytest.raises(ValueError, match='round_tokens must be None with split "rows", got 512'):
        ContextPlan.load(path)


def test_report_counts_bytes_of_keys_and_values():
    report = make_plan(CAUSAL, 2, "contiguous").report(
        kv_heads=2, head_dim=32, dtype=torch.float32
    )
    assert report.receive_bytes == [0, 2048 * 2 * 2 * 32 * 4]
    assert report.send_bytes == [2048 * 2 * 2 * 32 * 4, 0]
    assert report.gathered_bytes == [2048 * 2 * 2 * 32 * 4] * 2
    assert sum(report.receive_bytes) >= 2 * report.least_bytes > 0
    assert "50.00%" in str(report)
    assert "at least 0.03 MB" in str(report)
    assert "at least" not in str(make_plan(masks.local(64)(4096, 64), 2).report())
    assert "shared" not in str(report)
    computed, moved = report.plot().axes
    names = [text.get_text() for text in moved.get_legend().get_texts()]
    assert sorted(names) == ["all-gather, ring", "least received on average", "received", "sent"]
    assert [bar.get_height() for bar in computed.patches] == report.blocks  # pyright: ignore
    heights = [bar.get_height() * 1e6 for bar in moved.patches]  # pyright: ignore
    assert heights == pytest.approx([*report.receive_bytes, *report.send_bytes])
    assert max(moved.lines[-1].get_ydata()) * 1e6 == pytest.approx(report.least_bytes)
    shared = make_plan(CAUSAL, 2, "contiguous", shared_rows=[30, 31]).report(2, 32, torch.float32)
    assert shared.shared_rows == 2
    assert "of these 0.07 MB are queries and results of 2 shared block rows" in str(shared)
    # Rank 0 owns both rows: 128 tokens of 2 heads of queries out, O and LSE back. No row of it
    # fetches, and rank 1 fetches as before.
    queries, results = 128 * 2 * 32 * 4, 128 * 2 * 33 * 4
    assert shared.receive_bytes == [results, report.receive_bytes[1] + queries]
    assert shared.send_bytes == [report.send_bytes[0] + queries, results]
    assert shared.shared_bytes == queries + results


def test_lower_bound_holds_with_shared_rows():
    mask = (masks.local(256) | masks.global_tokens([0, 5000]))(65536, 128)
    for report in (make_plan(mask, 8).report(), make_plan(mask, 8, shared_rows=()).report()):
        fetched = sum(report.receive_bytes) - report.shared_bytes
        assert fetched >= report.least_bytes * 8
        assert report.least_share <= report.share


def test_a_plan_says_what_it_moves():
    text = repr(make_plan(CAUSAL, 2, "contiguous"))
    assert "shared_rows=0, imbalance=1.49, moves=50.00% of an all-gather, at least 1.56%" in text


def test_wrong_lengths_and_ranks_are_named():
    plan = make_plan(CAUSAL, 2)
    with pytest.raises(ValueError, match="kv_heads must divide the 4 heads of the mask, got 3"):
        make_plan(masks.stack([masks.causal()] * 4)(512, 64), 2, split="rows").report(kv_heads=3)
    with pytest.raises(ValueError, match="rank must be at most 1"):
        plan.positions(2)
    with pytest.raises(ValueError, match="tensor must have 4096 tokens in dim 1"):
        plan.shard(torch.zeros(1, 4095), 0, dim=1)
    with pytest.raises(ValueError, match=r"shards\[1\] must have the 2048 tokens of rank 1"):
        plan.unshard([torch.zeros(2048), torch.zeros(2047)], dim=0)


@pytest.mark.parametrize(
    ("of_plan", "message"),
    [
        (lambda plan: plan.shard(None, 0, 0), "tensor must be a tensor, got NoneType"),
        (lambda plan: plan.shard(torch.zeros(4096), 0, 1), "dim must be at most 0, got 1"),
        (lambda plan: plan.shard(torch.zeros(4096), 0, "x"), "dim must be an integer, got 'x'"),
        (lambda plan: plan.unshard(None, 0), "shards must be a list of tensors, got NoneType"),
        (lambda plan: plan.unshard([[], []], 0), r"shards\[0\] must be a tensor, got list"),
        (lambda plan: plan.report(3, "x"), "head_dim must be an integer, got 'x'"),
        (lambda plan: plan.report(0), "kv_heads must be at least 1, got 0"),
        (lambda plan: plan.report(batch=-1), "batch must be at least 1, got -1"),
        (lambda plan: plan.report(heads=0), "heads must be at least 1, got 0"),
        (lambda plan: plan.report(2, 16, "bf16"), "dtype must be a .* torch.dtype, got 'bf16'"),
    ],
)
def test_wrong_arguments_of_a_plan_are_named(of_plan, message):
    with pytest.raises((TypeError, ValueError), match=message):
        of_plan(make_plan(CAUSAL, 2))


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("ranks", "renks"),
        ("rounds", "raunds"),
        ('\\"rows\\"', '\\"rowz\\"'),
        ('groups\\": ', 'groups\\":9'),
        ('ranks\\": 2', 'ranks\\": 3'),
        ('batches\\": 1', 'batches\\": 3'),
        ('rounds\\": null', 'rounds\\": 1e3 '),
        ('"owner"', '"ownes"'),
        ('"shared"', '"sharey"'),
        ("context_plan", "context_plam"),
    ],
)
def test_a_damaged_plan_is_named(part, other, tmp_path):
    path = tmp_path / "plan.safetensors"
    make_plan(CAUSAL, 2, "zigzag", split="rows").save(path)
    whole = path.read_bytes()
    assert part.encode() in whole
    path.write_bytes(whole.replace(part.encode(), other.encode()))
    with pytest.raises(ValueError, match="safetensors contains no valid context plan: "):
        ContextPlan.load(path)


def _tokens(columns, plan):
    tokens = columns.unsqueeze(1) * plan.mask.grid.bk + torch.arange(plan.mask.grid.bk)
    return tokens[tokens < plan.seq_len]


def test_positions_of_inference_serve_training():
    """Autograd cannot save tensors that are made in inference mode."""
    with torch.inference_mode():
        plan = make_plan(masks.causal()(100, 16), 2)
        plan.shard(torch.ones(100), 1, 0)
        plan.unshard([plan.shard(torch.ones(100), rank, 0) for rank in range(2)], 0)
    whole = torch.ones(100, requires_grad=True)
    shards = [plan.shard(whole, rank, 0) for rank in range(2)]
    plan.unshard(shards, 0).sum().backward()
    assert torch.equal(whole.grad, torch.ones(100))
