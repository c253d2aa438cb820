import json

import pytest
import torch
from matplotlib.image import imread
from torch import nn

import masks
from sparseflash import lab

PATTERNS = ["local(9)", "longformer(8, 3)"]


def tensors(layers: int, heads: int = 2, kv_heads: int = 1, tokens: int = 80):
    q = [torch.randn(2, heads, tokens, 16) for _ in range(layers)]
    k, v = ([2 * torch.randn(2, kv_heads, tokens, 16) for _ in range(layers)] for _ in range(2))
    return list(zip(q, k, v, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_recall_and_error_are_those_of_dense_attention(causal):
    source = tensors(3)
    found = lab.profile(source, PATTERNS, causal=causal)
    assert found.patterns == ("causal()" if causal else "full()", *PATTERNS)
    assert found.layers == ("layer 0", "layer 1", "layer 2")
    own = torch.ones(80, 80, dtype=torch.bool)
    own = own.tril() if causal else own
    for layer, (q, k, v) in enumerate(source):
        k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
        scores = (q.double() @ k.mT / 4).masked_fill(~own, -torch.inf)
        p = scores.softmax(-1)
        for number, text in enumerate(PATTERNS, 1):
            inside = masks.parse(text)(80, 16).to_dense()
            recall = (p * inside).sum(-1).mean((0, 2))
            assert torch.allclose(found.recall[layer, :, number], recall, atol=1e-5)
            sparse = scores.masked_fill(~inside, -torch.inf).softmax(-1) @ v
            dense = p @ v
            error = (
                (sparse - dense).square().sum((0, 2, 3)) / dense.square().sum((0, 2, 3))
            ).sqrt()
            assert torch.allclose(found.error[layer, :, number], error, atol=1e-4)
    assert (found.recall[..., 0] == 1).all()
    assert (found.error[..., 0] == 0).all()
    assert found.loss is None
    assert (found.measured_ms > 0).all()
    assert torch.equal(found.predicted_ms, found.measured_ms[0] * found.density / found.density[0])


def test_predicted_times_are_shares_of_the_time_of_the_models_own_mask():
    """Of the causal mask in blocks of 128: 3 of 4 blocks."""
    found = lab.profile([tuple(torch.randn(3, 1, 1, 256, 16))], ["local(0)"], causal=True)
    assert found.density.tolist() == [0.75, 0.5]
    assert found.predicted_ms.tolist() == pytest.approx(
        [float(found.measured_ms[0]), float(found.measured_ms[0]) * 2 / 3]
    )


def test_rows_are_ranked_by_recall_and_name_the_worst_head():
    q, k, v = tensors(1)[0]
    q[:, 1], k[:] = 0, 0  # uniform attention everywhere
    q[:, 0] = 0
    found = lab.profile([(q, k, v)], ["local(0)", "full()", "local(30)"])
    ranked = found.ranked()
    assert [row["pattern"] for row in ranked][2:] == ["local(30)", "local(0)"]
    assert ranked[3]["recall"] == pytest.approx(1 / 80)
    assert ranked[0]["recall"] == 1
    assert "local(30)" in str(found)
    json.dumps(found.to_dict())


def test_plot_is_a_picture(tmp_path):
    found = lab.profile(tensors(2), PATTERNS)
    found.plot(tmp_path / "pareto.png")
    assert imread(tmp_path / "pareto.png").std() > 0
    found.plot(tmp_path / "pareto.svg")
    with pytest.raises(ValueError, match=r"path must end in \.png, .*, got .*pareto\.txt"):
        found.plot(tmp_path / "pareto.txt")


def test_progress_counts_layers():
    steps = []
    lab.profile(tensors(2), PATTERNS, progress=lambda *step: steps.append(step))
    assert steps == [(1, 2), (2, 2)]


def test_layers_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="layer 1 beside"):
        lab.profile([*tensors(1), *tensors(1, tokens=64)], PATTERNS)
    with pytest.raises(ValueError, match="patterns"):
        lab.profile(tensors(1), [])
    with pytest.raises(TypeError, match="patterns must be a list"):
        lab.profile(tensors(1), "local(20)")
    with pytest.raises(TypeError, match=r"patterns must be a list of patterns, got local\(20\)"):
        lab.profile(tensors(1), masks.local(20))
    with pytest.raises(TypeError, match="pattern must be a Pattern or its text, got BlockMask"):
        lab.profile(tensors(1), [masks.local(20)(80)])
    with pytest.raises(TypeError, match=r"source\[0\] must be \(query, key, value\), got Tensor"):
        lab.profile(tensors(1)[0], PATTERNS)
    with pytest.raises(TypeError, match=r"source\[0\] must be \(query, key, value\), got 2"):
        lab.profile([tensors(1)[0][:2]], PATTERNS)
    with pytest.raises(TypeError, match=r"source must be a model or a list .*, got int"):
        lab.profile(3, PATTERNS)
    with pytest.raises(ValueError, match="at least 1 layer"):
        lab.profile([], PATTERNS)
    with pytest.raises(ValueError, match=r"Linear cannot be hooked: .* no module of it is named"):
        lab.profile(nn.Linear(3, 3), PATTERNS, torch.randn(3))
    unused = nn.Sequential(nn.Linear(3, 3))
    unused[0].other = nn.MultiheadAttention(4, 1)
    with pytest.raises(ValueError, match=r"Sequential cannot be hooked: .* not run: 0\.other"):
        lab.profile(unused, PATTERNS, torch.randn(3))


def test_patterns_are_timed_beside_one_another(monkeypatch):
    def timed(runs, device, seconds):
        assert seconds == pytest.approx(0.2 * len(runs))
        assert device.type == "cpu"
        for run in runs.values():
            run()
        return {name: float(number) for number, name in enumerate(runs, 4)}

    monkeypatch.setattr("sparseflash.lab.profiler.median_ms", timed)
    found = lab.profile(tensors(1), ["local(20)", "full()"])
    assert found.measured_ms.tolist() == [4, 5, 6]
