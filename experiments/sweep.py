"""The sweeps of the speed-up: which patterns are measured at which sizes, and by whom."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from experiments.baselines import Baseline
from experiments.measure import Case, Method
from experiments.pattern_families import CAUSAL, FULL, Size, parse_family
from experiments.record import OURS
from experiments.timing import Clock

GROWING = ("butterfly()", "local(256)")


@dataclass(frozen=True)
class Settings(Method):
    """What is measured, and how.

    lengths:   at which patterns are swept over densities, with `batch` sequences of `heads` heads
    growth:    over which a few patterns are swept, with one sequence of `growth_heads` heads
    dense_limit, standard_limit: the longest of `growth` for full masks, and for materialised
    attention
    """

    lengths: tuple[int, ...]
    growth: tuple[int, ...]
    batch: int
    heads: int
    growth_heads: int
    head_dim: int
    block_size: int
    patterns: tuple[str, ...]
    densities: tuple[float, ...]
    baselines: tuple[str, ...]
    dense_limit: int
    standard_limit: int


DEFAULTS = {
    "cpu": {
        "dtype": "fp32",
        "lengths": (4096,),
        "growth": (1024, 4096, 16384, 65536),
        "batch": 1,
        "heads": 4,
        "growth_heads": 1,
        "head_dim": 64,
        "block_size": 64,
        "baselines": (Baseline.SDPA,),
        "clock": Clock.CPU,
        "dense_limit": 8192,
        "standard_limit": 4096,
        "budget_ms": 400.0,
    },
    "cuda": {
        "dtype": "bf16",
        "lengths": (8192, 16384),
        "growth": (1024, 4096, 16384, 65536),
        "batch": 2,
        "heads": 16,
        "growth_heads": 16,
        "head_dim": 128,
        "block_size": 128,
        "baselines": (Baseline.FLASH, Baseline.CUDNN, Baseline.FLEX),
        "clock": Clock.GRAPH,
        "dense_limit": 65536,
        "standard_limit": 16384,
        "budget_ms": 60.0,
    },
}
COMMON = {
    "backend": "auto",
    "patterns": ("butterfly", "local", "strided", "random", "fading_memory"),
    "densities": (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32),
}
QUICK = {
    "lengths": (1024,),
    "growth": (1024, 2048),
    "densities": (1 / 2, 1 / 8),
    "budget_ms": 20.0,
}


def plan(settings: Settings, say: Callable[[str], None]) -> Iterator[Case]:
    """Every case of the settings, its mask compiled; says what it has to leave out."""
    for seq_len in settings.lengths:
        yield from density_cases(settings, seq_len, say)
    for seq_len in settings.growth:
        yield from length_cases(settings, seq_len)


def density_cases(settings: Settings, seq_len: int, say: Callable[[str], None]) -> Iterator[Case]:
    """Every pattern at every density; the full mask, to which others are compared, first."""
    size = Size(seq_len, settings.block_size, torch.device(settings.device))
    sparse_baselines = [baseline for baseline in settings.baselines if baseline == Baseline.FLEX]
    for family in (FULL, CAUSAL, *map(parse_family, settings.patterns)):
        candidates, missed = family.choose(size, settings.densities)
        for density in missed:
            say(f"left out: no {family.name} of density {density:.3g} at N = {seq_len}")
        for problem in candidates:
            baselines = settings.baselines if problem.dense else sparse_baselines
            yield Case(
                suite="density",
                family=family.name,
                problem=problem,
                batch=settings.batch,
                heads=settings.heads,
                seq_len=seq_len,
                head_dim=settings.head_dim,
                block_size=settings.block_size,
                implementations=(OURS, *baselines),
            )


def length_cases(settings: Settings, seq_len: int) -> Iterator[Case]:
    """The growing patterns at one length, and full masks while they are short enough."""
    size = Size(seq_len, settings.block_size, torch.device(settings.device))
    implementations = dict.fromkeys(GROWING, (OURS,))
    if seq_len <= settings.dense_limit:
        # FlexAttention would be compiled anew for every length, longer than all the rest takes.
        dense_baselines = [
            baseline for baseline in settings.baselines if baseline != Baseline.FLEX
        ]
        standard = [Baseline.STANDARD] if seq_len <= settings.standard_limit else []
        implementations = {"full": (OURS, *dense_baselines, *standard)} | implementations
    for name, who in implementations.items():
        family = FULL if name == "full" else parse_family(name)
        for problem in family.choose(size, ())[0]:
            yield Case(
                suite="length",
                family=name,
                problem=problem,
                batch=1,
                heads=settings.growth_heads,
                seq_len=seq_len,
                head_dim=settings.head_dim,
                block_size=settings.block_size,
                implementations=who,
            )
