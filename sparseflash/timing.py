"""The time of a call, by torch's own timer."""

from collections.abc import Callable

import torch


def median_ms(run: Callable[[], object], seconds: float) -> float:
    """Median milliseconds of a call, of as many as take about `seconds`; a GPU is waited for."""
    from torch.utils.benchmark import Timer  # takes long to import

    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median * 1e3
