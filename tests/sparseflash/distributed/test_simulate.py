"""The model of attention over many ranks, against sums by hand."""

import pytest
import torch
from typer.testing import CliRunner

import masks
from sparseflash.distributed import make_plan
from sparseflash.distributed.assign import Workload
from sparseflash.distributed.model import divided
from sparseflash.distributed.simulate import Attention, Machine, parse_tokens, predict


@pytest.mark.parametrize("strategy", ["contiguous", "zigzag", "balanced chunks"])
def test_blocks_are_divided_by_who_owns_their_keys_and_by_what_their_rows_attend(strategy):
    local, random = masks.local(100), masks.local(200) & masks.random(0.6, seed=1)
    mask = masks.stack([local, random, local])(1024, (32, 64))
    plan = make_plan(mask, 5, strategy)
    found = divided(Workload(mask), plan.owner, 5)
    for rank in range(5):
        part = plan.part(rank)
        mine, own = mask.to_blocks()[:, part.rows], torch.zeros(mask.grid.nk, dtype=torch.bool)
        own[part.columns] = True
        waits = (mine & ~own).any(2)
        counts = (mine & own, mine & ~own, mine[~waits], mine[waits], waits)
        expected = [int(x.sum()) for x in counts]
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
    machine = Machine(tflops=1e9, bandwidth=1.0, latency_us=7.0)
    found = predict(plan, machine, Attention(heads=2, kv_heads=1, head_dim=64))
    exchange = 1024 * 2 * 64 * 2 / 1e6 + 0.007
    assert found.receive_mb == pytest.approx(1024 * 2 * 64 * 2 / 1e6)
    assert found.total_ms == pytest.approx(2 * exchange, rel=1e-4)
    assert found.exposed_ms == pytest.approx(2 * exchange, rel=1e-4)


def test_masks_of_heads_count_as_the_heads_that_they_are_of():
    one, each = masks.causal(), masks.stack([masks.causal()] * 4)
    found = [
        predict(make_plan(mask(2048, 128), 2, "zigzag"), Machine(), Attention(8, 4))
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
