"""Training of a small model on ranks, by our own loop."""

from pathlib import Path

import torch

from experiments.long_context.choices import Precision, Settings
from experiments.long_context.training import Training

SETTINGS = Settings(
    tokens=200,
    pattern="(local(30) | global_tokens(2) | strided(4)) & causal()",
    block_size=16,
    width=32,
    batch=2,
    steps=4,
    warm_up=2,
    precision=Precision.DOUBLE,
    save_every=2,
)


def train(rank: int, settings: Settings, folder: Path) -> list[float]:
    """The losses of a rank."""
    folder.mkdir(exist_ok=True)
    return Training(settings, folder, torch.device("cpu")).run()
