import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer import BadParameter

import sparseflash
from experiments.instruments import counters
from experiments.pattern_families import Size
from tests.helpers.instruments import pretend_gpu

PRINTED = """\
==PROF== Connected to process 1
"ID","Kernel Name","Block Size","{names}"
"","","","ns","cycle","%","%","%","%","%","%"
"0","forward_kernel","(384, 1, 1)","1,234,000","2,100,000","70.5","40","30","20","50.25","10"
"1","query_gradient_kernel","(384, 1, 1)","2000000","3300000","75","41","31","21","51","11"
==PROF== Disconnected
"""


def test_rows_are_those_of_the_profiler():
    printed = PRINTED.format(names='","'.join(counters.COUNTERS))
    entries = counters.parse_kernels(printed)
    forward, backward = (counters.row_of("full", "sparseflash:auto", entry) for entry in entries)
    assert (forward.kernel, forward.milliseconds) == ("forward", 1.234)
    assert (forward.implementation, forward.cycles) == ("sparseflash:auto", 2_100_000)
    assert (forward.percent["tensor cores"], forward.percent["L2"]) == (70.5, 50.25)
    assert (backward.kernel, backward.percent["exponentials"]) == ("query_gradient", 41)


def test_what_is_known_is_written_after_every_problem(monkeypatch, tmp_path):
    written = []

    def profiled(problem, implementation):
        if written:
            raise KeyboardInterrupt
        written.append(problem)
        names = '","'.join(counters.COUNTERS)
        entries = counters.parse_kernels(PRINTED.format(names=names))
        return [counters.row_of(problem, implementation, entry) for entry in entries]

    monkeypatch.setattr(counters, "profiled", profiled)
    pretend_gpu(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        counters.main(output=tmp_path)
    found = json.loads((tmp_path / "counters-gpu.json").read_text())
    assert [row["problem"] for row in found["rows"]] == written * 2
    assert not found["complete"]
    written.clear()
    counters.main(only="causal", output=tmp_path)
    assert json.loads((tmp_path / "counters-gpu.json").read_text())["complete"]


@pytest.mark.parametrize(
    ("problem", "names"),
    [
        ("full", ["sparseflash:auto", "cudnn", "flash4"]),
        ("random 1/16", ["sparseflash:auto", "flash4"]),
        ("full, in any order", ["sparseflash:auto/any-order"]),
    ],
)
def test_baselines_are_profiled_on_masks_that_they_know(problem, names):
    found = counters.implementations(counters.PROBLEMS[problem], "auto", ("cudnn", "flash4"))
    assert list(found) == names


@pytest.mark.parametrize(("name", "problem"), counters.PROBLEMS.items())
def test_every_problem_has_a_mask(name, problem):
    size = Size(problem.seq_len, problem.side, torch.device("cpu"))
    found = counters.with_mask(problem, size)
    # At random 1/16 has all blocks of the diagonal, too.
    density = {"full": 1.0, "causal": 0.5, "random": 1 / 16}[problem.pattern]
    assert found.density == pytest.approx(density, rel=0.2)
    assert found.label == ("random 1/16" if problem.pattern == "random" else problem.pattern)


def test_a_baseline_may_fail_and_ours_may_not(monkeypatch, tmp_path, capsys):
    failing = ["flash4"]

    def profiled(problem, implementation):
        if implementation in failing:
            raise RuntimeError(f"{implementation} is missing\nTraceback")
        return []

    monkeypatch.setattr(counters, "profiled", profiled)
    pretend_gpu(monkeypatch)
    counters.main(only="full", baselines=("flash4",), output=tmp_path)
    found = json.loads((tmp_path / "counters-gpu.json").read_text())
    assert found["skipped"] == {"full": {"flash4": "flash4 is missing"}}
    assert "flash4 did not run on full: flash4 is missing" in capsys.readouterr().out
    failing.append("sparseflash:auto")
    with pytest.raises(RuntimeError, match="sparseflash:auto is missing"):
        counters.main(only="full", output=tmp_path)


def test_says_what_it_needs(monkeypatch):
    with pytest.raises(BadParameter, match="random 1/16 in blocks of 64"):
        counters.main(only="nothing")
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BadParameter, match="ncu"):
        counters.main()


def test_says_what_the_profiler_said(monkeypatch, tmp_path):
    failing = tmp_path / "ncu"
    failing.write_text("#!/bin/sh\necho no permission\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(RuntimeError, match="no permission"):
        counters.profiled("full", "sparseflash:auto")
    failing.write_text("#!/bin/sh\necho No kernels were profiled\n")
    with pytest.raises(RuntimeError, match="No kernels"):
        counters.profiled("full", "sparseflash:auto")
    failing.write_text("#!/bin/sh\necho Traceback\necho ValueError: blocks\nexit 1\n")
    with pytest.raises(RuntimeError, match=r"\Ancu counted no kernels: ValueError: blocks\n"):
        counters.profiled("full", "flash4")
    failing.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(RuntimeError, match="printed nothing"):
        counters.profiled("full", "flash4")


def test_the_kernels_of_our_backends_are_profiled():
    files = [*Path(sparseflash.__file__).parent.glob("backends/*/kernels/*.py")]
    named = re.findall(r"^def (\w+_kernel)\(", "".join(file.read_text() for file in files), re.M)
    pattern = re.compile(counters.OUR_KERNELS.removeprefix("regex:"))
    assert len(named) > 10
    assert [name for name in named if not pattern.search(name)] == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ncu") is None, reason="needs ncu")
def test_kernels_are_counted(tmp_path):
    counters.main(only="random 1/16", output=tmp_path)
    (path,) = tmp_path.glob("counters-*.json")
    found = path.read_text()
    assert '"kernel": "forward"' in found
    assert torch.cuda.get_device_name() in found


def test_an_unknown_backend_is_an_error(tmp_path):
    with pytest.raises(BadParameter, match="unknown backend 'hoper'; known: auto, cpu"):
        counters.main(backend="hoper", output=tmp_path)
    assert not list(tmp_path.iterdir())
