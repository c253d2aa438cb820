"""Selects a pattern for every head, within a budget of time."""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from masks._parse import parse
from sparseflash.lab.profiler import Profile

CRITERIA = ("recall", "error", "loss")


@dataclass(frozen=True)
class Suggestion:
    """The pattern of each head.

    Attributes:
        layers: For each layer the pattern of each head, as text.
        seq_len: Length of the profile, in tokens.
        by: The criterion that was minimised.
        budget: Allowed time as a share of the time of the model's own attention.
        time_share: Measured time of the suggestion as a share of the time of the model's own
            attention.
        recall: Mean recall over all heads.
    """

    layers: tuple[tuple[str, ...], ...]
    seq_len: int
    by: str
    budget: float
    time_share: float
    recall: float

    def to_dict(self) -> dict[str, Any]:
        """{"layers": [{"heads": [text, ...]}, ...], "seq_len": ..., ...}

        Raises:
            ValueError: A pattern has no text that masks.parse reads.
        """
        for text in {text for heads in self.layers for text in heads}:
            parse(text)
        return asdict(self) | {"layers": [{"heads": list(heads)} for heads in self.layers]}

    def save(self, path: str | Path) -> None:
        """Writes to_dict as a JSON file, which sparsify reads.

        Args:
            path: The file, which is overwritten if it exists.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=1))


def suggest(profile: Profile, budget: float, *, by: str = "recall") -> Suggestion:
    """Selects a pattern for each head, within a budget of time.

    Minimises the sum over heads of 1 - recall, error or |loss|, while the sum of the times is at
    most the budget. This is a multiple-choice knapsack problem, solved greedily: every head starts
    with its fastest pattern. Then the steps along the convex hull of (time, cost) of each head are
    taken in the order of gain per time, as long as they fit. The result is optimal except for the
    last step, which would need a fraction of a head.

    Args:
        profile: A result of `profile`.
        budget: Allowed time as a share of the time of the model's own attention, in (0, 1]. The
            heads of a layer are assumed to share its time equally.
        by: The criterion: "recall", "error" or "loss".

    Returns:
        The patterns, for the layers and heads of the profile.

    Raises:
        TypeError: `profile` is not a Profile.
        ValueError: `by` is unknown, the profile has no loss, or the budget is outside (0, 1] or
            below the time of the fastest patterns.

    Reference:
        Sinha and Zoltners 1979, The multiple-choice knapsack problem.
    """
    if not isinstance(profile, Profile):
        raise TypeError(f"profile must be a Profile, got {type(profile).__name__}")
    lost = _lost(profile, by)
    times = profile.measured_ms.numpy() / profile.measured_ms.max().item()
    base = times[0]
    if not isinstance(budget, Real) or not 0 < budget <= 1:
        raise ValueError(f"budget must be above 0 and at most 1, got {budget!r}")
    layers, heads, _ = lost.shape
    max_time = budget * base * layers * heads
    chosen = np.full((layers, heads), int(times.argmin()))
    time = float(times.min()) * chosen.size
    if time > max_time * (1 + 1e-9):
        raise ValueError(
            f"budget must be at least {times.min() / base:.4g}, the time of the fastest patterns, "
            f"got {budget}"
        )
    steps = [
        (gain, layer, head, before, after)
        for layer in range(layers)
        for head in range(heads)
        for gain, before, after in _steps(times, lost[layer, head])
    ]
    for _, layer, head, before, after in sorted(steps, key=lambda step: -step[0]):
        cost = times[after] - times[before]
        if chosen[layer, head] == before and time + cost <= max_time * (1 + 1e-9):
            chosen[layer, head] = after
            time += cost
    recall = np.take_along_axis(profile.recall.numpy(), chosen[..., None], 2)
    return Suggestion(
        layers=tuple(tuple(profile.patterns[p] for p in row) for row in chosen),
        seq_len=profile.seq_len,
        by=by,
        budget=budget,
        time_share=float(time / (base * chosen.size)),
        recall=float(recall.mean()),
    )


def _lost(profile: Profile, by: str) -> np.ndarray:
    """The criterion that is minimised: float64 (layers, heads, patterns)."""
    if by not in CRITERIA:
        raise ValueError(f"by must be one of {CRITERIA}, got {by!r}")
    values = {"recall": 1 - profile.recall, "error": profile.error, "loss": profile.loss}[by]
    if values is None:
        raise ValueError('by must not be "loss": the profile has no loss')
    return values.abs().numpy()


def _steps(times: np.ndarray, lost: np.ndarray) -> list[tuple[float, int, int]]:
    """(gain per time, pattern, next pattern) along the lower convex hull, from the fastest on."""
    hull = [int(times.argmin())]
    for p in np.lexsort((lost, times)):
        if times[p] <= times[hull[-1]] or lost[p] >= lost[hull[-1]]:
            continue
        while len(hull) > 1 and _gain(times, lost, hull[-2], hull[-1]) <= _gain(
            times, lost, hull[-1], p
        ):
            hull.pop()
        hull.append(int(p))
    return [(_gain(times, lost, a, b), a, b) for a, b in pairwise(hull)]


def _gain(times: np.ndarray, lost: np.ndarray, before: int, after: int) -> float:
    return float((lost[before] - lost[after]) / (times[after] - times[before]))
