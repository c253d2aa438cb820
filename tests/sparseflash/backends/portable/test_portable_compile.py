"""All kernels that ship, compiled for two architectures on a machine that may have neither."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_kernels.py"
ROOT = Path(__file__).parents[4]
ARCHITECTURES = (80, 90)
STACK_LIMIT = 512  # bytes per thread


def start(what: str, architecture: int) -> subprocess.Popen:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-W", "ignore", str(SCRIPT), what, str(architecture)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> list[dict]:
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def variants() -> dict[int, list[dict]]:
    """What the compiler made of each kernel, by architecture."""
    running = {architecture: start("variants", architecture) for architecture in ARCHITECTURES}
    return {architecture: finish(process) for architecture, process in running.items()}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_memory_is_within_the_estimate_and_the_device(variants, architecture):
    for report in variants[architecture]:
        assert report["shared"] <= report["estimate"], report["variant"]
        assert report["estimate"] <= report["limit"], report["variant"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_suffice(variants, architecture):
    for report in variants[architecture]:
        assert report["stack"] <= STACK_LIMIT, report["variant"]


@pytest.mark.slow
def test_hopper_multiplies_by_warpgroups(variants):
    for report in variants[90]:
        if report["wants_warpgroups"]:
            assert report["warpgroup_products"] > 0, report["variant"]


@pytest.mark.slow
def test_lengths_batches_and_masks_share_a_kernel():
    first, second = finish(start("calls", 90))
    assert set(first.values()) == {1}
    assert set(second.values()) == {2}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_products_are_in_tf32_only_on_request(architecture):
    ieee, tf32 = finish(start("products", architecture))
    assert set(ieee.values()) == {False}
    assert set(tf32.values()) == {True}


@pytest.mark.slow
def test_what_is_launched_without_asking_triton_is_what_triton_would_launch():
    (report,) = finish(start("layouts", 90))
    assert report["variants"] >= 18
    assert report["kernels of one variant"] == 1
