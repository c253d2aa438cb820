import pytest
import torch

import masks
import sparseflash
from sparseflash import explanation

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(explanation, "SECONDS", 0.01)


def tensors(seq_len=100, kv_heads=2, head_dim=16):
    device = "cuda" if HAS_GPU else "cpu"
    query = torch.randn(1, 2, seq_len, head_dim, device=device)
    return query, *torch.randn(2, 1, kv_heads, seq_len, head_dim, device=device).unbind()


def test_backend_configuration_and_reasons():
    found = sparseflash.explain(masks.causal(), *tensors(), backend="triton", measure=False)
    assert found.backend == "triton"
    assert set(found.configuration) == {"forward", "dq", "dkdv"}
    assert found.measured is found.predicted is found.dense_is_faster is None
    assert "forward: Config(bm=" in str(found)


def test_no_backend_is_no_error():
    found = sparseflash.explain(None, *tensors(head_dim=512), backend="triton")
    assert found.backend is None
    assert "head_dim is 512" in found.why_not["triton"][0]
    assert "not triton: head_dim is 512" in str(found)


def test_times():
    tensors_ = tensors(kv_heads=1)
    mask = masks.causal()(100, 16, tensors_[0].device)
    sinks = torch.zeros(2, device=tensors_[0].device)
    found = sparseflash.explain(mask, *tensors_, dropout_p=0.1, sinks=sinks)
    assert found.density == mask.density
    for times in (found.measured, found.full, found.dense):
        assert times.forward > 0
        assert times.backward > 0
    assert found.predicted.forward == pytest.approx(found.full.forward * mask.density)
    total = found.measured.forward + found.measured.backward
    assert found.dense_is_faster == (found.dense.forward + found.dense.backward < total)
    assert ("dense attention is faster here" in str(found)) == found.dense_is_faster


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="precision must be"):
        sparseflash.explain(None, *tensors(), precision="half")
    with pytest.raises(ValueError, match="sinks must be"):
        sparseflash.explain(None, *tensors(), sinks=torch.zeros(3), measure=False)
