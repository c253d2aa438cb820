import sys

import pytest
import torch

from experiments.lra.model import Encoder, EncoderConfig
from experiments.lra.tasks import Shape
from experiments.packaged import BARE, PACKAGED
from tests.helpers.baselines import need_package


@pytest.mark.parametrize("name", PACKAGED)
def test_layers_of_other_packages_take_the_place_of_attention(name):
    need_package(name)
    config = EncoderConfig(attention=[name, "flash"], dim=16, feedforward=32, dropout=0.0)
    encoder = Encoder(config, Shape(seq_len=256, vocabulary=20, classes=2)).eval()
    features, _ = encoder(torch.randint(1, 20, (2, 256)), torch.tensor([256, 100]))
    assert features.shape == (2, 256, 16)
    assert features.isfinite().all()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "linformer", None)
    with pytest.raises(
        ImportError, match=r"linformer is not installed: pip install .*lra-baselines"
    ):
        PACKAGED["linformer"](16, 2, 64)
    monkeypatch.setitem(sys.modules, "routing_transformer", None)
    with pytest.raises(ImportError, match=r"^routing_transformer is not installed"):
        BARE["routing"](torch.zeros(1, 1, 64, 16), 0.0)


def test_chunks_must_fill_the_sequence():
    with pytest.raises(ValueError, match="reformer needs a multiple of 64 tokens, got 100"):
        PACKAGED["reformer"](16, 2, 100)


def test_layers_without_turns_refuse_rotary_positions():
    config = EncoderConfig(attention="linformer", positions="rotary")
    with pytest.raises(ValueError, match="positions 'rotary' cannot be used with 'linformer'"):
        Encoder(config, Shape(seq_len=64, vocabulary=20, classes=2))
