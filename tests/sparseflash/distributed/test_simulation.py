"""The model of attention over many ranks, against sums by hand."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import masks
from sparseflash.commands.simulate import hiding, parse_tokens, simulate
from sparseflash.distributed import make_plan
from sparseflash.distributed.model import MERGED_ROW, OF_KEYS, Division, divide_blocks
from sparseflash.distributed.simulation import (
    Attention,
    Demand,
    Machine,
    Prediction,
    predict,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("strategy", ["contiguous", "zigzag", "balanced chunks"])
def test_blocks_are_divided_by_who_owns_their_keys_and_by_what_their_rows_attend(strategy):
    local, random = masks.local(100), masks.local(200) & masks.random(0.6, seed=1)
    mask = masks.stack([local, random, local])(1024, (32, 64))
    plan = make_plan(mask, 5, strategy)
    found = divide_blocks(plan.assignment)
    for rank in range(5):
        part = plan.part(rank)
        mine, own = mask.to_blocks()[:, part.rows], torch.zeros(mask.grid.nk, dtype=torch.bool)
        own[part.columns] = True
        waits = (mine & ~own).any(2)
        counts = (mine & own, mine & ~own, mine[~waits], mine[waits], waits)
        expected = [int(x.sum()) for x in counts]
        rows = waits.any(0).nonzero().flatten()
        expected.append(expected[-1] * bool((rows.diff() != 1).any()))
        assert [float(x[rank]) for x in vars(found).values()] == expected


def test_time_is_that_of_blocks_where_nothing_is_exchanged():
    plan = make_plan(masks.documents([1024] * 4)(4096, 128), 4)
    found = predict(plan, Machine(tflops=100), Attention(heads=2, head_dim=64))
    flops = 4 * 64 * 2 * 1024 * 1024
    assert found.forward_ms == pytest.approx(flops / 100e9)
    assert found.total_ms == pytest.approx(3.5 * flops / 100e9)
    assert (found.exposed_ms, found.share, found.efficiency) == (0, 0, pytest.approx(1))


def test_time_is_that_of_the_exchange_where_it_is_slow():
    plan = make_plan(masks.full()(2048, 128), 2, "contiguous")
    machine = Machine(tflops=1e9, bandwidth=1.0, latency_us=7.0, memory=1e9)
    found = predict(plan, machine, Attention(heads=2, kv_heads=1, head_dim=64))
    exchange = 1024 * 2 * 64 * 2 / 1e6 + 0.007
    assert found.receive_mb == pytest.approx(1024 * 2 * 64 * 2 / 1e6)
    assert found.total_ms == pytest.approx(2 * exchange, rel=1e-4)
    assert found.exposed_ms == pytest.approx(2 * exchange, rel=1e-4)


def test_each_pass_has_its_rate_and_its_call():
    plan = make_plan(masks.documents([1024] * 4)(4096, 128), 4)
    machine = Machine(tflops=100, backward_tflops=50, call_us=30)
    found = predict(plan, machine, Attention(heads=2, head_dim=64))
    flops = 4 * 64 * 2 * 1024 * 1024
    assert found.forward_ms == pytest.approx(flops / 100e9 + 0.03)
    assert found.total_ms == pytest.approx(flops / 100e9 + 2.5 * flops / 50e9 + 0.06)
    assert found.exposed_ms == pytest.approx(0)


def test_of_selected_blocks_all_are_fetched_and_some_computed():
    plan = make_plan(masks.full()(4096, 128), 4, "contiguous", split="rows", fetch_cost=0.01)
    assert plan.groups == 1
    machine = Machine(bandwidth=1e9, latency_us=0, memory=1e9)  # nothing of the exchange is seen
    every, some = (predict(plan, machine, Attention(), selected) for selected in (1.0, 0.125))
    assert some.receive_mb == every.receive_mb > 0
    assert some.total_ms == pytest.approx(every.total_ms / 8, rel=1e-4)


def test_copies_take_time():
    """Of a butterfly on two ranks sent keys are copied; by rows also received and own ones.

    The gradients of all own keys are added in both: two operands are read, and one is written. By
    rows those of received and own keys are copied before.
    """
    mask, attention = masks.butterfly()(4096, 128), Attention(heads=4, kv_heads=2, head_dim=64)
    shard = 2048 * 2 * 2 * 64 * 2
    for split, copied, again in (("rows", 3 * shard, 3 * shard), ("keys", shard, 0)):
        plan = make_plan(mask, 2, "contiguous", split=split)
        assert attention.report(plan).copied_bytes == [copied] * 2
        slow, fast = Machine(memory=1.0), Machine(memory=1e9)
        gaps = [
            predict(plan, machine, attention).total_ms - predict(plan, fast, attention).total_ms
            for machine in (slow, Machine(memory=2.0))
        ]
        assert gaps[0] == pytest.approx((2 * (copied + again) + 3 * shard) / 1e6, rel=1e-6)
        assert gaps[1] == pytest.approx(gaps[0] / 2, rel=1e-6)


def test_gradients_of_heads_are_those_of_the_keys_that_each_head_fetches():
    heads = masks.stack([masks.local(300), masks.full()])(4096, 128)
    plan = make_plan(heads, 2, "contiguous", split="rows")
    demand = Demand.of(plan, Attention(heads=2, kv_heads=2, head_dim=64))
    sent = plan.traffic(2).sum(0)  # key tokens of one head
    assert (sent < 2 * plan.costs.traffic.sum(0)).all()
    added = 3 * sent * 2 * 64 * 2 + torch.tensor(demand.copied)
    assert demand.added == added.tolist()


def test_in_place_only_sent_keys_are_copied():
    """Graph growing sends some keys of a shard. Their gradients are added, and not copied."""
    mask, attention = masks.butterfly()(16384, 128), Attention(heads=4, kv_heads=2, head_dim=64)
    plan = make_plan(mask, 2, "graph growing", split="in place")
    sent = plan.costs.traffic.sum(0)
    assert 0 < sent[0] < 8192
    assert plan.copied().tolist() == sent.tolist()
    demand = Demand.of(plan, attention)
    assert demand.copied == [2 * each * 512 for each in sent.tolist()]
    assert demand.added == [3 * each * 512 for each in sent.tolist()]
    machine = Machine(bandwidth=1e9, latency_us=0, memory=1e9)
    forward, _ = demand.times(machine)
    block_ms, _ = demand.block_ms(machine)
    torch.testing.assert_close(forward, demand.blocks * block_ms, rtol=1e-4, atol=0)
    some = Demand.of(plan, attention, 0.5)
    assert some.split == plan.otherwise[0] != "in place"


def test_each_round_merges_rows():
    """Zigzag shards of a butterfly are exchanged by two ranks at a time."""
    plan = make_plan(masks.butterfly()(4096, 128), 4, "zigzag", split="keys")
    demand = Demand.of(plan, Attention(heads=4, head_dim=64))
    assert demand.rounds == (plan.traffic() > 0).sum(1).tolist() == [3.0] * 4
    machine = Machine(bandwidth=1e9, latency_us=0, memory=1e9)
    thrice, once = (sum(x.times(machine)) for x in (demand, replace(demand, rounds=[])))
    block_ms = sum(demand.block_ms(machine))
    merged = 2 * MERGED_ROW * torch.tensor(demand.waiting_rows) * block_ms
    torch.testing.assert_close(thrice - once, merged.double())


def test_selected_blocks_are_computed_faster_but_not_moved_or_merged_faster():
    """Beside many blocks neither the exchange nor merging takes long; beside few both do."""
    mask = masks.full()(65536, 128)
    plans = [make_plan(mask, 4, "contiguous", fetch_cost=4.0 * n) for n in (1, 6, 16)]
    assert [plan.split for plan in plans] == ["in place", "keys", "in place"]


@pytest.mark.parametrize("exchange", [0.5, 3.0, 9.0, 40.0])
def test_an_exchange_waits_for_kernels_that_are_started_before_it(exchange):
    """Of several exchanges each one starts with a kernel, and the next kernel waits for it.

    Ten ready blocks, six waiting ones, twelve of own and four of fetched keys; rows take no time.
    """
    numbers = {"own": 12.0, "fetched": 4.0, "ready": 10.0, "waiting": 6.0}
    numbers |= {"waiting_rows": 0.0, "gathered_rows": 0.0}
    division = Division(**{name: torch.tensor([x]).double() for name, x in numbers.items()})

    def elapsed(split, groups, rounds=1.0, backward=False):
        moved = torch.tensor([exchange]).double()
        return float(division.elapsed(split, groups, 1.0, moved, rounds, backward))

    def in_turn(kernels, count):
        """Kernel n + 1 needs exchange n, which starts with kernel n."""
        time = 0.0
        for kernel in kernels[:-1]:
            time += max(kernel, exchange / count)
        return time + kernels[-1]

    assert elapsed("rows", 1) == elapsed("in place", 1) == in_turn([10, 6], 1)
    assert elapsed("rows", 4) == pytest.approx(in_turn([10, 1.5, 1.5, 1.5, 1.5], 4))
    assert elapsed("keys", 1) == in_turn([12, 4], 1)
    assert elapsed("keys", 1, torch.tensor([2.0])) == in_turn([12, 2, 2], 2)
    for split, groups in (("rows", 4), ("keys", 1)):
        assert elapsed(split, groups) == elapsed(split, groups, backward=True)
    # dQ and gradients of fetched keys are computed before the exchange, those of own keys beside.
    of_own = 12 * OF_KEYS
    assert elapsed("in place", 1, backward=True) == pytest.approx(
        16 - of_own + max(of_own, exchange)
    )


def test_exchange_of_shared_rows_takes_time():
    mask = (masks.local(256) | masks.global_tokens(list(range(128))))(16384, 128)
    plan = make_plan(mask, 4, "contiguous", shared_rows=[0])
    demand = Demand.of(plan, Attention(heads=4, kv_heads=2, head_dim=64))
    # Rank 0 owns the row: what it gets of three ranks, and what it sends to them.
    there, back = 128 * 4 * 64 * 2, 128 * 4 * 65 * 4
    assert demand.moved[0] == max(plan.costs.receive[0] * 512 + 3 * back, 3 * there)
    assert demand.returned[0] > 3 * 2 * back


def test_a_demand_comes_back_from_json():
    demand = Demand.of(make_plan(masks.causal()(4096, 128), 3), Attention())
    assert Demand(**json.loads(json.dumps(asdict(demand)))) == demand


def test_a_machine_is_read_from_a_file(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text('{"machine": {"tflops": 1.5, "call_us": 2.0}}')
    assert Machine.load(path) == Machine(tflops=1.5, call_us=2.0)
    for wrong in ("{", "{}", '{"machine": {"rate": 1}}', '{"machine": 3}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r'must have "machine" with some of .*tflops'):
            Machine.load(path)
    for name in ("tflops", "bandwidth", "backward_tflops", "latency_us", "call_us", "memory"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            Machine(**{name: -1})


def test_masks_of_heads_count_as_the_heads_that_they_are_of():
    one, each = masks.causal(), masks.stack([masks.causal()] * 4)
    found = [
        predict(make_plan(mask(2048, 128), 2, "zigzag", split="rows"), Machine(), Attention(8, 4))
        for mask in (one, each)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(("text", "tokens"), [("1000", 1000), ("2K", 2048), ("1m", 2**20)])
def test_tokens_may_have_a_unit(text, tokens):
    assert parse_tokens(text) == tokens


def test_command_shows_every_strategy_and_names_what_is_wrong(tmp_path):
    import typer

    app = typer.Typer()
    app.command()(simulate)
    run = CliRunner().invoke
    done = run(
        app, ["local(300) & causal()", "--tokens", "16K", "--ranks", "4", "--strategy", "all"]
    )
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in ("contiguous", "zigzag", "balanced chunks"))
    assert "contiguous with repair: communication is not hidden on 4 ranks" in done.output
    path = tmp_path / "machine.json"
    path.write_text('{"machine": {"tflops": 1e-6}}')
    done = run(app, ["causal()", "--tokens", "1K", "--ranks", "1", "--machine", str(path)])
    assert f"{3.5 * 36 * 4 * 128**3 * 16 / 1e3:.2f}" in done.output
    for latency_us, hidden in (("0", "is hidden on up to 4"), ("1e9", "is not hidden on 4")):
        rates = ["--tflops", "0.1", "--latency-us", latency_us]
        done = run(app, ["causal()", "--tokens", "16K", "--ranks", "4", *rates])
        assert f"auto: communication {hidden} ranks" in done.output
    for named, *wrong in (
        ("nonsense", "nonsense"),
        ("tokens must", "causal()", "--tokens", "1X"),
        ("ranks must", "causal()", "--ranks", "0"),
        ("ranks must", "causal()", "--ranks", "2,a"),
        ("bandwidth", "causal()", "--bandwidth", "0"),
        ("have", "causal()", "--machine", __file__),
    ):
        done = run(app, wrong)
        assert done.exit_code == 2
        assert named in done.output


def test_where_communication_stops_hiding_is_said():
    def of(ranks, exposed):
        return Prediction(ranks, "contiguous", 1.0, 0.5, 1.0, 1.0, 10.0, exposed, 0.9)

    assert hiding([of(8, 0.0), of(2, 0.1)]) == "is hidden on up to 8 ranks"
    assert hiding([of(8, 3.0), of(2, 0.0), of(4, 0.1), of(64, 9.0)]) == (
        "is hidden on up to 4 ranks, but not on 8"
    )
    assert hiding([of(2, 0.2), of(4, 0.0)]) == "is not hidden on 2 ranks"


def test_the_model_is_a_module_that_runs():
    command = [sys.executable, "-m", "sparseflash.distributed.simulate", "causal()"]
    command += ["--tokens", "4K", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "auto: communication" in done.stdout
