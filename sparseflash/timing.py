"""The time of a call: rested, and under continuous load.

A GPU that works for some tens of milliseconds without a pause exceeds its power limit and lowers
its clock. So the time of a call depends on what ran before it. All times except `sustained_ms` are
rested: calls follow one another for a few milliseconds, which is a turn, and between turns the
device pauses for as long as the longest turn. During a pause the host enqueues so many calls that
the device never waits for it.

In a round each function has two turns. The second half of a round has the reverse order of the
first, so a drift within a round adds the same time to each function.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import torch

from masks.progress import Progress

WARM_UP_MS, COUNTED_MS = 1.0, 3.0  # of calls in a turn on a GPU
MAX_PAUSE_MS = 50.0  # after this pause the clock is no longer limited by power
HOST_AHEAD = 2.0  # least pause, as a multiple of the host's time to enqueue a turn
# The device queues about 1,000 launches, and a call has up to four.
MAX_CALLS = 100
CYCLES = 2e9  # clock cycles per second, at least those of any device
SETTLE_MS, SUSTAINED_MS = 100.0, 100.0  # of calls under continuous load, not counted and counted
CPU_MS, CPU_CALLS = 2.0, 20  # most time and most calls of a turn on a CPU
LONG_SECONDS = 0.5  # of a first call on a CPU, after which a turn has one call without an estimate
ESTIMATES = 3  # calls, at most, from which the number of calls of a turn is computed
MAX_ROUNDS = 50
MIN_ROUNDS = 2  # without which times have no spread
EXTENDED = 2.0  # most time of rounds that are not enough, over that of rounds that are

Run = Callable[[], object]


Step = TypeVar("Step")


class Turn(NamedTuple):
    """Mean milliseconds of one call in a turn.

    Args:
        device: Time on the device, with the host ahead.
        host: Time of the host to enqueue the call; 0 on a CPU.
    """

    device: float
    host: float

    @property
    def called(self) -> float:
        """The longer of both times, since device and host work at the same time."""
        return max(self)


class _Calls(NamedTuple):
    """The calls of a turn: first calls that are not counted, then calls that are."""

    run: Run
    warm_up: int
    count: int
    busy_ms: float
    enqueued_ms: float


def rested_turns(
    runs: Mapping[str, Run],
    device: torch.device,
    seconds: float,
    least_rounds: int,
    progress: Progress | None = None,
    enough: Callable[[dict[str, list[Turn]]], bool] = lambda turns: True,
    most_seconds: float = math.inf,
) -> dict[str, list[Turn]]:
    """Measures functions in rounds.

    Args:
        runs: Functions without arguments, by name.
        device: Device on which they run.
        seconds: Time after which no further round begins, unless there are not enough.
        least_rounds: Least number of rounds, whatever time they take.
        progress: Called with (steps done, least number of steps). A step is a turn of a function,
            or the calls from which the length of its turns is computed.
        enough: Called with the times of all rounds: whether they are enough. As long as it says
            no, further rounds begin until twice `seconds` have passed.
        most_seconds: Time after which no further round begins even if there are fewer than
            `least_rounds`; there are always MIN_ROUNDS.

    Returns:
        For each function its time in each round, the mean of its two turns.
    """
    done, steps = 0, len(runs) * (1 + 2 * least_rounds)

    def counted(result: Step) -> Step:
        nonlocal done
        done += 1
        if progress is not None and done <= steps:
            progress(done, steps)
        return result

    with no_garbage_collection():
        planned = {name: counted(_planned(run, device)) for name, run in runs.items()}
        pause_ms = max(
            min(max(calls.busy_ms for calls in planned.values()), MAX_PAUSE_MS),
            HOST_AHEAD * max(calls.enqueued_ms for calls in planned.values()),
        )
        rounds: list[dict[str, Turn]] = []
        begin = time.perf_counter()
        while len(rounds) < MAX_ROUNDS:
            passed = time.perf_counter() - begin
            if len(rounds) >= MIN_ROUNDS and passed > most_seconds:
                break
            if len(rounds) >= least_rounds and (
                passed > EXTENDED * seconds
                or (passed > seconds and enough(_by_name(planned, rounds)))
            ):
                break
            first = len(rounds) % len(planned)
            order = [*planned, *planned][first : first + len(planned)]
            of_names: dict[str, list[Turn]] = {name: [] for name in order}
            for name in [*order, *reversed(order)]:
                of_names[name].append(counted(_turn(planned[name], device, pause_ms)))
            rounds.append(
                {name: Turn(*map(fmean, zip(*of, strict=True))) for name, of in of_names.items()}
            )
    return _by_name(planned, rounds)


def _by_name(names: Iterable[str], rounds: Sequence[Mapping[str, Turn]]) -> dict[str, list[Turn]]:
    return {name: [of_round[name] for of_round in rounds] for name in names}


def median_ms(runs: Mapping[str, Run], device: torch.device, seconds: float) -> dict[str, float]:
    """The median rested time of each function, in milliseconds; arguments as in rested_turns."""
    times = rested_turns(runs, device, seconds, least_rounds=2)
    return {name: median(turn.called for turn in rounds) for name, rounds in times.items()}


def sustained_ms(run: Run, device: torch.device) -> float | None:
    """The time of a call under continuous load, in milliseconds; None on a CPU.

    Calls follow one another without a pause. Those before the clock has settled are not counted.
    """
    if device.type != "cuda":
        return None
    each_ms, _ = _estimate(run, device)
    with no_garbage_collection(), torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(math.ceil(SETTLE_MS / each_ms)):
            run()
        begin.record()
        count = math.ceil(SUSTAINED_MS / each_ms)
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context without Python's garbage collection, which takes the host milliseconds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _planned(run: Run, device: torch.device) -> _Calls:
    """The number of calls that fit into a turn."""
    each_ms, host_ms = _estimate(run, device)
    if device.type != "cuda":
        return _Calls(run, 0, max(1, min(CPU_CALLS, int(CPU_MS / each_ms))), 0.0, 0.0)
    warm_up = min(MAX_CALLS, round(WARM_UP_MS / each_ms))
    count = min(MAX_CALLS, math.ceil(COUNTED_MS / each_ms))
    return _Calls(run, warm_up, count, *((warm_up + count) * ms for ms in (each_ms, host_ms)))


def _estimate(run: Run, device: torch.device) -> tuple[float, float]:
    """(milliseconds of a call, milliseconds of the host to enqueue it)."""
    begin = time.perf_counter()
    run()
    _wait(device)
    first = time.perf_counter() - begin
    if device.type != "cuda" and first > LONG_SECONDS:
        return first * 1e3, 0.0
    count, begin = 0, time.perf_counter()
    while count < ESTIMATES:
        run()
        count += 1
        if device.type != "cuda" and time.perf_counter() - begin > CPU_MS / 1e3:
            break  # a turn has one call
    enqueued = time.perf_counter() - begin
    _wait(device)
    both = (time.perf_counter() - begin, enqueued)
    each_ms, host_ms = (max(seconds * 1e3 / count, 1e-3) for seconds in both)
    return each_ms, host_ms


def _turn(calls: _Calls, device: torch.device, pause_ms: float) -> Turn:
    if device.type != "cuda":
        return Turn(_seconds(calls) * 1e3 / calls.count, 0.0)
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(pause_ms * CYCLES / 1e3))
        for _ in range(calls.warm_up):
            calls.run()
        begin.record()
        host = _seconds(calls)
        end.record()
        end.synchronize()
        return Turn(begin.elapsed_time(end) / calls.count, host * 1e3 / calls.count)


def _seconds(calls: _Calls) -> float:
    """Time of the host for the counted calls, in seconds."""
    begin = time.perf_counter()
    for _ in range(calls.count):
        calls.run()
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
