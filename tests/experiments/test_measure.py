"""That what is timed was checked before, and what a run keeps of it."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import masks
from experiments import measure as measurement
from experiments.baselines import attend_sparseflash
from experiments.check import CheckError
from experiments.measure import Case, Method, make_attend, measure, random_problem, run
from experiments.pattern_families import Problem
from experiments.record import Measurement, Record
from experiments.timing import Timing

METHOD = Method("cpu", "fp32", "auto", ("forward", "backward"), "cpu", 1.0, 0)
LOCAL = Problem("local(20)", masks.local(20)(100, 16))
CASE = Case("density", "local", LOCAL, 1, 2, 100, 8, 16, ("sparseflash",))
HALF = Problem("half", masks.random(1 / 2)((3, 96), 16))
DECODED = replace(CASE, problem=HALF, seq_len=96, q_len=3, kv_heads=1)


@pytest.fixture
def instant(monkeypatch):
    """Checks and clocks that only say when they were asked, and of what."""
    asked = []

    def check(attend, inputs, mask, what, backward):
        asked.append(("check", what, backward))

    @contextmanager
    def prepared(prepare, clock):
        asked.append(("prepare", prepare, clock))
        yield prepare

    def time_interleaved(samples, budget_ms):
        asked.append(("time", len(samples)))
        return [Timing(2.0 + i, 1.0, 3.0, 5) for i in range(len(samples))]

    monkeypatch.setattr(measurement, "check", check)
    monkeypatch.setattr(measurement, "prepared", prepared)
    monkeypatch.setattr(measurement, "time_interleaved", time_interleaved)
    monkeypatch.setattr(measurement.memory, "peak_bytes", lambda run, device: 7)
    return asked


def test_a_row_holds_the_facts_of_its_case_and_nothing_is_timed_before_it_is_checked(instant):
    (forward, backward), reasons = measure(CASE, ["sparseflash"], METHOD)
    assert not reasons
    assert [event[0] for event in instant] == ["check", *["prepare", "time"] * 2]
    assert instant[0][1:] == ("sparseflash on local(20) at N = 100", True)
    out, gradients = (event[1]()() for event in instant if event[0] == "prepare")
    assert out.shape == (1, 2, 100, 8)
    assert [gradient.shape for gradient in gradients] == [out.shape] * 3
    density = LOCAL.density
    assert density < 1
    expected = Measurement(
        *("density", "sparseflash", "local", "local(20)", 1, 2, 100, 8, 16, density, 7 * density),
        *("forward", 2.0, 1.0, 3.0, 5, 7),
    )
    assert (forward, backward) == (expected, replace(expected, direction="backward"))


def test_implementations_are_all_checked_and_then_timed_interleaved_pass_by_pass(instant):
    said = []
    implementations = ["sparseflash", "sparseflash:cpu"]
    rows, _ = measure(CASE, implementations, METHOD, said.append)
    together = ["prepare", "prepare", "time"]
    assert [event[0] for event in instant] == ["check", "check", *together, *together]
    assert [(row.implementation, row.direction, row.median_ms) for row in rows] == [
        ("sparseflash", "forward", 2.0),
        ("sparseflash", "backward", 2.0),
        ("sparseflash:cpu", "forward", 3.0),
        ("sparseflash:cpu", "backward", 3.0),
    ]
    assert said[0] == "checking sparseflash on local(20) at N = 100"
    assert said[-1] == "timing local(20) at N = 100, backward"


def fails_to(stage, implementation):
    """What `make_attend` gives, but this one cannot run its pass, in words of two lines."""

    def made(name, problem, backend):
        if name == implementation and stage == "begin":
            raise RuntimeError("no kernel\nat all")
        right = attend_sparseflash(problem)
        if name != implementation:
            return right
        return lambda query, key, value: (
            right(query, Refused.apply(key), value) if stage == "backward" else refuse()
        )

    return made


def refuse(*_):
    raise RuntimeError("no kernel\nat all")


class Refused(torch.autograd.Function):
    """x, which has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        refuse()


@pytest.mark.parametrize("stage", ["begin", "forward", "backward"])
def test_a_peer_that_cannot_run_is_left_out_with_its_reason(instant, monkeypatch, stage):
    monkeypatch.setattr(measurement, "make_attend", fails_to(stage, "sdpa"))
    monkeypatch.setattr(measurement, "prepared", running)
    rows, reasons = measure(CASE, ["sparseflash", "sdpa"], METHOD)
    assert {row.implementation for row in rows} == {"sparseflash"}
    assert len(rows) == 2
    assert reasons == {"sdpa": "no kernel"}


@contextmanager
def running(prepare, clock):
    prepare()()
    yield prepare


def test_our_own_kernels_have_to_run(instant, monkeypatch):
    monkeypatch.setattr(measurement, "make_attend", fails_to("begin", "sparseflash:triton"))
    with pytest.raises(RuntimeError, match="no kernel"):
        measure(CASE, ["sparseflash", "sparseflash:triton"], METHOD)


def test_a_step_of_decoding_has_no_backward_pass(instant):
    (row,), _ = measure(DECODED, ["sparseflash"], METHOD)
    assert instant[0][2] is False
    assert (row.direction, row.q_len, row.kv_heads) == ("forward", 3, 1)
    assert row.key_value_bytes == row.density * 2 * 96 * 8 * 4 == 96 * 8 * 4


def test_a_backward_pass_is_timed_without_its_forward_pass_and_may_run_again():
    inputs, grad_out = random_problem(CASE, torch.float32, torch.device("cpu"), 0)
    attended = []

    def attend(query, key, value):
        attended.append(1)
        return query * key * value

    backward = measurement.backward_pass(attend, inputs, grad_out)()
    assert attended == [1]
    for _ in range(2):
        torch.testing.assert_close(backward()[0], (grad_out * inputs[1] * inputs[2]).detach())
    assert attended == [1]
    measurement.forward_pass(attend, inputs)()()
    assert attended == [1, 1]


def test_no_time_is_taken_of_a_wrong_gradient(monkeypatch):
    def wrong(implementation, problem, backend):
        right = make_attend(implementation, problem, backend)
        return lambda query, key, value: right(query, Doubled.apply(key), value)

    monkeypatch.setattr(measurement, "make_attend", wrong)
    monkeypatch.setattr(measurement, "time_interleaved", lambda *call: pytest.fail("timed"))
    with pytest.raises(CheckError, match=r"sparseflash on local\(20\) at N = 100, dk: error"):
        measure(CASE, ["sparseflash"], METHOD)


class Doubled(torch.autograd.Function):
    """x, with twice its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_an_implementation_names_its_backend(monkeypatch):
    monkeypatch.setattr(measurement, "attend_sparseflash", lambda problem, named: named)
    monkeypatch.setattr(measurement, "attend_baseline", lambda baseline, problem: baseline)
    implementations = ("sparseflash", "sparseflash:hopper/any-order", "sdpa")
    found = [make_attend(implementation, LOCAL, "cpu") for implementation in implementations]
    assert found == ["cpu", "hopper/any-order", "sdpa"]


def test_inputs_are_random_numbers_of_the_seed():
    (query, key, value), grad_out = random_problem(DECODED, torch.float32, torch.device("cpu"), 3)
    assert query.shape == grad_out.shape == (1, 2, 3, 8)
    assert key.shape == value.shape == (1, 1, 96, 8)
    for x in (query, key, value):
        assert x.requires_grad
        assert 0.5 < float(x.detach().std()) < 1.5
    (again, *_), _ = random_problem(DECODED, torch.float32, torch.device("cpu"), 3)
    (other, *_), _ = random_problem(DECODED, torch.float32, torch.device("cpu"), 4)
    assert torch.equal(query, again)
    assert not torch.equal(query, other)


class Runs:
    """Runs of cases whose times are written down in advance; backward passes take 4 ms."""

    def __init__(self, path, times):
        self.path, self.times, self.asked = path, iter(times), []

    def measure(self, case, implementations, method, say=None):
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

    def go(cases, times, record=None):
        runs = Runs(tmp_path / "record.json", times)
        monkeypatch.setattr(measurement, "measure", runs.measure)
        record = record or Record({}, {})
        run(lambda say: iter(cases), METHOD, record, runs.path, Console(quiet=True))
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
    kept = Record.load(tmp_path / "record.json")
    assert kept.complete
    assert (kept.drift, kept.rows) == (drift, record.rows)


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
