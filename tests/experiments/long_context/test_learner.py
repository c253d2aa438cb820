"""Training by Lightning's loop against our own, and its resumption."""

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from experiments.long_context.choices import Settings
from experiments.long_context.learner import fit
from tests.helpers import context_training
from tests.helpers.context_training import train as ours

pytestmark = pytest.mark.slow
SETTINGS = replace(context_training.SETTINGS, steps=5, warm_up=3, context=2)


def by_lightning(rank: int, settings: Settings, folder: Path) -> list[float]:
    ranks = str(dist.get_world_size())
    torchrun = {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    torchrun |= {"GROUP_RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    with mock.patch.dict(os.environ, torchrun):
        return fit(settings, folder, torch.device("cpu"))


def test_lightning_trains_as_our_loop_does_and_goes_on_from_a_checkpoint(two_ranks, tmp_path):
    expected = two_ranks.run(ours, SETTINGS, tmp_path / "ours")
    assert two_ranks.run(by_lightning, SETTINGS, tmp_path / "whole") == expected
    first = replace(SETTINGS, steps=3)
    assert two_ranks.run(by_lightning, first, tmp_path / "parts") == [
        each[:3] for each in expected
    ]
    # One that was killed while it was written is no checkpoint.
    (tmp_path / "parts/step=4.ckpt").mkdir()
    rest = two_ranks.run(by_lightning, SETTINGS, tmp_path / "parts")
    assert rest == [each[3:] for each in expected]
    assert two_ranks.run(by_lightning, SETTINGS, tmp_path / "parts") == [[], []]
    for refused in two_ranks.run(by_lightning, replace(SETTINGS, lr=0.5), tmp_path / "parts"):
        assert "other settings: lr 0.001, not 0.5" in refused


def test_ranks_that_share_no_sequence_read_different_ones(two_ranks, tmp_path):
    settings = replace(SETTINGS, context=1, steps=2)
    found = two_ranks.run(by_lightning, settings, tmp_path / "run")
    (expected, _) = two_ranks.run(ours, replace(settings, context=2), tmp_path / "ours")
    for losses in found:
        assert losses == pytest.approx(expected, abs=1e-10)
