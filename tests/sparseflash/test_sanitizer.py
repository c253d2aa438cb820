"""No kernel reads or writes where it must not."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import torch

SCRIPT = Path(__file__).parent / "every_kernel.py"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("backend", ["triton"] + ["hopper"] * HOPPER)
def test_memory_is_accessed_within_bounds(backend):
    # Every tensor an allocation of its own, so that its neighbours are out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    watched = subprocess.run(
        [*command, sys.executable, str(SCRIPT), backend],
        env=environment | {"PYTHONPATH": str(SCRIPT.parents[2])},
        capture_output=True,
        text=True,
    )
    assert watched.returncode == 0, watched.stdout[-3000:]
    assert "every kernel ran" in watched.stdout
