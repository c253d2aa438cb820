"""Which calls the Triton kernels refuse, and what they say."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import masks
from sparseflash.backends import triton as triton_backend
from sparseflash.backends.triton import configs
from tests.helpers.calls import mask_that_covers, spec_of

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
MASK = masks.full()(64, 64)
QUERY = torch.empty(1, 2, 64, 64, dtype=torch.float16, device=DEVICE)
SPEC = spec_of(QUERY, QUERY, MASK)


def test_serves_a_plain_call():
    assert triton_backend.why_not(SPEC, MASK) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float64}, ["dtype", "torch.float64", "torch.bfloat16"]),
        ({"head_dim": 7}, ["head_dim", "7", "8 to 256"]),
        ({"head_dim": 257}, ["head_dim", "257", "8 to 256"]),
        ({"block_size": (64, 48)}, ["block_size", "(64, 48)", "(16, 32, 64, 128, 256, 512)"]),
        ({"device": torch.device("meta")}, ["device", "meta", "cuda"]),
        ({"batch": 70000}, ["batch", "70000", "65535"]),
        ({"heads": 70000}, ["heads", "70000", "65535"]),
    ],
)
def test_says_what_came_and_what_is_allowed(change, words):
    (reason,) = triton_backend.why_not(replace(SPEC, **change), MASK)
    assert all(word in reason for word in words)


@pytest.mark.interpret
def test_interpreter_refuses_bfloat16():
    (reason,) = triton_backend.why_not(replace(SPEC, dtype=torch.bfloat16), MASK)
    assert "bfloat16" in reason


def test_refuses_devices_that_are_too_old(monkeypatch):
    monkeypatch.setattr(configs, "limits", lambda device: (75, 65536))
    (reason,) = triton_backend.why_not(SPEC, MASK)
    assert "7.5" in reason
    assert "8.0" in reason


def test_refuses_calls_that_fit_no_configuration(monkeypatch):
    monkeypatch.setattr(configs, "limits", lambda device: (80, 20000))
    reasons = triton_backend.why_not(replace(SPEC, head_dim=256, block_size=(16, 16)), MASK)
    assert [reason.split()[0] for reason in reasons] == list(configs.PASSES)
    assert all("20000" in reason for reason in reasons)


@pytest.mark.parametrize("memory", [101376, 166912, 232448])
@pytest.mark.parametrize("which", configs.PASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_configurations_fit_the_device(memory, which, dtype):
    for head_dim in (8, 64, 80, 128, 256):
        for block_size in [(16, 16), (16, 256), (64, 32), (64, 64), (512, 512)]:
            for architecture in (80, 90):
                facts = (which, architecture, memory, dtype, head_dim, block_size)
                for tma in (False, True):
                    config = configs.choose(*facts, tma)
                    assert configs.shared_memory(config, which, dtype, head_dim) <= memory
                    assert configs.divides(config, block_size)
                    assert tma or not config.tma


def test_small_blocks_that_fill_large_tiles_are_put_together():
    spec = replace(SPEC, device=torch.device("cuda"), block_size=(16, 32))

    def side(coverage, **change):
        return triton_backend.block_size_for(replace(spec, **change), mask_that_covers(coverage))

    assert [side(coverage) for coverage in (0.1, 0.95, None)] == [(16, 32), (64, 64), (16, 32)]
    assert side(0.95, q_len=1) == (16, 32)
    assert side(0.95, block_size=(128, 32)) == (128, 64)
    assert side(0.95, block_size=(64, 64)) == (64, 64)


def test_imports_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from sparseflash.backends import triton as triton_backend
assert triton_backend.why_not(None, None) == ["triton is not installed"]
"""
    subprocess.run([sys.executable, "-c", program], check=True)
