"""The scaling script: what it plans, predicts and measures, and runs over gloo."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

import masks
from experiments.cli import SHIPPED
from experiments.long_context import measurement, plots, scaling
from experiments.long_context.baselines import ring_plan
from experiments.long_context.cases import (
    BLOCK,
    Case,
    Kind,
    Way,
    cases,
    document_lengths,
    measured_order,
    patterns,
    predicted,
)
from sparseflash.distributed import make_plan
from sparseflash.distributed.simulation import Attention, Machine

ROOT = Path(__file__).parents[3]
SMALL = ["--tokens", "512", "--heads", "2", "--kv-heads", "1", "--head-dim", "16"]
SMALL += ["--window", "256"]
PREDICTED = "long-context-weak-512-2-1-heads-8-predicted-cpu"
OF_FOUR = ["documents", "top-k"]  # patterns that a run on four processes measures


def run(*arguments: str):
    app = typer.Typer()
    app.command()(scaling.main)
    return CliRunner().invoke(app, list(arguments))


def test_a_ring_brings_every_shard_once():
    plan = ring_plan(masks.local((100, 0))(1024, 64), 4)
    for rank in range(4):
        rounds = plan.part(rank).rounds
        senders = [each.splits.receive for each in rounds]
        assert senders == [[256 * (i == (rank + n) % 4) for i in range(4)] for n in (1, 2, 3)]
    assert [each.mask is None for each in plan.part(0).rounds] == [True] * 3
    assert [each.mask is None for each in plan.part(3).rounds] == [True, True, False]


def test_patterns_have_the_same_blocks_in_a_row_at_every_length():
    for name in ("window", "local+global"):
        short, long = (patterns(512, n)[name](n, BLOCK).blocks_per_row() for n in (4096, 8192))
        assert torch.equal(short[0, 8:16], long[0, 8:16])


def test_cases_keep_the_tokens_of_a_rank_or_those_of_the_sequence():
    found = [
        [(case.pattern, case.ranks, case.seq_len) for case in cases(kind, 512, [1, 4], 256, only)]
        for kind, only in ((Kind.WEAK, ["window"]), (Kind.STRONG, ["top-k"]))
    ]
    assert found[0] == [("window", 1, 512), ("window", 4, 2048)]
    assert found[1] == [("top-k", 1, 512), ("top-k", 4, 512)]
    assert len(list(cases(Kind.WEAK, 512, [1, 2], 256, ()))) == 14


def test_documents_of_a_longer_sequence_are_those_of_a_shorter_one_and_more():
    short, long = (document_lengths(1000, n) for n in (50_000, 100_000))
    assert (sum(short), sum(long)) == (50_000, 100_000)
    assert short[:-1] == long[: len(short) - 1]
    assert 700 < 100_000 / len(long) < 1400


def test_of_blocks_that_the_device_chooses_all_are_fetched_and_few_computed():
    """So fetching one takes longer, relative to computing those of a row."""
    mask = masks.full()(65536, BLOCK)
    case, every = (Case("top-k", mask, 2, k) for k in (32, None))
    assert case.plans[Way.PLAN] is make_plan(mask, 2, fetch_cost=4.0 * 512 / 32)
    splits = [
        (each.plans[Way.PLAN].split, each.plans[Way.PLAN].otherwise) for each in (case, every)
    ]
    assert splits == [("in place", ("keys", 1)), ("in place", ("rows", 1))]
    assert (case.selected, case.density) == (1 / 16, 1 / 16)
    some, all_ = (predicted(each, Machine(), Attention()) for each in (case, every))
    assert sum(some.demand.own + some.demand.fetched) * 16 == mask.nnz_blocks
    assert some.demand.moved == all_.demand.moved
    assert some.prediction.efficiency < all_.prediction.efficiency


def test_only_some_implementations_are_measured():
    setting = measurement.Setting(Kind.WEAK, Attention(), None, 0, torch.device("cpu"))
    (case,) = cases(Kind.WEAK, 512, [2], 256, ["window"])
    with (
        mock.patch.object(measurement, "_needed_bytes", return_value=0),
        mock.patch.object(measurement, "_measured", return_value=("row", ())) as measured,
    ):
        measurement.measure(setting, case, [Way.PLAN, Way.RING])
    assert [call.args[2] for call in measured.mock_calls] == [Way.PLAN, Way.RING]
    refused = run("weak", "--implementations", "plan,rings", "--dry-run")
    assert refused.exit_code == 2
    assert "unknown implementation 'rings'; known: plan, plan with" in refused.output


def test_the_single_rank_is_measured_after_the_others():
    found = list(cases(Kind.WEAK, 512, [1, 2, 4], 256, ["butterfly", "window"]))
    ordered = [(case.pattern, case.ranks) for case in measured_order(found)]
    assert ordered == [(name, n) for name in ("butterfly", "window") for n in (4, 2, 1)]


def test_results_that_differ_or_have_nan_are_found():
    expected = torch.ones(2), torch.full((3,), 4.0)
    found = [x.clone() for x in expected]
    assert measurement._largest_difference(found, expected) == 0
    found[1][2] = 5
    assert measurement._largest_difference(found, expected) == 0.25
    found[1][1] = torch.nan
    assert not measurement._largest_difference(found, expected) < measurement.TOLERANCE


def test_runs_are_timed_in_turn():
    """A device that becomes slower with each run is as slow for each of them, within one run."""
    order, clock = [], iter(range(1, 1000))
    setting = measurement.Setting(Kind.WEAK, Attention(), None, 0, torch.device("cpu"))

    def once(_, run):
        run()
        return float(next(clock))

    runs = [partial(order.append, name) for name in "abc"]
    with mock.patch.object(measurement, "_once", once):
        found = measurement._times(setting, runs)
    assert order[6:] == [*"abc"] * measurement.MAX_RUNS
    assert found == [found[0], found[0] + 1, found[0] + 2]


def test_a_dry_run_predicts_what_a_run_would_measure(tmp_path, monkeypatch):
    machine = tmp_path / "machine.json"
    machine.write_text('{"machine": {"tflops": 2.0}}')
    arguments = ["weak", "--dry-run", "--ranks", "8", "--only", "window,top-k", *SMALL]
    arguments += ["--output", str(tmp_path), "--machine", str(machine)]
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert f"{PREDICTED}.json" in "".join(done.output.split())
    record = json.loads((tmp_path / f"{PREDICTED}.json").read_text())
    assert (record["complete"], record["rows"]) == (True, [])
    assert record["machine"]["tflops"] == 2.0
    found = [(each["pattern"], each["prediction"]["ranks"]) for each in record["predicted"]]
    assert found == [(name, ranks) for name in ("window", "top-k") for ranks in (1, 2, 4, 8)]
    for each in record["predicted"]:
        assert each["seq_len"] == 512 * each["prediction"]["ranks"]
        assert len(each["demand"]["moved"]) == each["prediction"]["ranks"]
    for suffix in ("png", "svg"):
        assert (tmp_path / f"{PREDICTED}.{suffix}").exists()
    # Of the processes of torchrun one does it.
    monkeypatch.setenv("RANK", "1")
    assert run(*arguments[:2], "--output", str(tmp_path / "none")).exit_code == 0
    assert not (tmp_path / "none").exists()


def test_names_of_records_have_the_chosen_sizes():
    assert scaling._choices(None, 16, 16) == []
    assert scaling._choices(2**21, 16, 16) == ["2m"]
    assert scaling._choices(3 * 2**17, 32, 8) == ["384k", "32-8-heads"]
    assert scaling._choices(1000, 4, 4) == ["1000", "4-4-heads"]


def test_a_record_is_only_replaced_if_asked(tmp_path):
    arguments = ["weak", "--dry-run", "--only", "window", *SMALL, "--output", str(tmp_path)]
    assert run(*arguments).exit_code == 0
    (path,) = tmp_path.glob("*.json")
    before = path.read_bytes()
    again = run(*arguments, "--window", "384")
    assert again.exit_code == 2
    assert "--overwrite" in again.output
    assert path.read_bytes() == before
    assert run(*arguments, "--window", "384", "--overwrite").exit_code == 0
    assert path.read_bytes() != before


def test_what_does_not_fit_is_skipped():
    """A ring needs more memory than a plan, and a plan on one rank more than on two."""
    group = mock.Mock()
    setting = measurement.Setting(
        *(Kind.STRONG, Attention(4, 4, 64, dtype=torch.bfloat16), group, 0, torch.device("cpu"))
    )
    (one,), (two,) = (list(cases(Kind.STRONG, 8192, [n], 1024, ["window"])) for n in (1, 2))
    with mock.patch.object(measurement, "_over_ranks", lambda _, number: number):
        needed = {
            (case.ranks, way): measurement._needed_bytes(setting, case, way)
            for case in (one, two)
            for way in case.plans
        }
        most = needed[2, Way.PLAN] / measurement.USABLE
        with (
            mock.patch.object(measurement, "_memory", return_value=most),
            mock.patch.object(measurement, "_measured", return_value=("row", (torch.zeros(1),))),
        ):
            rows, skipped = measurement.measure(setting, two)
            assert measurement.measure(setting, one)[0] == []
    assert needed[2, Way.PLAN] < needed[2, Way.RING] < needed[2, Way.GATHER]
    assert needed[2, Way.PLAN] < 0.6 * needed[1, Way.PLAN]
    assert rows == ["row"]
    assert set(skipped) == {Way.RING, Way.GATHER, Way.COLLECTIVES}
    assert skipped[Way.COLLECTIVES] == "without GPUs every plan exchanges by all-to-alls"
    assert skipped[Way.RING].startswith("needs about 0 of 0 GB")


def test_a_plan_with_limited_memory_needs_the_keys_of_two_groups_of_heads():
    sizes = Attention(16, 16, 64, dtype=torch.bfloat16)
    setting = measurement.Setting(Kind.STRONG, sizes, mock.Mock(), 0, torch.device("cpu"))
    (case,) = cases(Kind.STRONG, 32768, [2], 1024, ["butterfly"], 16)
    received = int(case.plans[Way.PLAN].costs.receive[0])
    with mock.patch.object(measurement, "_over_ranks", lambda _, number: number):
        needed = [
            measurement._needed_bytes(setting, case, way) / (16 * 64 * 2)
            for way in (Way.PLAN, Way.LIMITED)
        ]
    # Of each fetched key and value there are their gradients and copies: 10 tensors of all heads.
    assert needed[0] - needed[1] == pytest.approx(10 * received * 14 / 16)


def test_memory_is_limited_by_groups_of_key_heads_where_many_keys_are_received():
    for kv_heads, groups in ((32, 16), (16, 16), (4, 4), (1, None)):
        (case,) = cases(Kind.STRONG, 32768, [2], 1024, ["butterfly"], kv_heads)
        plan = case.plans.get(Way.LIMITED)
        assert (plan and plan.head_groups(kv_heads)) == groups
    for name, count in (("window", 2), ("top-k", 2), ("butterfly", 1)):
        (case,) = cases(Kind.STRONG, 32768, [count], 1024, [name], 16)
        assert Way.LIMITED not in case.plans


@pytest.mark.parametrize(("device", "runs"), [("cuda", 4), ("cpu", 0)])
def test_a_gpu_is_busy_before_it_is_timed(device, runs):
    setting = measurement.Setting(Kind.WEAK, Attention(), None, 0, torch.device(device))
    with (
        mock.patch.object(measurement, "SETTLE_S", 0.4),
        mock.patch.object(measurement, "_once", return_value=100.0) as once,
    ):
        measurement._settle(setting, lambda: None)
    assert once.call_count == runs


def test_wrong_options_are_named():
    assert "--ranks needs --dry-run" in run("weak", "--ranks", "8").output
    arguments = ["weak", "--dry-run", "--machine", __file__]
    assert "must have" in " ".join(run(*arguments).output.replace("│", " ").split())
    assert "patterns must be of ['window'" in run("weak", "--dry-run", "--only", "diagonal").output


def test_predictions_are_on_disk_before_anything_is_measured(tmp_path, monkeypatch):
    def start():
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return torch.device("cpu")

    def measure(*_):
        raise RuntimeError("the first measurement")

    monkeypatch.setattr(measurement, "start", start)
    monkeypatch.setattr(measurement, "measure", measure)
    try:
        done = run("strong", *SMALL, "--output", str(tmp_path))
    finally:
        dist.destroy_process_group()
    assert "the first measurement" in str(done.exception)
    record = json.loads((tmp_path / "long-context-strong-512-2-1-heads-1-cpu.json").read_text())
    assert (record["complete"], record["rows"]) == (False, [])
    assert len(record["predicted"]) == 7


def test_pictures_show_gains_relative_to_one_rank():
    def row(way, ranks, ms, rate):
        sizes = {"pattern": "window", "implementation": way, "ranks": ranks, "tflops": rate}
        figures = {"counted_mb": 1.0, "exposed_total_ms": -0.1, "peak_bytes": 2e6}
        return sizes | figures | {"total_ms": ms}

    rows = [row("plan", 1, 8.0, 3.0), row("plan", 2, 5.0, 2.4), row("all-gather", 2, 8.0, 1.5)]
    rows.append(row("ring", 2, 8.0, 1.5) | {"pattern": "of a run that was cut off"})
    lines = plots.measured(rows)
    del lines["of a run that was cut off", "ring", 2]["memory"]
    assert lines["window", "plan", 1]["exposed"] == 0
    for kind, gains in ((Kind.WEAK, [1, 0.8]), (Kind.STRONG, [1, 1.6])):
        figure = plots._figure(kind, lines)
        assert list(figure.axes[0].lines[0].get_ydata()) == pytest.approx(gains)
        assert len(figure.axes) == 8
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert labels == ["plan", "all-gather", "ring", "ideal"]


def figures(*patterns: str, names=(*Way, plots.PREDICTED)) -> dict:
    """The figures of implementations on one and two ranks."""
    found = {"ms": 1.0, "rate": 1.0, "moved": 1.0, "exposed": 1.0}
    return {(pattern, name, n): found for pattern in patterns for name in names for n in (1, 2)}


def test_pictures_show_predictions_of_what_was_measured_alone():
    """Or all of a record in which nothing was."""
    predicted_only = figures("window", "top-k", "random", names=[plots.PREDICTED])
    some = figures("window", "random", names=["plan"]) | predicted_only
    for lines, shown in ((some, "window random"), (predicted_only, "window top-k random")):
        axes = plots._figure(Kind.WEAK, lines).axes
        assert [ax.get_title() for ax in axes if ax.get_title()] == shown.split()
        assert len(axes) == 3 * len(shown.split())


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_legend_of_a_picture_is_as_wide_as_its_panels(count):
    figure = plots._figure(Kind.WEAK, figures(*"abcdefg"[:count]))
    figure.draw_without_rendering()
    (legend,), width = figure.legends, figure.bbox.width
    assert len(legend.get_texts()) == len(Way) + 2
    assert 0.4 * width < legend.get_window_extent().width < width


@pytest.mark.slow(20)
def test_a_strong_run_on_two_processes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "experiments.long_context.scaling", "strong"]
    names = sorted(set(patterns(256, 512)) - set(OF_FOUR))
    command += [*SMALL, "--only", ",".join(names), "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check_record(tmp_path, "strong", 2, names)


def of_rank(rank: int, arguments: list[str]) -> str:
    """What a run prints on one of four processes that have met."""
    with (
        patch.dict(os.environ, {"WORLD_SIZE": "4", "RANK": str(rank)}),
        patch.object(measurement, "MAX_RUNS", 2),
        patch.object(measurement, "start", return_value=torch.device("cpu")),
        patch.object(dist, "destroy_process_group"),
    ):
        done = run(*arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


@pytest.mark.slow(20)
def test_a_weak_run_on_four_processes(four_ranks, tmp_path):
    arguments = ["weak", *SMALL, "--only", ",".join(OF_FOUR), "--output", str(tmp_path)]
    assert "Traceback" not in "".join(four_ranks.run(of_rank, arguments))
    check_record(tmp_path, "weak", 4, OF_FOUR)


def check_record(folder, kind, ranks, only):
    (path,) = folder.glob(f"long-context-{kind}-512-2-1-heads-{ranks}-*.json")
    record = json.loads(path.read_text())
    rows, counts = record["rows"], [n for n in (1, 2, 4) if n <= ranks]
    assert record["complete"]
    assert [each["ranks"] for each in record["exchanges"]] == [ranks, ranks]
    share = 2**20 // (ranks - 1)
    assert record["exchanges"][1]["received"] == share * (ranks - 1)
    assert all(each["milliseconds"] > 0 for each in record["exchanges"])
    assert path.with_suffix(".svg").exists()
    assert len(rows) == len(only) * (2 + 3 * (len(counts) - 1))
    assert {row["seq_len"] for row in rows} == {512 * n if kind == "weak" else 512 for n in counts}
    planned = [(each["pattern"], each["prediction"]["ranks"]) for each in record["predicted"]]
    measured = [(r["pattern"], r["ranks"]) for r in rows if r["implementation"] == "plan"]
    assert planned == sorted(measured, key=planned.index)  # measured on one rank last
    for row in rows:
        compared = row["implementation"] != Way.GATHER  # with the all-gather
        assert row["difference"] < 1e-4 if compared else row["difference"] is None
        assert row["counted_mb"] == pytest.approx(row["receive_mb"])
        assert row["total_ms"] > 0


def test_the_picture_of_a_record_is_drawn_where_it_is_asked_for(tmp_path):
    app = typer.Typer()
    app.command()(plots.main)
    record = SHIPPED / "long-context-weak-128k-2-nvidia-h200.json"
    done = CliRunner().invoke(app, [str(record), "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}
    other = str(SHIPPED / "power-nvidia-h200.json")
    for given, message in (
        ([str(record), "--output", str(SHIPPED)], "is a folder of the package"),
        ([other, "--output", str(tmp_path)], "must be a record of"),
    ):
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 2
        assert message in " ".join(done.output.replace("│", " ").split())
