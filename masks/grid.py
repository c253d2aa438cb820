"""Grid: one sequence length cut into blocks of one size, and the numbering of its blocks."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from masks import tiles
from masks.arguments import whole
from masks.cache import Cache
from masks.intervals import Runs

BLOCK_SIDES = (16, 32, 64, 128, 256)


def definite(device: torch.device | str) -> torch.device:
    """The device with its number, as tensors name theirs: "cuda" is the current one."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@dataclass(frozen=True)
class Grid:
    """The blocks of a (q_len, k_len) score matrix cut into (bq, bk) rectangles, both in tokens.

    Block (i, j) of layer l has the number (l * nq + i) * (nk + 1) + j on one line: rows follow one
    another with one unused number between them.
    """

    q_len: int
    k_len: int
    bq: int
    bk: int
    device: torch.device

    @classmethod
    def of(cls, seq_len, block_size, device=None) -> "Grid":
        """From an int or a (q, k) pair for each of seq_len and block_size; checks both."""
        q_len, k_len = _pair("seq_len", seq_len)
        bq, bk = _pair("block_size", block_size)
        if min(q_len, k_len) < 1:
            raise ValueError(f"seq_len must be at least 1 token, got {seq_len}")
        if bq not in BLOCK_SIDES or bk not in BLOCK_SIDES:
            raise ValueError(f"block_size must be made of {BLOCK_SIDES}, got {block_size}")
        return cls(q_len, k_len, bq, bk, definite("cpu" if device is None else device))

    @property
    def seq_len(self) -> tuple[int, int]:
        return self.q_len, self.k_len

    @property
    def block_size(self) -> tuple[int, int]:
        return self.bq, self.bk

    @property
    def nq(self) -> int:
        """Block rows."""
        return -(-self.q_len // self.bq)

    @property
    def nk(self) -> int:
        """Block columns."""
        return -(-self.k_len // self.bk)

    @property
    def line(self) -> int:
        """Numbers that one block row takes."""
        return self.nk + 1

    @property
    def layer(self) -> int:
        """Numbers that one layer takes."""
        return self.nq * self.line

    def number(self, row: Tensor, column: Tensor) -> Tensor:
        return row * self.line + column

    def split(self, number: Tensor) -> tuple[Tensor, Tensor]:
        """(row counted over all layers, column) of block numbers."""
        return number // self.line, number % self.line

    def every_row(self, layers: int = 1) -> Runs:
        """All blocks of all rows."""
        begin = torch.arange(layers * self.nq, device=self.device) * self.line
        return Runs(begin, begin + self.nk)

    def cut(self, number: Tensor) -> Tensor:
        """How the end of the sequence cuts each block: 0 not, +1 its keys, +2 its queries."""
        row, column = self.split(number)
        keys = (column == self.nk - 1) & (self.k_len % self.bk != 0)
        queries = (row % self.nq == self.nq - 1) & (self.q_len % self.bq != 0)
        return keys.long() + 2 * queries.long()

    @cached_property
    def whole(self) -> Tensor:
        """See cut_tiles."""
        return self.cut_tiles()

    def cut_tiles(self) -> Tensor:
        """int32 (4, bq, words): every pair of a block that lies in the sequence, for each value of
        cut.
        """
        keys = self.k_len - (self.nk - 1) * self.bk
        queries = self.q_len - (self.nq - 1) * self.bq
        sides = [(self.bq, self.bk), (self.bq, keys), (queries, self.bk), (queries, keys)]
        return torch.stack([tiles.full_tile(self.block_size, s, self.device) for s in sides])

    def with_blocks(self, bq: int, bk: int) -> "Grid":
        return Grid(self.q_len, self.k_len, bq, bk, self.device)

    @property
    def T(self) -> "Grid":
        return Grid(self.k_len, self.q_len, self.bk, self.bq, self.device)


class OnGrid:
    """What has a grid: its lengths and block sizes, in tokens, and its device."""

    grid: Grid

    @cached_property
    def cache(self) -> Cache:
        """What its users keep for as long as it lives."""
        return Cache()

    @property
    def seq_len(self) -> tuple[int, int]:
        """(q_len, k_len) in tokens."""
        return self.grid.seq_len

    @property
    def block_size(self) -> tuple[int, int]:
        """(bq, bk) in tokens."""
        return self.grid.block_size

    @property
    def device(self) -> torch.device:
        return self.grid.device


def _pair(name: str, value) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise TypeError(f"{name} must be an integer or a (q, k) pair of them, got {value!r}")
    return whole(name, pair[0]), whole(name, pair[1])
