"""That what is timed was checked before, and what a record keeps of it."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

import masks
from experiments import measure as measurement
from experiments.baselines import attend_sparseflash
from experiments.check import CheckError, Extras
from experiments.cli import Clock
from experiments.measure import Case, make_attend, measure, random_problem
from experiments.memory import peak_bytes
from experiments.pattern_families import Problem
from experiments.settings import Method
from experiments.timing import Timing, WaitsForDevice

METHOD = Method("cpu", "fp32", ("forward", "backward"), "cpu", "rested", 1.0, 0)
LOCAL = Problem("local(20)", masks.local(20)(100, 16))
CASE = Case("density", "local", LOCAL, 1, 2, 100, 8, 16, ("sparseflash",))
HALF = Problem("half", masks.random(1 / 2)((3, 96), 16))
DECODED = replace(CASE, problem=HALF, seq_len=96, q_len=3, kv_heads=1)


@pytest.mark.parametrize("timing", ["rested", "sustained", "both"])
def test_a_measurement_holds_the_facts_of_its_case(timing, monkeypatch):
    monkeypatch.setattr("experiments.timing.ROUNDS", 1)
    monkeypatch.setattr("experiments.timing.SUSTAINED_MS", 2.0)
    logged = []
    names = ["sparseflash", "sparseflash:cpu"]
    rows, reasons = measure(CASE, names, replace(METHOD, timing=timing), logged.append)
    assert not reasons
    assert [(row.implementation, row.direction) for row in rows] == [
        (name, direction) for name in names for direction in METHOD.directions
    ]
    assert logged[0] == "checking sparseflash on local(20) at N = 100"
    assert logged[-1] == "timing local(20) at N = 100, backward"
    for row in rows:
        assert (row.suite, row.family, row.pattern) == ("density", "local", "local(20)")
        assert (row.batch, row.heads, row.seq_len, row.head_dim, row.block_size) == (
            *(1, 2, 100, 8, 16),
        )
        assert row.density == LOCAL.density < 1
        assert row.blocks_per_row == 7 * LOCAL.density
        assert 0 < row.low_ms <= row.median_ms <= row.high_ms
        assert row.peak_bytes > 0
        assert (row.sustained_ms is None) == (timing == "rested")
        if timing == "sustained":
            assert row.median_ms == row.sustained_ms


def fails_to(stage, implementation):
    """What `make_attend` gives, but this one cannot run its pass, in words of two lines."""

    def attend_of(name, problem, extras=None):
        if name == implementation and stage == "begin":
            raise RuntimeError("no kernel\nat all")
        right = attend_sparseflash(problem)
        if name != implementation:
            return right
        return lambda query, key, value: (
            right(query, Refused.apply(key), value) if stage == "backward" else refuse()
        )

    return attend_of


def test_a_baseline_without_this_backward_pass_is_measured_forward(monkeypatch):
    def without_backward(*_):
        raise NotImplementedError("needs head_dim 128\nor so")

    def attend_of(name, problem, extras=None):
        right = attend_sparseflash(problem)
        return lambda query, key, value: right(query, Refused.apply(key), value)

    monkeypatch.setattr(measurement, "make_attend", attend_of)
    monkeypatch.setattr(f"{__name__}.refuse", without_backward)
    rows, reasons = measure(CASE, ["cudnn-bsa"], METHOD)
    assert [row.direction for row in rows] == ["forward"]
    assert reasons == {"cudnn-bsa, backward": "needs head_dim 128"}
    with pytest.raises(NotImplementedError):
        measure(CASE, ["sparseflash"], METHOD)


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
def test_a_baseline_that_cannot_run_is_left_out_with_its_reason(monkeypatch, stage):
    monkeypatch.setattr(measurement, "make_attend", fails_to(stage, "sdpa"))
    rows, reasons = measure(CASE, ["sparseflash", "sdpa"], METHOD)
    assert [row.implementation for row in rows] == ["sparseflash"] * 2
    assert reasons == {"sdpa": "no kernel"}


def test_what_does_not_fit_beside_the_others_is_timed_after_them(monkeypatch):
    """Memory for three: of 2, 1, 2 and 4 the first two fit together, the third alone."""
    held, together = [], []

    @contextmanager
    def prepared(prepare, clock):
        if sum(held) + prepare() > 3:
            raise torch.OutOfMemoryError(f"no memory for {prepare()}")
        held.append(prepare())
        try:
            yield lambda runs: [float(prepare())] * runs
        finally:
            held.remove(prepare())

    def time_rested(samples, budget_ms):
        together.append(list(held))
        return [Timing.of(sample(2)) for sample in samples]

    monkeypatch.setattr(measurement, "prepared", prepared)
    monkeypatch.setattr(measurement, "time_rested", time_rested)
    passes = {name: partial(int, size) for name, size in [("a", 2), ("b", 1), ("c", 2), ("d", 4)]}
    skips = measurement.SkipReasons()
    times = measurement.timed(passes, METHOD, skips)
    assert {name: of["median_ms"] for name, of in times.items()} == {"a": 2, "b": 1, "c": 2}
    assert together == [[2, 1], [2], []]
    assert skips.reasons == {"d": "no memory for 4"}


def test_our_own_kernels_have_to_run(monkeypatch):
    monkeypatch.setattr(measurement, "make_attend", fails_to("begin", "sparseflash:triton"))
    with pytest.raises(RuntimeError, match="no kernel"):
        measure(CASE, ["sparseflash", "sparseflash:triton"], METHOD)


def test_what_no_graph_can_contain_is_timed_as_called_from_python(monkeypatch):
    """BigBird is known for it, of Reformer the capture finds out; exact ones are left out."""
    asked = []

    @contextmanager
    def prepared(prepare, clock):
        name = prepare()
        asked.append((name, clock.value))
        if clock is Clock.GRAPH and name in ("reformer", "sdpa"):
            raise WaitsForDevice("it waits")
        yield lambda runs: [1.0] * runs

    monkeypatch.setattr(measurement, "prepared", prepared)
    names = ("sparseflash", "sdpa", "bigbird", "reformer", "linear")
    passes = {name: partial(str, name) for name in names}
    skips = measurement.SkipReasons()
    times = measurement.timed(passes, replace(METHOD, clock="graph"), skips)
    found = {name: fields.get("clock") for name, fields in times.items()}
    assert found == {
        "sparseflash": None,
        "bigbird": "events",
        "reformer": "events",
        "linear": None,
    }
    assert skips.reasons == {"sdpa": "it waits"}
    assert ("bigbird", "graph") not in asked
    with pytest.raises(WaitsForDevice), ExitStack() as stack:
        measurement.start_sampling(stack, "sparseflash", lambda: "sdpa", Clock.GRAPH)
    timed = measurement.timed(
        {"bigbird": lambda: "bigbird"}, replace(METHOD, clock="events"), skips
    )
    assert "clock" not in timed["bigbird"]  # it is the clock of the record


def test_a_backward_pass_has_the_memory_that_it_has_in_training(monkeypatch):
    """What the last of many operations saved is free when the gradient of the first one is made,
    which here is as large as eight inputs.
    """
    weights = torch.ones(100, 64)

    def attend(query, key, value):
        wide = query.repeat(1, 1, 1, 8) * weights
        out = wide.unflatten(-1, (8, 8)).sum(-2) + key + value
        for _ in range(24):
            out = out.sigmoid()
        return out

    monkeypatch.setattr(measurement, "make_attend", lambda *facts: attend)
    monkeypatch.setattr(measurement, "check", lambda *facts, **options: None)
    (row,), _ = measure(CASE, ["sparseflash"], replace(METHOD, directions=("backward",)))
    inputs, grad_out = random_problem(CASE, torch.float32, torch.device("cpu"), 0)
    prepare = measurement.BackwardPass(attend, inputs, grad_out)
    kept = peak_bytes(lambda: prepare()(), torch.device("cpu"))
    assert row.peak_bytes <= kept - 6 * inputs[0].nbytes


def test_a_step_of_decoding_has_no_backward_pass():
    (row,), _ = measure(DECODED, ["sparseflash"], METHOD)
    assert (row.direction, row.q_len, row.kv_heads) == ("forward", 3, 1)
    assert row.key_value_bytes == row.density * 2 * 96 * 8 * 4 == 96 * 8 * 4


def test_a_backward_pass_is_timed_without_its_forward_pass_and_may_run_again():
    inputs, grad_out = random_problem(CASE, torch.float32, torch.device("cpu"), 0)
    attended = []

    def attend(query, key, value):
        attended.append(1)
        return query * key * value

    backward = measurement.BackwardPass(attend, inputs, grad_out)()
    assert attended == [1]
    for _ in range(2):
        torch.testing.assert_close(backward()[0], (grad_out * inputs[1] * inputs[2]).detach())
    assert attended == [1]
    measurement.forward_pass(attend, inputs)()()
    assert attended == [1, 1]


def test_no_time_is_taken_of_a_wrong_gradient(monkeypatch):
    def wrong(name, problem, extras):
        right = make_attend(name, problem)
        return lambda query, key, value: right(query, Doubled.apply(key), value)

    monkeypatch.setattr(measurement, "make_attend", wrong)
    monkeypatch.setattr(measurement, "timed", lambda *call: pytest.fail("timed"))
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
    monkeypatch.setattr(measurement, "attend_sparseflash", lambda problem, named, extras: named)
    monkeypatch.setattr(measurement, "attend_baseline", lambda baseline, *rest: baseline)
    names = ("sparseflash", "sparseflash:hopper/any-order", "sdpa")
    assert [make_attend(name, LOCAL) for name in names] == ["auto", "hopper/any-order", "sdpa"]


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


HARD = {"dropout_p": 0.3, "padding": 0.5}


@pytest.mark.parametrize("extra", HARD)
def test_ours_is_checked_with_dropout_and_padding(extra, monkeypatch):
    """And what ignores them is found out."""
    case, method = replace(CASE, batch=3), replace(METHOD, **{extra: HARD[extra]})
    rows, reasons = measure(case, ["sparseflash", "flash4"], method)
    assert [row.direction for row in rows] == ["forward", "backward"]
    assert list(reasons) == ["flash4"]
    assert ("no dropout" in reasons["flash4"]) == (extra == "dropout_p")
    monkeypatch.setattr(
        measurement, "make_attend", lambda name, problem, extras: attend_sparseflash(problem)
    )
    with pytest.raises(CheckError, match=r"sparseflash on local\(20\) at N = 100, out: error"):
        measure(case, ["sparseflash"], method)


def test_a_baseline_is_checked_with_padding(monkeypatch):
    """And one that ignores key lengths is found out."""
    full = Problem("full", masks.full()(100, 16), dense="full")
    case, method = replace(CASE, batch=3, problem=full), replace(METHOD, **HARD)
    rows, reasons = measure(case, ["sdpa"], method)
    assert [row.direction for row in rows] == ["forward", "backward"]
    assert not reasons
    monkeypatch.setattr(
        measurement, "make_attend", lambda name, problem, extras: make_attend(name, problem)
    )
    with pytest.raises(CheckError, match=r"sdpa on full at N = 100, out: error"):
        measure(case, ["sdpa"], method)


def test_a_dense_baseline_has_dropout_of_its_own():
    full = replace(CASE, problem=Problem("full", masks.full()(100, 16), dense="full"))
    rows, reasons = measure(full, ["sdpa", "standard"], replace(METHOD, dropout_p=0.5))
    assert len(rows) == 4
    assert not reasons
    for name in ("sdpa", "standard"):
        attend = make_attend(name, full.problem, Extras(0.5))
        inputs = [torch.ones(1, 1, 100, 8) for _ in range(3)]
        dropped = attend(*inputs)
        assert dropped.std() > 0.01
        assert abs(float(dropped.mean()) - 1) < 0.1


@pytest.mark.parametrize(
    ("batch", "padding", "lengths"),
    [(3, 0.5, [100, 75, 50]), (1, 0.5, [50]), (2, 0.99, [100, 1]), (2, 0.0, None)],
)
def test_padding_grows_over_the_batch(batch, padding, lengths):
    case, method = replace(CASE, batch=batch), replace(METHOD, padding=padding)
    assert case.lengths(method) == lengths
    blocks = [LOCAL.mask.crop(100, n).nnz_blocks for n in lengths or [100]]
    assert case.density(method) == pytest.approx(sum(blocks) / len(blocks) / 49)
    on_device = case.extras(method).key_lengths
    assert (on_device if lengths is None else on_device.tolist()) == lengths
