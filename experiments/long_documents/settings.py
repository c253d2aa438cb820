"""The settings of `tune`. This module does not import torch, so that `--help` is quick."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The settings that determine the result of a run.

    Attributes:
        encoder: Folder of a model and its tokenizer, saved by transformers.
        tokens: Number of tokens that are read of a document.
        attention: As in experiments.pretraining.Case.
        steps: Number of steps of the whole run.
        batch_size: Number of documents of a step.
        every: Number of steps between validations. The best one of them is tested.
        learning_rate, warmup_steps: Learning rate of AdamW, with linear decay after the warm-up.
        seed: Seed of the new layer, of the order of documents and of dropout.
    """

    encoder: str
    tokens: int
    attention: str = "ours"
    steps: int = 4000
    batch_size: int = 16
    every: int = 500
    learning_rate: float = 2e-5
    warmup_steps: int = 200
    seed: int = 0

    def __post_init__(self):
        for name in ("tokens", "steps", "batch_size", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"warmup_steps must be 0 to the {self.steps} steps of the run, got "
                f"{self.warmup_steps}"
            )
