"""Families of patterns with one parameter, and their masks closest to requested densities."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

import masks
from masks import BlockMask, Pattern
from masks._parse import defined_in

Predicate = Callable[[Tensor, Tensor], Tensor]

# A mask may differ from a requested density by this factor: half of an octave.
TOLERANCE = math.sqrt(2)


@dataclass(frozen=True)
class Size:
    """Lengths in tokens and the device for which masks are compiled; q_len if not seq_len."""

    seq_len: int
    block_size: int
    device: torch.device
    q_len: int | None = None

    def compile(self, pattern: Pattern) -> BlockMask:
        lengths = (self.q_len or self.seq_len, self.seq_len)
        return pattern(lengths, block_size=self.block_size, device=self.device)


@dataclass(frozen=True)
class Problem:
    """A compiled mask, its name in tables, and the forms for baselines.

    dense: "full" or "causal" if the mask is one of these
    predicate: (q, k) -> bool, with which FlexAttention computes partial blocks; without it,
        FlexAttention looks pairs up
    """

    label: str
    mask: BlockMask
    dense: str | None = None
    predicate: Predicate | None = None

    @property
    def density(self) -> float:
        return self.mask.density


@dataclass(frozen=True)
class Family:
    """A pattern with one parameter; candidates(size, densities) are masks near those densities."""

    name: str
    candidates: Callable[[Size, Sequence[float]], list[Problem]]

    def choose(self, size: Size, densities: Sequence[float]) -> tuple[list[Problem], list[float]]:
        """(the mask closest to each density, each once; the densities without a mask)"""
        candidates = self.candidates(size, densities)
        chosen, missed = {}, []
        for density in densities:
            nearest = min(candidates, key=lambda problem: _ratio(problem.density, density))
            if _ratio(nearest.density, density) > TOLERANCE:
                missed.append(density)
            else:
                chosen[nearest.label] = nearest
        return list(chosen.values()), missed


@dataclass(frozen=True)
class Single:
    """A pattern without a parameter, which is measured once, at its own density."""

    name: str
    pattern: Pattern
    dense: str | None = None
    predicate: Predicate | None = None

    def choose(self, size: Size, densities: Sequence[float]) -> tuple[list[Problem], list[float]]:
        mask = size.compile(self.pattern)
        return [Problem(self.name, mask, self.dense, self.predicate)], []


def _ratio(density: float, requested: float) -> float:
    return max(density / requested, requested / density)


def family_by_length(
    name: str,
    make: Callable[[int], Pattern],
    per_octave: int = 1,
    predicate: Callable[[torch.Tensor], Predicate] | None = None,
) -> Family:
    """The family make(n): multiples n of the block, in tokens, `per_octave` to a factor of 2."""

    def candidates(size, densities):
        return [problem(size, tokens) for tokens in lengths(size)]

    def lengths(size):
        steps = range(int(per_octave * math.log2(size.seq_len / size.block_size)))
        return sorted({size.block_size * round(2 ** (step / per_octave)) for step in steps})

    def problem(size, tokens):
        of_tokens = predicate(torch.tensor(tokens, device=size.device)) if predicate else None
        mask = size.compile(make(tokens))
        return Problem(f"{name}({tokens})", mask, predicate=of_tokens)

    return Family(name, candidates)


def fading_memory(window: int) -> Pattern:
    """A causal pattern whose density falls with distance; `window` in tokens.

    A query attends the last `window` tokens, every second group of 64 in the `window` tokens
    before them, every fourth group in the 2 window before these, and so on.
    """
    return masks.pattern(fading(window))


def fading(window: int | torch.Tensor) -> Predicate:
    def attends(q, k):
        octave = ((q - k).clamp(min=1) / window).log2().ceil().clamp(min=0).int()
        return (q >= k) & (k // 64 % (1 << octave) == 0)

    return attends


def _butterfly_candidates(size: Size, densities: Sequence[float]) -> list[Problem]:
    """Butterflies of every stride, also with coarser blocks for higher densities."""
    candidates = []
    for side in (s for s in (1, 2, 4) if s * size.block_size <= 256):
        coarse = replace(size, block_size=side * size.block_size)
        for step in range(int(math.log2(size.seq_len / coarse.block_size))):
            label = f"butterfly({2**step})" + f" of {coarse.block_size}" * (side > 1)
            mask = coarse.compile(masks.butterfly(max_stride=2**step))
            candidates.append(Problem(label, mask.reblock(size.block_size)))
    return candidates


def _strided_candidates(size: Size, densities: Sequence[float]) -> list[Problem]:
    steps = range(int(4 * math.log2(max(size.seq_len // size.block_size, 1))) + 1)
    strides = sorted({round(2 ** (step / 4)) for step in steps})
    return [Problem(f"strided({n})", size.compile(masks.strided(n))) for n in strides]


def _random_candidates(size: Size, densities: Sequence[float]) -> list[Problem]:
    return [Problem(f"random({s:.3g})", size.compile(masks.random(s, seed=0))) for s in densities]


FULL = Single("full", masks.full(), dense="full")
CAUSAL = Single("causal", masks.causal(), dense="causal", predicate=lambda q, k: q >= k)
FAMILIES = {
    family.name: family
    for family in (
        Family("butterfly", _butterfly_candidates),
        family_by_length(
            "local", masks.local, 4, predicate=lambda window: lambda q, k: (q - k).abs() <= window
        ),
        Family("strided", _strided_candidates),
        Family("random", _random_candidates),
        family_by_length("fading_memory", fading_memory, predicate=fading),
    )
}


KNOWN: dict[str, Family | Single] = FAMILIES | {single.name: single for single in (FULL, CAUSAL)}


def parse_family(text: str) -> Family | Single:
    """A family by name, `file.py:name` (a Pattern, or a function from a length in tokens to one),
    or an expression.

    Raises ValueError for a text that is none of these.
    """
    if text in KNOWN:
        return KNOWN[text]
    if file := re.fullmatch(r"(.+\.py):(\w+)", text):
        return _from_file(Path(file[1]), file[2])
    return Single(text, masks.parse(text))


def _from_file(path: Path, name: str) -> Family | Single:
    found = defined_in(path, name)
    if isinstance(found, Pattern):
        return Single(name, found)
    if callable(found):
        return family_by_length(name, cast(Callable[[int], Pattern], found))
    raise ValueError(
        f"{path}:{name} must be a Pattern or a function that makes one, got {type(found).__name__}"
    )
