"""Masks from the elements of dense and scipy matrices, and back."""

from collections.abc import Callable

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from masks import tiles
from masks.block_mask import BlockMask, assemble, distinct_layers
from masks.grid import Grid
from masks.intervals import empty, from_points

STRIP = 1 << 22  # pairs that are looked at together when a mask is read element by element


def from_dense(dense: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
    """See BlockMask.from_dense."""
    dense = _checked(dense)
    grid = Grid.of(tuple(dense.shape[1:]), block_size, dense.device)
    head_to_mask, kept = distinct_layers(dense)
    rows = dense[kept]
    return from_strips(grid, lambda layer, q: rows[layer, q], head_to_mask)


def _checked(dense: Tensor) -> Tensor:
    """The tensor as (heads, q, k)."""
    if not isinstance(dense, Tensor) or dense.dtype != torch.bool:
        raise TypeError(
            f"dense must be a bool tensor, got {getattr(dense, 'dtype', type(dense).__name__)}"
        )
    if dense.ndim not in (2, 3) or 0 in dense.shape:
        raise ValueError(
            f"dense must be (q, k) or (heads, q, k) and not empty, got {tuple(dense.shape)}"
        )
    return dense if dense.ndim == 3 else dense[None]


def checked_blocks(blocks) -> Tensor:
    """Blocks of any accepted form as bool (heads, nq, nk). Raises TypeError or ValueError."""
    if scipy.sparse.issparse(blocks):
        blocks = blocks.toarray()
    if not isinstance(blocks, Tensor):
        blocks = _tensor_of(blocks)
    if blocks.is_floating_point() or blocks.is_complex():
        raise TypeError(f"blocks must be of bool or of the integers 0 and 1, got {blocks.dtype}")
    if blocks.ndim == 4:
        raise ValueError(
            f"blocks must be (nq, nk) or (heads, nq, nk), got {tuple(blocks.shape)}: for a mask "
            "of each batch element see DynamicMask.from_blocks"
        )
    if blocks.ndim not in (2, 3) or 0 in blocks.shape:
        raise ValueError(
            f"blocks must be (nq, nk) or (heads, nq, nk) and not empty, got {tuple(blocks.shape)}"
        )
    if blocks.dtype != torch.bool and bool(((blocks != 0) & (blocks != 1)).any()):
        raise ValueError(f"blocks must be 0 or 1, got {int(blocks.min())} to {int(blocks.max())}")
    return (blocks if blocks.ndim == 3 else blocks[None]).bool()


def _tensor_of(blocks) -> Tensor:
    """An array or nested lists as a tensor on the CPU."""
    try:
        array = np.asarray(blocks)
    except ValueError as error:
        raise ValueError(f"blocks must have rows of one length: {error}") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(
            "blocks must be a tensor, an array, nested lists or a scipy.sparse matrix, got "
            f"{type(blocks).__name__} of {array.dtype}"
        )
    if array.dtype.kind in "ui":
        # torch has few operations on unsigned integers, and tells 0 and 1 apart in any other.
        array = array.astype(np.int64, copy=False)
    return torch.as_tensor(array, device="cpu")


def from_strips(grid: Grid, pairs: Callable[[int, slice], Tensor], head_to_mask=(0,)) -> BlockMask:
    """The mask read strip by strip: pairs(layer, slice of queries) is bool (queries, k_len)."""
    rows = max(1, STRIP // (grid.bq * grid.k_len))
    found_full, found_number, found_bank, found_tile = [], [], [], []
    tiles_so_far = 0
    for layer in range(max(head_to_mask) + 1):
        for row in range(0, grid.nq, rows):
            strip = pairs(layer, slice(row * grid.bq, min((row + rows) * grid.bq, grid.q_len)))
            number, words = _strip_blocks(grid, strip, layer * grid.nq + row)
            is_full = (words == grid.whole[grid.cut(number)]).flatten(1).all(1)
            bit_tiles, tile = tiles.distinct(words[~is_full])
            found_full.append(number[is_full])
            found_number.append(number[~is_full])
            found_bank.append(bit_tiles)
            found_tile.append(tile + tiles_so_far)
            tiles_so_far += len(bit_tiles)
    full = from_points(torch.cat(found_full))
    return assemble(
        grid,
        head_to_mask,
        full,
        torch.cat(found_number),
        torch.cat(found_bank),
        torch.cat(found_tile),
    )


def _strip_blocks(grid: Grid, strip: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
    """Numbers and packed pairs of the non-zero blocks of a strip of whole block rows."""
    short_q, short_k = -strip.shape[0] % grid.bq, -strip.shape[1] % grid.bk
    if short_q or short_k:
        strip = torch.nn.functional.pad(strip, (0, short_k, 0, short_q))
    words = tiles.pack(strip.view(strip.shape[0], grid.nk, grid.bk))
    words = words.view(-1, grid.bq, *words.shape[1:]).transpose(1, 2)
    row, column = (words != 0).any(-1).any(-1).nonzero(as_tuple=True)
    return grid.number(row + first_row, column), words[row, column]


def from_scipy(matrix, block_size: int | tuple[int, int] = 128) -> BlockMask:
    """See BlockMask.from_scipy."""
    if not scipy.sparse.issparse(matrix):
        raise TypeError(
            f"matrix must be a scipy.sparse array or matrix, got {type(matrix).__name__}"
        )
    if matrix.ndim != 2:
        raise ValueError(f"matrix must have 2 dimensions, got {matrix.ndim}")
    grid = Grid.of(tuple(int(n) for n in matrix.shape), block_size)
    blocks = _padded_bsr(matrix, grid)
    row = np.repeat(np.arange(grid.nq), np.diff(blocks.indptr))
    number = grid.number(torch.from_numpy(row).long(), torch.from_numpy(blocks.indices).long())
    pairs = tiles.pack(torch.from_numpy(blocks.data != 0))
    return assemble(grid, (0,), empty(grid.device), number, *tiles.distinct(pairs))


def _padded_bsr(matrix, grid: Grid) -> scipy.sparse.bsr_array:
    """The matrix as bsr_array of whole blocks, duplicates summed and indices ascending."""
    if matrix.format == "bsr" and matrix.blocksize == grid.block_size:
        blocks = scipy.sparse.bsr_array(matrix, copy=True)
    else:
        coo = scipy.sparse.coo_array(matrix != 0)
        shape = (grid.nq * grid.bq, grid.nk * grid.bk)
        padded = scipy.sparse.coo_array((coo.data, (coo.row, coo.col)), shape=shape)
        blocks = padded.tobsr(blocksize=grid.block_size)
    blocks.sum_duplicates()
    return blocks


def to_scipy(mask: BlockMask) -> scipy.sparse.bsr_array:
    """See BlockMask.to_scipy."""
    if mask.num_heads != 1:
        raise ValueError(
            f"to_scipy takes a mask of one head, got {mask.num_heads}; use mask.head(h)"
        )
    g = mask.grid
    number, order = torch.cat([mask.full.expand(), mask.partial]).sort()
    inside = g.whole[g.cut(mask.full.expand())]
    pairs = tiles.unpack(torch.cat([inside, mask.bit_tiles[mask.partial_bit_tile]])[order], g.bk)
    row, column = g.split(number)
    indptr = torch.searchsorted(row, torch.arange(g.nq + 1, device=mask.device))
    parts = (t.cpu().numpy() for t in (pairs, column, indptr))
    return scipy.sparse.bsr_array(tuple(parts), shape=(g.nq * g.bq, g.nk * g.bk))
