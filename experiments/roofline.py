"""The roofline of a GPU, an upper bound of all kernels, measured in the same run as they are."""

import torch

from experiments.timing import Clock, time_call

MATRIX = 8192
COPY_BYTES = 2**30
BUDGET_MS = 60.0


def measure_roofline(dtype: torch.dtype) -> dict[str, float]:
    """TFLOP/s of a product of square random matrices; TB/s that a copy reads and writes."""
    a, b = (torch.randn(MATRIX, MATRIX, dtype=dtype, device="cuda") for _ in range(2))
    product = time_call(lambda: lambda: a @ b, Clock.GRAPH, BUDGET_MS)
    source = torch.empty(COPY_BYTES, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    # A graph hands copies to a slower engine.
    copy = time_call(lambda: lambda: target.copy_(source), Clock.EVENTS, BUDGET_MS)
    return {
        "matrix_product_tflops": 2 * MATRIX**3 / (product.median_ms * 1e9),
        "copy_terabytes_per_second": 2 * COPY_BYTES / (copy.median_ms * 1e9),
    }
