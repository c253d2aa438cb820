"""The named suites of the benchmark: what each of them measures, and whom it compares with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import masks
from experiments.baselines import Baseline
from experiments.measure import Case
from experiments.pattern_families import CAUSAL, FULL, Single, Size
from masks import Pattern

TOKENS = 32_768
MODELS = ((16, 128), (32, 64))  # (heads, head dim)
BLOCK = 128
# Long Range Arena: (batch, heads, seq_len, head dim); the last is Path-X.
LRA = (
    (64, 2, 1024, 32),
    (64, 2, 4096, 32),
    (64, 8, 1024, 64),
    (32, 8, 4096, 64),
    (32, 2, 16384, 64),
)
# A step of decoding: (batch, heads, keys, head dim, heads of keys, queries).
DECODE = (
    (8, 32, 65_536, 128, 8, 1),
    (8, 8, 65_536, 128, 8, 1),
    (1, 32, 65_536, 128, 8, 1),
    (64, 32, 4096, 128, 8, 1),
    (8, 32, 65_536, 64, 8, 1),
    (8, 32, 65_536, 128, 8, 8),
)
LONGEST_MATERIALISED = 4096
GROWTH = (1024, 4096, 16_384, 65_536, 262_144)
LONGEST_DENSE = 65_536


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens; kv_heads and q_len where they are not heads and seq_len."""

    batch: int
    heads: int
    seq_len: int
    head_dim: int
    kv_heads: int | None = None
    q_len: int | None = None

    def size(self, block_size: int) -> Size:
        return Size(self.seq_len, block_size, torch.device("cuda"), self.q_len)

    def case(
        self, suite: str, family: Single, block_size: int, implementations: tuple[str, ...]
    ) -> Case:
        (problem,), _ = family.choose(self.size(block_size), ())
        return Case(
            suite=suite,
            family=family.name,
            problem=problem,
            batch=self.batch,
            heads=self.heads,
            seq_len=self.seq_len,
            head_dim=self.head_dim,
            block_size=block_size,
            implementations=implementations,
            q_len=self.q_len,
            kv_heads=self.kv_heads,
        )


def dense(ours: tuple[str, ...]) -> Iterator[Case]:
    """Full and causal masks, 32,768 tokens in all, against every dense baseline."""
    for heads, head_dim in MODELS:
        for seq_len in (2048, 8192, 32_768):
            shape = Shape(TOKENS // seq_len, heads, seq_len, head_dim)
            for family in (FULL, CAUSAL):
                implementations = (
                    *ours,
                    Baseline.FLASH,
                    Baseline.CUDNN,
                    Baseline.FLASH4,
                    Baseline.FLEX,
                )
                yield shape.case("dense", family, BLOCK, implementations)


def sparse(ours: tuple[str, ...]) -> Iterator[Case]:
    """Masks of full blocks, which every block-sparse baseline computes too."""
    for heads, head_dim in MODELS:
        for seq_len in (16_384, 32_768):
            shape = Shape(TOKENS // seq_len, heads, seq_len, head_dim)
            implementations = (*ours, Baseline.FLASH4, Baseline.FLEX)
            for name, pattern in of_full_blocks(seq_len, BLOCK).items():
                yield shape.case("sparse", Single(name, pattern), BLOCK, implementations)


def small_blocks(ours: tuple[str, ...]) -> Iterator[Case]:
    """Masks of full blocks of 128, 64, 32 and 16 tokens a side.

    Those of 128 are as sparse, too, as the butterflies of the others: rows of fewer blocks are
    slower whatever their size.
    """
    shape = Shape(2, 16, 16_384, 128)
    for side in (128, 64, 32, 16):
        patterns = of_full_blocks(shape.seq_len, side)
        chosen = {name: patterns[name] for name in ("full", "random 1/16", "butterfly", "band")}
        if side == BLOCK:
            chosen |= {f"random 1/{n}": at_random(n, shape.seq_len, side) for n in (32, 64, 128)}
        for name, pattern in chosen.items():
            yield shape.case("small-blocks", Single(name, pattern), side, ours)


def decode(ours: tuple[str, ...]) -> Iterator[Case]:
    """Few queries against long caches of keys and values, forward only."""
    for sizes in DECODE:
        shape = Shape(*sizes)
        yield shape.case(
            "decode", FULL, BLOCK, (*ours, Baseline.FLASH, Baseline.CUDNN, Baseline.FLEX)
        )
        for share in (4, 8, 16):
            family = Single(f"random 1/{share}", masks.random(1 / share))
            yield shape.case("decode", family, BLOCK, (*ours, Baseline.FLEX))


def lra(ours: tuple[str, ...]) -> Iterator[Case]:
    """The sizes of Long Range Arena: many short sequences of small heads."""
    for sizes in LRA:
        shape = Shape(*sizes)
        materialised = (Baseline.STANDARD,) if shape.seq_len <= LONGEST_MATERIALISED else ()
        implementations = (*ours, Baseline.FLASH, Baseline.CUDNN, *materialised)
        yield shape.case("lra", FULL, BLOCK, implementations)
        for name in ("butterfly", "random 1/4", "band"):
            pattern = of_full_blocks(shape.seq_len, BLOCK)[name]
            yield shape.case("lra", Single(name, pattern), BLOCK, (*ours, Baseline.FLEX))


def memory(ours: tuple[str, ...]) -> Iterator[Case]:
    """One sequence that grows, and the memory that it takes."""
    for seq_len in GROWTH:
        shape = Shape(1, 16, seq_len, 128)
        materialised = (Baseline.STANDARD,) if seq_len <= LONGEST_MATERIALISED else ()
        if seq_len <= LONGEST_DENSE:
            implementations = (*ours, Baseline.FLASH, Baseline.CUDNN, *materialised)
            yield shape.case("memory", FULL, BLOCK, implementations)
        for name in ("butterfly", "band"):
            pattern = of_full_blocks(seq_len, BLOCK)[name]
            yield shape.case("memory", Single(name, pattern), BLOCK, ours)


def of_full_blocks(seq_len: int, side: int) -> dict[str, Pattern]:
    """Patterns without partial blocks; bands reach 512 tokens."""
    reach = 512 // side
    band = masks.block_pattern(lambda i, j: (i - j).abs() <= reach)
    edges = masks.block_pattern(lambda i, j: (i < max(1, reach // 4)) | (j < max(1, reach // 4)))
    return {
        "full": masks.full(),
        **{f"random 1/{n}": at_random(n, seq_len, side) for n in (4, 16, 32)},
        "butterfly": masks.butterfly(),
        "band": band,
        "band and edges": band | edges,
        "strided": masks.strided(8),
    }


def at_random(share: int, seq_len: int, side: int) -> Pattern:
    """One of `share` blocks, and the diagonal."""
    return masks.random(1 / share) | masks.strided(seq_len // side)


SUITES: dict[str, Callable[[tuple[str, ...]], Iterator[Case]]] = {
    "dense": dense,
    "sparse": sparse,
    "small-blocks": small_blocks,
    "decode": decode,
    "lra": lra,
    "memory": memory,
}
