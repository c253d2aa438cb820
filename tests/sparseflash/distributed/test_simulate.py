"""The model of attention over many ranks, against sums by hand."""

import pytest
from typer.testing import CliRunner

import masks
from sparseflash.distributed import make_plan
from sparseflash.distributed.assign import Workload
from sparseflash.distributed.simulate import (
    Attention,
    Machine,
    own_share,
    parse_tokens,
    predict,
)


@pytest.mark.parametrize("strategy", ["contiguous", "zigzag", "balanced chunks"])
def test_own_share_is_that_of_the_blocks_whose_keys_a_rank_owns(strategy):
    mask = masks.random(0.3, seed=1)(1024, (32, 64))
    plan = make_plan(mask, 5, strategy)
    found = own_share(Workload(mask), plan.owner, 5)
    blocks = mask.to_blocks()
    for rank in range(5):
        part = plan.part(rank)
        mine = blocks[part.rows]
        assert found[rank] == mine[:, part.columns].sum() / mine.sum()


def test_time_is_that_of_blocks_where_nothing_is_exchanged():
    plan = make_plan(masks.documents([1024] * 4)(4096, 128), 4)
    found = predict(plan, Machine(tflops=100), Attention(heads=2, head_dim=64))
    flops = 4 * 64 * 2 * 1024 * 1024
    assert found.forward_ms == pytest.approx(flops / 100e9)
    assert found.total_ms == pytest.approx(3.5 * flops / 100e9)
    assert (found.exposed_ms, found.share, found.efficiency) == (0, 0, pytest.approx(1))


def test_time_is_that_of_the_exchange_where_it_is_slow():
    plan = make_plan(masks.full()(2048, 128), 2, "contiguous")
    machine = Machine(tflops=1e9, bandwidth=1.0, latency_us=7.0)
    found = predict(plan, machine, Attention(heads=2, kv_heads=1, head_dim=64))
    exchange = 1024 * 2 * 64 * 2 / 1e6 + 0.007
    assert found.receive_mb == pytest.approx(1024 * 2 * 64 * 2 / 1e6)
    assert found.total_ms == pytest.approx(2 * exchange, rel=1e-4)
    assert found.exposed_ms == pytest.approx(2 * exchange, rel=1e-4)


def test_masks_of_heads_count_as_the_heads_that_they_are_of():
    one, each = masks.causal(), masks.stack([masks.causal()] * 4)
    found = [
        predict(make_plan(mask(2048, 128), 2, "zigzag"), Machine(), Attention(heads=8))
        for mask in (one, each)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(("text", "tokens"), [("1000", 1000), ("2K", 2048), ("1m", 2**20)])
def test_tokens_may_have_a_unit(text, tokens):
    assert parse_tokens(text) == tokens


def test_command_shows_every_strategy_and_names_what_is_wrong():
    import typer

    from sparseflash.distributed import simulate

    app = typer.Typer()
    app.command()(simulate.main)
    run = CliRunner().invoke
    done = run(
        app, ["local(300) & causal()", "--tokens", "16K", "--ranks", "4", "--strategy", "all"]
    )
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in ("contiguous", "zigzag", "balanced chunks"))
    for named, *wrong in (
        ("nonsense", "nonsense"),
        ("tokens must", "causal()", "--tokens", "1X"),
        ("ranks must", "causal()", "--ranks", "0"),
        ("ranks must", "causal()", "--ranks", "2,a"),
        ("bandwidth", "causal()", "--bandwidth", "0"),
    ):
        done = run(app, wrong)
        assert done.exit_code == 2
        assert named in done.output
