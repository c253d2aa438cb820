"""Splits the gap of a sparse mask into its causes.

Ideally a mask of density s takes s times as long as the full mask. The gap is the time beyond this
ideal. It is split by timing masks that remove one cause after another:

    device       the call as it is, on the device
    whole        the same blocks, all full
    contiguous   the same number of full blocks in every row, side by side
    equal        the same number of full blocks in total, side by side, in rows of equal length
    longer       rows of eight times that length, or of all blocks

The masks below `device` are computed in tiles of the size that the call has, whatever size would
be chosen for them. Most parts are the difference of two neighbours in this list. A row takes the
time of its prologue and epilogue, and the time of its blocks. `longer` has the same rows with
eight times as many blocks, so its difference to `equal` is the time of seven times the blocks. The
rest of `equal` is prologues and epilogues. It includes the additional time of a block in a short
row, whose loads of Q and stores of O take longer than its products, so that these cannot hide
them. Rows of only twice the length would be short, too, and an error of 1 % in their time would
be one of 2 % in the time of the blocks.

The last wave of work tiles may leave a part of the device idle: the tail of the grid. The full
mask has prologues, epilogues and a tail, too. Only the part of them counts that exceeds the
density times those of the full mask. "Launch and host" is the time by which the host takes longer
to enqueue a call than the device to run it. All parts and the ideal time add up to the measured
time.

All times are rested (see sparseflash.timing). Differences are taken within a round, so a change of
speed between rounds cancels. A part is the median over rounds, and its noise is half of the
confidence interval of this median. There are more rounds if the remainder is noisy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import pad

from masks import BlockMask
from sparseflash.timing import Turn

ROUNDS = 6  # least number of rounds
SECONDS = 3.0  # time of a pass after which no further round begins, unless the remainder is noisy
CONFIDENCE = 0.95
LONGER = 8  # length of the rows of the variant "longer", over that of "equal"
LARGE = 0.05  # share of the measured time above which a remainder is pointed out
QUIET = 0.01  # share of the measured time below which the noise of the remainder is small enough
# For a normal distribution: standard deviation over median absolute deviation; standard error of
# the median over that of the mean.
NORMAL_DEVIATION, MEDIAN_ERROR = 1.4826, 1.2533

CHANGES = {
    "launch and host": "capture the calls in a CUDA graph, or put more work into one",
    "partial blocks": "align the edges of the pattern with blocks, or choose another block size",
    "gather": "make the blocks of a row neighbours: reorder the tokens, or use larger blocks",
    "load imbalance": "give all rows about the same number of blocks",
    "tail of the grid": "choose batch x heads so that work tiles fill whole waves",
    "prologue and epilogue": "put more blocks into a row: fewer, larger blocks of queries",
    "tiles of another size": "use blocks of the size of a tile, or cluster small blocks",
    "remainder": "no change is known",
}


@dataclass(frozen=True)
class Gap:
    """The gap of one pass and its parts, in rested milliseconds.

    Args:
        measured: Time of a call.
        ideal: Density of the mask times the time of the full mask, on the device.
        parts: The parts of the gap, by the names of CHANGES. A part may be negative.
        noise: Half of the 95 % confidence interval of each part. A part that is not larger than
            its noise may be zero, and is printed as 0.
    """

    measured: float
    ideal: float
    parts: Mapping[str, float]
    noise: Mapping[str, float]

    @property
    def largest(self) -> str | None:
        """The largest part above its noise, except the remainder; None if there is none."""
        above = (part for part, cost in self.parts.items() if cost > self.noise[part])
        changed = (part for part in above if part != "remainder")
        return max(changed, key=lambda part: self.parts[part], default=None)

    @property
    def remainder(self) -> float:
        """The remainder over the measured time: the share that the parts do not explain."""
        return self.parts["remainder"] / self.measured

    @property
    def quiet(self) -> bool:
        """Whether the noise of the remainder is at most 1 % of the measured time."""
        return self.noise["remainder"] <= QUIET * self.measured

    def __str__(self) -> str:
        gap = self.measured - self.ideal
        lines = [f"{self.measured:.3f} ms, ideal {self.ideal:.3f}, gap {gap:+.3f}"]
        lines += [
            f"{name:>21} {f'{cost:+.3f}' if abs(cost) > self.noise[name] else '0':>6} "
            f"± {self.noise[name]:.3f}"
            for name, cost in self.parts.items()
            if cost or self.noise[name]
        ]
        if abs(self.remainder) > LARGE:
            noise = self.noise["remainder"] / self.measured
            known = f", above {LARGE:.0%}: the parts do not explain it"
            noisy = f": it may be 0 or above {LARGE:.0%}, so measure again on an idle device"
            lines.append(
                f"the remainder is {self.remainder:+.0%} ± {noise:.0%} of the measured time"
                f"{known if abs(self.remainder) > noise else noisy}"
            )
        if self.largest is None:
            return "\n  ".join([*lines, "no part with a known change exceeds its noise"])
        share = self.parts[self.largest] / self.measured
        lines.append(f"largest part: {self.largest} ({share:.0%}); {CHANGES[self.largest]}")
        return "\n  ".join(lines)


def variants(mask: BlockMask, rows: int = 1) -> dict[str, BlockMask]:
    """The masks that remove causes, by the names in the docstring of this module.

    Args:
        mask: The mask, in the blocks that the backend reads or in parts of them.
        rows: Number of block rows of the mask that are a block row of the table. The masks have
            equal blocks in them.
    """
    own = mask.to_blocks()
    row_count = own.shape[-2]
    blocks = pad(own, (0, 0, 0, -row_count % rows)).unflatten(-2, (-1, rows)).any(-2)
    counts, columns = blocks.sum(-1), blocks.shape[-1]
    index = torch.arange(blocks.shape[-2] + 1, device=blocks.device)
    ends = index * counts.sum(-1, keepdim=True) // (len(index) - 1)
    equal = ends.diff(dim=-1)
    matrices = {
        "whole": blocks,
        "contiguous": _windows(counts, columns),
        "equal": _windows(equal, columns),
        "longer": _windows((LONGER * equal).clamp(max=columns), columns),
    }
    sizes = {"block_size": mask.block_size, "seq_len": mask.seq_len}
    return {
        name: BlockMask.from_blocks(
            matrix.repeat_interleave(rows, -2)[..., :row_count, :], **sizes
        )
        for name, matrix in matrices.items()
    }


def _windows(counts: Tensor, columns: int) -> Tensor:
    """bool (..., rows, columns): in each row `counts` blocks around the diagonal.

    They wrap around the ends, so that columns are as balanced as rows.
    """
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
    """Splits the gap of a pass.

    Args:
        turns: Times in each round of "device", "full" and each of `variants`.
        masks: The masks of `variants`.
        tile_density: Density of the mask in the blocks that the backend reads.
        density: Density of the mask in its own blocks.
        filled: Work tiles over the capacity of the waves that they occupy, 0 to 1.
        filled_by_full: The same for the full mask.
    """
    properties = masks, tile_density, density, filled, filled_by_full
    rounds = [
        {name: turn.device for name, turn in zip(turns, of_round, strict=True)}
        | {"called": of_round[list(turns).index("device")].called}
        for of_round in zip(*turns.values(), strict=True)
    ]
    in_rounds = [_parts(of_round, *properties) for of_round in rounds]
    costs_by_part = {name: [of[name] for of in in_rounds] for name in CHANGES}
    parts = {name: median(costs) for name, costs in costs_by_part.items()}
    measured = median(of_round["called"] for of_round in rounds)
    ideal = median(of_round["full"] for of_round in rounds) * density
    noise = {name: _noise(costs) for name, costs in costs_by_part.items()}
    apart = measured - ideal - sum(parts.values())  # because medians do not add up
    parts["remainder"] += apart
    noise["remainder"] += abs(apart)
    return Gap(measured, ideal, parts, noise)


def _noise(rounds: Sequence[float]) -> float:
    """Half of the confidence interval of the median, by Student's distribution.

    The standard deviation is estimated from the median absolute deviation, so a single outlier has
    little influence.
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
    blocks, longer = masks["equal"].nnz_blocks, masks["longer"].nnz_blocks
    equal, ideal = times["equal"], times["full"] * density
    of_blocks = equal
    if longer > blocks:
        of_blocks = (times["longer"] - equal) / (longer - blocks) * blocks
    of_rows = (equal - of_blocks) * filled  # as many rows as those of the full mask
    in_tiles = of_blocks * filled
    in_blocks = in_tiles * density / tile_density if tile_density else 0.0
    return {
        "launch and host": times["called"] - times["device"],
        "partial blocks": times["device"] - times["whole"],
        "gather": times["whole"] - times["contiguous"],
        "load imbalance": times["contiguous"] - equal,
        "tail of the grid": equal * (1 - filled) - ideal * (1 - filled_by_full),
        "prologue and epilogue": of_rows * (1 - density),
        "tiles of another size": in_tiles - in_blocks,
        "remainder": in_blocks - (ideal * filled_by_full - of_rows * density),
    }
