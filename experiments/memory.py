"""The memory of a call: the largest amount allocated during it, minus the amount before it."""

import gc
import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.profiler import profile

METHOD = {
    "cuda": "torch.cuda.max_memory_allocated during the call, less the bytes allocated before it",
    "cpu": "largest sum of live allocations of torch's CPU allocator, from the profiler's record",
}


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak of what `run()` allocates on `device`, its result included."""
    return _peak_on_gpu(run, device) if device.type == "cuda" else _peak_on_cpu(run)


def _peak_on_gpu(run: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    # What earlier calls left in reference cycles would count as memory before the call, and as
    # free memory once Python collects it during the call.
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _peak_on_cpu(run: Callable[[], object]) -> int:
    # The profiler's library otherwise writes a line to the terminal each time it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    record: Any = profile(profile_memory=True)
    with record:
        result = run()
    del result
    # Its own list of events: to make of them what torch.profiler shows takes ten times the run.
    events = record.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes), default=0)
