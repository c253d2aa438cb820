"""Fixtures of the tests of experiments."""

from collections.abc import Callable

import pytest
import torch


@pytest.fixture(autouse=True)
def matmul_precision():
    """Commands let torch round float32 products to TF32, in the whole process. Later tests compare
    them.
    """
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def is_pinned(monkeypatch) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is in pinned memory, which is other memory where there is no GPU."""
    if torch.cuda.is_available():
        return torch.Tensor.is_pinned
    empty_like, allocated = torch.empty_like, []

    def allocate(tensor: torch.Tensor, *, pin_memory: bool) -> torch.Tensor:
        allocated.append(empty_like(tensor))
        return allocated[-1]

    monkeypatch.setattr(torch, "empty_like", allocate)
    return lambda tensor: any(tensor is each for each in allocated)
