"""Model sizes and contexts by name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A size of model at a context, both as in ModelConfig, and its learning rate."""

    layers: int
    dim: int
    heads: int
    learning_rate: float
    context: int


# Of bytes, which need few embeddings: 124M are one layer more than GPT-2 small, and wider ones.
SIZES = {"tiny": (2, 64, 2, 3e-3), "25m": (8, 512, 8, 1e-3), "124m": (13, 896, 14, 6e-4)}
CONTEXTS = (1, 4, 16, 64)  # thousands of tokens
PRESETS = {
    f"{size}-{thousands}k": Preset(*values, context=1024 * thousands)
    for size, values in SIZES.items()
    for thousands in CONTEXTS
}
