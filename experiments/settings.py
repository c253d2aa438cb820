"""The settings of a measurement, as records store them, and the defaults of each device."""

from dataclasses import dataclass, field
from typing import Any

from experiments.cli import FAMILY_NAMES, Baseline, Clock, Load


@dataclass(frozen=True)
class Method:
    """How cases are measured.

    Attributes:
        device: "cpu" or "cuda".
        dtype: Dtype of the inputs, a key of `measure.DTYPES`.
        directions: The passes, "forward" and "backward".
        clock: See `cli.Clock`.
        timing: See `cli.Load`.
        budget_ms: Time for each rested median, in milliseconds.
        seed: Seed of the random inputs.
        dropout_p: Probability of dropout.
        padding: Share of the keys that are masked in the shortest sequence of a batch.
        limit_ms: An implementation that takes longer in a pass, or cannot run, is not measured on
            longer sequences. None for no limit.
    """

    device: str
    dtype: str
    directions: tuple[str, ...]
    clock: str
    timing: str
    budget_ms: float
    seed: int
    dropout_p: float = field(default=0.0, kw_only=True)
    padding: float = field(default=0.0, kw_only=True)
    limit_ms: float | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class LandscapeMethod(Method):
    """The suite "landscape": all implementations over lengths; parts of standard attention.

    Attributes:
        growth: Sequence lengths, in tokens.
        batch, heads, head_dim: Sizes of these cases.
        block_size: Side of a block, in tokens.
        patterns: Expressions of patterns, which only our implementation computes.
        parts: (batch, heads, tokens) of each case of parts of standard attention.
    """

    growth: tuple[int, ...]
    batch: int
    heads: int
    head_dim: int
    block_size: int
    patterns: tuple[str, ...]
    parts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class DensityMethod(Method):
    """The suite "speedup": patterns over densities, and a few patterns over lengths.

    Attributes:
        lengths: Sequence lengths at which densities are measured, in tokens.
        growth: Sequence lengths at which `growing` patterns are measured, with batch 1, in tokens.
        batch, heads: Sizes of the cases of `lengths`.
        growth_heads: Number of heads in the cases of `growth`.
        head_dim: Head dim.
        block_size: Side of a block, in tokens.
        patterns: Names of families, expressions or `file.py:name`.
        growing: Expressions of patterns.
        densities: Requested densities of each family.
        ours: Names of our implementations.
        baselines: Names of baselines.
        dense_limit: Largest length of `growth` for full masks.
        standard_limit: Largest length of `growth` for materialised attention.
    """

    lengths: tuple[int, ...]
    growth: tuple[int, ...]
    batch: int
    heads: int
    growth_heads: int
    head_dim: int
    block_size: int
    patterns: tuple[str, ...]
    growing: tuple[str, ...]
    densities: tuple[float, ...]
    ours: tuple[str, ...]
    baselines: tuple[str, ...]
    dense_limit: int
    standard_limit: int


PATTERNS = ("causal", "butterfly", "local", "strided", "random", "fading_memory")
DENSITIES = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
GROWTH = (1024, 4096, 16384, 65536)
METHOD_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "fp32", "clock": Clock.CPU, "timing": Load.RESTED, "budget_ms": 400.0},
    "cuda": {"dtype": "bf16", "clock": Clock.GRAPH, "timing": Load.BOTH, "budget_ms": 60.0},
}
GPU_BASELINES = (Baseline.FLASH, Baseline.CUDNN, Baseline.FLEX)
# name: (on a CPU, on a GPU)
DENSITY_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "patterns": (PATTERNS, PATTERNS),
    "densities": (DENSITIES, DENSITIES),
    "lengths": ((4096,), (8192, 16384)),
    "growth": (GROWTH, GROWTH),
    "batch": (1, 2),
    "heads": (4, 16),
    "growth_heads": (1, 16),
    "head_dim": (64, 128),
    "block_size": (64, 128),
    "baselines": ((Baseline.SDPA,), GPU_BASELINES),
    "dense_limit": (8192, 65536),
    "standard_limit": (4096, 16384),
}
LANDSCAPE_PATTERNS = ("butterfly()", "local(256)", "bigbird(3, 1, 1)")
# name: (on a CPU, on a GPU)
LANDSCAPE_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "growth": (tuple(2**n for n in range(7, 13)), tuple(2**n for n in range(7, 17))),
    "batch": (1, 16),
    "heads": (4, 8),
    "head_dim": (64, 64),
    "block_size": (64, 128),
    "patterns": (LANDSCAPE_PATTERNS, LANDSCAPE_PATTERNS),
    # GPT-2's context, and the heads of its small and its medium model.
    "parts": (((1, 12, 1024), (1, 16, 1024)), ((64, 12, 1024), (64, 16, 1024))),
    "limit_ms": (1000.0, 1000.0),
}
# The member of a family whose number of blocks grows about linearly with the length.
GROWING = {"butterfly": "butterfly()", "local": "local(256)"}
QUICK: dict[str, Any] = {
    "lengths": (1024,),
    "growth": (1024, 2048),
    "densities": (1 / 2, 1 / 8),
    "budget_ms": 20.0,
}


def defaults(device: str) -> dict[str, Any]:
    """All defaults for a type of device."""
    density = {name: of[device == "cuda"] for name, of in DENSITY_DEFAULTS.items()}
    return METHOD_DEFAULTS[device] | density


def landscape_method(device: str, given: dict[str, Any]) -> LandscapeMethod:
    """The settings of the suite "landscape": those given, or the defaults of a type of device."""
    own = {name: of[device == "cuda"] for name, of in LANDSCAPE_DEFAULTS.items()}
    return LandscapeMethod(**METHOD_DEFAULTS[device] | own | given)


def density_method(device: str, quick: bool, given: dict[str, Any]) -> DensityMethod:
    """The settings of the suite "speedup": those given, or the defaults of a type of device."""
    fields: dict[str, Any] = defaults(device) | (QUICK if quick else {}) | given
    fields["growing"] = growing_patterns(given.get("patterns", tuple(GROWING)))
    return DensityMethod(**fields)


def growing_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The patterns that are measured over lengths, for given families of patterns.

    Families without a member whose work grows linearly with the length are omitted.
    """
    left_out = {"full", "causal", *FAMILY_NAMES} - GROWING.keys()
    named = [name for name in patterns if name not in left_out and ".py:" not in name]
    return tuple(GROWING.get(name, name) for name in named)
