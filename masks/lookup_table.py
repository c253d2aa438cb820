"""The lookup table: a compiled mask in the form that kernels read."""

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from masks import tiles
from masks.cache import Cache

# Kernels fetch the index of the next block while they work on this one: every list ends in so many
# readable entries.
PREFETCH = 2
# A tile takes 32 times its size while it is transposed.
TILES_AT_ONCE = 1024


@dataclass(frozen=True, eq=False)
class BlockLists:
    """One direction of a lookup table: for every block row the full and the partial blocks in it.

    Rows and layers may share storage: two rows that list the same blocks may point at the same
    range.

    row_ptr:          int32 (masks, rows, 4)  full_start, full_count, partial_start, partial_count
    full_index:       int32 (n,)              column of each full block, ascending within a row
    partial_index:    int32 (p,)              column of each partial block, ascending within a row
    partial_bit_tile: int32 (p,)              which of the bit tiles holds its element mask
    schedule:         int32 (masks, rows)     the rows of a mask, most blocks first
    max_blocks:       most non-zero blocks in any row
    total_blocks:     non-zero blocks over all masks (shared storage counted once per row)

    max_blocks and total_blocks are None in the table of a DynamicMask: only the device knows.
    """

    row_ptr: Tensor
    full_index: Tensor
    partial_index: Tensor
    partial_bit_tile: Tensor
    schedule: Tensor
    max_blocks: int | None
    total_blocks: int | None

    @cached_property
    def num_rows(self) -> int:
        return self.row_ptr.shape[1]

    @cached_property
    def imbalance(self) -> float:
        """How many times the mean the heaviest row holds; inf where only the device knows."""
        if self.max_blocks is None or self.total_blocks is None:
            return math.inf
        return self.max_blocks * self.row_ptr.shape[0] * self.num_rows / max(self.total_blocks, 1)

    @cached_property
    def mean_blocks(self) -> float | None:
        """Non-zero blocks of a row on average; None where only the device knows."""
        return (
            None
            if self.total_blocks is None
            else self.total_blocks / (self.row_ptr.shape[0] * self.num_rows)
        )

    def to(self, device: torch.device | str) -> "BlockLists":
        return _move(self, device)


@dataclass(frozen=True, eq=False)
class LookupTable:
    """What kernels read: both directions of a mask and the element masks of its partial blocks.

    by_query:     rows are query blocks, columns are key blocks (forward, dQ)
    by_key:       the transpose: rows are key blocks, columns are query blocks (dK, dV)
    bit_tiles:    int32 (tiles, bq, ceil(bk / 32)); bit c % 32 of bit_tiles[t, r, c // 32] is pair
        (query r, key c) of tile t, in both directions; bits outside the sequence are 0
    head_to_mask: int32 (mask batch, mask heads): the distinct mask that each head reads; one entry
        serves any number of heads, and of batch elements
    seq_len:      (q_len, k_len) in tokens
    block_size:   (bq, bk) in tokens

    A block listed as full has every pair of the sequence set. One that the end of the sequence
    cuts is listed as partial in the direction whose columns end there: by query where the keys
    end, by key where the queries end. So the loop of a kernel over its columns needs bounds checks
    and element masks for partial blocks only, and few queries leave blocks full.
    """

    by_query: BlockLists
    by_key: BlockLists
    bit_tiles: Tensor
    head_to_mask: Tensor
    seq_len: tuple[int, int]
    block_size: tuple[int, int]

    @property
    def device(self) -> torch.device:
        return self.bit_tiles.device

    @cached_property
    def bit_tiles_by_key(self) -> Tensor:
        """int32 (tiles, bk, ceil(bq / 32)): the bit tiles with a row for each key; made when first
        asked for.
        """
        transposed = [
            tiles.pack(tiles.unpack(part, self.block_size[1]).mT)
            for part in self.bit_tiles.split(TILES_AT_ONCE)
        ]
        return torch.cat(transposed)

    @cached_property
    def cache(self) -> Cache:
        """What its readers keep for as long as it lives."""
        return Cache()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the table takes."""
        tensors = [
            self.bit_tiles,
            self.head_to_mask,
            *_tensors(self.by_query),
            *_tensors(self.by_key),
        ]
        return sum(t.numel() * t.element_size() for t in tensors)

    def to(self, device: torch.device | str) -> "LookupTable":
        return _move(self, device)


def _tensors(record) -> list[Tensor]:
    return [v for f in fields(record) if isinstance(v := getattr(record, f.name), Tensor)]


def _move(record, device):
    """A copy of a frozen record with every tensor (and nested record) on `device`."""
    moved = {
        f.name: v.to(device) for f in fields(record) if hasattr(v := getattr(record, f.name), "to")
    }
    return replace(record, **moved)
