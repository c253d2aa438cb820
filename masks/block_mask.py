"""BlockMask and DynamicMask: a pattern at one length and block size, exact to the pair.

They are in one module because each constructs the other: BlockMask.select returns a DynamicMask,
and DynamicMask.to_block_mask returns a BlockMask. Their operations are in masks._core.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from masks._core import block_set, convert, reblock, slicing
from masks._core.block_set import EMPTY, BlockSet
from masks._core.grid import (
    TABLE_SIDES,
    Grid,
    OnGrid,
    checked_block_size,
)
from masks._core.tracing import untraced
from masks._core.transpose import transpose
from masks.arguments import (
    broadcasts,
    check_dtype,
    check_floating,
    check_index,
    check_integer,
    checked_device,
)
from masks.lookup_table import LookupTable, compile_selected, compile_table
from masks.registry import Caching, Handled

if TYPE_CHECKING:
    import scipy.sparse

Size = int | tuple[int, int]


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask(OnGrid, Caching, Handled):
    """Which (query, key) pairs attend, in blocks that are full, partial or empty.

    A call of a Pattern makes one, and so do from_blocks, from_dense and from_scipy. A BlockMask is
    immutable. Lengths and block sizes are in tokens. `&`, `|`, `-`, `^`, `~` and `==` are exact
    for every pair. A mask of one head applies to any number of heads.

    Attributes:
        block_set: The stored form, which only the functions of masks._core read.

    Raises:
        TypeError: `block_set` is not a BlockSet.
        ValueError: The operands of `&`, `|`, `-` or `^` differ in lengths, block size, device, or
            number of heads other than 1.

    Reference:
        Dong et al. 2024, Flex Attention (BlockMask).
    """

    block_set: BlockSet

    def __post_init__(self) -> None:
        if not isinstance(self.block_set, BlockSet):
            raise TypeError(
                "block_set must be a BlockSet, which from_blocks, from_dense and from_scipy make, "
                f"got {type(self.block_set).__name__}"
            )
        super().__post_init__()

    @staticmethod
    def from_blocks(blocks, block_size: Size = 128, seq_len: Size | None = None) -> "BlockMask":
        """The mask whose blocks are full where `blocks` is true, and empty elsewhere.

        Args:
            blocks: (nq, nk), or (heads, nq, nk) with a matrix for each head: a tensor on any
                device, a numpy array or nested lists, of bool or of the integers 0 and 1; or a
                scipy.sparse matrix (nq, nk) of such values.
            block_size: Block size in tokens, one number or (bq, bk).
            seq_len: Length in tokens, one number or (q_len, k_len), which must give nq by nk
                blocks; by default that of nq by nk whole blocks.

        Returns:
            A mask on the device of `blocks`.

        Raises:
            TypeError: `blocks` has another type.
            ValueError: `blocks` has other values or another shape, or does not fit seq_len.
        """
        blocks = convert.checked_blocks(blocks)
        grid = convert.grid_of_blocks("blocks", blocks, block_size, seq_len)
        return BlockMask(convert.from_blocks(grid, blocks))

    @staticmethod
    def from_dense(dense: Tensor, block_size: Size = 128) -> "BlockMask":
        """The block mask of a dense mask, exact for every pair.

        Args:
            dense: bool (q_len, k_len), or (heads, q_len, k_len) with a mask for each head; True
                means attend.
            block_size: Block size in tokens, one number or (bq, bk).

        Returns:
            A mask on the device of `dense`.

        Raises:
            TypeError: `dense` is not a bool tensor.
            ValueError: `dense` is empty or has another number of dimensions.
        """
        return BlockMask(convert.from_dense(dense, block_size))

    @staticmethod
    def from_scipy(matrix, block_size: Size = 128) -> "BlockMask":
        """The mask of a scipy.sparse matrix: stored non-zero entries attend.

        A bsr_array whose blocks are `block_size` is read block by block. Any other format is read
        entry by entry. No dense matrix is made.

        Args:
            matrix: scipy.sparse array or matrix (q_len, k_len).
            block_size: Block size in tokens, one number or (bq, bk).

        Returns:
            A mask on the CPU.

        Raises:
            TypeError: `matrix` is not a scipy.sparse array or matrix.
            ValueError: `matrix` does not have 2 dimensions.
        """
        return BlockMask(convert.from_scipy(matrix, block_size))

    @property
    def grid(self) -> Grid:
        """Lengths, block size, device, and the numbers nq and nk of block rows and columns."""
        return self.block_set.grid

    @property
    def head_to_mask(self) -> tuple[int, ...]:
        """For each head, the index of its mask among the distinct masks."""
        return self.block_set.head_to_mask

    @property
    def num_heads(self) -> int:
        """Number of heads; a mask with 1 head applies to any number of heads."""
        return len(self.head_to_mask)

    @property
    def num_batches(self) -> int:
        """Number of batch elements with different masks: 1, all batch elements share the mask."""
        return 1

    @property
    def num_masks(self) -> int:
        """Number of distinct masks that are stored."""
        return self.block_set.num_masks

    @property
    def shape(self) -> tuple[int, ...]:
        """(q_len, k_len), or (num_heads, q_len, k_len) if there are several heads."""
        return self.seq_len if self.num_heads == 1 else (self.num_heads, *self.seq_len)

    @cached_property
    def nnz_blocks(self) -> int:
        """Number of non-zero blocks, summed over num_heads."""
        return int(self.blocks_per_row().sum())

    @property
    def density(self) -> float:
        """The density s: non-zero blocks over all blocks."""
        return self.nnz_blocks / (self.num_heads * self.grid.nq * self.grid.nk)

    @cached_property
    def partial_blocks(self) -> int:
        """Number of partial blocks, summed over num_heads."""
        return self.block_set.count_partial()

    @property
    def num_bit_tiles(self) -> int:
        """Number of distinct bit tiles, the element masks of partial blocks."""
        return len(self.block_set.bit_tiles)

    def blocks_per_row(self) -> Tensor:
        """The number of non-zero blocks in each block row: int64 (num_heads, nq)."""
        return self.block_set.count_per_row()

    def to_blocks(self) -> Tensor:
        """The non-zero blocks: bool (nq, nk), or (num_heads, nq, nk) for several heads.

        Raises:
            ValueError: They would take more memory than the machine has.
        """
        return self._by_head(convert.to_blocks(self.block_set))

    def to_dense(self) -> Tensor:
        """The dense mask: bool with shape `shape`, which takes q_len * k_len bytes per head.

        Raises:
            ValueError: It would take more memory than the machine has.
        """
        return self._by_head(convert.to_dense(self.block_set))

    def to_scipy(self) -> "scipy.sparse.bsr_array":
        """The mask as a sparse matrix of scipy.

        Returns:
            A bool bsr_array (nq * bq, nk * bk) of whole blocks with ascending indices.

        Raises:
            ValueError: The mask has several heads, or the matrix would take more memory than the
                machine has.
        """
        return convert.to_scipy(self.block_set)

    def head(self, index: int) -> "BlockMask":
        """The mask of one head.

        Args:
            index: Index of the head; negative ones count from the last head.

        Returns:
            A mask with one head.

        Raises:
            TypeError: `index` is not an integer.
            IndexError: There is no such head.
        """
        index = check_index("index", index, self.num_heads, "heads")
        return BlockMask(self.block_set.select_masks([self.head_to_mask[index]]))

    def to(self, device: torch.device | str) -> "BlockMask":
        """The same mask on another device.

        Args:
            device: A torch device or its name.

        Returns:
            A mask; this object if it is on the device already.
        """
        same = checked_device(device) == self.device
        return self if same else BlockMask(self.block_set.to(device))

    def table(
        self, device: torch.device | str | None = None, block_size: Size | None = None
    ) -> LookupTable:
        """The lookup table that kernels read.

        It is compiled once for each device and block size, and cached with the mask.

        Args:
            device: Device of the table; by default that of the mask.
            block_size: Block size of the table in tokens, one number or (bq, bk); by default that
                of the mask. With another one the mask is re-blocked, and the same pairs attend.

        Returns:
            The table.
        """
        device = self.device if device is None else checked_device(device)
        block_size = self.block_size if block_size is None else block_size
        key = (device, checked_block_size(block_size, TABLE_SIDES))
        if key not in self.tables:
            self.tables[key] = compile_table(reblock.reblock(self.block_set, key[1])).to(device)
        return self.tables[key]

    def coverage(self, block_size: Size) -> float:
        """The share of larger blocks that the blocks of this mask cover.

        coverage = area of the blocks of this mask / area of the larger blocks that contain any

        If the sides of neither divide those of the other, the non-zero parts that both consist of
        are counted. It is cached for each block size.

        Args:
            block_size: Size of the larger blocks in tokens, one number or (bq, bk).

        Returns:
            A number from 0 to 1; 1 if `block_size` divides that of this mask.
        """
        block_size = checked_block_size(block_size, TABLE_SIDES)
        if self.grid.bq % block_size[0] == 0 and self.grid.bk % block_size[1] == 0:
            return 1.0
        if ("coverage", block_size) not in self.tables:
            self.tables["coverage", block_size] = reblock.coverage(self.block_set, block_size)
        return self.tables["coverage", block_size]

    @property
    def T(self) -> "BlockMask":
        """The transpose, in which keys become queries."""
        return BlockMask(transpose(self.block_set))

    def crop(self, q_len: int, k_len: int) -> "BlockMask":
        """The mask of the first queries and keys.

        Args:
            q_len: Number of queries, in tokens.
            k_len: Number of keys, in tokens.

        Returns:
            A mask with these lengths.

        Raises:
            TypeError, ValueError: A length is not an integer, below 1, or above that of the mask.
        """
        return BlockMask(slicing.crop(self.block_set, q_len, k_len))

    def slice_queries(self, begin: int, end: int) -> "BlockMask":
        """The mask of the queries `begin` to `end - 1`, which a decoding step needs.

        Its time is proportional to the number of blocks of these queries.

        Args:
            begin: First query, in tokens.
            end: Query after the last one, in tokens.

        Returns:
            A mask with end - begin queries and all keys.

        Raises:
            TypeError, ValueError: An argument is not an integer, or not 0 <= begin < end <= q_len.
        """
        return BlockMask(slicing.slice_queries(self.block_set, begin, end))

    def take_blocks(self, rows: Tensor, columns: Tensor) -> "BlockMask":
        """The mask of some block rows and block columns, in their order.

        Context parallelism uses it for the mask of a rank. Its time is proportional to the number
        of runs and partial blocks of the mask.

        Args:
            rows: Indices of block rows, int64 (n,), ascending, on the device of the mask.
            columns: Indices of block columns, int64 (m,), ascending, on the device of the mask.

        Returns:
            A mask with n block rows and m block columns.

        Raises:
            TypeError, ValueError: `rows` or `columns` has another type or order, or is empty.
        """
        return BlockMask(slicing.take_blocks(self.block_set, rows, columns))

    def keep_rows(self, rows: Tensor) -> "BlockMask":
        """The mask with all block rows but the given ones empty.

        Args:
            rows: Indices of block rows, int64 (n,), ascending, on the device of the mask.

        Returns:
            A mask with the same lengths.

        Raises:
            TypeError, ValueError: `rows` has another type or order, or is empty.
        """
        return BlockMask(slicing.keep_rows(self.block_set, rows))

    def reblock(self, block_size: Size) -> "BlockMask":
        """The same pairs in blocks of another size.

        Args:
            block_size: Block size in tokens, one number or (bq, bk).

        Returns:
            A mask in which the same pairs attend.
        """
        return BlockMask(reblock.reblock(self.block_set, checked_block_size(block_size)))

    def select(self, blocks: Tensor, scores: Tensor | None = None) -> "DynamicMask":
        """Selects the blocks of this mask where `blocks` is true.

        It does not wait for the device. `blocks` is read by the first call that uses the mask, and
        must not be changed after that.

        Args:
            blocks: bool (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk), on the device of the
                mask. A size of 1 applies to all heads or batch elements.
            scores: Floating-point tensor with the shape of `blocks`. If it requires a gradient, it
                gets the straight-through gradient of the blocks; see DynamicMask.

        Returns:
            A dynamic mask.

        Raises:
            TypeError: An argument has another type.
            ValueError: An argument has another shape, or is on another device.
        """
        return DynamicMask(self, blocks, scores)

    def select_topk(self, scores: Tensor, k: int) -> "DynamicMask":
        """Selects in every block row the k blocks of this mask with the highest scores.

        Fewer than k blocks are selected if fewer scores of the row are above -inf. A block whose
        score is NaN is never selected.

        Args:
            scores: As in select.
            k: Number of blocks in a row, at least 1.

        Returns:
            A dynamic mask.

        Raises:
            TypeError, ValueError: As select does.
        """
        k = check_integer("k", k, least=1)
        check_floating("scores", scores)
        scores = convert.batch_of_blocks("scores", scores, self.grid, self.num_heads)
        empty = self._tile_codes() == self.num_bit_tiles + EMPTY
        eligible = scores.detach().masked_fill(empty | scores.isnan(), -torch.inf)
        best, column = eligible.topk(min(k, eligible.shape[-1]), dim=-1)
        blocks = torch.zeros_like(eligible, dtype=torch.bool)
        return self.select(blocks.scatter_(-1, column, best > -torch.inf), scores)

    def select_threshold(self, scores: Tensor, threshold: float | Tensor) -> "DynamicMask":
        """Selects the blocks of this mask whose scores are above a threshold.

        Args:
            scores: As in select.
            threshold: A number, or a tensor that broadcasts to the scores.

        Returns:
            A dynamic mask.

        Raises:
            TypeError, ValueError: As select does.
        """
        check_floating("scores", scores)
        if not isinstance(threshold, (Real, Tensor)):
            raise TypeError(f"threshold must be a number or a tensor, got {threshold!r}")
        if isinstance(threshold, Tensor) and not broadcasts(threshold.shape, scores.shape):
            raise ValueError(
                f"threshold must broadcast to the scores, {tuple(scores.shape)}, got "
                f"{tuple(threshold.shape)}"
            )
        return self.select(scores.detach() > threshold, scores)

    def __and__(self, other: "BlockMask") -> "BlockMask":
        return self._binary(other, torch.bitwise_and)

    def __or__(self, other: "BlockMask") -> "BlockMask":
        return self._binary(other, torch.bitwise_or)

    def __xor__(self, other: "BlockMask") -> "BlockMask":
        return self._binary(other, torch.bitwise_xor)

    def __sub__(self, other: "BlockMask") -> "BlockMask":
        return self._binary(other, lambda a, b: a & ~b)

    def __invert__(self) -> "BlockMask":
        with untraced():
            return from_full_runs(self.grid) - self

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
        with untraced():
            return BlockMask(block_set.elementwise(self.block_set, other.block_set, rule))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if (self.grid, self.num_heads) != (other.grid, other.num_heads):
            return False
        difference = (self ^ other).block_set
        return len(difference.full.begin) == 0 and len(difference.partial) == 0

    def __hash__(self) -> int:
        return hash((self.grid, self._hash_of_pairs))

    @cached_property
    def _hash_of_pairs(self) -> int:
        return self.block_set.hash_of_pairs()

    def __repr__(self) -> str:
        with untraced():
            density, partial = self.density, self.partial_blocks
        return (
            f"BlockMask(shape={self.shape}, block_size={self.block_size}, "
            f"density={density:.4g}, partial_blocks={partial}, "
            f"bit_tiles={self.num_bit_tiles}, device={self.device})"
        )

    def _by_head(self, masks: Tensor) -> Tensor:
        return (
            masks[self.head_to_mask[0]] if self.num_heads == 1 else masks[list(self.head_to_mask)]
        )

    def _tile_codes(self) -> Tensor:
        """int64 (num_heads, nq, nk); does not wait for the device."""
        masks = self.block_set.tile_code_grid().view(self.num_masks, self.grid.nq, self.grid.nk)
        return torch.stack([masks[mask] for mask in self.head_to_mask])


def from_full_runs(grid: Grid) -> BlockMask:
    """The mask of all pairs."""
    return BlockMask(block_set.from_full_runs(grid, grid.all_blocks()))


def stack(masks: Sequence[BlockMask]) -> BlockMask:
    """The mask whose head h is masks[h]; heads with equal masks share storage.

    Raises:
        ValueError: A mask has several heads, or lengths, block size or device differ.
    """
    for mask in masks:
        if mask.num_heads != 1 or mask.grid != masks[0].grid:
            raise ValueError(
                f"masks must have one head each and equal lengths, block size and device, got "
                f"{masks[0]} and {mask}"
            )
    index: dict[BlockMask, int] = {}
    head_to_mask = tuple(index.setdefault(mask, len(index)) for mask in masks)
    return BlockMask(block_set.stack([mask.block_set for mask in index], head_to_mask))


@dataclass(frozen=True, eq=False, repr=False)
class DynamicMask(OnGrid, Caching):
    """The blocks of a BlockMask that a tensor selects, for each batch element and head.

    A dynamic mask is made and used by operations on the device with fixed sizes. The host does not
    wait, so a CUDA graph can contain everything from the scores to the gradients. So can a graph
    of torch.compile, if `support` is made outside of it. The table has space for every block. The
    methods density, to_blocks, to_dense and to_block_mask wait for the device.

    If the scores require a gradient, attention computes the straight-through gradient: that of a
    gate g of each selected block, at g = 1, in

        S[q, k] = softcap(scale Q K^T)[q, k] + bias + log g[i, j]    for q in row i, k in column j
        dL/dscores[i, j] = dL/dg[i, j] = sum over q in i, k in j of dS[q, k]
        dS = P * (dropout(dO V^T) - rowsum(dO * O) + dLSE)

    Blocks that are not selected are not computed and get the gradient 0.

    Attributes:
        support: The mask from which blocks are selected.
        blocks: The selected blocks, bool (batch or 1, heads or 1, nq, nk).
        scores: Floating-point tensor with the same shape, or None.

    Raises:
        TypeError, ValueError: As BlockMask.select does, which takes the same tensors.

    Reference:
        Bengio, Léonard, Courville 2013, Estimating or propagating gradients through stochastic
        neurons (straight-through). Michel, Levy, Neubig 2019, Are sixteen heads really better than
        one? (gates at 1).
    """

    support: BlockMask
    blocks: Tensor
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        support, blocks, scores = self.support, self.blocks, self.scores
        if not isinstance(support, BlockMask):
            raise TypeError(f"support must be a BlockMask, got {type(support).__name__}")
        check_dtype("blocks", blocks, torch.bool)
        if scores is not None:
            check_floating("scores", scores)
            if scores.shape != blocks.shape:
                raise ValueError(
                    f"scores must have the shape of blocks, {tuple(blocks.shape)}, got "
                    f"{tuple(scores.shape)}"
                )
            scores = convert.batch_of_blocks("scores", scores, self.grid, support.num_heads)
            object.__setattr__(self, "scores", scores)
        blocks = convert.batch_of_blocks("blocks", blocks, self.grid, support.num_heads)
        object.__setattr__(self, "blocks", blocks)
        # A graph of torch.compile takes the blocks as input, and compiles the table when it runs.
        if not torch.compiler.is_compiling():
            self.__dict__["_table"] = compile_selected(self.support.block_set, self.blocks)

    @staticmethod
    def from_blocks(
        blocks: Tensor, block_size: Size = 128, seq_len: Size | None = None
    ) -> "DynamicMask":
        """Selects the blocks where `blocks` is true; see BlockMask.select.

        Args:
            blocks: bool (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk).
            block_size: Block size in tokens, one number or (bq, bk).
            seq_len: Length in tokens, one number or (q_len, k_len), which must give nq by nk
                blocks; by default that of nq by nk whole blocks.

        Returns:
            A dynamic mask on the device of `blocks`.

        Raises:
            TypeError: `blocks` is not a bool tensor.
            ValueError: The shape of `blocks` does not fit.
        """
        return _full_mask_like("blocks", blocks, block_size, seq_len).select(blocks)

    @staticmethod
    def from_topk(
        scores: Tensor, k: int, block_size: Size = 128, seq_len: Size | None = None
    ) -> "DynamicMask":
        """Selects in every block row the k blocks with the highest scores.

        Args:
            scores: Floating-point (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk).
            k: Number of blocks in a row, at least 1; see BlockMask.select_topk.
            block_size: Block size in tokens, one number or (bq, bk).
            seq_len: As in from_blocks.

        Returns:
            A dynamic mask on the device of `scores`.

        Raises:
            TypeError, ValueError: An argument has another type, value or shape.
        """
        return _full_mask_like("scores", scores, block_size, seq_len).select_topk(scores, k)

    @staticmethod
    def from_threshold(
        scores: Tensor,
        threshold: float | Tensor,
        block_size: Size = 128,
        seq_len: Size | None = None,
    ) -> "DynamicMask":
        """Selects the blocks whose scores are above a threshold.

        Args:
            scores: Floating-point (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk).
            threshold: A number, or a tensor that broadcasts to the scores.
            block_size: Block size in tokens, one number or (bq, bk).
            seq_len: As in from_blocks.

        Returns:
            A dynamic mask on the device of `scores`.

        Raises:
            TypeError, ValueError: An argument has another type, value or shape.
        """
        support = _full_mask_like("scores", scores, block_size, seq_len)
        return support.select_threshold(scores, threshold)

    @property
    def grid(self) -> Grid:
        """Lengths, block size, device, and the numbers nq and nk of block rows and columns."""
        return self.support.grid

    @property
    def num_batches(self) -> int:
        """Number of batch elements; with 1 all batch elements share the mask."""
        return self.blocks.shape[0]

    @property
    def num_heads(self) -> int:
        """Number of heads; a mask with 1 head applies to any number of heads."""
        return self.blocks.shape[1]

    def to(self, device: torch.device | str) -> "DynamicMask":
        """The same mask on another device. The copy of the scores is differentiable.

        Args:
            device: A torch device or its name.

        Returns:
            A mask; this object if it is on the device already.
        """
        if checked_device(device) == self.device:
            return self
        scores = None if self.scores is None else self.scores.to(device)
        return DynamicMask(self.support.to(device), self.blocks.to(device), scores)

    def table(
        self, device: torch.device | str | None = None, block_size: Size | None = None
    ) -> LookupTable:
        """The lookup table that kernels read.

        Args:
            device: Device of the table; by default that of the mask.
            block_size: The block size of the mask, or None: a dynamic mask is not re-blocked.

        Returns:
            The table.

        Raises:
            ValueError: `block_size` is not that of the mask.
        """
        if block_size is not None and checked_block_size(block_size) != self.block_size:
            raise ValueError(f"block_size must be {self.block_size}, got {block_size}")
        if device is not None and checked_device(device) != self.device:
            return self.to(device).table()
        table = self.__dict__.get("_table")
        return compile_selected(self.support.block_set, self.blocks) if table is None else table

    def coverage(self, block_size: Size) -> float | None:
        """See BlockMask.coverage; None for another block size, as the host does not know it."""
        same = checked_block_size(block_size, TABLE_SIDES) == self.block_size
        return 1.0 if same else None

    @cached_property
    def density(self) -> float:
        """The density s: non-zero blocks over all blocks."""
        return float(self.to_blocks().double().mean())

    def to_blocks(self) -> Tensor:
        """The non-zero blocks: bool (batch or 1, heads or 1, nq, nk)."""
        support = self.support
        return self.blocks & (support._tile_codes() != support.num_bit_tiles + EMPTY)

    def to_dense(self) -> Tensor:
        """The dense mask: bool (batch or 1, heads or 1, q_len, k_len).

        Raises:
            ValueError: It would take more memory than the machine has.
        """
        g = self.grid
        convert.check_dense(g, self.num_batches * self.num_heads)
        pairs = self.blocks.repeat_interleave(g.bq, 2).repeat_interleave(g.bk, 3)
        return pairs[..., : g.q_len, : g.k_len] & self.support.to_dense()

    def to_block_mask(self, batch_index: int = 0) -> BlockMask:
        """The mask of a batch element as a static BlockMask; waits for the device.

        Args:
            batch_index: Index of the batch element; negative ones count from the last one.

        Returns:
            The block mask.

        Raises:
            TypeError: `batch_index` is not an integer.
            IndexError: There is no such batch element.
        """
        batch_index = check_index("batch_index", batch_index, self.num_batches, "batch elements")
        return BlockMask(convert.from_blocks(self.grid, self.blocks[batch_index])) & self.support

    def __repr__(self) -> str:
        return (
            f"DynamicMask(num_batches={self.num_batches}, num_heads={self.num_heads}, "
            f"support={self.support})"
        )


def _full_mask_like(name: str, like: Tensor, block_size: Size, seq_len: Size | None) -> BlockMask:
    """The full mask with as many blocks as the last two dimensions of `like`."""
    if not isinstance(like, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(like).__name__}")
    if not 2 <= like.ndim <= 4:
        raise ValueError(f"{name} must have 2 to 4 dimensions, got {tuple(like.shape)}")
    return from_full_runs(convert.grid_of_blocks(name, like, block_size, seq_len))
