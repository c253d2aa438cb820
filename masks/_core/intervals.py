"""Sets of integers as sorted runs [begin, end).

The full blocks of a mask are a set of flat indices. Operations on masks take time in proportion to
the number of runs, not to the number of blocks. Full and causal masks have one run per block row.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# Elements of a chunk. Smaller chunks would stay in the caches of a CPU, but threads synchronise
# after every operation, which takes long if the cores are busy.
CHUNK = 1 << 21


class Runs(NamedTuple):
    """Disjoint, sorted runs [begin, end) of integers, as int64 tensors of shape (runs,)."""

    begin: Tensor
    end: Tensor

    def contains(self, points: Tensor) -> Tensor:
        """Whether each of `points` lies in a run."""
        if len(self.begin) == 0:
            return torch.zeros_like(points, dtype=torch.bool)
        run = torch.searchsorted(self.begin, points, right=True) - 1
        return (run >= 0) & (points < self.end[run.clamp(min=0)])

    def expand(self) -> Tensor:
        """Every integer of the set, ascending."""
        length = self.end - self.begin
        first = torch.cumsum(length, 0) - length
        shift = torch.repeat_interleave(self.begin - first, length)
        return torch.arange(len(shift), device=shift.device) + shift

    def to_bool(self, length: int) -> Tensor:
        """bool (length,): whether each integer below `length` is in the set."""
        change = torch.zeros(length + 1, dtype=torch.int8, device=self.begin.device)
        change[self.begin] = 1
        change[self.end] -= 1
        # Sums of 0 and 1 in the same memory, which may be most of that of the machine.
        return change[:-1].cumsum_(0).view(torch.bool)

    def size(self) -> int:
        """The number of integers in the set."""
        return int((self.end - self.begin).sum())

    def shift(self, distance: int) -> "Runs":
        """The set with `distance` added to every integer."""
        return Runs(self.begin + distance, self.end + distance)

    def between(self, low: int, high: int) -> "Runs":
        """The runs inside [low, high). No run may cross `low` or `high`."""
        edges = torch.tensor([low, high], device=self.begin.device)
        first, last = torch.searchsorted(self.begin, edges).tolist()
        return Runs(self.begin[first:last], self.end[first:last])

    def select(self, chosen: Tensor) -> "Runs":
        """The runs where `chosen`, bool (runs,), is true."""
        return Runs(self.begin[chosen], self.end[chosen])

    def nonempty(self) -> "Runs":
        """The runs that are not empty."""
        return self.select(self.end > self.begin)


def in_chunks(rule: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """rule(*tensors) for an elementwise rule, chunk by chunk on a CPU.

    Chunks reuse the memory of intermediate results. Without chunks the operating system would
    first zero new pages, which takes several times as long as the arithmetic.
    """
    if tensors[0].is_cuda or len(tensors[0]) <= CHUNK:
        return rule(*tensors)
    chunks = zip(*(t.split(CHUNK) for t in tensors), strict=True)
    return torch.cat([rule(*chunk) for chunk in chunks])


def from_points(points: Tensor) -> Runs:
    """The set of `points`, which must be ascending and distinct."""
    is_break = torch.diff(points) != 1
    edge = torch.ones(min(len(points), 1), dtype=torch.bool, device=points.device)
    return Runs(points[torch.cat([edge, is_break])], points[torch.cat([is_break, edge])] + 1)


def from_bool_matrix(blocks: Tensor) -> Runs:
    """The flat indices of the true blocks of a bool (masks, nq, nk) matrix."""
    padded = torch.nn.functional.pad(blocks, (0, 1)).flatten()
    before = torch.nn.functional.pad(padded[:-1], (1, 0))
    return Runs((padded & ~before).nonzero().flatten(), (before & ~padded).nonzero().flatten())


def empty(device: torch.device) -> Runs:
    """The empty set."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return Runs(nothing, nothing)


def concatenate(sets: list[Runs]) -> Runs:
    """The union of sets, each of which lies before the next one."""
    return Runs(torch.cat([s.begin for s in sets]), torch.cat([s.end for s in sets]))


def union(*sets: Runs) -> Runs:
    """The union of sets whose runs may be unsorted, overlap or touch."""
    begin, end = _by_begin(*(torch.cat(edges) for edges in zip(*sets, strict=True)))
    end = torch.cummax(end, 0).values
    first = torch.ones_like(begin, dtype=torch.bool)
    first[1:] = begin[1:] > end[:-1]
    return Runs(begin[first], end[first.roll(-1)])


def _by_begin(begin: Tensor, end: Tensor) -> Runs:
    """Non-negative runs in the order of `begin`; those that begin equally in any order."""
    length = end - begin
    bits = int(length.max()).bit_length() if len(begin) else 0
    if begin.device.type != "cpu" or not len(begin) or int(begin.max()).bit_length() + bits > 63:
        begin, order = begin.sort()
        return Runs(begin, end[order])
    # A sort of single integers takes a fraction of the time of a sort with an order.
    packed = torch.from_numpy(np.sort(((begin << bits) | length).numpy()))
    begin = packed >> bits
    return Runs(begin, begin + (packed & ((1 << bits) - 1)))


def combine(rule: Callable[..., Tensor], *sets: Runs) -> Runs:
    """The set of integers p for which rule(p in sets[0], p in sets[1], ...) is true.

    Args:
        rule: An elementwise function of bool tensors, false if all arguments are false.
        *sets: Sets, at least one.
    """
    points = torch.unique(torch.cat([edge for s in sets for edge in s]))
    if len(points) == 0:
        return empty(points.device)
    inside = rule(*(s.contains(points) for s in sets))
    before = torch.cat([torch.zeros_like(inside[:1]), inside[:-1]])
    return Runs(points[inside & ~before], points[before & ~inside])
