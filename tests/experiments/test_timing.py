import gc
import time
import warnings
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import pairwise, permutations
from unittest import mock

import pytest
import torch

from experiments import timing as timing_module
from experiments.cli import Clock
from experiments.timing import (
    ESTIMATES,
    MAX_RUNS,
    MIN_RUNS,
    ROUNDS,
    SUSTAINED_MS,
    TURNS,
    WARM_UP_MS,
    Timing,
    WaitsForDevice,
    time_call,
    time_rested,
    time_sustained,
)
from sparseflash.timing import no_garbage_collection


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


class Sampled:
    """Takes its time in ms, a little longer from turn to turn; writes down whose turn it is."""

    def __init__(self, name, ms, log):
        self.name, self.ms, self.log = name, ms, log

    def __call__(self, runs):
        self.log.append((self.name, runs))
        return [self.ms + len(self.log) / 1000] * runs


def test_each_gets_its_own_time_and_as_many_runs_as_the_budget_allows():
    log = []
    fast, slow = Sampled("fast", 1.0, log), Sampled("slow", 5.0, log)
    timings = time_rested([fast, slow], budget_ms=60)
    assert [round(timing.median_ms) for timing in timings] == [1, 5]
    assert [timing.runs for timing in timings] == [59, 11]
    assert log[:2] == [("fast", 1), ("slow", 1)]  # to warm up
    shares = [runs for name, runs in log[2:] if name == "fast"]
    assert len(shares) == TURNS
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_each_comes_after_each_other_one_as_often(count):
    log = []
    names = "abcdef"[:count]
    time_rested([Sampled(name, 1.0, log) for name in names], budget_ms=60)
    order = [name for name, _ in log[count:]]
    orders = [order[i : i + count] for i in range(0, len(order), count)]
    assert len(orders) == TURNS
    assert all(sorted(turn) == list(names) for turn in orders)
    pairs = Counter(pairwise(order))
    found = [pairs[pair] for pair in permutations(names, 2)]
    assert sum(found) == len(order) - 1  # none comes after itself
    assert max(found) - min(found) <= 1


def test_a_slow_call_takes_part_in_every_turn():
    log = []
    (timing,) = time_rested([Sampled("slow", 1000.0, log)], budget_ms=1)
    assert timing.runs == MIN_RUNS == sum(runs for _, runs in log[1:])
    assert all(runs for _, runs in log)


def test_a_sustained_turn_is_long_and_its_warm_up_is_not_counted():
    class Settling:
        """Runs of 3 ms while the clock settles, then of 2 ms."""

        def __init__(self):
            self.asked = []

        def __call__(self, runs):
            self.asked.append(runs)
            return [2.0] * runs if len(self.asked) == 1 else [3.0] * 5 + [2.0] * (runs - 5)

    first, second = Settling(), Settling()
    for timing in time_sustained([first, second]):
        assert timing == Timing(2.0, 2.0, 2.0, ROUNDS * 10)
    runs = round((WARM_UP_MS + SUSTAINED_MS) / 2.0)
    assert first.asked == second.asked == [ESTIMATES, *[runs] * ROUNDS]


def test_sustained_turns_rotate():
    log = []
    time_sustained([Sampled(name, 30.0, log) for name in "abc"])
    order = "".join(name for name, _ in log[3:])
    assert order.startswith("abcbcacab")


@pytest.mark.gpu
@pytest.mark.parametrize("clock", [Clock.EVENTS, Clock.GRAPH])
def test_a_gpu_copy_takes_as_long_as_its_bytes_need(clock):
    source = torch.randn(2**28, device="cuda")
    timing = time_call(lambda: source.clone, clock, budget_ms=50)
    terabytes = 2 * source.numel() * source.element_size() / 1e12
    assert 0.1 < terabytes / (timing.median_ms / 1e3) < 20


def test_the_mode_that_refuses_waiting_ends_with_its_block_and_warns_of_nothing(monkeypatch):
    modes = []

    def set_mode(mode):
        modes.append(mode)
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(RuntimeError, match="waits"), timing_module.no_waiting():
        raise RuntimeError("it waits")
    assert modes == ["error", "default"]


def test_what_earlier_calls_left_in_reference_cycles_is_freed_before_a_run_is_prepared(
    monkeypatch,
):
    """Else nodes of autograd that belong to another stream would be part of what is captured."""
    for name in ("current_device", "current_stream", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(timing_module, "_stream", mock.Mock())
    monkeypatch.setattr(timing_module, "_captured", lambda run, _: run)
    monkeypatch.setattr(timing_module, "_sample_gpu", lambda _, runs: [1.0] * runs)
    alive = []

    def prepare():
        alive.append(left() is not None)
        return lambda: None

    with no_garbage_collection():
        earlier = torch.ones(1)
        vars(earlier)["itself"], left = earlier, weakref.ref(earlier)
        del earlier
        with timing_module.prepared(prepare, Clock.GRAPH):
            pass
    assert alive == [False]


@pytest.mark.gpu
def test_a_run_that_waits_for_the_device_is_refused_before_its_capture():
    source = torch.ones(8, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"):
        time_call(lambda: source.sum().item, Clock.GRAPH, budget_ms=1)
    assert time_call(lambda: source.sum, Clock.GRAPH, budget_ms=1).runs >= MIN_RUNS


def test_a_run_that_waits_for_the_device_is_not_captured(monkeypatch):
    monkeypatch.setattr(timing_module, "no_waiting", nullcontext)

    def fails(message):
        raise RuntimeError(message)

    for message, kind in (
        ("called a synchronizing CUDA operation", WaitsForDevice),
        ("another error", RuntimeError),
    ):
        with pytest.raises(RuntimeError, match=message) as caught:
            timing_module._captured(partial(fails, message), None)
        assert type(caught.value) is kind


def test_a_graph_holds_what_its_run_holds(monkeypatch):
    """A graph reads the results of a forward pass that only the run of its backward pass holds."""
    graph, results = mock.Mock(), torch.ones(3)
    held = weakref.ref(results)
    monkeypatch.setattr(timing_module, "no_waiting", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    replay = timing_module._captured(results.sum, mock.Mock())
    del results
    gc.collect()
    replay()
    assert graph.replay.called
    assert held() is not None
    del replay
    gc.collect()
    assert held() is None
