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
