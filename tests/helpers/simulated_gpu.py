"""A GPU that is no more than its clocks: how long calls take on it, by what power and chance do.

Its figures are those of an H200. A kernel that draws 1.4 times the power that the device may takes
12 % longer under continuous load, as forward passes do (record `power`), and nearly as long after
a turn of 36 ms, as the full mask did in a split of the gap that had no rests. Turns that power
does not slow differ by some tenths of a percent.
"""

import math
import random
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from sparseflash import timing

IDLE = 0.25  # power over what the device may draw
AVERAGED_MS = 60.0  # of the power that is looked at, every DECIDED_MS
DECIDED_MS = 20.0
CLOCK_STEP, SLOWEST = 0.03, 0.7
STEP_MS = 0.5
TURN_JITTER, CALL_JITTER = 0.004, 0.01  # standard deviations, of 1
HICCUP, HICCUP_SHARE = 1.06, 0.02  # of turns
DRIFT, DRIFT_MS = 0.015, 6_000.0  # amplitude and period of a clock that the temperature moves
HOST_JITTER, HOST_DRIFT, HOST_DRIFT_MS = 0.2, 0.1, 700.0
WAKES_MS = 0.3  # late, after it has waited: the host


@dataclass(frozen=True)
class Kernel:
    """Milliseconds at the rested clock, those of the host to enqueue it, and power at that clock
    over what the device may draw.
    """

    device: float
    host: float = 0.05
    power: float = 1.4


class SimulatedGpu:
    """Works off what the host enqueues; all in milliseconds."""

    def __init__(self, monkeypatch, seed=0, noisy=True, averaged_ms=AVERAGED_MS):
        self.random = random.Random(seed)
        self.noisy, self.averaged_ms, self.decided = noisy, averaged_ms, 0.0
        self.host = self.device = 0.0
        self.speed, self.average, self.turn = 1.0, IDLE, 1.0
        self.phases = [self.random.uniform(0, 2 * math.pi) for _ in range(2)]
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.host / 1e3)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimulatedEvent(self))

    def synchronize(self, _=None):
        self.host = max(self.host, self.device) + WAKES_MS

    def sleep(self, cycles):
        self._idle_until(self.host)
        self._idle_until(self.device + cycles / timing.CYCLES * 1e3)
        hiccup = HICCUP if self.random.random() < HICCUP_SHARE else 1.0
        self.turn = self._chance(TURN_JITTER) * (hiccup if self.noisy else 1.0)

    def call(self, kernel):
        self.host += (
            kernel.host * self._chance(HOST_JITTER) * self._drift(1, HOST_DRIFT, HOST_DRIFT_MS)
        )
        self._idle_until(self.host)
        left = (
            kernel.device * self.turn * self._chance(CALL_JITTER) * self._drift(0, DRIFT, DRIFT_MS)
        )
        while left > 0:
            took = min(left / self.speed, STEP_MS)
            left -= took * self.speed
            self._pass(took, kernel.power * self.speed**3)

    def _chance(self, deviation):
        return math.exp(self.random.gauss(-(deviation**2) / 2, deviation)) if self.noisy else 1.0

    def _drift(self, which, amplitude, period):
        at = 2 * math.pi * self.host / period + self.phases[which]
        return 1 + amplitude * math.sin(at) if self.noisy else 1.0

    def _idle_until(self, when):
        if when > self.device:
            self._pass(when - self.device, IDLE)

    def _pass(self, milliseconds, power):
        self.device += milliseconds
        share = 1 - math.exp(-milliseconds / self.averaged_ms)
        self.average += share * (power - self.average)
        while self.decided < self.device:
            self.decided += DECIDED_MS
            step = -CLOCK_STEP if self.average > 1 else CLOCK_STEP
            self.speed = min(max(self.speed + step, SLOWEST), 1.0)


class SimulatedEvent:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, 0.0

    def record(self):
        self.at = max(self.gpu.host, self.gpu.device)

    def synchronize(self):
        self.gpu.synchronize()

    def elapsed_time(self, other):
        return other.at - self.at
