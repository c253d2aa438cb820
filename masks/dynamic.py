"""DynamicMask: the blocks of a mask that a tensor chooses, in lists that a device makes alone."""

from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import torch
from torch import Tensor

from masks.arguments import check_floating, whole
from masks.block_mask import EMPTY, FULL, BlockMask, grid_of_blocks, of_blocks
from masks.grid import Grid, OnGrid, definite
from masks.lookup_table import PREFETCH, BlockLists, LookupTable

MOST_BLOCKS = 2**31 - 1 - PREFETCH  # tables number their entries in 32 bits


@dataclass(frozen=True, eq=False)
class DynamicMask(OnGrid):
    """The blocks of a BlockMask that a tensor chooses, for each batch element and head.

    grid:   the sequence length, block size and device
    support: the mask whose blocks are chosen from
    blocks: bool (batch or 1, heads or 1, nq, nk)
    scores: floating-point, of the same shape, or None

    Making one and attending with it takes operations of the device only, of fixed sizes: nothing
    waits, and a CUDA graph may hold it all, from the scores to the gradients; a graph of
    torch.compile too, if `support` was made outside. Its table has room for every block. What is
    read from it on the host waits for the device: density, to_blocks, to_dense, to_block_mask.

    Where scores require a gradient, attention gives them the straight-through one: what a gate g
    of each chosen block would get, at g = 1, in

        S[q, k] = softcap(scale Q K^T)[q, k] + bias + log g[i, j]    for q in row i, k in column j
        dL/dscores[i, j] = dL/dg[i, j] = sum over q in i, k in j of dS[q, k]
        dS = P * (dropout(dO V^T) - rowsum(dO * O) + dLSE)

    and 0 for blocks that are not chosen, which were not computed.
    Source: Bengio, Léonard, Courville, "Estimating or propagating gradients through stochastic
    neurons", 2013 (straight-through); gates at 1 as in Michel, Levy, Neubig, "Are sixteen heads
    really better than one?", 2019.
    """

    grid: Grid
    support: BlockMask
    blocks: Tensor
    scores: Tensor | None
    _table: LookupTable | None

    @staticmethod
    def from_blocks(
        blocks: Tensor,
        block_size: int | tuple[int, int] = 128,
        seq_len: int | tuple[int, int] | None = None,
    ) -> "DynamicMask":
        """The blocks where `blocks` is true, whatever it holds when a kernel runs.

        Args:
            blocks: bool (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk).
            block_size: Tokens of a block, one number or (bq, bk).
            seq_len: Tokens, one number or (q_len, k_len), that need exactly nq by nk blocks; by
                default whole blocks.

        Raises:
            TypeError: `blocks` is no bool tensor.
            ValueError: Its shape does not fit.
        """
        return _every_block("blocks", blocks, block_size, seq_len).select(blocks)

    @staticmethod
    def from_topk(
        scores: Tensor,
        k: int,
        block_size: int | tuple[int, int] = 128,
        seq_len: int | tuple[int, int] | None = None,
    ) -> "DynamicMask":
        """The k blocks of the highest scores in every row: see BlockMask.select_topk, and
        from_blocks for the rest.
        """
        return _every_block("scores", scores, block_size, seq_len).select_topk(scores, k)

    @staticmethod
    def from_threshold(
        scores: Tensor,
        threshold: float | Tensor,
        block_size: int | tuple[int, int] = 128,
        seq_len: int | tuple[int, int] | None = None,
    ) -> "DynamicMask":
        """The blocks whose scores are above the threshold: see BlockMask.select_threshold, and
        from_blocks for the rest.
        """
        every = _every_block("scores", scores, block_size, seq_len)
        return every.select_threshold(scores, threshold)

    @classmethod
    def of(cls, support: BlockMask, blocks: Tensor, scores: Tensor | None = None) -> "DynamicMask":
        """See BlockMask.select."""
        if not isinstance(blocks, Tensor) or blocks.dtype != torch.bool:
            got = getattr(blocks, "dtype", type(blocks).__name__)
            raise TypeError(f"blocks must be a bool tensor, got {got}")
        if scores is not None:
            check_floating("scores", scores)
        if scores is not None and scores.shape != blocks.shape:
            raise ValueError(
                f"scores must have the shape of blocks, {tuple(blocks.shape)}, got "
                f"{tuple(scores.shape)}"
            )
        blocks = _of_heads("blocks", blocks, support)
        scores = None if scores is None else _of_heads("scores", scores, support)
        # A graph takes the blocks, and what runs in it makes a table of them.
        table = None if torch.compiler.is_compiling() else _table_of(support, blocks)
        return cls(support.grid, support, blocks, scores, table)

    @classmethod
    def of_topk(cls, support: BlockMask, scores: Tensor, k: int) -> "DynamicMask":
        """See BlockMask.select_topk."""
        k = whole("k", k, least=1)
        check_floating("scores", scores)
        scores = _of_heads("scores", scores, support)
        eligible = scores.detach().masked_fill(support.tile_of_block() == EMPTY, -torch.inf)
        best, column = eligible.topk(min(k, eligible.shape[-1]), dim=-1)
        blocks = torch.zeros_like(eligible, dtype=torch.bool)
        return cls.of(support, blocks.scatter_(-1, column, best > -torch.inf), scores)

    @classmethod
    def of_threshold(
        cls, support: BlockMask, scores: Tensor, threshold: float | Tensor
    ) -> "DynamicMask":
        """See BlockMask.select_threshold."""
        check_floating("scores", scores)
        if not isinstance(threshold, (Real, Tensor)):
            raise TypeError(f"threshold must be a number or a tensor, got {threshold!r}")
        return cls.of(support, scores.detach() > threshold, scores)

    @property
    def num_batches(self) -> int:
        """Batch elements with a mask of their own; 1 serves any number of them."""
        return self.blocks.shape[0]

    @property
    def num_heads(self) -> int:
        """Heads with a mask of their own; 1 serves any number of heads."""
        return self.blocks.shape[1]

    def to(self, device) -> "DynamicMask":
        """The mask on another device; scores that require a gradient get it through the copy."""
        if definite(device) == self.device:
            return self
        scores = None if self.scores is None else self.scores.to(device)
        return DynamicMask.of(self.support.to(device), self.blocks.to(device), scores)

    def table(self, device=None, block_size: tuple[int, int] | None = None) -> LookupTable:
        """The lookup table that kernels read, on `device`, by default the mask's own. Raises
        ValueError for another block size (tokens).
        """
        if device is not None and definite(device) != self.device:
            return self.to(device).table(block_size=block_size)
        if block_size not in (None, self.block_size):
            raise ValueError(f"block_size must be {self.block_size}, got {block_size}")
        return _table_of(self.support, self.blocks) if self._table is None else self._table

    def coverage(self, block_size: tuple[int, int]) -> float | None:
        """See BlockMask.coverage; None for blocks of another size: only the device knows."""
        return 1.0 if block_size == self.block_size else None

    @cached_property
    def density(self) -> float:
        """s: non-zero blocks over all blocks."""
        return float(self.to_blocks().double().mean())

    def to_blocks(self) -> Tensor:
        """bool (batch or 1, heads or 1, nq, nk): the non-zero blocks."""
        return self.blocks & (self.support.tile_of_block() != EMPTY)

    def to_dense(self) -> Tensor:
        """bool (batch or 1, heads or 1, q_len, k_len): every pair."""
        g = self.grid
        pairs = self.blocks.repeat_interleave(g.bq, 2).repeat_interleave(g.bk, 3)
        return pairs[..., : g.q_len, : g.k_len] & self.support.to_dense()

    def to_block_mask(self, batch_index: int = 0) -> BlockMask:
        """The mask of a batch element as it is now."""
        return of_blocks(self.grid, self.blocks[batch_index]) & self.support

    def __repr__(self) -> str:
        return (
            f"DynamicMask(num_batches={self.num_batches}, num_heads={self.num_heads}, "
            f"support={self.support})"
        )


def _every_block(
    name: str,
    like: Tensor,
    block_size: int | tuple[int, int],
    seq_len: int | tuple[int, int] | None,
) -> BlockMask:
    """All pairs in as many blocks as the last two dimensions of `like` say."""
    if not isinstance(like, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(like).__name__}")
    if not 2 <= like.ndim <= 4:
        raise ValueError(f"{name} must have 2 to 4 dimensions, got {tuple(like.shape)}")
    grid = grid_of_blocks(name, like, block_size, seq_len)
    return BlockMask.of_full(grid, grid.every_row())


def _of_heads(name: str, blocks: Tensor, support: BlockMask) -> Tensor:
    """A tensor of blocks with all four dimensions, and the heads of the mask."""
    g, heads = support.grid, support.num_heads
    shape = (1,) * (4 - blocks.ndim) + tuple(blocks.shape)
    if not 2 <= blocks.ndim <= 4 or 0 in shape or shape[2:] != (g.nq, g.nk):
        raise ValueError(
            f"{name} must be ({g.nq}, {g.nk}), with or without (heads,) or (batch, heads) in "
            f"front, for seq_len {g.seq_len} in blocks of {g.block_size}, got "
            f"{tuple(blocks.shape)}"
        )
    if heads > 1 and shape[1] not in (1, heads):
        raise ValueError(f"{name} must be of 1 or {heads} heads, got {shape[1]}")
    if blocks.device != support.device:
        raise ValueError(f"{name} must be on {support.device} like the mask, got {blocks.device}")
    return blocks.view(shape).expand(-1, max(heads, shape[1]), -1, -1)


def _table_of(support: BlockMask, blocks: Tensor) -> LookupTable:
    """A table with room for all blocks; every tensor has a size that the host knows."""
    tile = torch.where(blocks, support.tile_of_block(), EMPTY)
    if tile.numel() > MOST_BLOCKS:
        raise ValueError(f"blocks must be at most {MOST_BLOCKS}, got {tile.numel()}")
    batch, heads = tile.shape[:2]
    # A block that only the queries cut is full by query, and one that only the keys cut by key.
    cut_keys, cut_queries = len(support.bit_tiles), len(support.bit_tiles) + 1
    layers = torch.arange(batch * heads, dtype=torch.int32, device=support.device)
    tile = tile.flatten(0, 1)
    return LookupTable(
        by_query=_block_lists(tile.masked_fill(tile == cut_queries, FULL)),
        by_key=_block_lists(tile.masked_fill(tile == cut_keys, FULL).mT),
        bit_tiles=support.bit_tiles_with_clipped(),
        head_to_mask=layers.view(batch, heads),
        seq_len=support.seq_len,
        block_size=support.block_size,
    )


def _block_lists(tile: Tensor) -> BlockLists:
    """Lists of the blocks of (layers, rows, columns) tiles: each row has room for all its columns
    and holds the full ones, then the partial ones.
    """
    layers, rows, columns = tile.shape
    full, partial = tile == FULL, tile >= 0
    fulls, partials = full.sum(-1), partial.sum(-1)
    after_fulls = fulls.unsqueeze(-1) + partial.cumsum(-1) - 1
    place = torch.where(full, full.cumsum(-1) - 1, after_fulls)
    place = place.masked_fill(~(full | partial), columns)
    start = torch.arange(layers * rows, device=tile.device).view(layers, rows) * columns
    index = _listed(torch.arange(columns, device=tile.device).expand_as(tile), place)
    return BlockLists(
        row_ptr=torch.stack([start, fulls, start + fulls, partials], dim=-1).int(),
        full_index=index,
        partial_index=index,
        partial_bit_tile=_listed(tile.clamp(min=0), place),
        schedule=torch.argsort(fulls + partials, dim=1, descending=True, stable=True).int(),
        max_blocks=None,
        total_blocks=None,
    )


def _listed(entries: Tensor, place: Tensor) -> Tensor:
    """Every row's entries at their places, those past its end left out, row after row."""
    columns = entries.shape[-1]
    room = entries.new_zeros(*entries.shape[:-1], columns + 1, dtype=torch.int32)
    room.scatter_(-1, place, entries.int())
    return torch.nn.functional.pad(room[..., :columns].flatten(), (0, PREFETCH))
