import json

import pytest
import torch
from typer import BadParameter

from experiments.instruments import lab as instrument
from masks import parse
from sparseflash import lab


def test_a_profile_of_a_model_is_timed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(instrument, "PATTERNS", ("local(32)", "butterfly()"))
    profiles = []
    measured = lab.profile

    def profile(*arguments, **options):
        profiles.append(measured(*arguments, **options))
        return profiles[-1]

    monkeypatch.setattr(lab, "profile", profile)
    sizes = {"layers": 3, "heads": 4, "kv_heads": 2, "seq_len": 128, "head_dim": 16}
    instrument.main(**sizes, output=tmp_path)
    (path,) = tmp_path.glob("lab-*.json")
    found = json.loads(path.read_text())
    (row,) = found["rows"]
    assert found["patterns"] == ["local(32)", "butterfly()"]
    assert (row["layers"], row["heads"], row["kv_heads"], row["tokens"]) == (3, 4, 2, 128)
    assert row["patterns"] == 2
    assert row["scores_gb"] == 4 * 128**2 * (2 if torch.cuda.is_available() else 4) / 1e9
    assert 0 < row["first_layer_seconds"] < row["seconds"]
    assert 0 < row["layer_seconds"] < row["seconds"]
    assert "first layer" in capsys.readouterr().out
    # Every head of every layer, by every criterion, under the model's own causal mask.
    (of_model,) = profiles
    assert of_model.patterns == ("causal()", "local(32)", "butterfly()")
    assert of_model.recall.shape == of_model.loss.shape == (3, 4, 3)
    assert of_model.loss[..., 1].abs().min() > 0
    instrument.main(**sizes | {"layers": 1}, loss=False, output=tmp_path)
    assert profiles[-1].loss is None
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["layer_seconds"], row["loss"]) == (None, False)


def test_candidates_are_patterns_of_any_length():
    assert len(instrument.PATTERNS) == 8
    for text in instrument.PATTERNS:
        assert 0 < parse(text)(512).density <= 1


def test_heads_that_do_not_share_keys_equally_are_named():
    with pytest.raises(BadParameter, match="multiple of --kv-heads, got 3 and 2"):
        instrument.main(heads=3, kv_heads=2)
