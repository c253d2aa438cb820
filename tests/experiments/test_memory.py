import gc
import weakref

import pytest
import torch

from experiments.memory import peak_bytes

MIB = 2**20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensor(device):
    return torch.ones(MIB, dtype=torch.int8, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_peak_counts_what_is_alive_at_once(device):
    def run():
        for _ in range(3):
            both = [tensor(device), tensor(device)]
            del both
        return tensor(device)

    assert peak_bytes(run, torch.device(device)) == pytest.approx(2 * MIB, rel=0.01)


@pytest.mark.parametrize("device", DEVICES)
def test_peak_is_the_same_every_time_and_counts_nothing_from_before(device):
    before = tensor(device)
    peaks = [peak_bytes(lambda: before + before, torch.device(device)) for _ in range(3)]
    assert peaks == pytest.approx([MIB] * 3, rel=0.01)


class Garbage:
    """An object that only a collection of garbage frees."""

    def __init__(self):
        self.own = self


def test_garbage_from_before_is_not_subtracted(monkeypatch):
    """A call of 4 bytes, in which garbage of 9 bytes is collected, takes 4 bytes, not -5."""
    gpu = {"now": 9, "most": 9}

    def allocate(size):
        gpu["now"] += size
        gpu["most"] = max(gpu["most"], gpu["now"])

    def run():
        gc.collect()
        allocate(4)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: gpu.update(most=gpu["now"])
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: gpu["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: gpu["most"])
    gc.disable()
    try:
        weakref.finalize(Garbage(), allocate, -9)
        assert peak_bytes(run, torch.device("cuda")) == 4
    finally:
        gc.enable()
