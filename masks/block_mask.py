"""BlockMask: a pattern at one sequence length and one block size, exact to the element."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from masks import tiles
from masks.grid import Grid, OnGrid, definite
from masks.handle import Handled
from masks.intervals import Runs, combine, concatenate, from_points
from masks.lookup_table import LookupTable
from masks.transpose import transpose_points, transpose_runs

if TYPE_CHECKING:
    from masks.dynamic import DynamicMask

# What tile_of_block says of blocks without a tile.
FULL, EMPTY = -1, -2


@dataclass(frozen=True, eq=False)
class BlockMask(OnGrid, Handled):
    """Which (query, key) pairs attend, block by block: full, partial (with its element mask) or
    empty.

    grid:         the sequence length, block size and device
    head_to_mask:   the layer that each head reads; heads with the same mask share a layer
    full:         numbers (see Grid) of the blocks whose pairs inside the sequence are all set, as
        runs
    partial:      int64 (p,) numbers of the other non-zero blocks, ascending
    partial_bit_tile: int64 (p,) which of the bit tiles each one has
    bit_tiles:         int32 (tiles, bq, words), distinct, bits outside the sequence 0

    Lengths and block sizes are in tokens. Immutable; `&`, `|`, `-`, `^`, `~` and `==` act on
    elements.
    """

    grid: Grid
    head_to_mask: tuple[int, ...]
    full: Runs
    partial: Tensor
    partial_bit_tile: Tensor
    bit_tiles: Tensor
    _made: dict = field(default_factory=dict, repr=False)

    @staticmethod
    def from_blocks(
        blocks,
        block_size: int | tuple[int, int] = 128,
        seq_len: int | tuple[int, int] | None = None,
    ) -> "BlockMask":
        """The mask whose blocks are full where `blocks` is true.

        Args:
            blocks: (nq, nk), or (heads, nq, nk) for heads with masks of their own: a tensor of any
                device, a numpy array or nested lists, of bool or of the integers 0 and 1; or a
                scipy.sparse matrix (nq, nk) of them.
            block_size: Tokens of a block, one number or (bq, bk).
            seq_len: Tokens, one number or (q_len, k_len), that need exactly nq by nk blocks; by
                default whole blocks.

        Returns:
            A mask on the device of `blocks`.

        Raises:
            TypeError: `blocks` are of another type.
            ValueError: They hold other numbers, are of another shape, or do not fit seq_len.
        """
        from masks.elements import checked_blocks

        blocks = checked_blocks(blocks)
        grid = grid_of_blocks("blocks", blocks, block_size, seq_len)
        return of_blocks(grid, blocks)

    @staticmethod
    def from_dense(dense: Tensor, block_size: int | tuple[int, int] = 128) -> "BlockMask":
        """The mask of a bool (Nq, Nk) or (heads, Nq, Nk) tensor, exactly."""
        from masks.elements import from_dense

        return from_dense(dense, block_size)

    @staticmethod
    def from_scipy(matrix, block_size: int | tuple[int, int] = 128) -> "BlockMask":
        """The mask of a scipy.sparse matrix of shape (Nq, Nk): stored non-zero entries attend.

        A bsr_array whose blocks are `block_size` is read block by block, any other format element
        by element; neither goes through a dense matrix.
        """
        from masks.elements import from_scipy

        return from_scipy(matrix, block_size)

    @classmethod
    def of_full(cls, grid: Grid, full: Runs, head_to_mask: tuple[int, ...] = (0,)) -> "BlockMask":
        """The mask whose non-zero blocks are all full."""
        nothing = torch.empty(0, dtype=torch.int64, device=grid.device)
        bit_tiles = torch.empty(
            0, grid.bq, tiles.words(grid.bk), dtype=torch.int32, device=grid.device
        )
        return cls(grid, head_to_mask, full, nothing, nothing, bit_tiles)

    @property
    def num_heads(self) -> int:
        """Heads with a mask of their own; 1 serves any number of heads."""
        return len(self.head_to_mask)

    @property
    def num_batches(self) -> int:
        """Batch elements with a mask of their own: one mask serves any number of them."""
        return 1

    @property
    def shape(self) -> tuple[int, ...]:
        """(q_len, k_len), or (num_heads, q_len, k_len) when heads have masks of their own."""
        return self.seq_len if self.num_heads == 1 else (self.num_heads, *self.seq_len)

    @property
    def num_masks(self) -> int:
        """Distinct masks stored."""
        return max(self.head_to_mask) + 1

    @cached_property
    def nnz_blocks(self) -> int:
        """Non-zero blocks, summed over num_heads."""
        return int(self.blocks_per_row().sum())

    @property
    def density(self) -> float:
        """s: non-zero blocks over all blocks."""
        return self.nnz_blocks / (self.num_heads * self.grid.nq * self.grid.nk)

    @cached_property
    def partial_blocks(self) -> int:
        """Blocks that carry an element mask, summed over num_heads."""
        return int(self._per_layer(self._count(self.partial)).sum())

    def blocks_per_row(self) -> Tensor:
        """int64 (num_heads, nq): non-zero blocks in each block row."""
        row = self.full.begin // self.grid.line
        full = self._zeros().index_add_(0, row, self.full.end - self.full.begin)
        return self._per_layer(full + self._count(self.partial))

    def _zeros(self) -> Tensor:
        return torch.zeros(self.num_masks * self.grid.nq, dtype=torch.int64, device=self.device)

    def _count(self, number: Tensor) -> Tensor:
        row = number // self.grid.line
        return self._zeros().index_add_(0, row, torch.ones_like(row))

    def _per_layer(self, rows: Tensor) -> Tensor:
        return rows.view(self.num_masks, self.grid.nq)[list(self.head_to_mask)]

    def tile_of_block(self) -> Tensor:
        """int64 (num_heads, nq, nk): the tile of each block in bit_tiles_with_clipped, or FULL,
        or EMPTY.

        Blocks that the end of the sequence cuts have a tile. Never waits for the device.
        """
        g = self.grid
        row = torch.arange(self.num_masks * g.nq, device=self.device).unsqueeze(1)
        number = g.number(row, torch.arange(g.nk, device=self.device))
        cut = g.cut(number)
        inside = torch.where(cut == 0, FULL, len(self.bit_tiles) + cut - 1)
        tile = torch.where(self.full.contains(number), inside, EMPTY)
        tile[g.split(self.partial)] = self.partial_bit_tile
        layers = tile.view(self.num_masks, g.nq, g.nk).unbind()
        return torch.stack([layers[layer] for layer in self.head_to_mask])

    def bit_tiles_with_clipped(self) -> Tensor:
        """The bit tiles, then the tiles of blocks that the end of the sequence cuts."""
        return torch.cat([self.bit_tiles, self.grid.cut_tiles()[1:]])

    def to_blocks(self) -> Tensor:
        """bool (nq, nk), or (num_heads, nq, nk): the non-zero blocks."""
        return self._heads(self._layer_blocks())

    def to_dense(self) -> Tensor:
        """bool `shape`: every pair. Takes q_len * k_len bytes per head."""
        g = self.grid
        blocks = self._layer_blocks().repeat_interleave(g.bq, 1).repeat_interleave(g.bk, 2)
        view = blocks.view(self.num_masks * g.nq, g.bq, g.nk, g.bk)
        row, column = g.split(self.partial)
        view[row, :, column] = tiles.unpack(self.bit_tiles, g.bk)[self.partial_bit_tile]
        return self._heads(blocks[:, : g.q_len, : g.k_len])

    def _layer_blocks(self) -> Tensor:
        g = self.grid
        blocks = torch.zeros(self.num_masks * g.nq, g.nk, dtype=torch.bool, device=self.device)
        blocks[g.split(torch.cat([self.full.expand(), self.partial]))] = True
        return blocks.view(self.num_masks, g.nq, g.nk)

    def _heads(self, layers: Tensor) -> Tensor:
        return (
            layers[self.head_to_mask[0]]
            if self.num_heads == 1
            else layers[list(self.head_to_mask)]
        )

    def to_scipy(self) -> scipy.sparse.bsr_array:
        """A bool bsr_array (nq * bq, nk * bk): whole blocks, indices ascending. Raises ValueError
        for several heads.
        """
        from masks.elements import to_scipy

        return to_scipy(self)

    def head(self, index: int) -> "BlockMask":
        """The mask of one head. Raises IndexError for one that there is not."""
        if not -self.num_heads <= index < self.num_heads:
            raise IndexError(f"index must be that of one of {self.num_heads} heads, got {index}")
        return self._select([self.head_to_mask[index]])

    def to(self, device) -> "BlockMask":
        device = definite(device)
        if device == self.device:
            return self
        return replace(
            self,
            grid=replace(self.grid, device=device),
            full=Runs(*(t.to(device) for t in self.full)),
            partial=self.partial.to(device),
            partial_bit_tile=self.partial_bit_tile.to(device),
            bit_tiles=self.bit_tiles.to(device),
            _made={},
        )

    def table(self, device=None, block_size: tuple[int, int] | None = None) -> LookupTable:
        """The lookup table that kernels read, of the same elements in blocks of `block_size`
        (tokens, by default its own); compiled once per device and block size.
        """
        device = self.device if device is None else definite(device)
        block_size = self.block_size if block_size is None else block_size
        if (device, block_size) not in self._made:
            from masks.compile import compile_table

            self._made[device, block_size] = compile_table(self.reblock(block_size)).to(device)
        return self._made[device, block_size]

    def coverage(self, block_size: tuple[int, int]) -> float:
        """The share of blocks of `block_size` (tokens) that this mask's blocks cover, over those
        that they touch: 1 for a mask whose own are no smaller. Computed once per block size.
        """
        if self.grid.bq >= block_size[0] and self.grid.bk >= block_size[1]:
            return 1.0
        if block_size not in self._made:
            from masks.reblock import coverage

            self._made[block_size] = coverage(self, block_size)
        return self._made[block_size]

    @property
    def T(self) -> "BlockMask":
        """The transpose: keys as queries."""
        g = self.grid
        number, order = transpose_points(self.partial, g).sort()
        pairs = tiles.unpack(self.bit_tiles, g.bk).transpose(1, 2)
        full = transpose_runs(self.full, g)
        return BlockMask(
            g.T, self.head_to_mask, full, number, self.partial_bit_tile[order], tiles.pack(pairs)
        )

    def crop(self, q_len: int, k_len: int) -> "BlockMask":
        """The mask of the first q_len queries and k_len keys (tokens)."""
        from masks.cut import crop

        return crop(self, q_len, k_len)

    def slice_queries(self, begin: int, end: int) -> "BlockMask":
        """The mask of the queries from `begin` to `end` (tokens), which a step of decoding needs.

        O(blocks of the row) where they lie in one row of blocks. Otherwise a `begin` within a
        block takes a look at all (end - begin) * k_len pairs of every distinct mask.
        """
        from masks.cut import slice_queries

        return slice_queries(self, begin, end)

    def select(self, blocks: Tensor, scores: Tensor | None = None) -> "DynamicMask":
        """The blocks of this mask where `blocks` is true, whatever it holds when a kernel runs.

        blocks: bool (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk), on the mask's device,
            where 1 stands for any number of heads or batch elements
        scores: floating-point, of the same shape; attention's gradient of them is that of the
            blocks, if they require one: see DynamicMask
        Never waits for the device. Raises TypeError or ValueError naming the argument.
        """
        from masks.dynamic import DynamicMask

        return DynamicMask.of(self, blocks, scores)

    def select_topk(self, scores: Tensor, k: int) -> "DynamicMask":
        """In every row the k blocks of this mask that have the highest scores; fewer where fewer
        scores are above -inf.

        scores: as in select. Raises ValueError for k below 1.
        """
        from masks.dynamic import DynamicMask

        return DynamicMask.of_topk(self, scores, k)

    def select_threshold(self, scores: Tensor, threshold: float | Tensor) -> "DynamicMask":
        """The blocks of this mask whose scores, as in select, are above the threshold, a number
        or a tensor that broadcasts to them.
        """
        from masks.dynamic import DynamicMask

        return DynamicMask.of_threshold(self, scores, threshold)

    def reblock(self, block_size) -> "BlockMask":
        """The same elements in blocks of another size."""
        from masks.reblock import reblock

        return reblock(self, block_size)

    def __and__(self, other: "BlockMask") -> "BlockMask":
        return self._binary(other, torch.bitwise_and)

    def __or__(self, other: "BlockMask") -> "BlockMask":
        return self._binary(other, torch.bitwise_or)

    def __xor__(self, other: "BlockMask") -> "BlockMask":
        return self._binary(other, torch.bitwise_xor)

    def __sub__(self, other: "BlockMask") -> "BlockMask":
        return self._binary(other, lambda a, b: a & ~b)

    def __invert__(self) -> "BlockMask":
        return BlockMask.of_full(self.grid, self.grid.every_row()) - self

    def __eq__(self, other) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if (self.grid, self.num_heads) != (other.grid, other.num_heads):
            return False
        difference = self ^ other
        return len(difference.full.begin) == 0 and len(difference.partial) == 0

    def __hash__(self) -> int:
        return hash((self.grid, self.num_heads, self.nnz_blocks))

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, block_size={self.block_size}, "
            f"density={self.density:.4g}, "
            f"partial_blocks={self.partial_blocks}, tiles={len(self.bit_tiles)}, "
            f"device={self.device})"
        )

    def _binary(self, other: "BlockMask", rule: Callable[[Tensor, Tensor], Tensor]) -> "BlockMask":
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self.grid != other.grid:
            raise ValueError(
                f"masks must share lengths, block size and device, got {self} and {other}"
            )
        if 1 not in (self.num_heads, other.num_heads) and self.num_heads != other.num_heads:
            raise ValueError(
                f"masks must have the same heads, or 1, got {self.num_heads} and {other.num_heads}"
            )
        heads = max(self.num_heads, other.num_heads)
        pairs = [
            (self.head_to_mask[h % self.num_heads], other.head_to_mask[h % other.num_heads])
            for h in range(heads)
        ]
        layer = {pair: i for i, pair in enumerate(dict.fromkeys(pairs))}
        a = self._select([pair[0] for pair in layer])
        b = other._select([pair[1] for pair in layer])

        points = torch.unique(torch.cat([a.partial, b.partial]))
        full = combine(lambda x, y, p: rule(x, y) & ~p, a.full, b.full, from_points(points))
        tile_a, tile_b = a._tile_at(points), b._tile_at(points)
        met, inverse = torch.unique(torch.stack([tile_a, tile_b]), dim=1, return_inverse=True)
        mixed = rule(a.extended_bit_tiles()[met[0]], b.extended_bit_tiles()[met[1]])
        head_to_mask = tuple(layer[pair] for pair in pairs)
        return assemble(self.grid, head_to_mask, full, points, mixed, inverse)

    def _select(self, layers: list[int]) -> "BlockMask":
        """A mask with one head for each of `layers`, in storage of its own."""
        if layers == list(range(self.num_masks)):
            return replace(self, head_to_mask=tuple(layers), _made={})
        size = self.grid.layer
        runs, points, which = [], [], []
        for new, old in enumerate(layers):
            runs.append(self.full.between(old * size, (old + 1) * size).shift((new - old) * size))
            inside = (self.partial >= old * size) & (self.partial < (old + 1) * size)
            points.append(self.partial[inside] + (new - old) * size)
            which.append(self.partial_bit_tile[inside])
        return replace(
            self,
            head_to_mask=tuple(range(len(layers))),
            full=concatenate(runs),
            partial=torch.cat(points),
            partial_bit_tile=torch.cat(which),
            _made={},
        )

    def _tile_at(self, points: Tensor) -> Tensor:
        """For each block its tile in the extended bit_tiles: partial, full or empty."""
        code = len(self.bit_tiles) + (~self.full.contains(points)).long()
        code[torch.searchsorted(points, self.partial)] = self.partial_bit_tile
        return code

    def extended_bit_tiles(self) -> Tensor:
        """The bit tiles, then a tile of ones, then a tile of zeros."""
        ends = torch.tensor([-1, 0], dtype=torch.int32, device=self.device)
        return torch.cat(
            [self.bit_tiles, ends[:, None, None].expand(2, *self.bit_tiles.shape[1:])]
        )


def stack(masks: Sequence[BlockMask]) -> BlockMask:
    """The mask whose head h has masks[h]; heads with equal masks share storage.

    Raises ValueError when a mask has several heads, or lengths, block size or device differ.
    """
    for mask in masks:
        if mask.num_heads != 1 or mask.grid != masks[0].grid:
            raise ValueError(
                f"stacked masks must have one head and agree, got {masks[0]} and {mask}"
            )
    layer: dict[BlockMask, int] = {}
    head_to_mask = tuple(layer.setdefault(mask, len(layer)) for mask in masks)
    parts = [mask._select([mask.head_to_mask[0]]) for mask in layer]
    grid = masks[0].grid
    bank_start = np.cumsum([0, *(len(part.bit_tiles) for part in parts)]).tolist()
    return assemble(
        grid,
        head_to_mask,
        concatenate([part.full.shift(i * grid.layer) for i, part in enumerate(parts)]),
        torch.cat([part.partial + i * grid.layer for i, part in enumerate(parts)]),
        torch.cat([part.bit_tiles for part in parts]),
        torch.cat(
            [part.partial_bit_tile + start for part, start in zip(parts, bank_start, strict=False)]
        ),
    )


def assemble(
    grid: Grid,
    head_to_mask: tuple[int, ...],
    full: Runs,
    number: Tensor,
    bit_tiles: Tensor,
    tile: Tensor,
) -> BlockMask:
    """A canonical mask from its full blocks and candidates for partial ones.

    number: int64 (p,) ascending numbers of the candidates, none of them in `full`; candidate i has
    the pairs bit_tiles[tile[i]], whatever their bits outside the sequence. Candidates that turn
    out full or empty become so.
    """
    met, inverse = torch.unique(tile * 4 + grid.cut(number), return_inverse=True)
    whole = grid.whole[met % 4]
    pairs = bit_tiles[met // 4] & whole
    is_full = (pairs == whole).flatten(1).all(1)
    is_partial = (pairs != 0).flatten(1).any(1) & ~is_full
    kept, position = tiles.distinct(pairs[is_partial])
    where = torch.full_like(met, -1)
    where[is_partial] = position
    grown = from_points(number[is_full[inverse]])
    full = combine(torch.bitwise_or, full, grown) if len(grown.begin) else full
    keep = is_partial[inverse]
    return BlockMask(grid, head_to_mask, full, number[keep], where[inverse[keep]], kept)


def of_blocks(grid: Grid, blocks: Tensor) -> BlockMask:
    """The mask whose blocks are full where `blocks`, bool (heads, nq, nk), is true."""
    head_to_mask, kept = distinct_layers(blocks)
    row, column = blocks[kept].flatten(0, 1).nonzero(as_tuple=True)
    return BlockMask.of_full(grid, from_points(grid.number(row, column)), head_to_mask)


def grid_of_blocks(
    name: str,
    like: Tensor,
    block_size: int | tuple[int, int],
    seq_len: int | tuple[int, int] | None,
) -> Grid:
    """The grid of as many blocks as the last two dimensions of `like` say; of whole blocks where
    seq_len is None.
    """
    nq, nk = like.shape[-2:]
    grid = Grid.of((1, 1) if seq_len is None else seq_len, block_size, like.device)
    if seq_len is None:
        return replace(grid, q_len=nq * grid.bq, k_len=nk * grid.bk)
    if (grid.nq, grid.nk) != (nq, nk):
        raise ValueError(
            f"{name} must be ({grid.nq}, {grid.nk}) in their last two dimensions for seq_len "
            f"{grid.seq_len} in blocks of {grid.block_size}, got {tuple(like.shape)}"
        )
    return grid


def distinct_layers(heads: Tensor) -> tuple[tuple[int, ...], list[int]]:
    """(layer of each head, the first head of each layer): heads that are equal share a layer."""
    kept: list[int] = []
    head_to_mask = []
    for h in range(len(heads)):
        layer = next((i for i, k in enumerate(kept) if torch.equal(heads[k], heads[h])), len(kept))
        if layer == len(kept):
            kept.append(h)
        head_to_mask.append(layer)
    return tuple(head_to_mask), kept
