import json
import re
from dataclasses import replace

import pytest
import torch
from typer import BadParameter

from experiments import io_complexity, io_plots
from experiments.instruments import counters
from sparseflash.io_model import DEVICES
from tests.helpers.instruments import pretend_gpu
from tests.helpers.records import ENVIRONMENT, FULL


def test_model_and_pictures_stand_alone_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(io_complexity, "LENGTHS", (16_384, 32_768))
    io_complexity.main(output=tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    pictures = {
        f"io-complexity-cpu-{name}.{end}"
        for name in ("figure-2", "scaling")
        for end in ("png", "svg")
    }
    assert names == pictures | {"io-complexity-cpu.json"}
    found = json.loads((tmp_path / "io-complexity-cpu.json").read_text())
    assert found["model"]["name"] == "H200"
    assert {row["panel"] for row in found["rows"]} == set(io_complexity.Panel)
    assert all(row["measured_ms"] is None for row in found["rows"])
    assert "predicted for H200" in capsys.readouterr().out


def test_every_panel_says_what_is_predicted_and_what_is_measured(tmp_path):
    measured = [
        replace(row, measured_ms=row.predicted_ms, measured_gb=row.memory_gb)
        for only in ("left", "middle", "right")
        for row in rows(only)
    ]
    _, vector = io_plots.draw(measured, ENVIRONMENT, "H200", tmp_path / "x.json")
    texts = re.findall(r"<!-- (.*) -->", vector.read_text())
    # Two of bars and two of block sizes; that of densities is in the panel of their bytes.
    assert texts.count("predicted") == texts.count("measured") == 5


def rows(only):
    device = DEVICES["H200"]
    return [
        io_complexity.predict(case, direction, device)
        for case in io_complexity.chosen_cases(only)
        for direction in io_complexity.DIRECTIONS
    ]


def test_flash_computes_more_and_reads_less():
    standard, flash = (
        [r for r in rows("left") if r.implementation == name]
        for name in ("standard", "sparseflash")
    )
    assert sum(r.gflop for r in flash) > sum(r.gflop for r in standard)
    assert sum(r.memory_gb for r in flash) < sum(r.memory_gb for r in standard) / 8
    assert sum(r.predicted_ms for r in flash) < sum(r.predicted_ms for r in standard)


def test_blocks_of_every_size_have_the_same_density():
    found = rows("middle")
    assert [r.block_size for r in found[::2]] == [64, 128, 256, 512]
    assert {round(r.density, 2) for r in found} == {0.12} or all(
        r.density == pytest.approx(1 / 8, rel=0.05) for r in found
    )
    assert found[0].l2_gb > 1.8 * found[2].l2_gb
    mask = io_complexity.random_blocks(8, 4096, 512)(4096, block_size=256)
    blocks = mask.to_blocks()
    assert torch.equal(blocks[::2, ::2].repeat_interleave(2, 0).repeat_interleave(2, 1), blocks)


def test_exponents_are_those_of_theory():
    found = {(fit.name, fit.figure): fit for fit in io_complexity.fits(rows("scaling"))}
    assert set(found) == {
        (n, f) for n in ("strided", "butterfly") for f in ("l2_gb", "predicted_ms")
    }
    for fit in found.values():
        assert fit.exponent == pytest.approx(fit.theory, abs=0.06)
    assert io_complexity.exponent([(1, 3), (2, 12), (4, 48)]) == pytest.approx(2)


def test_measured_figures_join_their_predictions(monkeypatch):
    predicted = rows("left")
    names = ["spin", "gemm", "softmax", "spin", "gemm", "spin", "forward", "spin", "dq", "dkdv"]
    entries = [
        {
            "Kernel Name": f"{name}_kernel(long)",
            "dram__bytes_read.sum": "1,000,000,000",
            "dram__bytes_write.sum": "500000000",
        }
        for name in names
    ]
    monkeypatch.setattr(counters, "count", lambda *call: entries)
    monkeypatch.setattr(io_complexity.shutil, "which", lambda name: name)
    found, skipped = io_complexity.with_bytes(predicted, "left")
    assert [row.measured_gb for row in found] == [3.0, 1.5, 1.5, 3.0]
    assert not skipped
    assert found[0].bytes_deviation == pytest.approx(3 / predicted[0].memory_gb - 1)
    timed = replace(found[0], measured_ms=2 * found[0].predicted_ms)
    assert timed.time_deviation == pytest.approx(1)
    assert predicted[0].bytes_deviation is predicted[0].time_deviation is None


def test_says_why_bytes_are_left_out(monkeypatch):
    predicted = rows("left")
    monkeypatch.setattr(io_complexity.shutil, "which", lambda name: None)
    found, skipped = io_complexity.with_bytes(predicted, "left")
    assert (found, skipped) == (
        predicted,
        {"bytes": "there is no ncu (Nsight Compute) on the PATH"},
    )

    def refuse(*call):
        raise RuntimeError("ncu counted no kernels: no permission\nmore")

    monkeypatch.setattr(io_complexity.shutil, "which", lambda name: name)
    monkeypatch.setattr(counters, "count", refuse)
    assert "no permission" in io_complexity.with_bytes(predicted, "left")[1]["bytes"]
    monkeypatch.setattr(counters, "count", lambda *call: [])
    assert "0 passes of 4" in io_complexity.with_bytes(predicted, "left")[1]["bytes"]


def test_unknown_device_lists_the_known_ones():
    with pytest.raises(BadParameter, match="A100, H100, H200, got 'V100'"):
        io_complexity.model_device("V100", "cpu")


def test_a_case_that_does_not_fit_has_no_times_and_the_others_have_their_own(monkeypatch):
    monkeypatch.setattr("experiments.measure.measure", measured)
    monkeypatch.setattr(io_complexity, "measured_case", lambda case: case)
    cases = list(io_complexity.chosen_cases("left"))
    found = list(io_complexity.with_times(cases, rows("left")))
    assert [(row.implementation, row.direction, row.measured_ms) for row in found] == [
        *(("standard", direction, None) for direction in io_complexity.DIRECTIONS),
        *(("sparseflash", "forward", 7.0), ("sparseflash", "backward", 8.0)),
    ]


def measured(case, implementations, method):
    """As measure: what does not fit in memory is left out, with the reason."""
    if case.implementation == "standard":
        return [], {"standard": "out of memory"}
    times = zip(("backward", "forward"), (8.0, 7.0), strict=True)
    return [replace(FULL, direction=direction, median_ms=ms) for direction, ms in times], {}


def test_what_was_measured_is_kept_when_a_run_breaks_off(tmp_path, monkeypatch):
    def with_times(cases, predicted):
        yield replace(predicted[0], measured_ms=1.5)
        raise KeyboardInterrupt

    pretend_gpu(monkeypatch)
    monkeypatch.setattr(io_complexity, "model_device", lambda *names: DEVICES["H200"])
    monkeypatch.setattr(io_complexity, "with_times", with_times)
    with pytest.raises(KeyboardInterrupt):
        io_complexity.main(only=io_complexity.Panel.LEFT, output=tmp_path)
    found = json.loads((tmp_path / "io-complexity-gpu.json").read_text())
    assert [row["measured_ms"] for row in found["rows"]] == [1.5, None, None, None]
    assert not found["complete"]


@pytest.mark.gpu
@pytest.mark.slow
def test_measures(tmp_path):
    io_complexity.main(only=io_complexity.Panel.LEFT, output=tmp_path)
    (path,) = tmp_path.glob("io-complexity-*.json")
    found = json.loads(path.read_text())
    assert all(row["measured_ms"] > 0 for row in found["rows"])
