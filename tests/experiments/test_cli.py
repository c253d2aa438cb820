"""What the command lines share: that runs go on only where nothing has changed, and end as they
should.
"""

from dataclasses import asdict, replace

import pytest
import typer

from experiments import cli
from experiments.check import CheckError
from experiments.measure import Method
from experiments.record import Record
from tests.helpers.records import FULL

METHOD = Method("cpu", "fp32", "auto", ("forward",), "cpu", 1.0, 0)
HERE = {
    "device": "a device",
    "git": {"commit": "a", "dirty": False},
    "versions": {"torch": "2"},
    "date": "2026-01-01",
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(cli, "environment", lambda device: dict(HERE))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"device": "another"}, "device"),
        ({"git": {"commit": "b", "dirty": False}}, "git"),
        ({"git": {"commit": "a", "dirty": True}}, "git"),
    ],
)
def test_a_run_goes_on_with_the_same_device_and_code_only(tmp_path, change, name):
    path, settings = tmp_path / "record.json", asdict(METHOD)
    Record(HERE | {"date": "2025-01-01"}, settings, [FULL]).save(path)
    assert cli.open_record(METHOD, path, resume=True).rows == [FULL]
    assert cli.open_record(METHOD, path, resume=False).rows == []
    with pytest.raises(typer.BadParameter, match=r"is of another run: budget_ms 1\.0, now 2\.0"):
        cli.open_record(replace(METHOD, budget_ms=2.0), path, resume=True)
    Record(HERE | change, settings, [FULL]).save(path)
    with pytest.raises(typer.BadParameter, match=f"is of another run: environment {name} "):
        cli.open_record(METHOD, path, resume=True)


def test_roofs_are_measured_once_for_a_record(tmp_path, monkeypatch, capsys):
    measured, path = [], tmp_path / "record.json"
    monkeypatch.setattr(
        cli, "measure_roofline", lambda dtype: measured.append(dtype) or {"copy": 4.2}
    )
    monkeypatch.setattr(cli, "draw", lambda record, path: [])

    def run(plan, method, record, path, console):
        record.rows = [FULL]
        record.save(path)

    monkeypatch.setattr(cli, "run", run)
    for resume in (False, True):
        cli.carry_out(iter, METHOD, path, resume, roofline=True)
        assert Record.load(path).roofline == {"copy": 4.2}
    assert measured == [cli.DTYPES["fp32"]]
    assert "copy 4.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "kept"), [(KeyboardInterrupt, cli.INTERRUPTED, True), (CheckError, 1, False)]
)
def test_a_run_that_breaks_off_says_so_by_its_exit_code(tmp_path, monkeypatch, error, code, kept):
    def run(plan, method, record, path, console):
        record.rows = [FULL]
        raise error("a wrong result")

    monkeypatch.setattr(cli, "run", run)
    with pytest.raises(typer.Exit) as ended:
        cli.carry_out(iter, METHOD, tmp_path / "record.json", resume=False)
    assert ended.value.exit_code == code
    assert (tmp_path / "record.json").exists() == kept
