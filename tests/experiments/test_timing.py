import gc
import time

import pytest
import torch

from experiments.timing import MAX_RUNS, MIN_RUNS, Clock, Timing, time_call


def test_timing_is_the_median_and_the_quartiles():
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Timing(3.0, 2.0, 4.0, 5)


def test_preparation_is_not_timed():
    def prepare():
        time.sleep(0.2)
        return lambda: time.sleep(0.005)

    timing = time_call(prepare, Clock.CPU, budget_ms=30)
    assert 5 <= timing.low_ms <= timing.median_ms <= timing.high_ms < 100
    assert timing.runs >= MIN_RUNS


@pytest.mark.parametrize(
    ("budget_ms", "seconds", "runs"),
    [(1.0, 0.01, MIN_RUNS), (35.0, 0.004, 8), (9e9, 0.0, MAX_RUNS)],
)
def test_so_many_runs_as_the_budget_allows_without_collecting_garbage(
    budget_ms, seconds, runs, monkeypatch
):
    now, collecting = [0.0], []

    def run():
        now[0] += seconds
        collecting.append(gc.isenabled())

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    timing = time_call(lambda: run, Clock.CPU, budget_ms)
    assert timing.runs == runs
    assert timing.median_ms == pytest.approx(1e3 * seconds)
    assert not any(collecting[-runs:])
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.parametrize("clock", [Clock.EVENTS, Clock.GRAPH])
def test_a_gpu_copy_takes_as_long_as_its_bytes_need(clock):
    source = torch.randn(2**28, device="cuda")
    timing = time_call(lambda: source.clone, clock, budget_ms=50)
    terabytes = 2 * source.numel() * source.element_size() / 1e12
    assert 0.1 < terabytes / (timing.median_ms / 1e3) < 20
