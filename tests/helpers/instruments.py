"""What tests of instruments share."""

import shutil

import torch

from experiments import environment, instruments


def pretend_gpu(monkeypatch) -> None:
    """Makes commands find a GPU and the tools that read it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(environment, "environment", lambda device: {})
    monkeypatch.setattr(
        instruments,
        "output_file",
        lambda output, name, device, overwrite: output / f"{name}-gpu.json",
    )
