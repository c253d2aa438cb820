import pytest
import torch

from experiments import overhead


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(overhead, "REPEATS", 3)
    monkeypatch.setattr(overhead, "CALLS", 5)


def test_overhead_is_printed(capsys):
    overhead.main(heads=1, seq_len=64, head_dim=16)
    assert "overhead: " in capsys.readouterr().out


@pytest.mark.gpu
def test_launches_are_counted():
    x = torch.zeros(8, device="cuda")
    assert overhead.count_launches(lambda: x.add_(1).add_(1)) == 2
