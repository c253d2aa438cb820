"""The roofline of a device, from times that are written down."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from experiments import roofline
from experiments.timing import Clock, Timing


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(
            *args, **(kwargs or {}) | ({"device": "cpu"} if "device" in (kwargs or {}) else {})
        )


def test_rooflines_are_the_work_over_its_time(monkeypatch):
    times = {Clock.GRAPH: 2.0, Clock.EVENTS: 4.0}  # of the product, of the copy

    def time_call(prepare, clock, budget_ms):
        prepare()()
        return Timing(times[clock], 0.0, 0.0, 5)

    monkeypatch.setattr(roofline, "time_call", time_call)
    monkeypatch.setattr(roofline, "MATRIX", 64)
    monkeypatch.setattr(roofline, "COPY_BYTES", 1024)
    with OnCpu():
        measured = roofline.measure_roofline(torch.float32)
    assert measured == {
        "matrix_product_tflops": pytest.approx(64**2 * (64 + 64) / 2e-3 / 1e12),
        "copy_terabytes_per_second": pytest.approx((1024 + 1024) / 4e-3 / 1e12),
    }
