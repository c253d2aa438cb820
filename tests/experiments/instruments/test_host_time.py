import json

import pytest
import torch
import typer

from experiments.instruments import host_time


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(host_time, "RUNS", 3)
    monkeypatch.setattr(host_time, "CALLS", 5)


def test_every_call_is_measured_forward_and_backward(tmp_path, capsys):
    host_time.main(heads=1, seq_len=64, head_dim=16, output=tmp_path)
    (path,) = tmp_path.glob("host-time-*.json")
    rows = json.loads(path.read_text())["rows"]
    calls = ["forward", "forward, gradients wanted", "backward", "one query"]
    assert [row["call"] for row in rows] == calls
    for row in rows:
        assert 0 < row["total_us"] <= row["median_us"]
        assert row["kernels_us"] > 0
        assert (row["engine_us"] > 0) == (row["call"] in calls[1:3])
        parts = row["kernels_us"] + row["engine_us"]
        assert row["overhead_us"] == pytest.approx(row["total_us"] - parts)
    printed = capsys.readouterr().out
    assert all(call in printed for call in calls)


def test_torchs_engine_is_timed_on_a_function_that_computes_nothing():
    query, key, value = leaves = [torch.randn(2, requires_grad=True) for _ in range(3)]
    results = torch.randn(2), torch.randn(1)
    out, lse = host_time.null_function(*results)(*leaves, None, None)
    assert torch.equal(out, results[0])
    assert torch.equal(lse, results[1])
    gradients = torch.autograd.grad(out, leaves, torch.ones(2))
    assert all(map(torch.equal, gradients, (query, key, value)))


@pytest.mark.gpu
def test_launches_are_counted():
    x = torch.zeros(8, device="cuda")
    assert host_time.count_launches(lambda: x.add_(1).add_(1)) == 2


def test_an_unknown_backend_is_an_error(tmp_path):
    with pytest.raises(typer.BadParameter, match="unknown backend 'hoper'; known: auto, cpu"):
        host_time.main(backend="hoper", output=tmp_path)
    assert not list(tmp_path.iterdir())
