"""The time of a call: the median of many runs, and its spread."""

import gc
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch

from experiments.cli import Clock
from sparseflash.timing import no_garbage_collection

Run = Callable[[], object]
Prepare = Callable[[], Run]
Sample = Callable[[int], list[float]]  # from a number of runs to the milliseconds of each

# Larger than the last-level cache of any GPU: writing it between two runs makes every run read its
# inputs from memory.
FLUSH_BYTES = 256 * 2**20
TURNS = 6
MIN_RUNS = TURNS  # at least one run in each turn
MAX_RUNS = 200
ROUNDS = 3
WARM_UP_MS, SUSTAINED_MS = 100.0, 20.0
ESTIMATES = 3  # runs; the fastest one determines the number of runs of a turn
MAX_SUSTAINED_RUNS = 1000


class WaitsForDevice(RuntimeError):
    """A CUDA graph cannot contain a run, because it waits for the device."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, first and third quartile of `runs` runs."""

    median_ms: float
    low_ms: float
    high_ms: float
    runs: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> "Timing":
        times = torch.tensor(milliseconds, dtype=torch.float64)
        low, median, high = torch.quantile(
            times, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
        ).tolist()
        return cls(median, low, high, len(milliseconds))


def time_call(prepare: Prepare, clock: Clock, budget_ms: float) -> Timing:
    """Times the function that `prepare()` returns, for about `budget_ms`; see `prepared`."""
    with prepared(prepare, clock) as sample:
        (timing,) = time_rested([sample], budget_ms)
    return timing


def time_rested(samples: Sequence[Sample], budget_ms: float) -> list[Timing]:
    """Times functions in short turns, for about `budget_ms` each after one run to warm up.

    A turn has a few runs of one function, and each function follows each other one about equally
    often. The clock of a GPU depends on its recent power, so long turns, or a fixed order, would
    give each function another clock. The host waits for the device after every turn, so the power
    limit is hardly reached.
    """
    estimates = [sample(1)[0] for sample in samples]
    wanted = [min(MAX_RUNS, max(MIN_RUNS, int(budget_ms / max(e, 1e-3)))) for e in estimates]
    milliseconds: list[list[float]] = [[] for _ in samples]
    with no_garbage_collection():
        for turn, order in enumerate(_orders(len(samples))):
            for i in order:
                runs = wanted[i] * (turn + 1) // TURNS - wanted[i] * turn // TURNS
                milliseconds[i] += samples[i](runs) if runs else []
    return [Timing.of(times) for times in milliseconds]


def time_sustained(samples: Sequence[Sample]) -> list[Timing]:
    """Times functions under continuous load of their own.

    In each of ROUNDS rounds each function has one turn of consecutive runs: WARM_UP_MS that are
    not counted, in which the clock settles to what the power of this function allows, then
    SUSTAINED_MS. With less to warm up all would have the clock of those before them. The order
    rotates in each round.
    """
    turns = [_runs_of_a_turn(sample) for sample in samples]
    milliseconds: list[list[float]] = [[] for _ in samples]
    with no_garbage_collection():
        for turn in range(ROUNDS):
            for n in range(len(samples)):
                i = (turn + n) % len(samples)
                warm_up, runs = turns[i]
                milliseconds[i] += samples[i](warm_up + runs)[warm_up:]
    return [Timing.of(times) for times in milliseconds]


def _runs_of_a_turn(sample: Sample) -> tuple[int, int]:
    """The runs of a sustained turn that are not counted, and those that are."""
    begin = time.perf_counter()
    estimate = max(min(sample(ESTIMATES)), 1e-3)
    # With the flush of the cache, and with the launch where the host takes longer.
    period = max(estimate, (time.perf_counter() - begin) * 1e3 / ESTIMATES)
    warm_up, runs = math.ceil(WARM_UP_MS / period), math.ceil(SUSTAINED_MS / estimate)
    return min(MAX_SUSTAINED_RUNS, warm_up), min(MAX_SUSTAINED_RUNS, runs)


def _orders(count: int) -> Iterator[list[int]]:
    """An order of turns in which each function follows each other one about equally often."""
    came_after: Counter[tuple[int | None, int]] = Counter()
    last = None
    for turn in range(TURNS):
        order: list[int] = []
        while len(order) < count:
            left = [i for i in range(count) if i not in order and (i != last or count == 1)]
            following = min(left, key=lambda i: (came_after[last, i], (i - turn) % count))
            came_after[last, following] += 1
            order.append(following)
            last = following
        yield order


@contextmanager
def prepared(prepare: Prepare, clock: Clock) -> Iterator[Sample]:
    """A Sample of the function that `prepare()` returns.

    `prepare` itself (the forward pass before a backward pass) is not timed. On a GPU it runs on
    the stream that is timed, as the capture of a backward pass requires.

    Raises:
        WaitsForDevice: The clock is GRAPH, and the run waits for the device.
    """
    if clock is Clock.CPU:
        yield partial(_sample_cpu, prepare())
        return
    # What earlier calls left in reference cycles may hold nodes of autograd of the inputs, which
    # belong to another stream, so that a capture would fail.
    gc.collect()
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    runs: list[Run] = []

    def sample(count: int) -> list[float]:
        with torch.cuda.stream(stream):
            return _sample_gpu(runs[0], count)

    try:
        with torch.cuda.stream(stream):
            run = prepare()
            run()
            runs.append(_captured(run, stream) if clock is Clock.GRAPH else run)
        del run  # `runs` holds it, and frees it at the end
        sample(1)  # allocates all memory that later samples need
        yield sample
    finally:
        torch.cuda.current_stream().wait_stream(stream)
        # Frees the memory pools of the stream and of the graph.
        runs.clear()
        gc.collect()
        torch.cuda.empty_cache()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream on which everything is timed.

    Inputs that require gradients belong to the stream on which they were first used, and all
    implementations share the inputs.
    """
    return torch.cuda.Stream(device)


def _sample_cpu(run: Run, runs: int) -> list[float]:
    """Milliseconds of each of `runs` runs."""
    milliseconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        run()
        milliseconds.append((time.perf_counter() - begin) * 1e3)
    return milliseconds


def _sample_gpu(run: Run, runs: int) -> list[float]:
    """Milliseconds of each of `runs` runs, which are all enqueued before the host waits."""
    cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(runs)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        cache.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)]


@contextmanager
def no_waiting() -> Iterator[None]:
    """A context in which operations that wait for the device raise RuntimeError."""
    try:
        with warnings.catch_warnings():  # torch calls the mode a prototype
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _captured(run: Run, stream: torch.cuda.Stream) -> Run:
    """The replay of one run. `stream`, which is captured, must be the current one.

    Raises:
        WaitsForDevice: The run waits for the device. A failed capture would leave the allocator
            and the random generator in a state in which later runs fail.
    """
    try:
        with no_waiting():
            run()
    except RuntimeError as error:
        if "synchronizing CUDA operation" in f"{error}":
            raise WaitsForDevice(f"{error}") from error
        raise
    stream.synchronize()
    # A capture allocates free memory; it cannot use the memory that the allocator caches.
    gc.collect()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    try:
        run()
    finally:
        graph.capture_end()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, _captured_run: Run) -> None:
    """Replays a graph. Its run is held, because the graph reads tensors that only the run holds.

    Those of a backward pass are the results of the forward pass before it.
    """
    graph.replay()
