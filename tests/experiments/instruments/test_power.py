import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer import BadParameter

from experiments import measure, suites
from experiments.check import SampledRows
from experiments.cli import Baseline
from experiments.instruments import power
from tests.helpers.instruments import pretend_gpu

PRINTED = """\
1980, 120.50, Not Active
1605, 699.00, Active
[N/A], [N/A], Not Active
1590, 701.00, Active
15"""


@pytest.fixture
def on_cpu(monkeypatch):
    """Masks are compiled for a machine that may have no GPU."""

    def size(self, block_size):
        return suites.Size(self.seq_len, block_size, torch.device("cpu"), self.q_len)

    monkeypatch.setattr(suites.Shape, "size", size)


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """A nvidia-smi that prints a given text, and its arguments."""
    script = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(power, "gpu_uuid", lambda: "GPU-1")

    def says(text: str) -> Path:
        script.write_text(
            f"#!/bin/sh\necho $@ > {tmp_path}/asked\nprintf '{text}'\nexec sleep 60\n"
        )
        script.chmod(0o755)
        return tmp_path / "asked"

    return says


def wait_for(path: Path) -> None:
    end = time.perf_counter() + 10
    while not path.exists() and time.perf_counter() < end:
        time.sleep(0.01)
    time.sleep(0.2)  # until it has printed, too


def test_samples_are_whole_lines_of_numbers():
    found = [(1980.0, 120.5, False)]
    lines = PRINTED.splitlines(keepends=True)
    assert list(power.parse_readings(lines[0] + lines[2] + lines[4])) == found
    assert list(power.parse_readings("1605, 699.00, Act")) == []


def test_readings_are_those_of_the_gpu_that_is_used(smi):
    asked = smi("1605, 699.00, Active\\n1590, 701.00, Active\\n")
    with power.readings() as read:
        wait_for(asked)
    assert read == [(1605.0, 699.0, True), (1590.0, 701.0, True)]
    assert "--id=GPU-1" in asked.read_text()


def test_says_what_nvidia_smi_said(smi):
    asked = smi("no permission\\n")
    with pytest.raises(OSError, match="no permission"), power.readings():
        wait_for(asked)


@pytest.mark.usefixtures("on_cpu")
def test_a_row_leaves_out_the_first_samples(monkeypatch):
    case = next(power.problems((power.IMPLEMENTATION,)))
    samples = [(1980.0, 100.0, False)] * 3 + [(1600.0, 700.0, True)] * 4 + [(1500.0, 690.0, False)]

    class Reading:
        def __enter__(self):
            return samples

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(power, "readings", Reading)
    monkeypatch.setattr(power, "rested", lambda sample: 2.0)
    monkeypatch.setattr(power, "sustained", lambda sample, seconds: 4.0)
    row = power.row_of(case, power.IMPLEMENTATION, "forward", lambda runs: [1.0] * runs, 1.0)
    assert (row.clock, row.power) == (1600, 700)
    assert row.capped == pytest.approx(4 / 6)  # two of eight are not counted
    assert row.rested_tflops == pytest.approx(4 * 8192**2 * 128 * 64 / 2e9)
    assert row.sustained_tflops == row.rested_tflops / 2


@pytest.mark.usefixtures("on_cpu")
def test_implementations_are_checked_before_they_are_timed(monkeypatch):
    case = next(power.problems((power.IMPLEMENTATION, Baseline.CUDNN)))
    checked = mock.create_autospec(measure.checked, side_effect=RuntimeError("no such kernel"))
    monkeypatch.setattr(measure, "checked", checked)
    monkeypatch.setattr(measure, "random_problem", lambda *_: ([], None))
    monkeypatch.setattr(SampledRows, "of", lambda mask, device: None)
    with pytest.raises(RuntimeError, match="no such kernel"):
        power.measure(case, 1.0)
    dense = replace(case, implementations=(Baseline.CUDNN,))
    assert power.measure(dense, 1.0) == ([], {Baseline.CUDNN: "no such kernel"})
    assert [call.args[0] for call in checked.call_args_list] == [
        power.IMPLEMENTATION,
        Baseline.CUDNN,
    ]


@pytest.mark.usefixtures("on_cpu")
def test_dense_baselines_take_part_in_the_full_mask_alone():
    full, *sparse = power.problems((power.IMPLEMENTATION, Baseline.CUDNN, Baseline.FLASH4))
    assert full.implementations == (power.IMPLEMENTATION, Baseline.CUDNN, Baseline.FLASH4)
    assert {case.implementations for case in sparse} == {(power.IMPLEMENTATION, Baseline.FLASH4)}
    assert [round(1 / case.problem.density) for case in sparse] == [14, 15, 4]


@pytest.mark.usefixtures("on_cpu")
def test_what_is_known_is_written_after_every_problem(monkeypatch, tmp_path):
    measured = []

    def measure(case, seconds):
        if measured:
            raise KeyboardInterrupt
        measured.append(case)
        figures = dict.fromkeys(power.Row.__dataclass_fields__, 1.0)
        figures |= {"problem": "full", "direction": "forward", "implementation": "ours"}
        return [power.Row(**figures)], {"flash4": "is not installed"}

    monkeypatch.setattr(power, "measure", measure)
    monkeypatch.setattr(power, "limit_watts", lambda: 700.0)
    pretend_gpu(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        power.main(output=tmp_path)
    found = json.loads((tmp_path / "power-gpu.json").read_text())
    assert [row["problem"] for row in found["rows"]] == ["full"]
    assert found["skipped"] == {"full at N = 8192": {"flash4": "is not installed"}}
    assert not found["complete"]


def test_says_what_it_needs(monkeypatch):
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BadParameter, match="nvidia-smi"):
        power.main()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi")
def test_a_gpu_is_read(tmp_path):
    power.main(baselines=(), seconds=0.5, output=tmp_path)
    (path,) = tmp_path.glob("power-*.json")
    found = json.loads(path.read_text())
    assert found["complete"]
    assert all(row["power"] > 0 and row["clock"] > 0 for row in found["rows"])
