import json

import pytest
import torch

from experiments import overhead


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(overhead, "RUNS", 3)
    monkeypatch.setattr(overhead, "CALLS", 5)


def test_every_call_is_measured_and_recorded(tmp_path):
    overhead.main(heads=1, seq_len=64, head_dim=16, output=tmp_path)
    (path,) = tmp_path.glob("overhead-*.json")
    rows = json.loads(path.read_text())["rows"]
    calls = ["forward", "forward, gradients wanted", "backward", "one query"]
    assert [row["call"] for row in rows] == calls
    for row in rows:
        assert 0 < row["total_us"] <= row["median_us"]
        assert row["kernels_us"] > 0
        assert row["overhead_us"] == pytest.approx(row["total_us"] - row["kernels_us"])


@pytest.mark.gpu
def test_launches_are_counted():
    x = torch.zeros(8, device="cuda")
    assert overhead.count_launches(lambda: x.add_(1).add_(1)) == 2
