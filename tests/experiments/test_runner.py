"""Runs of cases: how they go on, how they end, and what the record of them holds."""

import gc
import json
from dataclasses import asdict, replace
from itertools import chain

import pytest
import typer
from rich.console import Console

import masks
from experiments import runner
from experiments.check import CheckError
from experiments.cli import INTERRUPTED
from experiments.measure import DTYPES, Case
from experiments.pattern_families import Problem
from experiments.record import Measurement, Record
from experiments.report import show, wide_console
from experiments.settings import Method
from sparseflash.gap import CHANGES
from tests.helpers.records import FULL

METHOD = Method("cpu", "fp32", ("forward", "backward"), "cpu", "rested", 1.0, 0)
LOCAL = Problem("local(20)", masks.local(20)(100, 16))
CASE = Case("density", "local", LOCAL, 1, 2, 100, 8, 16, ("sparseflash",))
HERE = {
    "device": "a device",
    "git": {"commit": "a", "dirty": False},
    "versions": {"torch": "2"},
    "date": "2026-01-01",
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(runner, "environment", lambda device: dict(HERE))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"device": "another"}, "device"),
        ({"git": {"commit": "b", "dirty": False}}, "git"),
        ({"git": {"commit": "a", "dirty": True}}, "git"),
        ({"versions": {"torch": "3"}}, "versions"),
    ],
)
def test_a_run_goes_on_with_the_same_device_code_and_libraries_only(tmp_path, change, name):
    path, settings = tmp_path / "record.json", asdict(METHOD)
    Record(HERE | {"date": "2025-01-01"}, settings, [FULL]).save(path)
    assert runner.open_record(METHOD, path, resume=True).rows == [FULL]
    assert runner.open_record(METHOD, path, resume=False).rows == []
    with pytest.raises(
        typer.BadParameter, match=r"needs the settings, .*: budget_ms 1\.0, now 2\.0"
    ):
        runner.open_record(replace(METHOD, budget_ms=2.0), path, resume=True)
    Record(HERE | change, settings, [FULL]).save(path)
    with pytest.raises(
        typer.BadParameter, match=f"device, commit and versions of .*: environment {name} "
    ):
        runner.open_record(METHOD, path, resume=True)


def test_limits_are_measured_once_for_a_record(tmp_path, monkeypatch, capsys):
    measured, path = [], tmp_path / "record.json"
    monkeypatch.setattr(
        runner, "measure_roofline", lambda dtype: measured.append(dtype) or {"copy": 4.2}
    )
    monkeypatch.setattr(runner, "draw", lambda record, path: [])

    def run(plan, method, record, path, console):
        record.rows = [FULL]
        record.save(path)

    monkeypatch.setattr(runner, "run", run)
    for resume in (False, True):
        runner.carry_out(iter, METHOD, path, resume, roofline=True)
        assert Record.load(path).roofline == {"copy": 4.2}
    assert measured == [DTYPES["fp32"]]
    assert "copy 4.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "saved"),
    [(KeyboardInterrupt, INTERRUPTED, True), (CheckError, 1, False), (OSError, 1, False)],
)
def test_a_run_that_breaks_off_says_so_by_its_exit_code(tmp_path, monkeypatch, error, code, saved):
    def run(plan, method, record, path, console):
        record.rows = [FULL]
        raise error("a wrong result")

    monkeypatch.setattr(runner, "run", run)
    with pytest.raises(typer.Exit) as ended:
        runner.carry_out(iter, METHOD, tmp_path / "record.json", resume=False, roofline=False)
    assert ended.value.exit_code == code
    assert (tmp_path / "record.json").exists() == saved


class Runs:
    """Runs of cases whose times are written down in advance; backward passes take 4 ms."""

    def __init__(self, path, times):
        self.path, self.times, self.asked = path, iter(times), []

    def measure(self, case, implementations, method, log=None):
        saved = json.loads(self.path.read_text())["rows"] if self.path.exists() else []
        rows, reasons = [], {}
        for implementation in implementations:
            self.asked.append((implementation, case.seq_len, len(saved)))
            time = next(self.times)
            if isinstance(time, str):
                reasons[implementation] = time
                continue
            for direction in method.directions:
                ms = time if direction == "forward" else 4.0
                row = Measurement(
                    *(
                        case.suite,
                        implementation,
                        case.family,
                        case.problem.label,
                        1,
                        2,
                        case.seq_len,
                    ),
                    *(8, 16, 1.0, 1.0, direction, ms, ms, ms, 5, 7),
                )
                rows.append(row)
        return rows, reasons


@pytest.fixture
def go(monkeypatch, tmp_path):
    """Runs cases with the given times; what was asked for, and the record that came of it."""

    def go(cases, times, record=None, method=METHOD):
        runs = Runs(tmp_path / "record.json", times)
        monkeypatch.setattr(runner, "measure", runs.measure)
        record = record or Record({}, {})
        runner.run(lambda log: iter(cases), method, record, runs.path, Console(quiet=True))
        return runs.asked, record

    return go


@pytest.mark.parametrize(("again", "drift"), [(3.0, 1.5), (1.0, 2.0), (2.0, 1.0)])
def test_the_first_case_warms_up_and_is_measured_again_at_the_end(go, tmp_path, again, drift):
    longer = replace(CASE, seq_len=200)
    asked, record = go([CASE, longer], [9.0, 2.0, 5.0, again])
    # Each with the rows that the file holds by then.
    assert [ask[1:] for ask in asked] == [(100, 0), (100, 0), (200, 2), (100, 4)]
    assert [row.median_ms for row in record.rows] == [2.0, 4.0, 5.0, 4.0]
    assert record.drift == drift
    saved = Record.load(tmp_path / "record.json")
    assert saved.complete
    assert (saved.drift, saved.rows) == (drift, record.rows)


def test_no_object_is_frozen_after_a_run(go):
    """Triton would report its objects as leaked when the process ends."""
    go([CASE], [2.0, 2.0, 2.0])
    assert gc.get_freeze_count() == 0


def test_a_run_that_goes_on_measures_what_it_lacks_and_adds_its_seconds(go):
    longer = replace(CASE, seq_len=200, implementations=("sparseflash", "sdpa"))
    _, record = go([CASE], [9.0, 2.0, 2.0])
    record.seconds, record.skipped = 1000.0, [["sdpa", "a case", "a reason"]]
    asked, record = go([CASE, longer], [9.0, 4.0, "no kernel", 2.0], record)
    assert [ask[:2] for ask in asked] == [
        ("sparseflash", 100),
        ("sparseflash", 200),
        ("sdpa", 200),
        ("sparseflash", 100),
    ]
    assert [row.seq_len for row in record.rows] == [100, 100, 200, 200]
    assert record.skipped == [["sdpa", "local(20) at N = 200", "no kernel"]]
    assert record.seconds >= 1000


def test_gaps_are_saved_one_mask_at_a_time(go, tmp_path, monkeypatch):
    saved = []

    def measure_gaps(cases, method, known, log):
        for pattern in ("a", "b"):
            yield [{"pattern": pattern}]
            saved.append([gap["pattern"] for gap in Record.load(tmp_path / "record.json").gaps])

    monkeypatch.setattr(runner, "measure_gaps", measure_gaps)
    go([CASE], [9.0, 2.0, 2.0], method=replace(METHOD, device="cuda"))
    assert saved == [["a"], ["a", "b"]]


def test_gaps_are_those_of_masks_near_a_sixteenth_at_the_longest_sequences(capsys, monkeypatch):
    monkeypatch.setattr("sparseflash._explain.SECONDS", 0.0)

    def case(family, seq_len, tokens):
        problem = Problem(f"{family}({tokens})", masks.local(tokens)(seq_len, 16))
        return replace(CASE, family=family, problem=problem, seq_len=seq_len)

    cases = [
        *(case("local", 256, 1), case("local", 256, 60), case("local", 128, 4)),
        *(case("other", 128, 4), case("full", 256, 256)),
        replace(case("growing", 256, 4), suite="length"),
    ]
    found = list(chain(*runner.measure_gaps(cases, METHOD, [], lambda text: None)))
    assert [(gap["pattern"], gap["seq_len"], gap["direction"]) for gap in found] == [
        (pattern, seq_len, direction)
        for pattern, seq_len in (("local(1)", 256), ("other(4)", 128))
        for direction in ("forward", "backward")
    ]
    for gap in found:
        assert gap["change"] == CHANGES.get(gap["largest"])
    rest = list(runner.measure_gaps(cases, METHOD, found[:2], lambda text: None))
    assert [[gap["pattern"] for gap in gaps] for gaps in rest] == [["other(4)"] * 2]
    record = Record(dict(HERE), asdict(METHOD), [FULL], gaps=json.loads(json.dumps(found)))
    show(record, wide_console())
    printed = capsys.readouterr().out
    assert "local(1) at N = 256, forward:" in printed
    assert "load imbalance" in printed
