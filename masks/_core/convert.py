"""Conversion of masks from and to matrices of pairs or of blocks, dense or scipy.sparse."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from masks._core.bit_tiles import (
    deduplicate,
    pack,
    pack_bytes,
    renumbered,
    to_words,
    unpack,
    words_per_row,
)
from masks._core.block_set import BlockSet, assemble, from_full_runs
from masks._core.grid import Grid
from masks._core.intervals import empty, from_bool_matrix, from_points
from masks._core.ranges import Range, Spans
from masks.arguments import check_dtype, check_memory

if TYPE_CHECKING:
    import scipy.sparse

STRIP = 1 << 22  # pairs of a strip of block rows, which is converted at a time
# Bytes of pairs that stay in the cache of a CPU. Computing and packing so few at a time is several
# times as fast as whole strips.
CACHED_BYTES = 1 << 20
STRIPS_HELD, TILES_HELD = 64, 1024  # most strips and bit tiles that are not joined yet
MAX_RUNS = 8  # of spans that are read one by one
SPAN = 128  # keys, at least, that are decided or read together
_WORDS = {16: torch.int16, 32: torch.int32}  # the dtype with one bit per key of a block


def from_dense(dense: Tensor, block_size: int | tuple[int, int] = 128) -> BlockSet:
    """See BlockMask.from_dense."""
    check_dtype("dense", dense, torch.bool)
    if dense.layout != torch.strided:
        raise TypeError(
            f"dense must not be sparse, got {dense.layout}: see masks.interop.from_torch"
        )
    if dense.ndim not in (2, 3) or 0 in dense.shape:
        raise ValueError(
            f"dense must be (q, k) or (heads, q, k) and not empty, got {tuple(dense.shape)}"
        )
    dense = dense if dense.ndim == 3 else dense[None]
    grid = Grid.of(tuple(dense.shape[1:]), block_size, dense.device)
    head_to_mask, distinct = distinct_heads(dense)
    rows = dense[distinct]
    return from_strips(grid, lambda mask, q: rows[mask, q], head_to_mask)


def distinct_heads(heads: Tensor) -> tuple[tuple[int, ...], list[int]]:
    """(index of the mask of each head, first head of each mask). Equal heads share a mask."""
    first: list[int] = []
    head_to_mask = []
    for h in range(len(heads)):
        mask = next(
            (i for i, k in enumerate(first) if torch.equal(heads[k], heads[h])), len(first)
        )
        first += [h] if mask == len(first) else []
        head_to_mask.append(mask)
    return tuple(head_to_mask), first


def to_dense(blocks: BlockSet) -> Tensor:
    """The pairs of each mask: bool (num_masks, q_len, k_len)."""
    g = blocks.grid
    check_dense(g, len(blocks.head_to_mask))
    nonzero = to_blocks(blocks).repeat_interleave(g.bq, 1).repeat_interleave(g.bk, 2)
    view = nonzero.view(-1, g.bq, g.nk, g.bk)
    row, column = g.stacked_row(blocks.partial), blocks.partial % g.row_stride
    view[row, :, column] = unpack(blocks.bit_tiles, g.bk)[blocks.partial_bit_tile]
    return nonzero[:, : g.q_len, : g.k_len]


def check_dense(grid: Grid, count: int) -> None:
    """Raises ValueError if `count` dense masks would need more memory than the machine has."""
    less = (
        "slice_queries of a BlockMask makes a mask of fewer queries, and its to_scipy stores "
        "non-zero blocks alone"
    )
    check_memory("to_dense", count * grid.q_len * grid.k_len, less)


def from_blocks(grid: Grid, blocks: Tensor) -> BlockSet:
    """The set in which a block is full if `blocks`, bool (heads, nq, nk), is true."""
    head_to_mask, distinct = distinct_heads(blocks)
    return from_full_runs(grid, from_bool_matrix(blocks[distinct]), head_to_mask)


def to_blocks(blocks: BlockSet) -> Tensor:
    """The non-zero blocks of each mask: bool (num_masks, nq, nk)."""
    g = blocks.grid
    check_memory("to_blocks", len(blocks.head_to_mask) * g.mask_stride)
    nonzero = blocks.full.to_bool(blocks.num_masks * g.mask_stride)
    nonzero[blocks.partial] = True
    return nonzero.view(blocks.num_masks, g.nq, -1)[..., :-1]


def checked_blocks(blocks) -> Tensor:
    """Blocks in any accepted form as bool (heads, nq, nk). Raises TypeError or ValueError."""
    if _is_scipy(blocks):
        blocks = blocks.toarray()
    if not isinstance(blocks, Tensor):
        blocks = _as_tensor(blocks)
    if blocks.is_floating_point() or blocks.is_complex():
        raise TypeError(f"blocks must be bool or the integers 0 and 1, got {blocks.dtype}")
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


def _as_tensor(blocks) -> Tensor:
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
        # torch has few operations on unsigned integers.
        array = array.astype(np.int64, copy=False)
    return torch.as_tensor(array, device="cpu")


def grid_of_blocks(
    name: str,
    blocks: Tensor,
    block_size: int | tuple[int, int],
    seq_len: int | tuple[int, int] | None,
) -> Grid:
    """The grid with the number of blocks of the last two dims of `blocks`.

    If seq_len is None, the sequence has whole blocks.
    """
    nq, nk = blocks.shape[-2:]
    grid = Grid.of((1, 1) if seq_len is None else seq_len, block_size, blocks.device)
    if seq_len is None:
        return replace(grid, q_len=nq * grid.bq, k_len=nk * grid.bk)
    if (grid.nq, grid.nk) != (nq, nk):
        raise ValueError(
            f"{name} must be ({grid.nq}, {grid.nk}) in the last two dimensions for seq_len "
            f"{grid.seq_len} in blocks of {grid.block_size}, got ({nq}, {nk})"
        )
    return grid


def batch_of_blocks(name: str, blocks: Tensor, grid: Grid, heads: int) -> Tensor:
    """`blocks` as (batch, heads, nq, nk), with the heads of the mask from which they select.

    Args:
        name: Name of the argument, for errors.
        blocks: A value for each block, (nq, nk), (heads, nq, nk) or (batch, heads, nq, nk).
        grid: The grid of the blocks.
        heads: Heads of the mask from which blocks are selected; 1 if it applies to any number.

    Raises:
        ValueError: `blocks` has another shape, or is on another device.
    """
    shape = (1,) * (4 - blocks.ndim) + tuple(blocks.shape)
    if not 2 <= blocks.ndim <= 4 or 0 in shape or shape[2:] != (grid.nq, grid.nk):
        raise ValueError(
            f"{name} must be ({grid.nq}, {grid.nk}), with or without (heads,) or (batch, heads) "
            f"in front, for seq_len {grid.seq_len} in blocks of {grid.block_size}, got "
            f"{tuple(blocks.shape)}"
        )
    if heads > 1 and shape[1] not in (1, heads):
        raise ValueError(f"{name} must have 1 or {heads} heads, got {shape[1]}")
    if blocks.device != grid.device:
        raise ValueError(f"{name} must be on {grid.device} like the mask, got {blocks.device}")
    return blocks.view(shape).expand(-1, max(heads, shape[1]), -1, -1)


def span(grid: Grid) -> int:
    """Keys of a span: whole blocks."""
    return max(SPAN, grid.bk)


def from_strips(
    grid: Grid,
    pairs: Callable[..., Tensor],
    head_to_mask: tuple[int, ...] = (0,),
    pair_bytes: int = 1,
    run: Callable = map,
    decide: Callable[[slice], Range] | None = None,
    read_packed: Callable[[slice, Tensor, int], Tensor] | None = None,
) -> BlockSet:
    """The set of a function of pairs, evaluated strip by strip.

    Args:
        grid: Lengths, block size and device.
        pairs: pairs(mask, slice of queries) returns bool (queries, k_len). With `decide`,
            pairs(mask, slice of queries, Spans) returns bool (queries, keys) of these keys alone.
        head_to_mask: Index of the mask of each head.
        pair_bytes: Most bytes per pair of a value that `pairs` computes.
        run: `map`, or a function like it.
        decide: decide(slice of queries) returns for each span of keys whether all and whether any
            of the pairs attend, or (0, 1) where that depends on each pair.
        read_packed: read_packed(slice of queries, first keys, width) returns the same as `pairs`
            in bits, uint8 (queries, keys / 8), for so many keys from each first one on. It is
            called instead of `pairs`. Pairs past the last key may have any value.
    """
    rows = max(1, STRIP // (grid.bq * grid.k_len))
    strips = [(m, row) for m in range(max(head_to_mask) + 1) for row in range(0, grid.nq, rows)]
    width = span(grid)

    def reader(mask: int, first: Tensor) -> Callable[[slice], Tensor]:
        """A function from some queries to their pairs with the keys of the spans, in bits."""
        every = len(first) * width >= grid.k_len
        if (in_bits := read_packed) is not None:
            spans = first[:1] if every else first
            keys = grid.nk * grid.bk if every else width
            past = 0 if every else max(0, int(first[-1]) + width - grid.nk * grid.bk)

            def packed(queries: slice) -> Tensor:
                found = in_bits(queries, spans, keys)
                return found[:, : found.shape[1] - past // 8]

            return packed

        inside = first if every else first.clamp(max=grid.k_len - width)
        chosen, overlap = Spans.of(inside, width), int((first - inside)[-1])

        def read(queries: slice) -> Tensor:
            found = pairs(mask, queries) if every else pairs(mask, queries, chosen)
            if overlap:
                found = torch.cat([found[:, :-width], found[:, overlap - width :]], 1)
            return _packed(_pad_to_multiple(found, 1, grid.bk))

        return read

    def read_strip(strip: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mask, row = strip
        begin, end = row * grid.bq, min((row + rows) * grid.bq, grid.q_len)
        full, first = _decided(grid, decide, slice(begin, end), width)
        runs = []
        for some in _runs_of_spans(first, width) if read_packed is None else [first]:
            at_once = max(1, CACHED_BYTES // (pair_bytes * len(some) * width))
            if grid.device.type != "cpu" or read_packed is not None:
                at_once = rows * grid.bq
            read, starts = reader(mask, some), range(begin, end, at_once)
            runs.append(torch.cat([read(slice(at, min(at + at_once, end))) for at in starts]))
        starts = torch.arange(0, width, grid.bk, device=grid.device)
        columns = (first[:, None] + starts).flatten() // grid.bk
        blocks = full, columns[columns < grid.nk]
        return _strip_blocks(grid, torch.cat(runs, 1), mask * grid.nq + row, *blocks)

    # The blocks of a strip are joined with those of earlier strips before many strips are held.
    # Their small tensors lie between the large ones that were computed with them, so the memory
    # of all strips would stay occupied.
    joined: list[tuple[Tensor, Tensor, Tensor]] = []
    tiles = torch.empty(0, grid.bq, words_per_row(grid.bk), dtype=torch.int32, device=grid.device)
    held: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for number, strip in enumerate(run(read_strip, strips), 1):
        held.append(strip)
        count = sum(len(part) for *_, part in held)
        many = count >= max(TILES_HELD, len(tiles)) or (
            len(held) >= STRIPS_HELD and STRIPS_HELD * count >= len(tiles)
        )
        if many or number == len(strips):
            tiles, blocks = _joined(tiles, held)
            joined.append(blocks)
            held = []
    full, partial, tile = (torch.cat(parts) for parts in zip(*joined, strict=True))
    return assemble(grid, head_to_mask, from_points(full), partial, tiles, tile)


def _joined(
    tiles: Tensor, strips: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(distinct bit tiles, the first of which are `tiles`; (full, partial, tile) of all strips).

    Args:
        tiles: Distinct bit tiles.
        strips: (full, partial, tile, bit tiles) of each strip.
    """
    full, partial, tile, own_tiles = zip(*strips, strict=True)
    tile = renumbered(tile, own_tiles)
    distinct, inverse = deduplicate(torch.cat([tiles, *own_tiles]))
    number = torch.full((len(distinct),), -1, dtype=torch.int64, device=tile.device)
    number[inverse[: len(tiles)]] = torch.arange(len(tiles), device=tile.device)
    new = (number < 0).nonzero().flatten()
    number[new] = torch.arange(len(tiles), len(distinct), device=tile.device)
    blocks = torch.cat(full), torch.cat(partial), number[inverse[len(tiles) :]][tile]
    return torch.cat([tiles, distinct[new]]), blocks


def _pad_to_multiple(x: Tensor, dim: int, multiple: int) -> Tensor:
    """x, with zeros at the end of a dim so that its size is a multiple."""
    missing = -x.shape[dim] % multiple
    sizes = (0, missing) if dim == 1 else (0, 0, 0, missing)
    return torch.nn.functional.pad(x, sizes) if missing else x


def _decided(
    grid: Grid, decide: Callable[[slice], Range] | None, queries: slice, width: int
) -> tuple[Tensor, Tensor]:
    """(bool (nk,): columns of blocks that are full, int64: first keys of the spans to read)."""
    first = torch.arange(0, grid.k_len, width, device=grid.device)
    full = torch.zeros(grid.nk, dtype=torch.bool, device=grid.device)
    if decide is None:
        return full, first
    all_attend, some_attend = (
        torch.from_numpy(np.broadcast_to(end, len(first)) != 0) for end in decide(queries)
    )
    read = some_attend & ~all_attend
    if not read.any():
        read[0] = True  # so that at least one is
    return all_attend.repeat_interleave(width // grid.bk)[: grid.nk], first[read]


def _packed(pairs: Tensor) -> Tensor:
    """pack_bytes, by numpy where it can read the tensor: it takes a fourth of the time."""
    wrapped = type(pairs) is not Tensor or is_functorch_wrapped_tensor(pairs)
    if pairs.device.type != "cpu" or wrapped:
        return pack_bytes(pairs)
    return torch.from_numpy(np.packbits(pairs.numpy(), axis=-1, bitorder="little"))


def _runs_of_spans(first: Tensor, width: int) -> Sequence[Tensor]:
    """The first keys of spans, divided where spans are not consecutive if they are few runs.

    The pairs of consecutive spans are read without copies of tabulated values.
    """
    if first.is_cuda:
        return [first]
    ends = (first.diff() != width).nonzero().flatten() + 1
    return [first] if len(ends) >= MAX_RUNS else first.tensor_split(ends)


def _strip_blocks(
    grid: Grid, strip: Tensor, first_row: int, known: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(full, partial, tile, bit tiles) of a strip of whole block rows.

    Args:
        grid: Lengths, block size and device.
        strip: uint8 (queries, bytes), the pairs of the blocks of `columns`.
        first_row: Number of the first block row.
        known: bool (nk,), whether the blocks of other columns are full or empty.
        columns: int64, numbers of the columns of blocks that were read.
    """
    strip = _pad_to_multiple(strip, 0, grid.bq)
    # Most blocks are all false or all true, so pairs are compared as words.
    words = strip.view(_WORDS.get(grid.bk, torch.int64))
    words = words.view(-1, grid.bq, len(columns), words.shape[1] // len(columns))
    full = _reduce_blocks(torch.bitwise_and, words) == -1
    row, column = ((_reduce_blocks(torch.bitwise_or, words) != 0) & ~full).nonzero(as_tuple=True)
    bit_tiles, tile = deduplicate(to_words(words[row, :, column]))
    known = known.repeat(len(full), 1)
    known[:, columns] = full
    full_row, full_column = known.nonzero(as_tuple=True)
    return (
        grid.flat_index(0, full_row + first_row, full_column),
        grid.flat_index(0, row + first_row, columns[column]),
        tile,
        bit_tiles,
    )


def _reduce_blocks(rule: Callable[[Tensor, Tensor], Tensor], words: Tensor) -> Tensor:
    """Reduces the words of each block, (rows, bq, nk, words) -> (rows, nk), by halving dims."""
    for dim in (1, 3):
        while words.shape[dim] > 1:
            words = rule(*words.split(words.shape[dim] // 2, dim))
    return words[:, 0, :, 0]


def from_scipy(matrix, block_size: int | tuple[int, int] = 128) -> BlockSet:
    """See BlockMask.from_scipy."""
    if not _is_scipy(matrix):
        raise TypeError(
            f"matrix must be a scipy.sparse array or matrix, got {type(matrix).__name__}"
        )
    if matrix.ndim != 2:
        raise ValueError(f"matrix must have 2 dimensions, got {matrix.ndim}")
    grid = Grid.of(tuple(int(n) for n in matrix.shape), block_size)
    blocks = _padded_bsr(matrix, grid)
    row = torch.from_numpy(np.repeat(np.arange(grid.nq), np.diff(blocks.indptr))).long()
    flat = grid.flat_index(0, row, torch.from_numpy(blocks.indices).long())
    tiles = deduplicate(pack(torch.from_numpy(blocks.data != 0)))
    return assemble(grid, (0,), empty(grid.device), flat, *tiles)


def _is_scipy(matrix: object) -> bool:
    """Whether an object is a scipy.sparse matrix. Does not import scipy.sparse."""
    sparse = sys.modules.get("scipy.sparse")
    return sparse is not None and sparse.issparse(matrix)


def _padded_bsr(matrix, grid: Grid) -> "scipy.sparse.bsr_array":
    """The matrix as a bsr_array of whole blocks, without duplicates, with ascending indices."""
    import scipy.sparse

    if matrix.format == "bsr" and matrix.blocksize == grid.block_size:
        blocks = scipy.sparse.bsr_array(matrix, copy=True)
    else:
        coo = scipy.sparse.coo_array(matrix != 0)
        shape = (grid.nq * grid.bq, grid.nk * grid.bk)
        padded = scipy.sparse.coo_array((coo.data, (coo.row, coo.col)), shape=shape)
        blocks = padded.tobsr(blocksize=grid.block_size)
    blocks.sum_duplicates()
    return blocks


def to_scipy(blocks: BlockSet) -> "scipy.sparse.bsr_array":
    """See BlockMask.to_scipy."""
    import scipy.sparse  # here, because it takes longer to import than all of masks

    if len(blocks.head_to_mask) != 1:
        raise ValueError(
            f"to_scipy takes a mask of one head, got {len(blocks.head_to_mask)}; use mask.head(h)"
        )
    g = blocks.grid
    nnz_blocks = blocks.full.size() + len(blocks.partial)
    check_memory("to_scipy", nnz_blocks * g.bq * g.bk, "fewer non-zero blocks take less")
    flat = torch.cat([blocks.full.expand(), blocks.partial]).sort().values
    pairs = unpack(blocks.tiles_by_code(), g.bk)[blocks.tile_codes(flat)]
    row = g.stacked_row(flat)
    indptr = torch.searchsorted(row, torch.arange(g.nq + 1, device=g.device))
    parts = tuple(t.cpu().numpy() for t in (pairs, flat % g.row_stride, indptr))
    return scipy.sparse.bsr_array(parts, shape=(g.nq * g.bq, g.nk * g.bk))
