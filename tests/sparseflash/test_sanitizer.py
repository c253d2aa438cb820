"""No kernel reads or writes where it must not, and no two threads at once.

racecheck watches what threads read and write in shared memory. It sees neither the copies of the
tensor memory accelerator nor what tensor cores read there: whether the hopper kernels wait for
those is checked in simulation, by backends/hopper/test_simulated_kernels.py. Of those kernels it
reports how Triton gives work to its warps: one group writes to shared memory which part the others
are to run, and they read it after a barrier. Such reports name the first line of a kernel or of
its function `specialize_warps`, or the call of that; any other line is a failure.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import torch

import sparseflash
from sparseflash.backends import hopper
from tests.helpers.every_kernel import SHORT, kernel_calls, run

ROOT = Path(__file__).parents[2]
KERNELS = Path(hopper.__file__).parent
FOUND = 9  # the exit code of a sanitizer that found something
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


HANDS_OVER = re.compile(r"def \w+_kernel\(|(def )?specialize_warps(_in_order)?\(")


def races(printed: str) -> list[str]:
    """The reports of racecheck, but for those of only such lines as give warps their work."""
    reports = printed.split("Error:")[1:]
    return [report for report in reports if not all(map(HANDS_OVER.match, lines_of(report)))]


def lines_of(report: str) -> list[str]:
    return [code(*place) for place in re.findall(r" in (\w+\.py):(\d+)", report)]


def code(file: str, line: str) -> str:
    (path,) = KERNELS.rglob(file)
    return path.read_text().splitlines()[int(line) - 1].strip()


def test_lines_by_which_warps_get_work_are_distinguished():
    source = (KERNELS / "kernels/forward.py").read_text().splitlines()

    def report(beginning: str) -> str:
        (line,) = (i for i, text in enumerate(source, 1) if text.strip().startswith(beginning))
        return f"Error: Race reported between Read access at kernel+0x4b0 in forward.py:{line}"

    handed_over = ("def forward_kernel(", "def specialize_warps(", "specialize_warps(")
    assert not races("".join(map(report, handed_over)))
    race = report("def consumer(")
    assert races(report("def forward_kernel(") + race) == [race.removeprefix("Error:")]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_refuses_the_watched_calls_for_their_device_alone(head_dim):
    calls = [call for call in kernel_calls("hopper", head_dim) if call.lengths == SHORT]
    assert len(calls) > 10
    for call in calls:
        with pytest.raises(sparseflash.BackendError, match=r"\n  hopper: .*") as refused:
            run(call, "hopper", head_dim, "cpu")
        assert str(refused.value).endswith("hopper: device is cpu, needs cuda"), call


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("backend", ["triton"] + ["hopper"] * HOPPER)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_every_kernel_is_clean(tool, head_dim, backend):
    # Every tensor an allocation of its own, so that its neighbours are out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    python = [sys.executable, "-X", "faulthandler"]
    watched = subprocess.run(
        [*command, *python, "-m", "tests.helpers.every_kernel", backend, str(head_dim)],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "every kernel ran" in watched.stdout, watched.stdout[-3000:] + watched.stderr[-3000:]
    if (tool, backend) == ("racecheck", "hopper"):
        assert watched.returncode in (0, FOUND)
        found = races(watched.stdout)
        assert not found, "".join(found)
    else:
        assert watched.returncode == 0, watched.stdout[-3000:]
