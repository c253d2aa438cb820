"""Why a sparse mask is slower than its density promises: the gap, split into its causes.

A mask of density s should take s times as long as the full mask. What it takes longer is split by
masks that leave one cause after the other out, each with as many blocks as the mask itself:

    called       the call as it is, with the time of the host
    device       the same, the host ahead of the device
    whole        its blocks, all full
    contiguous   as many full blocks in every row, side by side
    equal        as many in all, side by side, in rows of equal length
    twice        rows of twice that length

The time of equal rows is a sum of rows and blocks, of which `twice` gives that of a block; what
is left of a row is its prologue and epilogue. Work tiles that do not fill the last wave of those
that run at a time are its tail. Every part is the difference of two neighbours, so all parts and
the ideal time add up to the measured one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from masks import BlockMask

ROUNDS = 7
MIN_ROUNDS, BUDGET_SECONDS = 5, 2.0  # fewer rounds where they take longer than that
BURST = 20  # calls in a row at most
BURST_MS = 2.0
# The device waits so many cycles, some 10 ms, while the host enqueues a burst.
HIDING_CYCLES = 20_000_000

Run = Callable[[], object]
CHANGES = {
    "launch and host": "capture the calls in a CUDA graph, or put more work into one",
    "partial blocks": "move the edges of the pattern to those of blocks, or choose another block "
    "size",
    "gather": "list neighbouring blocks: an order of tokens in which they are, or larger blocks",
    "load imbalance": "give all rows about as many blocks, and long rows to fewer heads",
    "tail of the grid": "choose batch x heads so that work tiles fill whole waves",
    "prologue and epilogue": "put more blocks into a row: fewer, larger blocks of queries",
    "larger tiles": "use blocks of the size of a tile, or scatter small ones less",
    "remainder": "no change is known",
}


@dataclass(frozen=True)
class Gap:
    """Milliseconds of one pass.

    Args:
        measured: Of the call.
        ideal: The density times the full mask.
        parts: Of the gap between both, by the names of CHANGES; some may be negative.
        noise: How far each part was from that in a round at most: one no larger says nothing.
    """

    measured: float
    ideal: float
    parts: Mapping[str, float]
    noise: Mapping[str, float]

    @property
    def largest(self) -> str | None:
        """The part that costs most, of those above their noise; None if none is."""
        above = [part for part, cost in self.parts.items() if cost > self.noise[part]]
        return max(above, key=lambda part: self.parts[part], default=None)

    def __str__(self) -> str:
        gap = self.measured - self.ideal
        lines = [f"{self.measured:.3f} ms, ideal {self.ideal:.3f}, gap {gap:+.3f}"]
        lines += [
            f"{name:>21} {cost:+.3f} ± {self.noise[name]:.3f}"
            for name, cost in self.parts.items()
            if cost or self.noise[name]
        ]
        if self.largest is None:
            return "\n  ".join([*lines, "no part is above its noise"])
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
    measured: Mapping[str, Sequence[float]],
    masks: Mapping[str, BlockMask],
    tile_density: float,
    density: float,
    filled: float,
) -> Gap:
    """The gap of a pass.

    Args:
        measured: Milliseconds of "called", "device", "full" and of each of `variants`, in
            as many rounds. "device" is left out where it is the host.
        masks: Those of `variants`.
        tile_density: Of the mask in the blocks that the backend reads.
        density: Of the mask in its own blocks.
        filled: Share of the waves of work tiles that is filled.
    """
    measured = {"device": measured["called"], **measured}
    times = {name: median(found) for name, found in measured.items()}
    rounds = (dict(zip(measured, of, strict=True)) for of in zip(*measured.values(), strict=True))
    densities = tile_density, density
    parts = _parts(times, masks, *densities, filled)
    in_rounds = [_parts(of_round, masks, *densities, filled) for of_round in rounds]
    noise = {name: max(abs(of[name] - cost) for of in in_rounds) for name, cost in parts.items()}
    return Gap(times["called"], times["full"] * density, parts, noise)


def _parts(
    times: Mapping[str, float],
    masks: Mapping[str, BlockMask],
    tile_density: float,
    density: float,
    filled: float,
) -> dict[str, float]:
    blocks, twice = masks["equal"].nnz_blocks, masks["twice"].nnz_blocks
    equal = times["equal"]
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
        "tail of the grid": equal * (1 - filled),
        "prologue and epilogue": (equal - of_blocks) * filled,
        "larger tiles": in_tiles - in_blocks,
        "remainder": in_blocks - times["full"] * density,
    }


def alternating(runs: Mapping[str, Run], device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each in several rounds, measured in alternation: "called" with the time of
    the host, the others without it where the device can be kept waiting.
    """
    counts = {}
    for name, run in runs.items():
        run()
        counts[name] = max(1, min(BURST, int(BURST_MS / max(_burst(run, 1, device, False), 1e-3))))
    found: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + BUDGET_SECONDS
    for turn in range(ROUNDS):
        if turn >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name, run in runs.items():
            hides_host = device.type == "cuda" and name != "called"
            found[name].append(_burst(run, counts[name], device, hides_host))
    return found


def _burst(run: Run, count: int, device: torch.device, hides_host: bool) -> float:
    """Milliseconds of one of `count` runs in a row."""
    if hides_host:
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HIDING_CYCLES)
            begin.record()
            for _ in range(count):
                run()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / count
    _wait(device)
    begin = time.perf_counter()
    for _ in range(count):
        run()
    _wait(device)
    return (time.perf_counter() - begin) * 1e3 / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
