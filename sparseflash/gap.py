"""Why a sparse mask is slower than its density promises: the gap, split into its causes.

A mask of density s should take s times as long as the full mask. What it takes longer is split by
masks that leave one cause after the other out, each with as many blocks as the mask itself:

    device       the call as it is, on the device
    whole        its blocks, all full
    contiguous   as many full blocks in every row, side by side
    equal        as many in all, side by side, in rows of equal length
    twice        rows of twice that length

A row takes the time of its prologue and epilogue, and the time of its blocks. `twice` has as many
rows of twice as many blocks, so its difference to `equal` is the time of the blocks; the rest of
`equal` is prologues and epilogues. The last wave of work tiles may leave a part of the device
idle: that is the tail of the grid, of which only what exceeds the tail of the full mask, times the
density, counts. Every part but one is the difference of two neighbours. Launch and host is what
the host takes to enqueue a call beyond the time of the device, for both work at once. So all parts
and the ideal time add up to the measured one.

All times are rested ones (see sparseflash.timing), and differences are taken within a round: what
slows the machine for a while slows both times. A part is the median over rounds, and its noise
the confidence interval of that median.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from masks import BlockMask
from sparseflash.timing import Turn

ROUNDS = 6  # at least
SECONDS = 3.0  # of measurement of a pass, after which no further round begins
CONFIDENCE = 0.95
# Of normal values: standard over median deviation, and the error of their median over that of
# their mean.
NORMAL_DEVIATION, MEDIAN_ERROR = 1.4826, 1.2533

CHANGES = {
    "launch and host": "capture the calls in a CUDA graph, or put more work into one",
    "partial blocks": "move the edges of the pattern to those of blocks, or choose another block "
    "size",
    "gather": "list neighbouring blocks: an order of tokens in which they are, or larger blocks",
    "load imbalance": "give all rows about as many blocks, and long rows to fewer heads",
    "tail of the grid": "choose batch x heads so that work tiles fill whole waves",
    "prologue and epilogue": "put more blocks into a row: fewer, larger blocks of queries",
    "tiles of another size": "use blocks of the size of a tile, or scatter small ones less",
    "remainder": "no change is known",
}


@dataclass(frozen=True)
class Gap:
    """Rested milliseconds of one pass.

    Args:
        measured: The time of a call, of calls one after another.
        ideal: The density times the full mask, on the device.
        parts: The gap between both, split by the names of CHANGES; some may be negative.
        noise: Half the confidence interval of each part at 95 %, two to three standard errors: a
            part that is no larger may be zero, and is printed so.
    """

    measured: float
    ideal: float
    parts: Mapping[str, float]
    noise: Mapping[str, float]

    @property
    def largest(self) -> str | None:
        """The part that costs most, of those above their noise that a change can lower; None if
        there is none.
        """
        above = (part for part, cost in self.parts.items() if cost > self.noise[part])
        changed = (part for part in above if part != "remainder")
        return max(changed, key=lambda part: self.parts[part], default=None)

    def __str__(self) -> str:
        gap = self.measured - self.ideal
        lines = [f"{self.measured:.3f} ms, ideal {self.ideal:.3f}, gap {gap:+.3f}"]
        lines += [
            f"{name:>21} {f'{cost:+.3f}' if abs(cost) > self.noise[name] else '0':>6} "
            f"± {self.noise[name]:.3f}"
            for name, cost in self.parts.items()
            if cost or self.noise[name]
        ]
        if self.largest is None:
            return "\n  ".join([*lines, "no part that a change lowers is above its noise"])
        share = self.parts[self.largest] / self.measured
        lines.append(f"most by {self.largest} ({share:.0%}): {CHANGES[self.largest]}")
        return "\n  ".join(lines)


def variants(mask: BlockMask) -> dict[str, BlockMask]:
    """The masks that leave causes out, by their names above."""
    blocks = mask.to_blocks()
    counts, columns = blocks.sum(-1), blocks.shape[-1]
    rows = torch.arange(blocks.shape[-2] + 1, device=blocks.device)
    ends = rows * counts.sum(-1, keepdim=True) // (len(rows) - 1)
    equal = ends.diff(dim=-1)
    found = {
        "whole": blocks,
        "contiguous": _windows(counts, columns),
        "equal": _windows(equal, columns),
        "twice": _windows((2 * equal).clamp(max=columns), columns),
    }
    sizes = {"block_size": mask.block_size, "seq_len": mask.seq_len}
    return {name: BlockMask.from_blocks(each, **sizes) for name, each in found.items()}


def _windows(counts: Tensor, columns: int) -> Tensor:
    """bool (..., rows, columns): in every row so many blocks around the diagonal, wrapped around
    the ends, so that columns are as even as rows."""
    row = torch.arange(counts.shape[-1], device=counts.device)
    start = row * columns // counts.shape[-1] - counts // 2
    column = torch.arange(columns, device=counts.device)
    return (column - start.unsqueeze(-1)) % columns < counts.unsqueeze(-1)


def split(
    turns: Mapping[str, Sequence[Turn]],
    masks: Mapping[str, BlockMask],
    tile_density: float,
    density: float,
    filled: float,
    filled_by_full: float,
) -> Gap:
    """The gap of a pass.

    Args:
        turns: Of "device", "full" and each of `variants`, as many rounds.
        masks: The masks of `variants`.
        tile_density: Density of the mask in the blocks that the backend reads.
        density: Density of the mask in its own blocks.
        filled: Share of the waves of work tiles that is filled.
        filled_by_full: The same of the full mask.
    """
    facts = masks, tile_density, density, filled, filled_by_full
    rounds = [
        {name: turn.device for name, turn in zip(turns, of_round, strict=True)}
        | {"called": of_round[list(turns).index("device")].called}
        for of_round in zip(*turns.values(), strict=True)
    ]
    in_rounds = [_parts(of_round, *facts) for of_round in rounds]
    found = {name: [of[name] for of in in_rounds] for name in CHANGES}
    parts = {name: median(costs) for name, costs in found.items()}
    measured = median(of_round["called"] for of_round in rounds)
    ideal = median(of_round["full"] for of_round in rounds) * density
    noise = {name: _noise(costs) for name, costs in found.items()}
    apart = measured - ideal - sum(parts.values())  # as far as medians do not add up
    parts["remainder"] += apart
    noise["remainder"] += abs(apart)
    return Gap(measured, ideal, parts, noise)


def _noise(rounds: Sequence[float]) -> float:
    """Half the confidence interval of the median: standard errors by Student's distribution.

    The deviation is that of a normal distribution with the median deviation of the rounds, so that
    a round in which the machine stood still for a while counts as one round.
    """
    from scipy.special import stdtrit  # takes long to import

    middle, count = median(rounds), len(rounds)
    deviation = NORMAL_DEVIATION * median(abs(cost - middle) for cost in rounds)
    error = MEDIAN_ERROR * deviation / count**0.5
    return float(stdtrit(max(count - 1, 1), (1 + CONFIDENCE) / 2)) * error


def _parts(
    times: Mapping[str, float],
    masks: Mapping[str, BlockMask],
    tile_density: float,
    density: float,
    filled: float,
    filled_by_full: float,
) -> dict[str, float]:
    blocks, twice = masks["equal"].nnz_blocks, masks["twice"].nnz_blocks
    equal, ideal = times["equal"], times["full"] * density
    of_blocks = equal
    if twice > blocks:
        of_blocks = (times["twice"] - equal) / (twice - blocks) * blocks
    in_tiles = of_blocks * filled
    in_blocks = in_tiles * density / tile_density if tile_density else 0.0
    return {
        "launch and host": times["called"] - times["device"],
        "partial blocks": times["device"] - times["whole"],
        "gather": times["whole"] - times["contiguous"],
        "load imbalance": times["contiguous"] - equal,
        "tail of the grid": equal * (1 - filled) - ideal * (1 - filled_by_full),
        "prologue and epilogue": (equal - of_blocks) * filled,
        "tiles of another size": in_tiles - in_blocks,
        "remainder": in_blocks - ideal * filled_by_full,
    }
