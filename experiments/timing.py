"""How long a call takes: the median of many runs, and its spread."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch

Run = Callable[[], object]

# Larger than the last-level cache of any GPU: writing it between two runs makes every run read its
# inputs from memory.
FLUSH_BYTES = 256 * 2**20
MIN_RUNS = 3
MAX_RUNS = 200


class Clock(StrEnum):
    """What measures the time.

    cpu:    perf_counter around the call
    events: two CUDA events around the call, caches flushed before it; host time shows where it
    outlasts the device's
    graph:  two CUDA events around the replay of a CUDA graph that holds the call, caches flushed
    before it: device time
    """

    CPU = "cpu"
    EVENTS = "events"
    GRAPH = "graph"


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


def time_call(prepare: Callable[[], Run], clock: Clock, budget_ms: float) -> Timing:
    """Times the function that `prepare()` returns, for about `budget_ms` after one run to warm up.

    What `prepare` itself does (the forward pass before a backward one) is not timed. On a GPU it
    runs on the stream that is timed, as the capture of a backward pass asks for.
    """
    if clock is Clock.CPU:
        return _time(prepare(), _sample_cpu, budget_ms)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run = prepare()
        run()
        timing = _time(
            _captured(run, stream) if clock is Clock.GRAPH else run, _sample_gpu, budget_ms
        )
    torch.cuda.current_stream().wait_stream(stream)
    # The stream and the graph have pools of their own, which nothing uses again.
    del run
    gc.collect()
    torch.cuda.empty_cache()
    return timing


def _time(run: Run, sample: Callable[[Run, int], list[float]], budget_ms: float) -> Timing:
    estimate = sample(run, 1)[0]
    runs = min(MAX_RUNS, max(MIN_RUNS, int(budget_ms / max(estimate, 1e-3))))
    gc.disable()
    try:
        return Timing.of(sample(run, runs))
    finally:
        gc.enable()


def _sample_cpu(run: Run, runs: int) -> list[float]:
    """Milliseconds of each of `runs` runs."""
    milliseconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        run()
        milliseconds.append((time.perf_counter() - begin) * 1e3)
    return milliseconds


def _sample_gpu(run: Run, runs: int) -> list[float]:
    """Milliseconds of each of `runs` runs, all enqueued before the first is waited for."""
    cache = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(runs)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        cache.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)]


def _captured(run: Run, stream: torch.cuda.Stream) -> Run:
    """The replay of one run. `stream` must be the current one, which the capture watches."""
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    graph.capture_begin()
    try:
        run()
    finally:
        graph.capture_end()
    return graph.replay
