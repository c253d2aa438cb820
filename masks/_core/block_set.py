"""BlockSet: the stored form of a mask, and the algebra on it.

A mask of 3 x 4 blocks, F full, P partial, . empty:

      0  1  2  3                flat indices          stored
    0 P  .  .  .                0  1  2  3            full     [6, 7) [10, 12)
    1 P  F  .  P                5  6  7  8            partial  0  5  8  12  13
    2 F  F  P  P               10 11 12 13            partial_bit_tile  0  1  2  0  2

The form is canonical, so equal masks have equal sets. A block is full if all of its pairs inside
the sequence attend, also if the end of the sequence clips it. Empty blocks are not stored. Bits
outside the sequence are 0, and bit tiles are distinct. Only `assemble` establishes this form.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from masks._core.bit_tiles import (
    deduplicate,
    hash_rows,
    renumbered,
    unique_codes,
    unpack,
    words_per_row,
)
from masks._core.grid import Grid
from masks._core.intervals import Runs, combine, concatenate, from_points, in_chunks
from masks.arguments import checked_device

# A tile code is the index of a bit tile, or the number of bit tiles plus one of these: a full
# block whose keys, queries or both are clipped; a full block that is not clipped; an empty block.
# See BlockSet.tiles_by_code.
CLIPPED_KEYS, CLIPPED_QUERIES, CLIPPED_BOTH, FULL, EMPTY = range(5)


@dataclass(frozen=True, eq=False)
class BlockSet:
    """The non-zero blocks of one or several masks of one grid, in canonical form.

    Attributes:
        grid: Lengths, block size and device.
        head_to_mask: Index of the mask of each head. Heads with equal masks share one.
        full: Flat indices of the full blocks, as runs.
        partial: int64 (p,), flat indices of the partial blocks, ascending.
        partial_bit_tile: int64 (p,), index of the bit tile of each partial block.
        bit_tiles: int32 (tiles, bq, words), the distinct element masks.
    """

    grid: Grid
    head_to_mask: tuple[int, ...]
    full: Runs
    partial: Tensor
    partial_bit_tile: Tensor
    bit_tiles: Tensor

    @property
    def num_masks(self) -> int:
        """The number of stored masks."""
        return max(self.head_to_mask) + 1

    def tile_codes(self, flat: Tensor) -> Tensor:
        """The tile code of each block, an index of tiles_by_code; -1 for an empty block."""
        full = len(self.bit_tiles) + full_code(self.grid.clip_kind(flat))
        code = torch.where(self.full.contains(flat), full, len(self.bit_tiles) + EMPTY)
        if len(self.partial):
            nearest = torch.searchsorted(self.partial, flat).clamp(max=len(self.partial) - 1)
            code = torch.where(self.partial[nearest] == flat, self.partial_bit_tile[nearest], code)
        return code

    def tile_code_grid(self) -> Tensor:
        """The tile codes of all blocks, int64 (num_masks * nq, nk). Never waits for the device."""
        g = self.grid
        row = torch.arange(self.num_masks * g.nq, device=g.device).unsqueeze(1)
        flat = g.flat_index(0, row, torch.arange(g.nk, device=g.device))
        full = len(self.bit_tiles) + full_code(g.clip_kind(flat))
        code = torch.where(self.full.contains(flat), full, len(self.bit_tiles) + EMPTY)
        code[g.stacked_row(self.partial), self.partial % g.row_stride] = self.partial_bit_tile
        return code

    def tiles_by_code(self) -> Tensor:
        """The bits of each tile code: int32 (tiles + 5, bq, words).

        The first tiles + 3 are the bit tiles of the lookup table of a clipped sequence.
        """
        inbounds = self.grid.inbounds_tiles
        return torch.cat(
            [self.bit_tiles, inbounds[1:], inbounds[:1], torch.zeros_like(inbounds[:1])]
        )

    def gather(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs of rectangles of rows x columns blocks.

        Args:
            flat: int64 (n, rows, columns), flat indices; -1 for an empty block.

        Returns:
            The distinct rectangles, bool (distinct, rows * bq, columns * bk), and the index of
            each of the n rectangles among them, int64 (n,).
        """
        distinct_codes, number = deduplicate(self.tile_codes(flat).flatten(1).int())
        blocks = unpack(self.tiles_by_code()[distinct_codes.long()], self.grid.bk)
        pairs = blocks.unflatten(1, flat.shape[1:]).transpose(2, 3)
        return pairs.flatten(3, 4).flatten(1, 2), number

    def count_per_row(self) -> Tensor:
        """The number of non-zero blocks in each block row: int64 (num_heads, nq)."""
        zeros = torch.zeros(
            self.num_masks * self.grid.nq, dtype=torch.int64, device=self.grid.device
        )
        row = self.grid.stacked_row(self.full.begin)
        full = zeros.index_add(0, row, self.full.end - self.full.begin)
        return (full + self._partial_per_row()).view(self.num_masks, -1)[list(self.head_to_mask)]

    def count_partial(self) -> int:
        """The number of partial blocks, summed over heads."""
        per_mask = self._partial_per_row().view(self.num_masks, -1)
        return int(per_mask[list(self.head_to_mask)].sum())

    def hash_of_pairs(self) -> int:
        """A hash of the pairs of each head, which differs for most sets that differ.

        It is a sum over blocks, modulo 2^64, of 2 f + 1 for the flat index f of each block, times
        the hash of the bit tile of a partial block. The sum over a run of full blocks is the
        difference of two squares. Neither how runs are divided nor the order of bit tiles matters.
        """
        stride = self.grid.mask_stride
        sums = torch.zeros(self.num_masks, dtype=torch.int64, device=self.grid.device)
        begin, end = self.full.begin % stride, (self.full.end - 1) % stride + 1
        sums.index_add_(0, self.full.begin // stride, end * end - begin * begin)
        if len(self.partial):
            tiles = hash_rows(self.bit_tiles.flatten(1))[self.partial_bit_tile]
            weights = 2 * (self.partial % stride) + 1
            sums.index_add_(0, self.partial // stride, weights * tiles)
        return hash(tuple(sums[list(self.head_to_mask)].tolist()))

    def _partial_per_row(self) -> Tensor:
        row = self.grid.stacked_row(self.partial)
        return torch.bincount(row, minlength=self.num_masks * self.grid.nq)

    def select_masks(self, masks: Sequence[int]) -> "BlockSet":
        """A set with one head for each of `masks`. A mask that occurs twice is stored twice."""
        heads = tuple(range(len(masks)))
        if list(masks) == list(range(self.num_masks)):
            return replace(self, head_to_mask=heads)
        stride = self.grid.mask_stride
        runs, partial, tiles = [], [], []
        for new, old in enumerate(masks):
            runs.append(
                self.full.between(old * stride, (old + 1) * stride).shift((new - old) * stride)
            )
            selected = self.partial_between(old * stride, (old + 1) * stride)
            partial.append(self.partial[selected] + (new - old) * stride)
            tiles.append(self.partial_bit_tile[selected])
        return replace(
            self,
            head_to_mask=heads,
            full=concatenate(runs),
            partial=torch.cat(partial),
            partial_bit_tile=torch.cat(tiles),
        )

    def partial_between(self, low: int, high: int) -> slice:
        """The slice of `partial` with flat indices in [low, high)."""
        edges = torch.tensor([low, high], device=self.grid.device)
        return slice(*torch.searchsorted(self.partial, edges).tolist())

    def to(self, device: torch.device | str) -> "BlockSet":
        """The same set on another device."""
        return BlockSet(
            replace(self.grid, device=checked_device(device)),
            self.head_to_mask,
            Runs(*(t.to(device) for t in self.full)),
            self.partial.to(device),
            self.partial_bit_tile.to(device),
            self.bit_tiles.to(device),
        )


def full_code(clip_kind: Tensor) -> Tensor:
    """The tile code of a full block, minus the number of bit tiles."""
    return torch.where(clip_kind == 0, FULL, clip_kind - 1)


def from_full_runs(grid: Grid, full: Runs, head_to_mask: tuple[int, ...] = (0,)) -> BlockSet:
    """A set of full blocks."""
    nothing = torch.empty(0, dtype=torch.int64, device=grid.device)
    words = (0, grid.bq, words_per_row(grid.bk))
    bit_tiles = torch.empty(words, dtype=torch.int32, device=grid.device)
    return BlockSet(grid, head_to_mask, full, nothing, nothing, bit_tiles)


def assemble(
    grid: Grid,
    head_to_mask: tuple[int, ...],
    full: Runs,
    candidates: Tensor,
    bit_tiles: Tensor,
    tile: Tensor,
) -> BlockSet:
    """The canonical set of full blocks and of candidates, which may be full, partial or empty.

    Args:
        grid: Lengths, block size and device.
        head_to_mask: Index of the mask of each head.
        full: Flat indices of full blocks.
        candidates: int64 (p,), flat indices of the candidates, ascending and not in `full`.
        bit_tiles: int32 (n, bq, words), not necessarily distinct, with any bits outside the
            sequence.
        tile: int64 (p,), index of the bit tile of each candidate.
    """
    # Whether a candidate is full depends on its tile and on which of four ways it is clipped.
    codes = in_chunks(lambda part, flat: part * 4 + grid.clip_kind(flat), tile, candidates)
    distinct_codes, code_number = unique_codes(codes, 4 * len(bit_tiles))
    inbounds = grid.inbounds_tiles[distinct_codes % 4]
    pairs = bit_tiles[distinct_codes // 4] & inbounds
    is_full = (pairs == inbounds).flatten(1).all(1)
    is_partial = (pairs != 0).flatten(1).any(1) & ~is_full
    distinct_tiles, tile_number = deduplicate(pairs[is_partial])
    if len(tile_number) < len(distinct_codes):
        new_tile = torch.full_like(distinct_codes, -1)
        new_tile[is_partial] = tile_number
        promoted = from_points(candidates[is_full[code_number]])
        full = combine(torch.bitwise_or, full, promoted) if len(promoted.begin) else full
        partial = is_partial[code_number]
        candidates, code_number, tile_number = candidates[partial], code_number[partial], new_tile
    return BlockSet(grid, head_to_mask, full, candidates, tile_number[code_number], distinct_tiles)


def elementwise(a: BlockSet, b: BlockSet, rule: Callable[[Tensor, Tensor], Tensor]) -> BlockSet:
    """rule(a, b) for each pair. Heads broadcast.

    Args:
        a, b: Sets of one grid, with one head or equally many.
        rule: A bitwise operation on integers and bools, with rule(0, 0) = 0.
    """
    heads = max(len(a.head_to_mask), len(b.head_to_mask))
    operands = [  # the masks of a and b of each head
        (a.head_to_mask[h % len(a.head_to_mask)], b.head_to_mask[h % len(b.head_to_mask)])
        for h in range(heads)
    ]
    index = {masks: i for i, masks in enumerate(dict.fromkeys(operands))}
    a, b = a.select_masks([m for m, _ in index]), b.select_masks([m for _, m in index])
    candidates = torch.unique(torch.cat([a.partial, b.partial]))
    full = combine(lambda x, y, p: rule(x, y) & ~p, a.full, b.full, from_points(candidates))
    tiles_a, tiles_b = a.tiles_by_code(), b.tiles_by_code()
    codes = a.tile_codes(candidates) * len(tiles_b) + b.tile_codes(candidates)
    distinct_codes, tile = unique_codes(codes, len(tiles_a) * len(tiles_b))
    tiles = rule(tiles_a[distinct_codes // len(tiles_b)], tiles_b[distinct_codes % len(tiles_b)])
    head_to_mask = tuple(index[masks] for masks in operands)
    return assemble(a.grid, head_to_mask, full, candidates, tiles, tile)


def stack(parts: Sequence[BlockSet], head_to_mask: tuple[int, ...]) -> BlockSet:
    """The set whose mask i is parts[i], a set with one head."""
    grid = parts[0].grid
    parts = [part.select_masks([part.head_to_mask[0]]) for part in parts]
    bit_tiles = [part.bit_tiles for part in parts]
    return assemble(
        grid,
        head_to_mask,
        concatenate([part.full.shift(i * grid.mask_stride) for i, part in enumerate(parts)]),
        torch.cat([part.partial + i * grid.mask_stride for i, part in enumerate(parts)]),
        torch.cat(bit_tiles),
        renumbered([part.partial_bit_tile for part in parts], bit_tiles),
    )


class DirectionLists(NamedTuple):
    """Full blocks as runs; partial blocks, ascending, with their tile codes."""

    full: Runs
    partial: Tensor
    tile: Tensor


def list_clipped_as_partial(blocks: BlockSet, *, keys: bool, queries: bool) -> DirectionLists:
    """The blocks of a set, with full blocks of clipped keys, queries or both listed as partial."""
    g, full, clipped = blocks.grid, blocks.full, []
    if queries and g.q_len % g.bq:
        in_last_row = g.stacked_row(full.begin) % g.nq == g.nq - 1
        clipped.append(full.select(in_last_row).expand())
        full = full.select(~in_last_row)
    if keys and g.k_len % g.bk:
        in_last_column = full.end % g.row_stride == g.nk
        clipped.append(full.end[in_last_column] - 1)
        full = Runs(full.begin, full.end - in_last_column.long()).nonempty()
    if not clipped:
        return DirectionLists(full, blocks.partial, blocks.partial_bit_tile)
    clipped_blocks = torch.cat(clipped)
    partial, order = torch.cat([blocks.partial, clipped_blocks]).sort()
    code = len(blocks.bit_tiles) + full_code(g.clip_kind(clipped_blocks))
    return DirectionLists(full, partial, torch.cat([blocks.partial_bit_tile, code])[order])
