"""Fixtures of the tests of experiments."""

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
