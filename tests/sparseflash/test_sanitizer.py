"""No kernel reads or writes where it must not, and no two threads at once.

racecheck watches what threads read and write in shared memory. It sees neither the copies of the
tensor memory accelerator nor what tensor cores read there: whether the hopper kernels wait for
those is checked in simulation, by backends/hopper/test_hopper_protocol.py.
"""

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
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_every_kernel_is_clean(tool, head_dim, backend):
    # Every tensor an allocation of its own, so that its neighbours are out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    watched = subprocess.run(
        [*command, sys.executable, str(SCRIPT), backend, str(head_dim)],
        env=environment | {"PYTHONPATH": str(SCRIPT.parents[2])},
        capture_output=True,
        text=True,
    )
    assert watched.returncode == 0, watched.stdout[-3000:]
    assert "every kernel ran" in watched.stdout
