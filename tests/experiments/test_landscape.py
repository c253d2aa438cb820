"""The suite landscape: limits, crossings, approximations without projections, parts."""

from dataclasses import replace
from importlib import import_module
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

import masks
from experiments import plots, runner, settings
from experiments.baselines import (
    STANDARD_PARTS,
    WITH_DROPOUT,
    BaselineError,
    attend_baseline,
    attend_standard,
)
from experiments.bench import app
from experiments.check import Extras
from experiments.cli import Baseline
from experiments.measure import Case, check_finite, measure, part_of_standard
from experiments.packaged import (
    BARE,
    BIGBIRD_BLOCK,
    RANDOM_BLOCKS,
    ROUTED,
    SHORTEST,
    WINDOW,
    without_projections,
)
from experiments.pattern_families import Problem
from experiments.pictures import COLOURS
from experiments.record import (
    FROM_PYTHON,
    NO_GRAPH,
    Measurement,
    Record,
    crossing_length,
    from_python,
    lines,
)
from experiments.report import show
from experiments.settings import Method
from tests.helpers.baselines import MODULES, need_package
from tests.helpers.records import FULL

METHOD = Method("cpu", "fp32", ("forward", "backward"), "cpu", "rested", 1.0, 0, limit_ms=100.0)
PACKAGED = [Baseline(name) for name in MODULES]


def row(implementation: str, seq_len: int, direction: str, ms: float, **more: Any) -> Measurement:
    facts = {"suite": "landscape", "family": "full"} | more
    return replace(
        FULL,
        implementation=implementation,
        seq_len=seq_len,
        direction=direction,
        median_ms=ms,
        peak_bytes=seq_len,
        **facts,
    )


def full_case(seq_len: int, *names: str, family: str = "full") -> Case:
    mask = masks.full()(seq_len, block_size=32)
    problem = Problem(family, mask, "full" if family == "full" else None)
    return Case("landscape", family, problem, 1, 2, seq_len, 16, 32, names)


def tokens_of(name: str) -> list[torch.Tensor]:
    """Inputs of the shortest length from 128 tokens on that a layer can compute."""
    seq_len = max(128, SHORTEST.get(name, 0))
    return [torch.randn(2, 2, seq_len, 16, requires_grad=True) for _ in range(3)]


@pytest.fixture
def inputs():
    return [torch.randn(2, 2, 128, 16, requires_grad=True) for _ in range(3)]


@pytest.mark.slow(20)
def test_the_suite_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setitem(settings.LANDSCAPE_DEFAULTS, "parts", (((1, 2, 64),), ()))
    arguments = "landscape --device cpu --growth 64,128 --heads 2 --head-dim 16 --budget-ms 1"
    call = [*arguments.split(), "--patterns", "local(16)", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    record = Record.load(tmp_path / "bench-landscape-cpu.json")
    found = lines(record.rows)
    measured = {"standard", "sdpa", "linear", "smyrf"}
    ours = ("sparseflash", "full"), ("sparseflash", "local(16)")
    assert {*ours, *((name, "full") for name in measured)} <= found.keys()
    assert tuple(found)[:2] == ours
    expected = {"longformer": {128}}  # it cannot compute 64 tokens
    assert all(line.keys() == expected.get(name, {64, 128}) for (name, _), line in found.items())
    left_out = {implementation for implementation, *_ in record.skipped}
    assert {name for name, _ in found} | left_out >= {b.value for b in Baseline if b.approximate}
    parts = [r.implementation for r in record.rows if r.suite == "parts"]
    assert parts == ["sparseflash", "standard", *(f"standard:{part}" for part in STANDARD_PARTS)]
    pictures = {path.suffix for path in tmp_path.glob("*-landscape.*")}
    assert pictures == {path.suffix for path in tmp_path.glob("*-parts.*")} == {".png", ".svg"}
    words = " ".join(result.output.split())  # titles are as narrow as their tables
    assert "peak MiB, at N tokens" in words
    assert "sum of all parts" in words
    again = CliRunner().invoke(app, [*call, "--resume"])
    assert again.exit_code == 0, again.output
    assert Record.load(tmp_path / "bench-landscape-cpu.json").rows == record.rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["landscape", "--densities", "1/2"], "the suite landscape has no option --densities"),
        (["speedup", "--baselines", "smyrf"], "--baselines smyrf is for the suite landscape only"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_each_ends_where_it_fails_or_takes_too_long(tmp_path, monkeypatch):
    asked = []

    def fake(case, names, method, log=print):
        asked.append((case.seq_len, *names))
        kept = [name for name in names if name != "standard"]
        ms = {"sdpa": 101.0}
        rows = [row(n, case.seq_len, d, ms.get(n, 1.0)) for n in kept for d in method.directions]
        failed = {"standard": "out of memory"} if "standard" in names else {}
        return rows, failed

    monkeypatch.setattr(runner, "measure", fake)
    names = ("sparseflash", "standard", "sdpa")
    cases = [full_case(n, *names) for n in (32, 64, 128)]
    record = Record({"device": "cpu"}, {})
    runner.run(lambda log: iter(cases), METHOD, record, tmp_path / "r.json", Console(quiet=True))
    alone = [(32, name) for name in names]
    assert asked[1:-1] == [*alone, (64, "sparseflash"), (128, "sparseflash")]
    reasons = [(name, where, "limit of 0.1 s" in why) for name, where, why in record.skipped]
    assert reasons == [("standard", "full at N = 32", False), ("sdpa", "full at N = 64", True)]
    asked.clear()
    record = Record({"device": "cpu"}, {})
    method = replace(METHOD, limit_ms=None)
    runner.run(lambda log: iter(cases), method, record, tmp_path / "r.json", Console(quiet=True))
    assert asked[1:-1] == [(n, *names) for n in (32, 64, 128)]


def test_ours_ends_where_memory_does(monkeypatch):
    def fake(*arguments):
        raise torch.OutOfMemoryError("out of memory\nand more")

    monkeypatch.setattr(runner, "measure", fake)
    call = full_case(32, "sparseflash"), ["sparseflash"], METHOD, print
    assert runner.measure_within_memory(*call) == ([], {"sparseflash": "out of memory"})
    with pytest.raises(torch.OutOfMemoryError):
        runner.measure_within_memory(*call[:2], replace(METHOD, limit_ms=None), print)


def test_crossings_lie_between_lengths():
    other = dict.fromkeys((128, 256, 512), (8.0, 0))
    line = {128: (32.0, 0), 256: (16.0, 0), 512: (4.0, 0), 1024: (1.0, 0)}
    assert crossing_length(line, other) == pytest.approx(256 * 2**0.5)
    assert crossing_length(other, line) is None
    assert crossing_length(other, other) == 128
    assert crossing_length(line, {2048: (1.0, 0)}) is None


def test_times_of_both_passes_are_added_and_half_measured_lengths_left_out():
    rows = [row("flex", 64, "forward", 1.0), row("flex", 64, "backward", 2.0)]
    rows += [row("flex", 128, "forward", 1.0), row("flex", 64, "forward", 9.0, suite="lra")]
    assert lines(rows) == {("flex", "full"): {64: (3.0, 64)}}


def test_parts_of_standard_attention_give_its_result(inputs):
    case = replace(full_case(128, "standard"), problem=Problem("", masks.causal()(128), "causal"))
    expected = scaled_dot_product_attention(*inputs, is_causal=True)
    last = part_of_standard(STANDARD_PARTS[-1], case, 0.0, inputs)()()
    torch.testing.assert_close(last, expected)
    torch.testing.assert_close(attend_standard(True)(*inputs), expected)
    weights = part_of_standard("softmax", case, 0.0, inputs)()()
    torch.testing.assert_close(weights @ inputs[2], expected)
    assert isinstance(last, torch.Tensor)
    assert not last.requires_grad


@pytest.mark.parametrize("name", PACKAGED)
def test_layers_without_projections_are_linear_in_the_values(name):
    need_package(name)
    query, key, value = inputs = tokens_of(name)
    attend = without_projections(name, query, 0.0)
    outs = []
    for factor in (1, 2):
        torch.manual_seed(0)  # of Reformer's hashes
        outs.append(attend(query, key, factor * value, None))
    assert outs[0].shape == query.shape
    if name == "sinkhorn":  # of 0.11.4, as docs/benchmark-columns.md says
        assert (2 * outs[0] - outs[1]).abs().max() > 0.1
    else:
        torch.testing.assert_close(2 * outs[0], outs[1], rtol=1e-3, atol=1e-4)
    check_finite(lambda *t: attend(*t, None), inputs, torch.randn_like(query))


@pytest.mark.parametrize("name", PACKAGED)
def test_layers_without_projections_leave_padding_out(name):
    need_package(name)
    inputs = tokens_of(name)
    seq_len = inputs[0].shape[2]
    attend = without_projections(name, inputs[0], 0.0)
    inside = torch.arange(seq_len) < torch.tensor([seq_len, seq_len * 6 // 10])[:, None]
    outs = []
    for masked in (0.0, 9.0):
        torch.manual_seed(0)
        filled = list(inputs)
        for i in range(3) if name in ("routing", "sinkhorn", "bigbird") else (2,):
            filled[i] = torch.where(inside[:, None, :, None], inputs[i], masked)
        outs.append(attend(*filled, inside)[1, :, : seq_len * 6 // 10])
    torch.testing.assert_close(*outs)
    check_finite(lambda *t: attend(*t, inside), inputs, torch.randn_like(inputs[0]))


@pytest.mark.parametrize("name", sorted(BARE.keys() & set(WITH_DROPOUT)))
def test_attention_of_packages_drops_probabilities(name):
    need_package(name)
    query = torch.randn(2, 2, 128, 16)
    ones = torch.ones_like(query)  # also as keys, which Sinkhorn attention has as values
    torch.manual_seed(0)  # of the means of routing
    expected = without_projections(name, query, 0.0)(query, ones, ones, None)
    attended = expected != 0  # routing may leave out a query
    # The sums of a mixture of buckets are about 1: they are normalised five times.
    torch.testing.assert_close(expected[attended], ones[attended], rtol=0, atol=0.05)
    torch.manual_seed(0)
    dropped = without_projections(name, query, 0.5)(query, ones, ones, None)[attended]
    assert dropped.mean() == pytest.approx(1, abs=0.05)
    assert dropped.std() > 0.05


def test_bigbird_attends_three_blocks_and_the_ends_and_random_ones():
    query, key, value = tokens_of("bigbird")
    attend = without_projections("bigbird", query, 0.0)
    out = attend(query, key, value, None)
    side, count = BIGBIRD_BLOCK, query.shape[2] // BIGBIRD_BLOCK
    allowed = torch.zeros(2, 2, count, count, dtype=torch.bool)
    for i in range(count):
        rows = out[:, :, i * side : (i + 1) * side]
        grad = torch.autograd.grad(rows.sum(), value, retain_graph=True)[0]
        allowed[:, :, i] = grad.unflatten(2, (count, side)).abs().amax((3, 4)) > 0
    assert allowed[:, :, [0, -1]].all()
    assert allowed[..., [0, -1]].all()
    near = (torch.arange(count)[:, None] - torch.arange(count)).abs() <= 1
    assert allowed[:, :, near].all()
    # In the middle the package draws from the first blocks alone, and not all of them differ.
    assert (allowed[:, :, 2:-2].sum(-1) <= 3 + 2 + RANDOM_BLOCKS).all()
    assert (allowed[:, :, 2:-2].sum(-1) > 3 + 2).any()
    pairs = allowed.repeat_interleave(side, 2).repeat_interleave(side, 3)
    expected = scaled_dot_product_attention(query, key, value, pairs)
    once = allowed.sum(-1) >= torch.tensor([count, 7, *[8] * (count - 4), 7, count])
    close = (out - expected).abs().unflatten(2, (count, side)).amax((3, 4)) < 1e-4
    assert close[once].all()
    assert once[:, :, 2:-2].any()


def test_routing_with_one_cluster_is_attention_without_the_padding():
    need_package("routing")
    query, key, value = (torch.randn(2, 2, ROUTED, 16) for _ in range(3))
    attend = without_projections("routing", query, 0.0)
    expected = scaled_dot_product_attention(query, key, value)
    for _ in range(2):  # the means are made in the first call
        torch.testing.assert_close(attend(query, key, value, None), expected, rtol=1e-3, atol=1e-4)
    inside = torch.arange(ROUTED) < torch.tensor([ROUTED, 40])[:, None]
    expected = scaled_dot_product_attention(query, key, value, inside[:, None, None])
    out = attend(query, key, value, inside)
    torch.testing.assert_close(out[1, :, :40], expected[1, :, :40], rtol=1e-3, atol=1e-4)


def test_routing_makes_its_means_in_the_first_call_alone(monkeypatch):
    need_package("routing")
    package = import_module("routing_transformer.routing_transformer")
    query, key, value = (torch.randn(1, 2, 4 * ROUTED, 16) for _ in range(3))
    attend = without_projections("routing", query, 0.1)
    attend(query, key, value, None)
    refused = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(package, "kmeans_iter", refused)
    monkeypatch.setattr(package.Kmeans, "init", refused)  # it asks the device for its state
    attend(query, key, value, None)


def test_a_length_that_an_implementation_cannot_compute_is_left_out_alone(tmp_path, monkeypatch):
    asked = []

    def fake(case, names, method, log=print):
        asked.append((case.seq_len, *names))
        return [row(n, case.seq_len, d, 1.0) for n in names for d in method.directions], {}

    monkeypatch.setattr(runner, "measure", fake)
    cases = [full_case(n, "sparseflash", "bigbird", "reformer") for n in (128, 800, 832)]
    record = Record({"device": "cpu"}, {})
    runner.run(lambda log: iter(cases), METHOD, record, tmp_path / "r.json", Console(quiet=True))
    measured = {
        name: [n for n, *names in asked if name in names] for name in ("bigbird", "reformer")
    }
    assert measured == {"bigbird": [832], "reformer": [128, 832]}
    assert {(name, where) for name, where, _ in record.skipped} == {
        ("bigbird", "full at N = 128"),
        ("bigbird", "full at N = 800"),
        ("reformer", "full at N = 800"),
    }
    reasons = [why for name, _, why in record.skipped if name == "bigbird"]
    assert reasons[0] == "bigbird needs at least 768 tokens, got 128"
    assert reasons[1] == "bigbird needs a multiple of 64 tokens, got 800"


def test_tables_and_pictures_mark_what_was_called_from_python(tmp_path):
    rows = [
        row(name, n, d, 1.0, clock=clock)
        for name, clock in (("sparseflash", None), ("bigbird", "events"), ("linear", None))
        for n in (64, 128)
        for d in METHOD.directions
    ]
    record = Record({"device": "cpu"}, {}, rows)
    record.save(tmp_path / "r.json")
    assert from_python(Record.load(tmp_path / "r.json").rows) == {"bigbird"}
    console = Console(record=True, width=150, quiet=False, file=StringIO())
    show(record, console)
    shown = " ".join(console.export_text().split())
    assert shown.count(FROM_PYTHON) == 2  # its row, and what that means
    assert NO_GRAPH in shown
    labels = [text.get_text() for text in plots._landscape(lines(rows), record).legends[0].texts]
    assert [FROM_PYTHON in label for label in labels] == [False, True, False]


def test_lines_of_a_picture_look_different_and_an_approximation_the_same_in_each():
    every = [b.value for b in Baseline if b.approximate]
    assert len(every) > len(COLOURS)

    def looks(*names: str) -> dict[str, tuple]:
        rows = [
            *(
                row("sparseflash", 64, d, 1.0, family=f)
                for f in ("full", "local(8)")
                for d in METHOD.directions
            ),
            *(row(name, 64, d, 1.0) for name in names for d in METHOD.directions),
        ]
        drawn = plots._landscape(lines(rows), Record({"device": "cpu"}, {}, rows)).axes[0].lines
        return {
            str(line.get_label()): (
                *(line.get_color(), line.get_marker(), line.get_linestyle()),
                line.get_markerfacecolor(),
            )
            for line in drawn
        }

    all_of_them, last = looks("standard", "sdpa", *every), looks("sdpa", every[-1])
    assert len(set(all_of_them.values())) == len(all_of_them) == 4 + len(every)
    label = "Sinkhorn (approximate)"
    assert last[label] == all_of_them[label]


def test_some_implementations_have_a_record_of_their_own(tmp_path, monkeypatch):
    call = (
        "landscape --device cpu --growth 64 --heads 1 --head-dim 16 --budget-ms 1 --name packages"
    )
    call += f" --baselines longformer,sinkhorn --patterns local(16) --output {tmp_path}"
    planned = []
    monkeypatch.setattr(
        "experiments.runner.carry_out",
        lambda cases, method, path, *rest, **more: planned.append((list(cases(print)), path)),
    )
    result = CliRunner().invoke(app, [*call.split(), "--dropout", "0.1"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, call.split())
    assert result.exit_code == 0, result.output
    names = [path.name for _, path in planned]
    assert names == [
        "bench-landscape-packages-dropout-cpu.json",
        "bench-landscape-packages-cpu.json",
    ]
    full, pattern = planned[1][0]  # no parts of standard attention, which is not chosen
    assert full.implementations == ("sparseflash", "longformer", "sinkhorn")
    assert pattern.implementations == ("sparseflash",)
    result = CliRunner().invoke(app, [*call.split(), "--name", "No Name"])
    assert result.exit_code == 2
    assert "must be small letters, digits and hyphens" in " ".join(result.output.split())


def test_windows_of_packages_are_those_of_patterns(inputs):
    """Of Longformer each query has its own; of local attention all of a chunk share one."""
    query, key, value = inputs
    near = masks.local(WINDOW)(128, block_size=32).to_dense()
    attend = without_projections("longformer", query, 0.0)
    expected = scaled_dot_product_attention(query, key, value, near)
    torch.testing.assert_close(attend(query, key, value, None), expected)
    need_package("local-attention")
    long = [torch.randn(1, 2, 4 * WINDOW, 16) for _ in range(3)]
    chunk = torch.arange(4 * WINDOW) // WINDOW
    shared = (chunk[:, None] - chunk).abs() <= 1
    attend = without_projections("local-attention", long[0], 0.0)
    expected = scaled_dot_product_attention(*long, shared)
    torch.testing.assert_close(attend(*long, None), expected)


@pytest.mark.parametrize("name", [b for b in Baseline if b.approximate])
@pytest.mark.parametrize("padding", [0.0, 0.3])
def test_approximations_run_in_bfloat16(name, padding):
    need_package(name)
    method = replace(METHOD, dtype="bf16", padding=padding)
    rows, reasons = measure(full_case(max(128, SHORTEST.get(name, 0)), name), [name], method)
    assert reasons == {}
    assert [row.direction for row in rows] == ["forward", "backward"]


def test_lengths_that_an_approximation_cannot_take_are_named(inputs):
    problem = Problem("", masks.full()(100), "full")
    with pytest.raises(BaselineError, match="smyrf needs a multiple of 32 tokens, got 100"):
        attend_baseline(Baseline.SMYRF, problem)(*(t[:, :, :100] for t in inputs))


def test_smyrf_of_one_cluster_is_attention_without_the_padding():
    inputs = [torch.randn(2, 2, 32, 16) for _ in range(3)]
    problem = Problem("", masks.full()(32), "full")
    attend = attend_baseline(Baseline.SMYRF, problem, Extras(0.0, torch.tensor([32, 20])))
    keys = torch.arange(32) < torch.tensor([32, 20])[:, None, None, None]
    torch.testing.assert_close(attend(*inputs), scaled_dot_product_attention(*inputs, keys))


@pytest.mark.parametrize("name", ["standard", "sdpa"])
def test_dense_baselines_leave_padded_keys_out(name, inputs):
    problem = Problem("", masks.full()(128), "full")
    lengths = torch.tensor([128, 50])
    out = attend_baseline(Baseline(name), problem, Extras(0.0, lengths))(*inputs)
    keys = torch.arange(128) < lengths[:, None, None, None]
    torch.testing.assert_close(out, scaled_dot_product_attention(*inputs, keys))


def test_an_approximation_that_is_not_finite_is_left_out_with_its_reason(monkeypatch):
    monkeypatch.setattr("experiments.baselines.linear", lambda q, k, v, *rest: (q + k + v) / 0)
    rows, reasons = measure(full_case(64, "linear"), ["linear"], METHOD)
    assert rows == []
    assert reasons == {"linear": "out is not finite"}
    with pytest.raises(BaselineError, match="smyrf is measured on full masks only"):
        attend_baseline(Baseline.SMYRF, Problem("", masks.causal()(64), "causal"))
