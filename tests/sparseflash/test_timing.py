import gc
import time
from functools import partial

import pytest
import torch

from sparseflash import timing
from sparseflash.timing import Turn, median_ms, rested_turns, sustained_ms
from tests.helpers.simulated_gpu import Kernel, SimulatedGpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_time_is_in_milliseconds():
    found = median_ms({"slept": lambda: time.sleep(0.02)}, CPU, seconds=0.1)
    assert 20 <= found["slept"] < 200
    assert sustained_ms(lambda: None, CPU) is None


def test_the_second_half_of_a_round_is_the_first_reversed(monkeypatch):
    order = []

    def run(name, seconds):
        order.append(name)
        time.sleep(seconds)

    monkeypatch.setattr(timing, "CPU_MS", 0.0)
    runs = {"a": lambda: run("a", 0.002), "b": lambda: run("b", 0.006)}
    found = rested_turns(runs, CPU, 0.0, least_rounds=3)
    planned = 2  # calls that are longer than a turn are estimated from one
    assert order[: 2 * planned] == ["a"] * planned + ["b"] * planned
    assert order[2 * planned :] == [*"abba", *"baab", *"abba"]
    assert len(found["a"]) == len(found["b"]) == 3
    assert min(turn.device for turn in found["b"]) >= 6
    assert {turn.host for turn in found["a"]} == {0.0}
    order.clear()
    monkeypatch.setattr(timing, "MAX_ROUNDS", 4)
    assert len(rested_turns(runs, CPU, 60.0, least_rounds=3)["a"]) == 4


def test_no_garbage_is_collected_while_calls_are_timed():
    during = []
    rested_turns({"a": lambda: during.append(gc.isenabled())}, CPU, 0.0, least_rounds=1)
    assert not any(during)
    assert gc.isenabled()


def test_a_call_takes_what_the_slower_of_host_and_device_takes():
    assert Turn(device=0.5, host=0.05).called == 0.5
    assert Turn(device=0.02, host=0.05).called == 0.05


@pytest.mark.parametrize(
    ("host", "device"), [(0.03, 0.5), (0.13, 1.9), (0.2, 25.0), (0.19, 0.02), (0.5, 0.4)]
)
def test_times_of_device_and_host(monkeypatch, host, device):
    """The host that comes late is in none of those of the device."""
    gpu = SimulatedGpu(monkeypatch, noisy=False)
    found = rested_turns(
        {"call": lambda: gpu.call(Kernel(device, host))}, CUDA, 0.5, least_rounds=2
    )["call"]
    assert [turn.device for turn in found] == pytest.approx([device] * len(found), rel=0.01)
    assert [turn.host for turn in found] == pytest.approx([host] * len(found), rel=0.01)


def test_rounds_go_on_until_they_are_enough_or_as_much_time_has_passed_again(monkeypatch):
    gpu = SimulatedGpu(monkeypatch, noisy=False)
    runs = {"call": partial(gpu.call, Kernel(0.5))}
    few = len(rested_turns(runs, CUDA, 0.2, least_rounds=2)["call"])
    more = rested_turns(runs, CUDA, 0.2, 2, enough=lambda turns: len(turns["call"]) == few + 3)
    assert len(more["call"]) == few + 3
    never = rested_turns(runs, CUDA, 0.2, 2, enough=lambda turns: False)
    assert len(never["call"]) == pytest.approx(2 * few, abs=1)


def test_two_rounds_are_measured_however_long_they_take():
    steps = []
    runs = {"a": lambda: time.sleep(0.003), "b": lambda: None}
    arguments = {"seconds": 60.0, "least_rounds": 5, "most_seconds": 0.0}
    found = rested_turns(runs, CPU, **arguments, progress=lambda *step: steps.append(step))
    assert [len(turns) for turns in found.values()] == [timing.MIN_ROUNDS] * 2
    assert steps == [(step, 2 * (1 + 2 * 5)) for step in range(1, 2 * (1 + 2 * 2) + 1)]


@pytest.mark.parametrize("device", [0.47, 1.6, 6.0])
def test_rested_times_have_the_fastest_clock_and_sustained_ones_what_power_leaves(
    monkeypatch, device
):
    gpu = SimulatedGpu(monkeypatch, noisy=False)
    run = partial(gpu.call, Kernel(device))
    rested = median_ms({"call": run}, CUDA, 1.0)["call"]
    loaded = sustained_ms(run, CUDA)
    assert rested == pytest.approx(device, rel=0.01)
    assert loaded == pytest.approx(device * Kernel(device).power ** (1 / 3), rel=0.05)
    # Turns without rests between them are neither.
    monkeypatch.setattr(timing, "MAX_PAUSE_MS", 0.0)
    assert median_ms({"call": run}, CUDA, 1.0)["call"] > 1.03 * device


def test_a_small_call_takes_the_time_of_the_host_under_load_too(monkeypatch):
    gpu = SimulatedGpu(monkeypatch, noisy=False)
    run = partial(gpu.call, Kernel(0.02, host=0.13))
    assert sustained_ms(run, CUDA) == pytest.approx(0.13, rel=0.01)
    assert median_ms({"call": run}, CUDA, 0.5)["call"] == pytest.approx(0.13, rel=0.01)
