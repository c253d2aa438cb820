"""Why a sparse mask is slower than its density promises: the gap, split into its causes.

A mask of density s should take s times as long as the full mask. What it takes longer is split by
masks that leave one cause after the other out, each with as many blocks as the mask itself:

    called       the call as it is, one after the other
    device       the same, the host so far ahead that the device never waits for it
    whole        its blocks, all full
    contiguous   as many full blocks in every row, side by side
    equal        as many in all, side by side, in rows of equal length
    twice        rows of twice that length

A row takes the time of its prologue and epilogue, and the time of its blocks. `twice` has as many
rows of twice as many blocks, so its difference to `equal` is the time of the blocks; the rest of
`equal` is prologues and epilogues. The last wave of work tiles may leave a part of the device
idle: that is the tail of the grid, of which only what exceeds the tail of the full mask, times the
density, counts. Every part is the difference of two neighbours, so all parts and the ideal time
add up to the measured one.

All are measured in one way: several calls one after another, alternately with those of the other
masks. On a GPU the clock first settles under calls that are not counted; events on the stream time
those that are. So the begin and the end of such a sequence are in none of the times, and where the
host is ahead of the device, launch and host cost nothing.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from masks import BlockMask

ROUNDS = 7
MIN_ROUNDS, BUDGET_SECONDS = 5, 2.0  # fewer rounds where they take longer than that
ESTIMATES = 3  # calls whose time sets how many follow one another
CPU_MS, CPU_CALLS = 2.0, 20  # of calls one after another on a CPU, at most
WARM_UP_MS, COUNTED_MS = 10.0, 20.0  # of calls one after another on a GPU
# Most calls of each of these two: the device queues some 1,000 launches, up to four for a call.
MOST_CALLS = 100
CYCLES = 2e9  # a second, as fast as any clock

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
        measured: The time of a call, of calls in a row.
        ideal: The density times the full mask, the host ahead.
        parts: The gap between both, split by the names of CHANGES; some may be negative.
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
    filled_by_full: float,
) -> Gap:
    """The gap of a pass.

    Args:
        measured: Milliseconds of "called", "device", "full" and of each of `variants`, in
            as many rounds.
        masks: The masks of `variants`.
        tile_density: Density of the mask in the blocks that the backend reads.
        density: Density of the mask in its own blocks.
        filled: Share of the waves of work tiles that is filled.
        filled_by_full: The same of the full mask.
    """
    times = {name: median(found) for name, found in measured.items()}
    rounds = (dict(zip(measured, of, strict=True)) for of in zip(*measured.values(), strict=True))
    facts = masks, tile_density, density, filled, filled_by_full
    parts = _parts(times, *facts)
    in_rounds = [_parts(of_round, *facts) for of_round in rounds]
    noise = {name: max(abs(of[name] - cost) for of in in_rounds) for name, cost in parts.items()}
    return Gap(times["called"], times["full"] * density, parts, noise)


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
        "larger tiles": in_tiles - in_blocks,
        "remainder": in_blocks - ideal * filled_by_full,
    }


@dataclass(frozen=True)
class _Calls:
    """Calls in a row, some before those that are counted.

    The device waits so many cycles before them, in which the host gets ahead, or waits as well:
    a pause changes the clock of a GPU.
    """

    run: Run
    warm_up: int
    count: int
    cycles: int = 0
    host_ahead: bool = False


def alternating(
    runs: Mapping[str, Run], device: torch.device, with_host: Collection[str]
) -> dict[str, list[float]]:
    """Milliseconds of a call of each in several rounds, measured in alternation: of those in
    `with_host` as they follow one another, of the others with the host ahead of a GPU.
    """
    planned = {name: _planned(run, device, name not in with_host) for name, run in runs.items()}
    measured = _on_gpu if device.type == "cuda" else _on_cpu
    found: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + BUDGET_SECONDS
    for number in range(ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name, calls in planned.items():
            found[name].append(measured(calls, device))
    return found


def _planned(run: Run, device: torch.device, host_ahead: bool) -> _Calls:
    """As many calls as fit into the time of a round."""
    run()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(ESTIMATES):
        run()
    enqueued = time.perf_counter() - begin
    _wait(device)
    each_ms = max((time.perf_counter() - begin) * 1e3 / ESTIMATES, 1e-3)
    if device.type != "cuda":
        return _Calls(run, 0, max(1, min(CPU_CALLS, int(CPU_MS / each_ms))))
    warm_up, count = (min(MOST_CALLS, math.ceil(ms / each_ms)) for ms in (WARM_UP_MS, COUNTED_MS))
    host = enqueued / ESTIMATES * (warm_up + count)
    return _Calls(run, warm_up, count, int(host * CYCLES), host_ahead)


def _on_gpu(calls: _Calls, device: torch.device) -> float:
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(calls.cycles)
        if not calls.host_ahead:
            _wait(device)
        for _ in range(calls.warm_up):
            calls.run()
        begin.record()
        for _ in range(calls.count):
            calls.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls.count


def _on_cpu(calls: _Calls, device: torch.device) -> float:
    begin = time.perf_counter()
    for _ in range(calls.count):
        calls.run()
    return (time.perf_counter() - begin) * 1e3 / calls.count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
