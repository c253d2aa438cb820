"""From a block mask to the lookup table that kernels read."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from masks import tiles
from masks.block_mask import BlockMask
from masks.grid import Grid
from masks.intervals import Runs, combine
from masks.lookup_table import PREFETCH, BlockLists, LookupTable
from masks.transpose import transpose_points, transpose_runs

SIDES = ("keys", "queries")


class Lists(NamedTuple):
    """The non-zero blocks of every layer: full ones as runs, partial ones ascending with their
    tiles.
    """

    full: Runs
    partial: Tensor
    tile: Tensor


def compile_table(mask: BlockMask) -> LookupTable:
    """The lookup table of a mask, on the mask's device, in O(runs + partial blocks + rows that
    list blocks).
    """
    g, layers = mask.grid, mask.num_masks
    rows, bit_tiles = without_cut_blocks(mask, ["keys"])
    turned, _ = without_cut_blocks(mask, ["queries"])
    number, order = transpose_points(turned.partial, g).sort()
    columns = Lists(transpose_runs(turned.full, g), number, turned.tile[order])
    if len(bit_tiles) == 0:
        bit_tiles = torch.zeros(1, g.bq, tiles.words(g.bk), dtype=torch.int32, device=mask.device)
    return LookupTable(
        by_query=_block_lists(rows, g, layers),
        by_key=_block_lists(columns, g.T, layers),
        bit_tiles=bit_tiles,
        head_to_mask=torch.tensor([mask.head_to_mask], dtype=torch.int32, device=mask.device),
        seq_len=g.seq_len,
        block_size=g.block_size,
    )


def without_cut_blocks(mask: BlockMask, sides: Sequence[str] = SIDES) -> tuple[Lists, Tensor]:
    """The blocks of a mask with the full ones that the end of the keys, of the queries, or of
    both cuts listed as partial; and their bit_tiles, the same for all `sides`.
    """
    g = mask.grid
    ragged = [side for side in SIDES if _ragged(g, side)]
    bit_tiles = torch.cat([mask.bit_tiles, g.whole[1:]]) if ragged else mask.bit_tiles
    cut = [_edge(g, mask.num_masks, side) for side in ragged if side in sides]
    if not cut:
        return Lists(mask.full, mask.partial, mask.partial_bit_tile), bit_tiles
    edge = cut[0] if len(cut) == 1 else combine(torch.bitwise_or, *cut)
    full = combine(lambda inside, e: inside & ~e, mask.full, edge)
    extra = combine(torch.bitwise_and, mask.full, edge).expand()
    number, order = torch.cat([mask.partial, extra]).sort()
    tile = torch.cat([mask.partial_bit_tile, len(mask.bit_tiles) + g.cut(extra) - 1])[order]
    return Lists(full, number, tile), bit_tiles


def _ragged(g: Grid, side: str) -> bool:
    return (g.k_len % g.bk if side == "keys" else g.q_len % g.bq) != 0


def _edge(g: Grid, layers: int, side: str) -> Runs:
    """The last block column, or the last block row, of every layer."""
    every = g.every_row(layers)
    if side == "keys":
        return Runs(every.end - 1, every.end)
    return Runs(*(edge[g.nq - 1 :: g.nq].contiguous() for edge in every))


def _block_lists(lists: Lists, g: Grid, layers: int) -> BlockLists:
    rows = layers * g.nq
    run_row, run_column = g.split(lists.full.begin)
    run_length = lists.full.end - lists.full.begin
    runs = torch.bincount(run_row, minlength=rows)
    zeros = torch.zeros(rows, dtype=torch.int64, device=g.device)
    full_count = zeros.index_add(0, run_row, run_length)
    partial_row, partial_column = g.split(lists.partial)
    partial_count = torch.bincount(partial_row, minlength=rows)

    # A row of one run is a window of one list 0, 1, 2, ... that all such rows share; other rows
    # list their blocks.
    alone = runs[run_row] == 1
    shared = torch.arange(g.nk if bool(alone.any()) else 0, device=g.device)
    listed = Runs(lists.full.begin[~alone], lists.full.end[~alone]).expand() % g.line
    listed_count = torch.where(runs > 1, full_count, 0)
    full_start = len(shared) + torch.cumsum(listed_count, 0) - listed_count
    full_start[run_row[alone]] = run_column[alone]
    partial_start = torch.cumsum(partial_count, 0) - partial_count

    count = (full_count + partial_count).view(layers, g.nq)
    row_ptr = torch.stack([full_start, full_count, partial_start, partial_count], dim=1)
    return BlockLists(
        row_ptr=row_ptr.view(layers, g.nq, 4).int(),
        full_index=_padded(torch.cat([shared, listed])),
        partial_index=_padded(partial_column),
        partial_bit_tile=_padded(lists.tile),
        schedule=torch.argsort(count, dim=1, descending=True, stable=True).int(),
        max_blocks=int(count.max()),
        total_blocks=int(count.sum()),
    )


def _padded(entries: Tensor) -> Tensor:
    return torch.nn.functional.pad(entries, (0, PREFETCH)).int()
