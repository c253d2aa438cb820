"""The named suites of the benchmark, with their problems and baselines."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import torch

import masks
from experiments.baselines import STANDARD_PARTS
from experiments.cli import Baseline, Suite
from experiments.measure import Case
from experiments.pattern_families import CAUSAL, FULL, Problem, Single, Size, parse_family
from experiments.record import is_ours
from experiments.settings import DensityMethod, LandscapeMethod, Method
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
# Those of lists of blocks, and the smallest blocks that they take.
SPARSE_BASELINES = {
    Baseline.FLASH4: 128,
    Baseline.FLEX: 128,
    Baseline.CUDNN_BSA: 64,
    Baseline.CUDNN_FLEX: 16,
    Baseline.FLASHINFER: 16,
}
LONGEST_MATERIALISED = 4096
GROWTH = (1024, 4096, 16_384, 65_536, 262_144)
LONGEST_DENSE = 65_536
PARTS_DROPOUT = 0.1


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
        """A case of this size; the pattern of `family` is compiled for a GPU."""
        (problem,), _ = family.choose(self.size(block_size), ())
        return self.of(suite, family.name, problem, block_size, implementations)

    def of(self, suite: str, family: str, problem: Problem, block_size: int, names) -> Case:
        """A case of this size and a compiled mask, for the implementations `names`."""
        facts = {"problem": problem, "block_size": block_size, "implementations": names}
        return Case(suite=suite, family=family, **facts, **asdict(self))


def dense(ours: tuple[str, ...]) -> Iterator[Case]:
    """Full and causal masks with 32,768 tokens in total, and every dense baseline."""
    for heads, head_dim in MODELS:
        for seq_len in (128, 512, 2048, 8192, 32_768):
            shape = Shape(TOKENS // seq_len, heads, seq_len, head_dim)
            for family in (FULL, CAUSAL):
                implementations = (
                    *ours,
                    Baseline.FLASH,
                    Baseline.CUDNN,
                    Baseline.FLASH4,
                    Baseline.FLEX,
                    Baseline.CUDNN_FLEX,
                )
                yield shape.case("dense", family, BLOCK, implementations)


def sparse(ours: tuple[str, ...]) -> Iterator[Case]:
    """Masks of full blocks, which every block-sparse baseline can compute."""
    for heads, head_dim in MODELS:
        for seq_len in (1024, 4096, 16_384, 32_768):
            shape = Shape(TOKENS // seq_len, heads, seq_len, head_dim)
            implementations = (*ours, *SPARSE_BASELINES)
            for name, pattern in of_full_blocks(seq_len, BLOCK).items():
                yield shape.case("sparse", Single(name, pattern), BLOCK, implementations)


def small_blocks(ours: tuple[str, ...]) -> Iterator[Case]:
    """Masks of full blocks of 128, 64, 32 and 16 tokens a side.

    Masks with blocks of 128 also have the densities of the butterflies with smaller blocks,
    because rows with fewer blocks are slower whatever their size.
    """
    shape = Shape(2, 16, 16_384, 128)
    for side in (128, 64, 32, 16):
        patterns = of_full_blocks(shape.seq_len, side)
        chosen = {name: patterns[name] for name in ("full", "random 1/16", "butterfly", "band")}
        if side == BLOCK:
            chosen |= {f"random 1/{n}": at_random(n, shape.seq_len, side) for n in (32, 64, 128)}
        baselines = [name for name, least in SPARSE_BASELINES.items() if side >= least]
        for name, pattern in chosen.items():
            yield shape.case("small-blocks", Single(name, pattern), side, (*ours, *baselines))


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


def density_cases(method: DensityMethod, log: Callable[[str], None]) -> Iterator[Case]:
    """Every pattern at every density; the full mask, to which others are compared, first."""
    flex = tuple(name for name in method.baselines if name == Baseline.FLEX)
    for seq_len in method.lengths:
        size = Size(seq_len, method.block_size, torch.device(method.device))
        shape = Shape(method.batch, method.heads, seq_len, method.head_dim)
        for family in (FULL, *map(parse_family, method.patterns)):
            problems, missed = family.choose(size, method.densities)
            for density in missed:
                log(f"left out: no {family.name} of density {density:.3g} at N = {seq_len}")
            for problem in problems:
                names = (*method.ours, *(method.baselines if problem.dense else flex))
                yield shape.of("density", family.name, problem, method.block_size, names)


def length_cases(method: DensityMethod) -> Iterator[Case]:
    """The growing patterns at each length, and full masks while they are short enough."""
    # FlexAttention would be compiled again for every length, which takes too long.
    dense = tuple(name for name in method.baselines if name != Baseline.FLEX)
    for seq_len in method.growth:
        size = Size(seq_len, method.block_size, torch.device(method.device))
        shape = Shape(1, method.growth_heads, seq_len, method.head_dim)
        names = dict.fromkeys(method.growing, method.ours)
        if seq_len <= method.dense_limit:
            standard = (Baseline.STANDARD,) if seq_len <= method.standard_limit else ()
            names = {"full": (*method.ours, *dense, *standard)} | names
        yield from _cases_at("length", size, shape, names)


def _cases_at(
    suite: str, size: Size, shape: Shape, names: Mapping[str, tuple[str, ...]]
) -> Iterator[Case]:
    """The cases of patterns without a parameter, each with the implementations of its name."""
    for name, implementations in names.items():
        for problem in parse_family(name).choose(size, ())[0]:
            yield shape.of(suite, name, problem, size.block_size, implementations)


def landscape_cases(method: LandscapeMethod, ours: tuple[str, ...]) -> Iterator[Case]:
    """All implementations over lengths, and the parts of standard attention.

    Full masks are measured with every implementation, patterns only with ours.
    """
    device = torch.device(method.device)
    known = (Baseline.STANDARD, Baseline.SDPA, Baseline.FLASH4, Baseline.FLEX)
    exact = tuple(name for name in known if method.device in name.devices)
    approximate = tuple(name for name in Baseline if name.approximate)
    for seq_len in method.growth:
        size = Size(seq_len, method.block_size, device)
        shape = Shape(method.batch, method.heads, seq_len, method.head_dim)
        names = {"full": (*ours, *exact, *approximate)} | dict.fromkeys(method.patterns, ours)
        yield from _cases_at("landscape", size, shape, names)
    parts = tuple(f"{Baseline.STANDARD}:{part}" for part in STANDARD_PARTS)
    for batch, heads, seq_len in method.parts if method.padding == 0 else ():
        shape = Shape(batch, heads, seq_len, method.head_dim)
        (problem,), _ = CAUSAL.choose(Size(seq_len, method.block_size, device), ())
        names = (*ours, Baseline.STANDARD, *parts)
        case = shape.of("parts", "causal", problem, method.block_size, names)
        yield replace(case, dropout_p=PARTS_DROPOUT, backward=False)


SUITES: dict[Suite, Callable[[tuple[str, ...]], Iterator[Case]]] = {
    Suite.DENSE: dense,
    Suite.SPARSE: sparse,
    Suite.SMALL_BLOCKS: small_blocks,
    Suite.DECODE: decode,
    Suite.LRA: lra,
    Suite.MEMORY: memory,
}


def planned(
    suite: Suite,
    method: Method,
    ours: tuple[str, ...],
    baselines: tuple[str, ...] | None,
    log: Callable[[str], None],
) -> Iterator[Case]:
    """The cases of a suite, with compiled masks and the chosen baselines.

    Args:
        suite: Name of the suite.
        method: The method of measurement: a `DensityMethod` for the suite "speedup", a
            `LandscapeMethod` for "landscape".
        ours: Names of our implementations.
        baselines: Names of baselines; None for those of the suite.
        log: Called with descriptions of omitted cases.
    """
    if isinstance(method, DensityMethod):
        yield from density_cases(method, log)
        yield from length_cases(method)
        return
    landscape = isinstance(method, LandscapeMethod)
    for case in landscape_cases(method, ours) if landscape else SUITES[suite](ours):
        names = case.implementations
        known = (n for n in names if baselines is None or n.partition(":")[0] in baselines)
        chosen = (*filter(is_ours, names), *(n for n in known if not is_ours(n)))
        if case.suite == "parts" and Baseline.STANDARD not in chosen:
            continue  # there would be no parts
        yield replace(case, implementations=chosen)
