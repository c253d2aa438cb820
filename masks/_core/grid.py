"""Grid: the blocks of a score matrix and their flat numbering."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from masks._core import bit_tiles
from masks._core.intervals import Runs
from masks.arguments import check_integer, checked_device

BLOCK_SIDES = (16, 32, 64, 128, 256, 512)
TABLE_SIDES = tuple(sorted((*BLOCK_SIDES, 192)))  # of tables: tiles of kernels
MAX_TOKENS = 2**31 - 1  # kernels number tokens in 32 bits


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class Grid:
    """The blocks of (bq, bk) tokens of a (q_len, k_len) score matrix.

    Block (row, column) of mask m has the flat index (m * nq + row) * (nk + 1) + column. One index
    between two rows is unused, so that no run of blocks continues in the next row:

        nq = 3, nk = 4         columns          unused
                           0   1   2   3  |   4
                           5   6   7   8  |   9
                          10  11  12  13  |  14
    """

    q_len: int
    k_len: int
    bq: int
    bk: int
    device: torch.device

    @classmethod
    def of(cls, seq_len, block_size, device=None) -> "Grid":
        """The grid of arguments of the user.

        Args:
            seq_len: Length in tokens, or (q_len, k_len).
            block_size: Side of a block in tokens, or (bq, bk).
            device: Device of the tensors; the CPU by default.

        Raises:
            TypeError: A length or a side is not an integer.
            ValueError: A length is below 1 or above MAX_TOKENS, a side is not in BLOCK_SIDES, or
                there is no such device or it holds no data.
        """
        lengths, sides = checked_seq_len(seq_len), checked_block_size(block_size)
        device = checked_device("cpu" if device is None else device)
        if device.type == "meta":
            raise ValueError("device must hold data, got 'meta'")
        return cls(*lengths, *sides, device)

    @property
    def seq_len(self) -> tuple[int, int]:
        """(q_len, k_len) in tokens."""
        return self.q_len, self.k_len

    @property
    def block_size(self) -> tuple[int, int]:
        """(bq, bk) in tokens."""
        return self.bq, self.bk

    @property
    def nq(self) -> int:
        """The number of block rows."""
        return -(-self.q_len // self.bq)

    @property
    def nk(self) -> int:
        """The number of block columns."""
        return -(-self.k_len // self.bk)

    @property
    def row_stride(self) -> int:
        """The number of flat indices of a block row."""
        return self.nk + 1

    @property
    def mask_stride(self) -> int:
        """The number of flat indices of a mask."""
        return self.nq * self.row_stride

    def flat_index(self, mask: Tensor | int, row: Tensor, column: Tensor) -> Tensor:
        """The flat index of a block."""
        return (mask * self.nq + row) * self.row_stride + column

    def locate(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mask, row, column) of flat indices."""
        stacked = self.stacked_row(flat)
        mask = stacked // self.nq
        return mask, stacked - mask * self.nq, flat - stacked * self.row_stride

    def stacked_row(self, flat: Tensor) -> Tensor:
        """mask * nq + row: the block row, counted over all masks."""
        return flat // self.row_stride

    def locate_runs(self, runs: Runs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(mask, row, first column, column past the last) of runs of blocks."""
        mask, row, first = self.locate(runs.begin)
        return mask, row, first, first + (runs.end - runs.begin)

    def runs(self, mask: Tensor | int, row: Tensor, first: Tensor, last: Tensor) -> Runs:
        """The runs of the columns [first, last) of block rows, without empty runs."""
        start = self.flat_index(mask, row, torch.zeros_like(row))
        return Runs(start + first, start + last).nonempty()

    def renumber(self, flat: Tensor, other: "Grid") -> Tensor:
        """The flat indices in `other` of the blocks with the same mask, row and column."""
        return other.flat_index(*self.locate(flat))

    def all_blocks(self, num_masks: int = 1) -> Runs:
        """All blocks, one run per block row."""
        begin = torch.arange(num_masks * self.nq, device=self.device) * self.row_stride
        return Runs(begin, begin + self.nk)

    def clip_kind(self, flat: Tensor) -> Tensor:
        """How the end of the sequence clips each block: 0 if not, +1 in keys, +2 in queries."""
        if not (self.k_len % self.bk or self.q_len % self.bq):
            return torch.zeros_like(flat)
        _, row, column = self.locate(flat)
        keys = (column == self.nk - 1) & (self.k_len % self.bk != 0)
        queries = (row == self.nq - 1) & (self.q_len % self.bq != 0)
        return keys.long() + 2 * queries.long()

    @property
    def inbounds_tiles(self) -> Tensor:
        """For each clip_kind the bit tile of all pairs inside the sequence: int32 (4, bq, words).

        Cached, except while a CUDA graph is captured: the graph owns the memory of its results.
        """
        stored = self.__dict__.get("_inbounds_tiles")
        if stored is not None:
            return stored
        keys = self.k_len - (self.nk - 1) * self.bk
        queries = self.q_len - (self.nq - 1) * self.bq
        sides = [(self.bq, self.bk), (self.bq, keys), (queries, self.bk), (queries, keys)]
        pairs = torch.zeros(4, *self.block_size, dtype=torch.bool, device=self.device)
        for tile, (rows, columns) in zip(pairs, sides, strict=True):
            tile[:rows, :columns] = True
        tiles = bit_tiles.pack(pairs)
        if not is_captured(self.device):
            self.__dict__["_inbounds_tiles"] = tiles
        return tiles

    def with_blocks(self, bq: int, bk: int) -> "Grid":
        """The same lengths in blocks of another size."""
        return replace(self, bq=bq, bk=bk)

    @property
    def T(self) -> "Grid":
        """The grid of the transposed matrix."""
        return Grid(self.k_len, self.q_len, self.bk, self.bq, self.device)


class OnGrid:
    """Base class of masks: lengths and block size, in tokens, and device of their grid."""

    @property
    def grid(self) -> Grid:
        """Lengths, block size, device, and the numbers nq and nk of block rows and columns."""
        raise NotImplementedError

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
        """The device of the tensors of the mask."""
        return self.grid.device


def checked_seq_len(seq_len) -> tuple[int, int]:
    """(q_len, k_len) of an int or a (q, k) pair; see Grid.of for what it raises."""
    q_len, k_len = _pair("seq_len", seq_len)
    if min(q_len, k_len) < 1:
        raise ValueError(f"seq_len must be at least 1 token, got {seq_len}")
    if max(q_len, k_len) > MAX_TOKENS:
        raise ValueError(f"seq_len must be at most {MAX_TOKENS} tokens, got {seq_len}")
    return q_len, k_len


def checked_block_size(block_size, sides=BLOCK_SIDES) -> tuple[int, int]:
    """(bq, bk) of an int or a (q, k) pair; see Grid.of for what it raises."""
    bq, bk = _pair("block_size", block_size)
    if bq not in sides or bk not in sides:
        raise ValueError(f"block_size must have sides in {sides}, got {block_size}")
    return bq, bk


def _pair(name: str, value) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise TypeError(f"{name} must be an integer or a (q, k) pair of them, got {value!r}")
    return check_integer(name, pair[0]), check_integer(name, pair[1])
