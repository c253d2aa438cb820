"""The cases of scaling: masks, sizes and plans, with their predicted times."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy

import masks
from experiments.long_context.baselines import ring_plan
from experiments.long_context.choices import Kind, Way
from masks import BlockMask, Pattern
from sparseflash.distributed import ContextPlan, make_plan
from sparseflash.distributed.model import FETCH_COST
from sparseflash.distributed.simulation import Attention, Demand, Machine, Prediction, predict

BLOCK = 128
TOP_K = "top-k"
NARROW = 1024  # tokens of the second window: less to compute for each token that is gathered
GROUPS = 16  # the most groups of heads that are exchanged one after another if memory is limited
# Memory is limited only if a rank receives more than this share of the keys that it owns.
RECEIVED = 1 / 8


def patterns(window: int, seq_len: int) -> dict[str, Pattern]:
    """The masks of the comparison, by name; `window` and `seq_len` in tokens."""
    local_global = masks.local(window // 2) | masks.global_tokens(list(range(BLOCK)))
    return {
        "window": masks.local((window - 1, 0)),
        f"window of {NARROW}": masks.local((NARROW - 1, 0)),
        "butterfly": masks.butterfly(),
        "local+global": local_global,
        "documents": masks.documents(document_lengths(2 * window, seq_len)),
        "random": masks.random(min(2 * window / seq_len, 1.0), seed=0),
        TOP_K: masks.full(),
    }


def document_lengths(mean: int, seq_len: int) -> list[int]:
    """Lognormal lengths with about this mean; a longer sequence starts with the same lengths."""
    rng, lengths = numpy.random.default_rng(0), []
    while (left := seq_len - sum(lengths)) > 0:
        lengths.append(min(left, 1 + int(mean * rng.lognormal(-0.5, 1.0))))
    return lengths


@dataclass(frozen=True, eq=False)
class Case:
    """A mask on a number of ranks.

    Attributes:
        pattern: Name of the pattern.
        mask: The mask, or the support of top-k.
        ranks: Number of ranks.
        k: Number of blocks that each block row selects from the mask; None for all.
        kv_heads: Number of key heads.
    """

    pattern: str
    mask: BlockMask
    ranks: int
    k: int | None
    kv_heads: int = 1

    @property
    def seq_len(self) -> int:
        return self.mask.grid.q_len

    @property
    def selected(self) -> float:
        """The share of the blocks of the mask that are computed."""
        return 1.0 if self.k is None else min(self.k / self.mask.grid.nk, 1.0)

    @property
    def density(self) -> float:
        return self.mask.density * self.selected

    @cached_property
    def plans(self) -> dict[Way, ContextPlan]:
        """The plans of the implementations that exist for this number of ranks."""
        cost = FETCH_COST / self.selected
        plans = {
            Way.GATHER: make_plan(self.mask, self.ranks, "contiguous"),
            Way.PLAN: make_plan(self.mask, self.ranks, fetch_cost=cost),
        }
        received = int(plans[Way.PLAN].costs.receive.max())
        if received > RECEIVED * self.seq_len / self.ranks and self.k is None:
            blocks = math.ceil(received / BLOCK / min(GROUPS, self.kv_heads))
            limit = blocks * BLOCK
            limited = make_plan(self.mask, self.ranks, fetch_cost=cost, round_tokens=limit)
            if limited.split == "in place" and limited.fetches_again:
                plans[Way.LIMITED] = plans[Way.CAPTURED] = limited
        if self.ranks > 1:
            plans[Way.COLLECTIVES] = plans[Way.PLAN]
            plans[Way.RING] = ring_plan(self.mask, self.ranks)
        return plans


def cases(
    kind: Kind,
    tokens: int,
    ranks: Sequence[int],
    window: int,
    only: Sequence[str],
    kv_heads: int = 1,
) -> Iterator[Case]:
    """Yields the cases; `tokens` of a rank (weak) or of the sequence (strong).

    Raises:
        ValueError: `only` has an unknown pattern.
    """
    names = [*patterns(window, tokens)]
    if unknown := [name for name in only if name not in names]:
        raise ValueError(f"patterns must be of {names}, got {unknown[0]!r}")
    for name in only or names:
        made: dict[int, BlockMask] = {}
        for count in ranks:
            length = tokens * count if kind is Kind.WEAK else tokens
            if length not in made:
                made[length] = patterns(window, length)[name](length, BLOCK)
            k = window // BLOCK if name == TOP_K else None
            yield Case(name, made[length], count, k, kv_heads)


def measured_order(cases: Sequence[Case]) -> list[Case]:
    """The same cases, of each pattern the one with the most ranks first.

    So devices have been under load when the single rank is timed, with which others are compared.
    """
    patterns = list(dict.fromkeys(case.pattern for case in cases))
    return sorted(cases, key=lambda case: (patterns.index(case.pattern), -case.ranks))


@dataclass(frozen=True)
class Predicted:
    """The prediction of the time model for the plan of a case.

    Attributes:
        pattern, seq_len: Pattern and length of the case.
        prediction: Prediction with the machine of the run.
        demand: The input of the model, from which the prediction for any machine follows.
    """

    pattern: str
    seq_len: int
    prediction: Prediction
    demand: Demand


def predicted(case: Case, machine: Machine, attention: Attention) -> Predicted:
    """The prediction of the plan of a case."""
    plan = case.plans[Way.PLAN]
    found = predict(plan, machine, attention, case.selected)
    demand = Demand.of(plan, attention, case.selected)
    return Predicted(case.pattern, case.seq_len, found, demand)
