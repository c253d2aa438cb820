import pytest
import torch
import typer
from typer.testing import CliRunner

from experiments import runner, suites
from experiments.bench import app, parse_backends
from experiments.cli import Suite
from experiments.measure import measure
from experiments.pattern_families import FULL as FULL_MASK
from experiments.record import Record
from experiments.settings import Method
from experiments.suites import SUITES, Shape, of_full_blocks, planned

METHOD = Method("cpu", "fp32", ("forward", "backward"), "cpu", "rested", 1.0, 0)


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
    cases = list(planned(suite, METHOD, ("sparseflash", "sparseflash:triton"), None, print))
    assert all(case.implementations[:2] == ("sparseflash", "sparseflash:triton") for case in cases)
    assert cases[0].family == "full"
    keys = [(case.group, case.family) for case in cases]
    assert len(set(keys)) == len(keys)
    sides = {(case.block_size, *case.problem.mask.block_size) for case in cases}
    assert all(len(set(side)) == 1 for side in sides)
    if suite in ("dense", "sparse"):
        assert {case.batch * case.seq_len for case in cases} == {suites.TOKENS}


DENSE = {"flash", "cudnn", "flash4", "flex"}
OF_BLOCKS = {"flash4", "flex", "cudnn-bsa", "cudnn-flex", "flashinfer"}


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    ("suite", "full", "sparse"),
    [
        ("dense", DENSE | {"cudnn-flex"}, DENSE | {"cudnn-flex"}),
        ("sparse", OF_BLOCKS, OF_BLOCKS),
        ("small-blocks", OF_BLOCKS, OF_BLOCKS),
        ("decode", {"flash", "cudnn", "flex"}, {"flex"}),
        ("lra", {"flash", "cudnn", "standard"}, {"flex"}),
        ("memory", {"flash", "cudnn", "standard"}, set()),
    ],
)
def test_baselines_are_measured_on_the_masks_that_they_know(suite, full, sparse):
    for case in SUITES[suite](()):
        baselines = full if case.family == "full" else sparse
        if case.seq_len > suites.LONGEST_MATERIALISED:
            baselines = baselines - {"standard"}
        if case.block_size < 128:
            baselines = baselines - {"flash4", "flex"}
        if case.block_size < 64:
            baselines = baselines - {"cudnn-bsa"}
        assert set(case.implementations) == baselines
        if suite == "memory" and case.family == "full":
            assert case.seq_len <= suites.LONGEST_DENSE


@pytest.mark.usefixtures("on_the_cpu")
def test_only_the_chosen_baselines_are_measured():
    cases = list(planned(Suite.DENSE, METHOD, ("sparseflash",), ("cudnn",), print))
    assert {case.implementations for case in cases} == {("sparseflash", "cudnn")}


@pytest.mark.usefixtures("on_the_cpu")
def test_a_step_of_decoding_is_measured_by_the_bytes_of_its_keys():
    shape = Shape(2, 4, 1024, 16, kv_heads=2, q_len=3)
    case = shape.case("decode", FULL_MASK, 128, ("sparseflash", "sdpa"))
    rows, _ = measure(case, case.implementations, METHOD)
    assert [row.direction for row in rows] == ["forward", "forward"]
    for row in rows:
        rate = 2 * 2 * 2 * 1024 * 16 * 4 / row.median_ms / 1e9
        assert row.useful == (pytest.approx(rate), "TB/s")
        assert row.tflops == pytest.approx(4 * 16 * 2 * 4 * 3 * 1024 / row.median_ms / 1e9)


def test_names_of_backends_are_checked():
    assert parse_backends("auto, triton") == ("sparseflash", "sparseflash:triton")
    assert parse_backends("hopper/any-order") == ("sparseflash:hopper/any-order",)
    assert parse_backends("auto/planned") == ("sparseflash:auto/planned",)
    for name in ("cuda", "auto/any", "cuda/planned"):
        with pytest.raises(typer.BadParameter, match=f"unknown backend .*{name.split('/')[0]}"):
            parse_backends(name)


def test_every_chosen_suite_is_carried_out_with_what_was_asked_for(tmp_path, monkeypatch):
    carried = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(suites, "planned", lambda *chosen: chosen)
    monkeypatch.setattr(
        runner, "carry_out", lambda *call, roofline: carried.append((*call, roofline))
    )
    options = "--backends hopper,auto --baselines flex --passes forward --dtype fp16 --seed 3"
    result = CliRunner().invoke(
        app, ["lra", "sparse", "--output", str(tmp_path), "--resume", *options.split()]
    )
    assert result.exit_code == 0, result.output
    wanted = Method("cuda", "fp16", ("forward",), "graph", "both", 60.0, 3)
    for suite, (plan, method, path, *rest) in zip(("lra", "sparse"), carried, strict=True):
        ours = ("sparseflash:hopper", "sparseflash")
        assert plan(print) == (suite, wanted, ours, ("flex",), print)
        assert method == wanted
        assert path == tmp_path / f"bench-{suite}-a-gpu.json"
        assert rest == [True, True]
    carried.clear()
    extras = ["--dropout", "0.1", "--padding", "0.5"]
    assert CliRunner().invoke(app, ["lra", "--output", str(tmp_path), *extras]).exit_code == 0
    ((_, method, path, *_),) = carried
    assert (method.dropout_p, method.padding) == (0.1, 0.5)
    assert path == tmp_path / "bench-lra-dropout-padding-a-gpu.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dens"], "'dens' is not one of 'speedup', 'dense'"),
        (
            ["sparse", "--quick", "--head-dim", "64"],
            "the suite sparse has no option --quick, --head-dim",
        ),
        (
            ["speedup", "--dropout", "1e-6"],
            "--dropout: dropout_p must be 0 or a number that rounds",
        ),
        (["sparse", "--peers", "fa9"], "unknown baseline 'fa9'; known: none, sdpa"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, message):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_suites_of_a_gpu_are_refused_before_another_suite_runs(monkeypatch):
    carried = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runner, "carry_out", lambda *call, roofline: carried.append(call))
    result = CliRunner().invoke(app, ["speedup", "dense", "--device", "cpu"])
    assert result.exit_code == 2
    assert "the suite dense measures a GPU, got --device cpu" in result.output
    assert carried == []


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
