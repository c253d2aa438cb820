"""The lookup table that kernels read, and its compilation from a mask.

The direction by query of a causal mask of 4 x 4 blocks whose diagonal is partial:

    mask          row_ptr of each row                                    full_index     0 1 2
    P . . .       full_start 0, full_count 0, partial_start 0, count 1   partial_index  0 1 2 3
    F P . .                  0,            1,               1,       1
    F F P .                  0,            2,               2,       1
    F F F P                  0,            3,               3,       1

If the full blocks of a row form one run, the row points into a list 0, 1, 2, ... that all such
rows share. So the table of a causal or full mask has O(rows) entries, not O(blocks).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from masks._core.bit_tiles import pack, unpack
from masks._core.block_set import (
    CLIPPED_KEYS,
    CLIPPED_QUERIES,
    EMPTY,
    FULL,
    BlockSet,
    DirectionLists,
    list_clipped_as_partial,
)
from masks._core.grid import Grid, is_captured
from masks._core.intervals import CHUNK, Runs
from masks._core.transpose import transpose_lists
from masks.registry import Caching

# Kernels load the index of the next block while they compute the current one. So every list is
# followed by this many readable entries.
PREFETCH = 2
MAX_ENTRIES = 2**31 - 1 - PREFETCH  # row pointers have 32 bits
TRANSPOSE_CHUNK = 1024  # bit tiles; a tile needs 32 times its size while it is transposed


@dataclass(frozen=True, eq=False, repr=False)
class BlockLists:
    """One direction of a lookup table, in CSR form: the full and partial blocks of each block row.

    Rows that list the same blocks may point to the same entries.

    Attributes:
        row_ptr: int32 (masks, rows, 4): full_start, full_count, partial_start, partial_count.
        full_index: int32 (n,), the column of each full block, ascending within a row.
        partial_index: int32 (p,), the column of each partial block, ascending within a row.
        partial_bit_tile: int32 (p,), the index of the bit tile of each partial block.
        schedule: int32 (masks, scheduled rows), rows of a mask, those with the most blocks first.
            These are all rows, or all that have blocks; see `without_empty_rows`.
        max_blocks: Most non-zero blocks in a row; None for a DynamicMask, where the host does
            not know it.
        total_blocks: Non-zero blocks of all masks; None for a DynamicMask.

    Reference:
        Graham 1969, Bounds on multiprocessing timing anomalies (longest processing time first).
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
        """The number of block rows of one mask."""
        return self.row_ptr.shape[1]

    @property
    def num_scheduled_rows(self) -> int:
        """The number of block rows of one mask that kernels compute."""
        return self.schedule.shape[1]

    @cached_property
    def without_empty_rows(self) -> "BlockLists":
        """The same lists with a schedule of the rows that have blocks, if they are of one mask.

        The lists themselves if there are several masks, whose schedules must have one length, if
        only the device knows the blocks, or if there are none.
        """
        if self.row_ptr.shape[0] > 1 or not self.total_blocks:
            return self
        counts = self.row_ptr[0, :, 1] + self.row_ptr[0, :, 3]
        return replace(self, schedule=self.schedule[:, : int(counts.count_nonzero())])

    @cached_property
    def has_partial(self) -> bool:
        """Whether a row may list partial blocks."""
        return len(self.partial_index) > PREFETCH

    @cached_property
    def imbalance(self) -> float:
        """Number of blocks in the longest row over the mean; inf if only the device knows."""
        if self.max_blocks is None or self.total_blocks is None:
            return math.inf
        return self.max_blocks * self.schedule.numel() / max(self.total_blocks, 1)

    @cached_property
    def mean_blocks(self) -> float | None:
        """Mean number of non-zero blocks in a row; None if only the device knows."""
        return None if self.total_blocks is None else self.total_blocks / self.schedule.numel()

    def to(self, device: torch.device | str) -> "BlockLists":
        """The same lists on another device.

        Args:
            device: A torch device or its name.
        """
        return moved(self, device)

    def __repr__(self) -> str:
        return (
            f"BlockLists(masks={len(self.row_ptr)}, rows={self.num_rows}, "
            f"total_blocks={self.total_blocks}, max_blocks={self.max_blocks}, "
            f"device={self.row_ptr.device})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class LookupTable(Caching):
    """The arrays that kernels read: block lists in two directions, and element masks.

    In a block that is listed as full, all pairs inside the sequence attend. If the end of the keys
    clips such a block, by_query lists it as partial; if the end of the queries clips it, by_key
    does. So the loop of a kernel over columns needs bounds checks and element masks only for
    partial blocks. Kernels do not store rows past the end, so a block row with few queries may
    list full blocks.

    Attributes:
        by_query: Rows are query blocks, columns are key blocks (forward, dQ).
        by_key: The transpose: rows are key blocks, columns are query blocks (dK, dV).
        bit_tiles: int32 (tiles, bq, ceil(bk / 32)). Bit c % 32 of bit_tiles[t, r, c // 32] is pair
            (query r, key c) of tile t, in both directions. Bits outside the sequence are 0.
        head_to_mask: int32 (mask batch, mask heads), the index of the distinct mask that each head
            reads. A size of 1 means that all batch elements, or all heads, share masks.
        seq_len: (q_len, k_len), in tokens.
        block_size: (bq, bk), in tokens.

    Reference:
        Dao et al. 2022, FlashAttention, Algorithm 5 (block-sparse).
    """

    by_query: BlockLists
    by_key: BlockLists
    bit_tiles: Tensor
    head_to_mask: Tensor
    seq_len: tuple[int, int]
    block_size: tuple[int, int]

    @property
    def device(self) -> torch.device:
        """Device of the table."""
        return self.bit_tiles.device

    @cached_property
    def bit_tiles_by_key(self) -> Tensor:
        """int32 (tiles, bk, ceil(bq / 32)): the bit tiles with a row for each key."""
        parts = self.bit_tiles.split(TRANSPOSE_CHUNK)
        return torch.cat([pack(unpack(part, self.block_size[1]).mT) for part in parts])

    def for_groups(self, group: int) -> "LookupTable":
        """The table for more heads, for grouped-query attention.

        Args:
            group: Number of consecutive heads that share each mask of this table.
        """
        if group == 1:
            return self
        table = self.cache.get(("group", group))
        if table is None:
            heads = self.head_to_mask.unsqueeze(2).expand(-1, -1, group)
            table = replace(self, head_to_mask=heads.flatten(1))
            if not is_captured(self.device):
                self.cache["group", group] = table
        return table

    def with_columns(self, order: Tensor) -> "LookupTable":
        """The table for blocks of keys that lie in another order in memory.

        Args:
            order: int64 (block columns,), where each block column lies, a permutation, on the
                device of the table. All blocks are whole.

        Returns:
            A table for calls without key lengths, because columns of a row no longer ascend.
        """

        def renamed(index: Tensor) -> Tensor:
            return order.int()[index.long()]

        by_query, by_key = self.by_query, self.by_key
        by_query = replace(
            by_query,
            full_index=renamed(by_query.full_index),
            partial_index=renamed(by_query.partial_index),
        )
        row_ptr = by_key.row_ptr[:, order.argsort()].contiguous()
        by_key = replace(by_key, row_ptr=row_ptr, schedule=renamed(by_key.schedule))
        return replace(self, by_query=by_query, by_key=by_key)

    @property
    def nbytes(self) -> int:
        """The size of the table in device memory, in bytes."""
        lists = (*_tensors(self.by_query), *_tensors(self.by_key))
        return sum(t.numel() * t.element_size() for t in (*_tensors(self), *lists))

    def to(self, device: torch.device | str) -> "LookupTable":
        """The same table on another device.

        Args:
            device: A torch device or its name.
        """
        return moved(self, device)

    def __repr__(self) -> str:
        return (
            f"LookupTable(seq_len={self.seq_len}, block_size={self.block_size}, "
            f"masks={len(self.by_query.row_ptr)}, total_blocks={self.by_query.total_blocks}, "
            f"bit_tiles={len(self.bit_tiles)}, nbytes={self.nbytes}, device={self.device})"
        )


def compile_table(blocks: BlockSet) -> LookupTable:
    """The lookup table of a mask, on its device, in O(runs + partial blocks + listed blocks)."""
    g, masks = blocks.grid, blocks.num_masks
    by_query = list_clipped_as_partial(blocks, keys=True, queries=False)
    by_key = transpose_lists(list_clipped_as_partial(blocks, keys=False, queries=True), g, masks)
    clipped = g.q_len % g.bq or g.k_len % g.bk
    bit_tiles = (
        blocks.tiles_by_code()[: len(blocks.bit_tiles) + FULL] if clipped else blocks.bit_tiles
    )
    return LookupTable(
        by_query=_block_lists(by_query, g, masks),
        by_key=_block_lists(by_key, g.T, masks),
        bit_tiles=bit_tiles if len(bit_tiles) else torch.zeros_like(g.inbounds_tiles[:1]),
        head_to_mask=torch.tensor([blocks.head_to_mask], dtype=torch.int32, device=g.device),
        seq_len=g.seq_len,
        block_size=g.block_size,
    )


class _RowLists(NamedTuple):
    """The lists of some block rows.

    Attributes:
        runs, full, partial: int64 (rows,), the number of runs, full blocks and partial blocks.
        window: int64 (rows,), for a row whose full blocks form one run its first entry in the
            shared list 0, 1, 2, ...
        full_index: int32 (n,), columns of the full blocks of the other rows.
        partial_index: int32 (p,), columns of the partial blocks.
    """

    runs: Tensor
    full: Tensor
    partial: Tensor
    window: Tensor
    full_index: Tensor
    partial_index: Tensor


def _block_lists(lists: DirectionLists, g: Grid, masks: int) -> BlockLists:
    parts = [_row_lists(*part, g) for part in _row_parts(lists, g, masks * g.nq)]
    runs, full, partial, window, full_index, partial_index = map(
        torch.cat, zip(*parts, strict=True)
    )
    single, count = runs == 1, (full + partial).view(masks, g.nq)
    shared = torch.arange(g.nk if bool(single.any()) else 0, device=g.device)
    listed = torch.where(single, 0, full)
    full_start = torch.where(single, window, len(shared) + torch.cumsum(listed, 0) - listed)
    partial_start = torch.cumsum(partial, 0) - partial
    _check_entries(max(len(shared) + len(full_index), len(partial_index)))
    return BlockLists(
        row_ptr=torch.stack([full_start, full, partial_start, partial], dim=1)
        .view(masks, g.nq, 4)
        .int(),
        full_index=_with_prefetch_entries(torch.cat([shared.int(), full_index])),
        partial_index=_with_prefetch_entries(partial_index),
        partial_bit_tile=_with_prefetch_entries(lists.tile),
        schedule=_longest_first(count),
        max_blocks=int(count.max()),
        total_blocks=int(count.sum()),
    )


def _row_parts(lists: DirectionLists, g: Grid, rows: int) -> Iterator[tuple[Runs, Tensor, range]]:
    """(full, partial, block rows) of groups of block rows: one group, or on a CPU several."""
    full, partial = lists.full, lists.partial
    parts = 1 if partial.is_cuda else 1 + (len(full.begin) + len(partial)) // CHUNK
    step = -(-rows // parts)
    first = [*range(0, rows, step), rows]
    flat = torch.tensor(first, device=g.device) * g.row_stride
    runs, points = (torch.searchsorted(t, flat).tolist() for t in (full.begin, partial))
    for i, own in enumerate(map(range, first, first[1:])):
        inside = slice(runs[i], runs[i + 1])
        yield (Runs(full.begin[inside], full.end[inside]), partial[points[i] : points[i + 1]], own)


def _row_lists(full: Runs, partial: Tensor, rows: range, g: Grid) -> _RowLists:
    row = g.stacked_row(full.begin)
    column, row = full.begin - row * g.row_stride, row - rows.start
    runs = torch.bincount(row, minlength=len(rows))
    single = runs[row] == 1
    window = torch.zeros_like(runs)
    window[row[single]] = column[single]
    listed = full.select(~single) if bool(single.any()) else full
    return _RowLists(
        runs=runs,
        full=torch.zeros_like(runs).index_add(0, row, full.end - full.begin),
        partial=torch.bincount(g.stacked_row(partial) - rows.start, minlength=len(rows)),
        window=window,
        full_index=(listed.expand() % g.row_stride).int(),
        partial_index=(partial % g.row_stride).int(),
    )


def _check_entries(entries: int) -> None:
    if entries > MAX_ENTRIES:
        raise ValueError(f"blocks must be at most {MAX_ENTRIES} in a table, got {entries}")


def _longest_first(count: Tensor) -> Tensor:
    return torch.argsort(count, dim=1, descending=True, stable=True).int()


def _with_prefetch_entries(entries: Tensor) -> Tensor:
    return torch.nn.functional.pad(entries, (0, PREFETCH)).int()


def compile_selected(support: BlockSet, blocks: Tensor) -> LookupTable:
    """The table of the blocks of `support` that `blocks`, bool (batch, heads, nq, nk), selects.

    Every row has entries for all of its columns. So the host knows all sizes, and nothing waits
    for the device.
    """
    g, tiles = support.grid, len(support.bit_tiles)
    _check_entries(blocks.numel())
    every = support.tile_code_grid().view(support.num_masks, g.nq, g.nk).unbind()
    every = torch.stack([every[mask] for mask in support.head_to_mask])
    batch, heads = blocks.shape[:2]
    code = torch.where(blocks, every, tiles + EMPTY).flatten(0, 1)
    # A full block with clipped queries is full in by_query, one with clipped keys in by_key.
    by_query = code.masked_fill(code == tiles + CLIPPED_QUERIES, tiles + FULL)
    by_key = code.masked_fill(code == tiles + CLIPPED_KEYS, tiles + FULL).mT
    masks = torch.arange(batch * heads, dtype=torch.int32, device=g.device)
    return LookupTable(
        by_query=_selected_lists(by_query, tiles),
        by_key=_selected_lists(by_key, tiles),
        bit_tiles=support.tiles_by_code()[: tiles + FULL],
        head_to_mask=masks.view(batch, heads),
        seq_len=g.seq_len,
        block_size=g.block_size,
    )


def _selected_lists(code: Tensor, tiles: int) -> BlockLists:
    """The block lists of tile codes (masks, rows, columns)."""
    masks, rows, columns = code.shape
    full, partial = code == tiles + FULL, code < tiles + FULL
    full_count, partial_count = full.sum(-1), partial.sum(-1)
    after_full = full_count.unsqueeze(-1) + partial.cumsum(-1) - 1
    slot = torch.where(full, full.cumsum(-1) - 1, after_full)
    slot = slot.masked_fill(~(full | partial), columns)
    start = torch.arange(masks * rows, device=code.device).view(masks, rows) * columns
    index = _scatter_rows(torch.arange(columns, device=code.device).expand_as(code), slot)
    row_ptr = torch.stack([start, full_count, start + full_count, partial_count], dim=-1)
    return BlockLists(
        row_ptr=row_ptr.int(),
        full_index=index,
        partial_index=index,
        partial_bit_tile=_scatter_rows(code.masked_fill(~partial, 0), slot),
        schedule=_longest_first(full_count + partial_count),
        max_blocks=None,
        total_blocks=None,
    )


def _scatter_rows(entries: Tensor, slot: Tensor) -> Tensor:
    """Writes the entries of each row to their slots, and drops those past its end."""
    columns = entries.shape[-1]
    rows = entries.new_zeros(*entries.shape[:-1], columns + 1, dtype=torch.int32)
    rows.scatter_(-1, slot, entries.int())
    return _with_prefetch_entries(rows[..., :columns].flatten())


def _tensors(record) -> list[Tensor]:
    return [v for f in fields(record) if isinstance(v := getattr(record, f.name), Tensor)]


def moved(record, device):
    """A copy of a frozen record with every tensor, mask and nested record on `device`."""
    values = {
        f.name: v.to(device) for f in fields(record) if hasattr(v := getattr(record, f.name), "to")
    }
    return replace(record, **values)
