from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from experiments import bench, suites
from experiments.bench import main, parse_backends, parse_suites, planned
from experiments.compare import compare
from experiments.measure import Method, measure
from experiments.pattern_families import FULL as FULL_MASK
from experiments.record import Record
from experiments.suites import SUITES, Shape, of_full_blocks
from tests.helpers.records import BASELINE, ENVIRONMENT, FULL

app = typer.Typer()
app.command()(main)


@pytest.mark.parametrize("side", [16, 64, 128])
def test_patterns_of_the_suites_have_no_partial_blocks(side):
    for name, pattern in of_full_blocks(1024, side).items():
        mask = pattern(1024, side)
        assert mask.partial_blocks == 0, name
        assert 0 < mask.density <= 1, name


def test_patterns_of_the_suites_are_what_they_are_called():
    found = {name: pattern(4096, 32) for name, pattern in of_full_blocks(4096, 32).items()}
    for share in (4, 16, 32):
        density = found[f"random 1/{share}"].density
        assert 1 / share <= density <= 1 / share + 1 / 128
        assert (found[f"random 1/{share}"].to_blocks().diagonal()).all()
    i = torch.arange(128)
    distance = (i[:, None] - i).abs()
    assert torch.equal(found["band"].to_blocks(), distance <= 512 // 32)
    assert found["band and edges"].to_blocks()[:4].all()
    assert found["strided"].density == 1 / 8


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Suites whose masks are compiled for one short sequence on the CPU."""

    def size(self: Shape, block_size: int):
        return suites.Size(1024, block_size, torch.device("cpu"), self.q_len)

    monkeypatch.setattr(Shape, "size", size)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_measures_ours_first_and_no_case_twice(suite):
    cases = list(planned(suite, ("sparseflash", "sparseflash:triton"), None, print))
    assert all(case.implementations[:2] == ("sparseflash", "sparseflash:triton") for case in cases)
    assert cases[0].family == "full"
    keys = [(case.group, case.family) for case in cases]
    assert len(set(keys)) == len(keys)
    sides = {(case.block_size, *case.problem.mask.block_size) for case in cases}
    assert all(len(set(side)) == 1 for side in sides)
    if suite in ("dense", "sparse"):
        assert {case.batch * case.seq_len for case in cases} == {suites.TOKENS}


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    ("suite", "full", "sparse"),
    [
        ("dense", {"flash", "cudnn", "flash4", "flex"}, {"flash", "cudnn", "flash4", "flex"}),
        ("sparse", {"flash4", "flex"}, {"flash4", "flex"}),
        ("small-blocks", set(), set()),
        ("decode", {"flash", "cudnn", "flex"}, {"flex"}),
        ("lra", {"flash", "cudnn", "standard"}, {"flex"}),
        ("memory", {"flash", "cudnn", "standard"}, set()),
    ],
)
def test_peers_are_measured_on_the_masks_that_they_know(suite, full, sparse):
    for case in SUITES[suite](()):
        baselines = full if case.family == "full" else sparse
        if case.seq_len > suites.LONGEST_MATERIALISED:
            baselines = baselines - {"standard"}
        assert set(case.implementations) == baselines
        if suite == "memory" and case.family == "full":
            assert case.seq_len <= suites.LONGEST_DENSE


@pytest.mark.usefixtures("on_the_cpu")
def test_only_the_chosen_peers_are_measured():
    cases = list(planned("dense", ("sparseflash",), ("cudnn",), print))
    assert {case.implementations for case in cases} == {("sparseflash", "cudnn")}


@pytest.mark.usefixtures("on_the_cpu")
def test_a_step_of_decoding_is_measured_by_the_bytes_of_its_keys():
    shape = Shape(2, 4, 1024, 16, kv_heads=2, q_len=3)
    case = shape.case("decode", FULL_MASK, 128, ("sparseflash", "sdpa"))
    method = Method("cpu", "fp32", "auto", ("forward", "backward"), "cpu", 1.0, 0)
    rows, _ = measure(case, case.implementations, method)
    assert [row.direction for row in rows] == ["forward", "forward"]
    for row in rows:
        rate = 2 * 2 * 2 * 1024 * 16 * 4 / row.median_ms / 1e9
        assert row.useful == (pytest.approx(rate), "TB/s")
        assert row.tflops == pytest.approx(4 * 16 * 2 * 4 * 3 * 1024 / row.median_ms / 1e9)


def test_names_are_checked():
    assert parse_suites(None) == list(SUITES)
    assert parse_backends("auto, triton") == ("sparseflash", "sparseflash:triton")
    assert parse_backends("hopper/any-order") == ("sparseflash:hopper/any-order",)
    with pytest.raises(typer.BadParameter, match="unknown suite 'dens'; known: dense"):
        parse_suites(["dens"])
    with pytest.raises(typer.BadParameter, match="unknown backend 'cuda'; known: auto, cpu"):
        parse_backends("cuda")


def test_every_chosen_suite_is_carried_out_with_what_was_asked_for(tmp_path, monkeypatch):
    carried = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "slug", lambda device: f"a-{device}")
    monkeypatch.setattr(bench, "planned", lambda *chosen: chosen)
    monkeypatch.setattr(
        bench, "carry_out", lambda *call, roofline: carried.append((*call, roofline))
    )
    options = "--backends hopper,auto --baselines flex --passes forward --dtype fp16 --seed 3"
    result = CliRunner().invoke(
        app, ["lra", "sparse", "--output", str(tmp_path), "--resume", *options.split()]
    )
    assert result.exit_code == 0, result.output
    for suite, (plan, method, path, resume, roofline) in zip(
        ("lra", "sparse"), carried, strict=True
    ):
        ours = ("sparseflash:hopper", "sparseflash")
        assert plan(print) == (suite, ours, ("flex",), print)
        assert method == Method("cuda", "fp16", "auto", ("forward",), "graph", 60.0, 3)
        assert path == tmp_path / f"bench-{suite}-a-cuda.json"
        assert resume
        assert roofline


def save(rows, path: Path) -> Path:
    Record(ENVIRONMENT, {"seed": 0}, list(rows), roofline={"copy": 4.0}).save(path)
    return path


def test_two_records_are_compared_row_by_row(tmp_path):
    before = save([FULL, BASELINE], tmp_path / "before.json")
    after = save([replace(FULL, median_ms=4.0), BASELINE], tmp_path / "after.json")
    result = CliRunner().invoke(app, ["--compare", str(before), str(after)])
    assert result.exit_code == 0, result.output
    assert "2.000x" in result.output
    assert "1.000x" in result.output


def test_a_comparison_holds_both_times_and_the_mean_of_each_implementation():
    wider = replace(FULL, head_dim=128)
    backward = replace(FULL, direction="backward", median_ms=20.0)
    before = Record(ENVIRONMENT, {}, [BASELINE, FULL, wider, backward])
    after = Record(
        ENVIRONMENT,
        {},
        [
            replace(FULL, median_ms=4.0),  # from 8
            replace(wider, median_ms=16.0),  # from 8
            backward,
            replace(BASELINE, median_ms=2.6),  # from 2.5
            replace(FULL, family="local", pattern="local(64)"),  # from nothing
            replace(BASELINE, pattern="full but another"),
        ],
    )
    table = compare(before, after)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert [row[1:] for row in rows] == [
        ("forward", "sparseflash", "8", "4", "[green]2.000x[/]"),
        ("forward", "sparseflash", "8", "16", "[red]0.500x[/]"),
        ("backward", "sparseflash", "20", "20", "[dim]1.000x[/]"),
        ("forward", "sdpa", "2.5", "2.6", "[red]0.962x[/]"),
        ("", "sparseflash", "", "", "1.000x"),
        ("", "sdpa", "", "", "0.962x"),
    ]
    quiet = compare(before, Record(ENVIRONMENT, {}, [replace(FULL, median_ms=8.1)]))
    assert next(iter(quiet.columns[-1].cells)) == "[dim]0.988x[/]"


def test_records_of_other_cases_are_not_compared(tmp_path):
    paths = [save([FULL], tmp_path / "a.json"), save([BASELINE], tmp_path / "b.json")]
    result = CliRunner().invoke(app, ["--compare", *map(str, paths)])
    assert result.exit_code == 2
    assert "no case in common" in result.output
    one = Record(ENVIRONMENT, {}, [FULL])
    other = Record(ENVIRONMENT, {}, [replace(FULL, head_dim=128)])
    with pytest.raises(ValueError, match="no case in common"):
        compare(one, other)


def test_records_of_other_dtypes_are_not_compared():
    one, other = (Record(ENVIRONMENT, {"dtype": dtype}, [FULL]) for dtype in ("fp16", "bf16"))
    with pytest.raises(ValueError, match="must share their dtype, got fp16, bf16"):
        compare(one, other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so():
    result = CliRunner().invoke(app, ["dense"])
    assert result.exit_code == 2
    assert "CUDA" in result.output


@pytest.mark.gpu
def test_a_suite_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "LRA", suites.LRA[:1])
    result = CliRunner().invoke(app, ["lra", "--output", str(tmp_path), "--budget-ms", "2"])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*.json")
    record = Record.load(path)
    assert record.roofline["matrix_product_tflops"] > 0
    assert record.skipped == []
    assert len(list(tmp_path.glob("*.png"))) == 1
