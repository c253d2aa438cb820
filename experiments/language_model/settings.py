"""The settings of `train`. This module does not import torch, so that `--help` is quick."""

import json
from dataclasses import asdict, dataclass
from math import inf
from typing import Literal

BYTES = 256  # size of the vocabulary if tokens are bytes
EVERY = 500  # steps between validations, by default


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a model.

    Attributes:
        layers, dim, heads: As in GPT-2. The feed-forward network is four times as wide as dim.
        context: Largest number of tokens of a sequence.
        attention: Attention of the layers, repeated cyclically: "sdpa" (dense, by torch), "flash"
            (dense, ours), or texts of patterns for the heads, separated by ";" and repeated
            cyclically. All are causal.
        positions: "rotary" rotates queries and keys, "learned" is added to the embeddings.
        block_size: Side of a block of patterns, in tokens.
        dropout: Probability of dropout on embeddings and on the output of each sublayer.
        vocabulary: Number of tokens in the vocabulary.
    """

    layers: int
    dim: int
    heads: int
    context: int
    attention: tuple[str, ...] = ("flash",)
    positions: Literal["rotary", "learned"] = "rotary"
    block_size: int = 128
    dropout: float = 0.0
    vocabulary: int = BYTES


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that determine the result of a run.

    Attributes:
        model: See ModelConfig.
        steps: Number of steps of the whole run.
        step_tokens: Number of tokens of a step, a multiple of the context.
        learning_rate, warmup_steps: Learning rate of AdamW, with cosine decay after the warm-up.
        seed: Seed of weights, of the sequences that are read, and of dropout.
        data: SHA-256 of the splits.
        precision, compiled: As in the command line.
        short_context: Length of the sequences in the first `short_steps` steps, in tokens
            (sequence-length warm-up, Li et al. 2022). All steps have equally many tokens. None for
            the context.
        short_steps: Number of these steps, fewer than `steps`.

    Raises:
        ValueError: Sizes do not divide, the learning rate is not positive and finite, the warm-up
            is longer than the run, or no step with the full context remains.
    """

    model: ModelConfig
    steps: int = 4000
    step_tokens: int = 2**17
    learning_rate: float
    warmup_steps: int = 200
    seed: int = 0
    data: dict[str, str]
    precision: str = "bf16-mixed"
    compiled: bool = False
    short_context: int | None = None
    short_steps: int = 0

    def __post_init__(self):
        if self.step_tokens < 1 or self.step_tokens % self.model.context:
            raise ValueError(
                f"step_tokens must be a multiple of the context of {self.model.context} tokens, "
                f"got {self.step_tokens}"
            )
        if not 0 < self.learning_rate < inf:
            raise ValueError(
                f"learning_rate must be positive and finite, got {self.learning_rate}"
            )
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"warmup_steps must be 0 to the {self.steps} steps of the run, got "
                f"{self.warmup_steps}"
            )
        if (self.short_context is None) != (self.short_steps == 0):
            raise ValueError(
                "short_context and short_steps must be given together, got "
                f"{self.short_context} and {self.short_steps}"
            )
        if self.short_context is None:
            return
        context, side = self.model.context, self.model.block_size
        if not 0 < self.short_context < context or context % self.short_context:
            raise ValueError(
                f"short_context must divide the context of {context} tokens and be shorter, got "
                f"{self.short_context}"
            )
        if self.short_context % side:
            raise ValueError(
                f"short_context must be a multiple of the block_size of {side} tokens, got "
                f"{self.short_context}"
            )
        if not 0 < self.short_steps < self.steps:
            raise ValueError(
                f"short_steps must be 1 to {self.steps - 1}, so that steps at the context follow, "
                f"got {self.short_steps}"
            )

    def context_of(self, step: int) -> int:
        """Length of the sequences of a step, in tokens; steps count from 0."""
        if self.short_context is not None and step < self.short_steps:
            return self.short_context
        return self.model.context

    def facts(self) -> dict:
        """The settings as values of JSON."""
        return json.loads(json.dumps(asdict(self)))
