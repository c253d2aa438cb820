import json
import os
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from experiments import measure as measurement
from experiments import runner, settings
from experiments.bench import app as bench
from experiments.check import CheckError
from experiments.cli import INTERRUPTED, ROOT
from experiments.record import read_rows

TINY = shlex.split(
    "--device cpu --lengths 256 --growth 256 --heads 2 --head-dim 16 --block-size 32"
    " --densities 1/2 --patterns 'causal,random,local(40)&causal()'"
)

RUN = {"capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": str(ROOT)}}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setitem(settings.METHOD_DEFAULTS["cpu"], "budget_ms", 1.0)


def invoke(*arguments):
    return CliRunner().invoke(bench, ["speedup", *(str(argument) for argument in arguments)])


def measure(output, *arguments):
    result = invoke(*TINY, "--output", output, *arguments)
    record = json.loads((output / "speedup-cpu.json").read_text())
    return result, record | {"rows": read_rows(record)}


def test_a_run_writes_every_row_and_the_pictures(tmp_path):
    result, record = measure(tmp_path, "--growth", "256,512", "--densities", "1/2,1/8")
    assert result.exit_code == 0, result.output
    assert record["complete"]
    assert record["environment"]["command"]
    density = [r for r in record["rows"] if r["suite"] == "density"]
    patterns = ["full", "causal", "random(0.5)", "random(0.125)", "local(40)&causal()"]
    assert list(dict.fromkeys(r["pattern"] for r in density)) == patterns
    assert {r["direction"] for r in density} == {"forward", "backward"}
    assert {r["implementation"] for r in density if r["pattern"] == "causal"} == {
        "sparseflash",
        "sdpa",
    }
    length = [r for r in record["rows"] if r["suite"] == "length"]
    assert {r["seq_len"] for r in length} == {256, 512}
    assert {r["pattern"] for r in length} == {"full", "local(40)&causal()"}
    assert all(r["speedup"] > 0 and r["peak_bytes"] > 0 for r in record["rows"])
    assert len(list(tmp_path.glob("*.png"))) == 3
    assert "Sparse is faster than dense up to density" in result.output


def test_the_command_of_the_readme_is_the_suite_speedup(tmp_path):
    command = [sys.executable, "-m", "experiments.speedup", *TINY, "--passes", "forward"]
    done = subprocess.run(
        [*command, "--patterns", "local(40)", "--budget-ms", "1"], cwd=tmp_path, **RUN
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results/speedup-cpu.json").exists()


def test_an_interrupted_run_keeps_what_it_has_and_goes_on(tmp_path, monkeypatch):
    right = measurement.measure
    measured = []

    def interrupted(case, *rest):
        if len(measured) == 3:  # the first was the warm-up
            raise KeyboardInterrupt
        measured.append(str(case))
        return right(case, *rest)

    monkeypatch.setattr(runner, "measure", interrupted)
    result, record = measure(tmp_path)
    assert result.exit_code == INTERRUPTED
    assert "Interrupted" in result.output
    assert not record["complete"]
    assert len(record["rows"]) == 8

    monkeypatch.setattr(runner, "measure", right)
    result, resumed = measure(tmp_path, "--resume")
    assert result.exit_code == 0, result.output
    assert resumed["complete"]
    assert [r["median_ms"] for r in resumed["rows"][:8]] == [
        r["median_ms"] for r in record["rows"]
    ]
    names = ("suite", "implementation", "pattern", "seq_len", "direction")
    keys = [tuple(row[name] for name in names) for row in resumed["rows"]]
    assert len(set(keys)) == len(keys) > 8


def test_a_run_of_other_settings_is_not_resumed(tmp_path):
    measure(tmp_path)
    result, _ = measure(tmp_path, "--resume", "--seed", 1)
    assert result.exit_code != 0
    assert "settings" in result.output


def test_nothing_to_resume(tmp_path):
    result = invoke(*TINY, "--output", tmp_path, "--resume")
    assert result.exit_code != 0
    assert "which does not exist" in " ".join(result.output.replace("│", " ").split())


def test_a_wrong_result_ends_the_run_and_is_named(tmp_path, monkeypatch):
    def wrong(attend, inputs, mask, what, **options):
        if what.startswith("sparseflash on random"):
            raise CheckError(f"{what}, out: error 1")

    monkeypatch.setattr(measurement, "check", wrong)
    result, record = measure(tmp_path)
    assert result.exit_code == 1
    assert "sparseflash on random(0.5) at N = 256" in result.output
    assert all(r["family"] in ("full", "causal") for r in record["rows"])


def test_a_baseline_that_cannot_run_is_reported(tmp_path, monkeypatch):
    def refused(baseline, problem, extras):
        raise RuntimeError("no such kernel\nat all")

    monkeypatch.setattr(measurement, "attend_baseline", refused)
    result, record = measure(tmp_path)
    assert result.exit_code == 0, result.output
    assert ["sdpa", "full at N = 256", "no such kernel"] in record["skipped"]
    assert "no such kernel" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "fp8"], "'fp16', 'bf16', 'fp32'"),
        (["--block-size", "48"], "'64'"),
        (["--lengths", "many"], "must be whole numbers such as"),
        (["--lengths", "0"], "at least 1 token"),
        (["--densities", "1/0"], "must be densities such as"),
        (["--densities", "2"], "above 0 and at most 1"),
        (["--patterns", "nonsense"], "butterfly"),
        (["--baselines", "fa9"], "unknown baseline"),
        (["--baselines", "cudnn"], "runs on cuda only"),
        (["--clock", "graph"], "does not measure a cpu"),
        (["--backend", "cuda"], "known: auto, cpu, hopper, triton"),
        (["--heads", "0"], "--heads"),
        (["--passes", "sideways"], "'both'"),
        (["--backend", "hopper"], "hopper: device is cpu, needs cuda"),
        (["--output", "/dev/null/x"], "--output"),
    ],
)
def test_bad_options_are_refused_with_the_allowed_ones(tmp_path, arguments, message):
    result = invoke("--device", "cpu", "--output", tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.gpu
@pytest.mark.parametrize("clock", ["graph", "events"])
def test_a_small_run_on_a_gpu(tmp_path, clock):
    result = invoke(
        *shlex.split("--device cuda --lengths 1024 --growth 1024 --heads 2 --densities 1/4"),
        *("--clock", clock, "--output", tmp_path),
    )
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["skipped"] == []
