"""Exact conversion of masks to and from other libraries.

The libraries are FlexAttention, FlashAttention-4, cuDNN, FlashInfer and torch.sparse. BlockMask
itself converts dense matrices and those of scipy.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from masks._core.bit_tiles import WORD_BITS, deduplicate, pack
from masks._core.block_set import BlockSet, assemble, from_full_runs
from masks._core.convert import STRIP
from masks._core.grid import Grid
from masks._core.intervals import from_points
from masks._pattern import Pattern
from masks.arguments import check_dtype, check_integer
from masks.block_mask import BlockMask, stack
from masks.builders import from_intervals
from masks.mask_batch import MaskBatch, check_block_mask

INTEGERS = (torch.int32, torch.int64)


class BlockSparseTensors(NamedTuple):
    """Block lists of FlashAttention-4, with the fields of its BlockSparseTensorsTorch.

    Attributes:
        mask_block_cnt: Number of partial blocks in each block row, int32 (1, heads, rows).
        mask_block_idx: Their columns, int32 (1, heads, rows, columns), ascending, undefined past
            the count.
        full_block_cnt, full_block_idx: The same for full blocks.
        block_size: (bq, bk) in tokens, also if the rows are block rows of keys.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


class CudnnBlocks(NamedTuple):
    """Block lists of cuDNN's block-sparse attention, with the names of its arguments.

    Attributes:
        q2k_block_index: Columns, int32 (batch, heads, nq, most), ascending, 0 past the count.
        q2k_block_nums: Number of blocks in each block row, int32 (batch, heads, nq).
        block_sizes: Number of keys in each block, int32 (nk,); None if no block is clipped.
        sparse_block_size: Side of a block, in tokens.
    """

    q2k_block_index: Tensor
    q2k_block_nums: Tensor
    block_sizes: Tensor | None
    sparse_block_size: int


class FlashInferBlocks(NamedTuple):
    """Blocks in CSR form, with the names of arguments of FlashInfer's block-sparse plan.

    Attributes:
        indptr: Row pointers, int32 (rows + 1,).
        indices: Columns, int32 (n,), ascending in each row.
        M, N: Number of queries and of keys.
        R, C: Number of queries and of keys in a block.
        mask: The pairs of each block that attend, bool (n, R, C); None if all blocks are full.
    """

    indptr: Tensor
    indices: Tensor
    M: int
    N: int
    R: int
    C: int
    mask: Tensor | None = None


def to_flex(mask: BlockMask) -> flex_attention.BlockMask:
    """Converts a mask to a mask of FlexAttention with the same pairs and block size.

    Its mask_mod looks pairs up in the bit tiles, with an index of 4 bytes for every block.

    Args:
        mask: The mask.

    Returns:
        A BlockMask of FlexAttention.

    Raises:
        TypeError: `mask` is not a BlockMask.
    """
    lists = to_block_lists(mask)
    return flex_attention.BlockMask.from_kv_blocks(
        *lists[:4], BLOCK_SIZE=mask.block_size, mask_mod=_mask_mod(mask), seq_lengths=mask.seq_len
    )


def from_flex(mask: flex_attention.BlockMask, batch: int | None = None) -> BlockMask:
    """Converts a mask of FlexAttention.

    All pairs of its full blocks attend, and the pairs of its partial blocks for which mask_mod is
    true.

    Args:
        mask: A BlockMask of FlexAttention. It must not be the result of indexing another one,
            because indexing drops mask_mod.
        batch: Index of the batch element, if there are several. masks.MaskBatch.from_masks joins
            the results.

    Returns:
        The mask of the batch element.

    Raises:
        TypeError: `mask` is not a BlockMask of FlexAttention, or `batch` is not an integer.
        ValueError: The mask has several batch elements, and `batch` is not the index of one.
    """
    if not isinstance(mask, flex_attention.BlockMask):
        raise TypeError(f"mask must be a BlockMask of FlexAttention, got {type(mask)}")
    batches = mask.kv_num_blocks.shape[0]
    if batch is None and batches != 1:
        raise ValueError(
            f"batch must be from 0 to {batches - 1}, because mask has {batches}, got None"
        )
    b = check_integer("batch", 0 if batch is None else batch, least=0, most=batches - 1)
    full_count, full_index = mask.full_kv_num_blocks, mask.full_kv_indices
    if full_count is None or full_index is None:
        full_count, full_index = torch.zeros_like(mask.kv_num_blocks), mask.kv_indices
    (bq, bk), (q_len, k_len), mask_mod = mask.BLOCK_SIZE, mask.seq_lengths, mask.mask_mod
    own = slice(b, b + 1)
    lists = BlockSparseTensors(
        mask.kv_num_blocks[own], mask.kv_indices[own], full_count[own], full_index[own], (bq, bk)
    )
    element = torch.tensor(b, device="cpu")
    return _from_lists(lists, (q_len, k_len), lambda h, q, k: mask_mod(element, h, q, k))


def to_block_lists(mask: BlockMask, *, by_key: bool = False) -> BlockSparseTensors:
    """Converts a mask to block lists of FlashAttention-4.

    The lists do not contain the element masks of partial blocks. The kernel needs a mask_mod for
    these.

    Args:
        mask: The mask.
        by_key: Whether rows are block rows of keys, as in the backward pass, not of queries.

    Returns:
        The lists.

    Raises:
        TypeError: `mask` is not a BlockMask.
    """
    check_block_mask(mask)
    blocks = (mask.T if by_key else mask).block_set
    return BlockSparseTensors(
        *_padded_lists(blocks, blocks.partial),
        *_padded_lists(blocks, blocks.full.expand()),
        block_size=mask.block_size,
    )


def from_block_lists(
    lists: BlockSparseTensors, seq_len: int | tuple[int, int], pattern: Pattern | None = None
) -> BlockMask:
    """Converts block lists of FlashAttention-4.

    Args:
        lists: The lists of the forward pass.
        seq_len: Length in tokens, one number or (q_len, k_len).
        pattern: Which pairs of the partial blocks attend.

    Returns:
        The mask.

    Raises:
        TypeError: `lists` is not a BlockSparseTensors of tensors of integers, or `pattern` is not
            a Pattern.
        ValueError: The lists have several batch elements or another length; they have partial
            blocks, but there is no pattern; a count exceeds its list; or a column is outside of
            the grid or listed twice in a row.
    """
    _check_lists("lists", lists, BlockSparseTensors)
    for kind in ("mask", "full"):
        count, index = (f"{kind}_block_{part}" for part in ("cnt", "idx"))
        _check_counts_and_columns(lists, count, index)
    if not isinstance(pattern, Pattern | None):
        raise TypeError(f"pattern must be a Pattern or None, got {type(pattern).__name__}")
    if lists.full_block_cnt.shape[0] != 1:
        raise ValueError(f"lists must have one batch element, got {lists.full_block_cnt.shape[0]}")
    if pattern is None:
        if lists.mask_block_cnt.any():
            raise ValueError("pattern must say which pairs of partial blocks attend, got None")
        return _from_lists(lists, seq_len, None)
    full = _from_lists(lists._replace(mask_block_cnt=torch.zeros_like(lists[0])), seq_len, None)
    candidates = _from_lists(lists, seq_len, None) - full
    return full | (candidates & pattern(seq_len, lists.block_size, full.device))


def to_cudnn_blocks(mask: BlockMask, batch: int = 1, heads: int | None = None) -> CudnnBlocks:
    """Converts a mask to block lists of cuDNN's block-sparse attention.

    Args:
        mask: A mask with square blocks and without partial blocks. The kernels of cuDNN take sides
            of 64 and 128.
        batch: Number of batch elements. All get the same lists.
        heads: Number of query heads, by default that of the mask.

    Returns:
        The arguments of cudnn.block_sparse_attention.

    Raises:
        TypeError: `mask` is not a BlockMask, or a number is not an integer.
        ValueError: The mask has partial blocks, blocks that are not square, or another number of
            heads.
    """
    check_block_mask(mask)
    g, batch = mask.grid, check_integer("batch", batch, least=1)
    heads = mask.num_heads if heads is None else check_integer("heads", heads, least=1)
    if mask.partial_blocks:
        raise ValueError(f"mask must have no partial blocks, got {mask.partial_blocks}")
    if g.bq != g.bk:
        raise ValueError(f"mask must have square blocks, got {g.block_size}")
    if mask.num_heads not in (1, heads):
        raise ValueError(f"mask must have 1 or {heads} heads, got {mask.num_heads}")
    count, index = _padded_lists(mask.block_set, mask.block_set.full.expand())
    index = index[..., : max(1, int(count.max()))].expand(batch, heads, -1, -1).contiguous()
    sizes = _keys_of_blocks(g).to(g.device) if g.k_len % g.bk else None
    return CudnnBlocks(index, count.expand(batch, heads, -1).contiguous(), sizes, g.bk)


def from_cudnn_blocks(blocks: CudnnBlocks, seq_len: int | tuple[int, int]) -> BlockMask:
    """Converts block lists of cuDNN.

    Args:
        blocks: The lists of one batch element.
        seq_len: Length in tokens, one number or (q_len, k_len).

    Returns:
        The mask.

    Raises:
        TypeError: `blocks` is not a CudnnBlocks of tensors of integers.
        ValueError: The lists have several batch elements or another length; a count exceeds its
            list; a column is outside of the grid or listed twice in a row; or block_sizes do not
            agree with seq_len.
    """
    _check_lists("blocks", blocks, CudnnBlocks)
    _check_counts_and_columns(blocks, "q2k_block_nums", "q2k_block_index")
    index, count, sizes, side = blocks
    expected = _keys_of_blocks(Grid.of(seq_len, side))
    if sizes is not None:
        check_dtype("block_sizes", sizes, *INTEGERS)
    if sizes is not None and sizes.tolist() != expected.tolist():
        raise ValueError(f"block_sizes must be {expected.tolist()}, got {sizes.tolist()}")
    none = torch.zeros_like(count)
    return from_block_lists(BlockSparseTensors(none, index, count, index, (side, side)), seq_len)


def to_cudnn_intervals(mask: BlockMask | MaskBatch, batch: int = 1) -> Tensor:
    """Converts a mask to the argument `mask_func` of cudnn.flex_attention.create_mask_plan.

    It has the keys of each query as intervals [0, F0), [F1, F2), ..., which may be empty.

    Args:
        mask: The mask of all batch elements, or a batch with a mask for each.
        batch: Number of batch elements that get the same intervals; 1 for a MaskBatch.

    Returns:
        int32 (heads, endpoints, batch * q_len), on the device of the mask. The number of endpoints
        is odd. If a query needs fewer than others, its last endpoint is repeated.

    Raises:
        TypeError: `mask` is not a BlockMask or a MaskBatch, or `batch` is not an integer.
        ValueError: `batch` is below 1, or above 1 for a MaskBatch.
    """
    batch = check_integer("batch", batch, least=1)
    if isinstance(mask, MaskBatch):
        each = [mask[b] for b in range(len(mask))]
        if batch > 1:
            raise ValueError(f"batch must be 1 for a MaskBatch, got {batch}")
    else:
        check_block_mask(mask, "a BlockMask or a MaskBatch")
        each = [mask]
    q_len, k_len = mask.seq_len
    rows = max(1, STRIP // k_len)
    strips = [
        _endpoints(own.slice_queries(begin, min(begin + rows, q_len)).to_dense())
        for own in each
        for begin in range(0, q_len, rows)
    ]
    most = max(strip.shape[1] for strip in strips)
    padded = [torch.cat([s, s[:, -1:].expand(-1, most - s.shape[1], -1)], dim=1) for s in strips]
    return torch.cat(padded, dim=2).repeat(1, 1, batch)


@overload
def from_cudnn_intervals(
    intervals: Tensor, k_len: int, block_size: int | tuple[int, int] = 128, batch: None = None
) -> BlockMask: ...
@overload
def from_cudnn_intervals(
    intervals: Tensor, k_len: int, block_size: int | tuple[int, int] = 128, *, batch: int
) -> MaskBatch: ...
def from_cudnn_intervals(
    intervals: Tensor,
    k_len: int,
    block_size: int | tuple[int, int] = 128,
    batch: int | None = None,
) -> BlockMask | MaskBatch:
    """Converts intervals of keys; see to_cudnn_intervals.

    Args:
        intervals: Integers (heads, endpoints, queries) from 0 to k_len, with an odd number of
            endpoints, which do not descend.
        k_len: Number of keys, in tokens.
        block_size: Block size in tokens, one number or (bq, bk).
        batch: Number of batch elements, whose queries follow one another; None for the mask of
            one batch element.

    Returns:
        The mask; with `batch` a MaskBatch.

    Raises:
        TypeError: `intervals` is not a tensor of integers, or `batch` is not an integer.
        ValueError: `intervals` has another shape, an endpoint is past the keys or below the one
            before it, or `batch` does not divide the number of queries.
    """
    check_dtype("intervals", intervals, *INTEGERS)
    if intervals.dim() != 3 or intervals.shape[1] % 2 == 0 or 0 in intervals.shape:
        raise ValueError(
            "intervals must be (at least 1 head, an odd number of endpoints, queries), got "
            f"{tuple(intervals.shape)}"
        )
    if batch is not None:
        batch = check_integer("batch", batch, least=1)
        if intervals.shape[2] % batch:
            raise ValueError(f"batch must divide the {intervals.shape[2]} queries, got {batch}")
        each = intervals.chunk(batch, dim=2)
        return MaskBatch.from_masks([from_cudnn_intervals(x, k_len, block_size) for x in each])
    grid = Grid.of(
        (intervals.shape[2], check_integer("k_len", k_len)), block_size, intervals.device
    )
    beyond = (intervals < 0) | (intervals > k_len)
    if bool(beyond.any()):
        raise ValueError(f"intervals must be 0 to k_len {k_len}, got {int(intervals[beyond][0])}")
    if bool((intervals.diff(dim=1) < 0).any()):
        head, _, query = (intervals.diff(dim=1) < 0).nonzero()[0].tolist()
        raise ValueError(
            f"intervals must not descend, got the endpoints {intervals[head, :, query].tolist()} "
            f"of query {query} in head {head}"
        )
    heads = []
    for endpoints in intervals.long():
        mask = from_intervals(grid, torch.zeros_like(endpoints[0]), endpoints[0])
        for low, high in zip(endpoints[1::2], endpoints[2::2], strict=True):
            mask = mask | from_intervals(grid, low, high)
        heads.append(mask)
    return stack(heads)


def to_flashinfer(mask: BlockMask) -> FlashInferBlocks:
    """Converts a mask to arguments of FlashInfer's BlockSparseAttentionWrapper.plan.

    Args:
        mask: A mask of one head, whose lengths are multiples of its block size.

    Returns:
        The arguments.

    Raises:
        TypeError: `mask` is not a BlockMask.
        ValueError: The mask has several heads, or lengths that are not whole blocks.
    """
    check_block_mask(mask)
    g = mask.grid
    if g.q_len % g.bq or g.k_len % g.bk:
        raise ValueError(
            f"mask must have lengths of whole blocks of {g.block_size}, got {g.seq_len}"
        )
    rows = mask.to_scipy()
    indptr, indices = (torch.from_numpy(part).int() for part in (rows.indptr, rows.indices))
    pairs = torch.from_numpy(rows.data).to(mask.device) if mask.partial_blocks else None
    lists = (indptr.to(mask.device), indices.to(mask.device))
    return FlashInferBlocks(*lists, *g.seq_len, *g.block_size, pairs)


def from_flashinfer(blocks: FlashInferBlocks) -> BlockMask:
    """Converts blocks in the form of FlashInfer.

    Args:
        blocks: The blocks.

    Returns:
        A mask on the device of `blocks`.

    Raises:
        TypeError: `blocks` is not a FlashInferBlocks of tensors of integers, or its mask is not
            bool.
        ValueError: A mask cannot have blocks of this size; indptr does not ascend from 0 to the
            number of blocks; a column is outside of the grid or listed twice in a row; or `mask`
            has another shape.
    """
    _check_lists("blocks", blocks, FlashInferBlocks)
    for name in ("indptr", "indices"):
        _check_integers(name, getattr(blocks, name), ("entries",))
    indptr, indices, *sizes, pairs = blocks
    if pairs is not None:
        check_dtype("mask", pairs, torch.bool)
    grid = Grid.of((sizes[0], sizes[1]), (sizes[2], sizes[3]), indices.device)
    if len(indptr) != grid.nq + 1 or int(indptr[-1]) != len(indices):
        raise ValueError(
            f"indptr must have {grid.nq + 1} entries and end in {len(indices)}, got "
            f"{len(indptr)} that end in {int(indptr[-1])}"
        )
    if int(indptr[0]) or bool((indptr.diff() < 0).any()):
        raise ValueError(f"indptr must ascend from 0, got {indptr}")
    if pairs is not None and pairs.shape != (len(indices), *grid.block_size):
        expected = (len(indices), *grid.block_size)
        raise ValueError(f"mask must be {expected}, got {tuple(pairs.shape)}")
    row = torch.arange(grid.nq, device=grid.device).repeat_interleave(indptr.diff())
    flat, order = _sorted_blocks(grid, row, indices)
    if pairs is None:
        return BlockMask(from_full_runs(grid, from_points(flat)))
    tiles = pack(pairs)[order]
    which = torch.arange(len(flat), device=grid.device)
    return BlockMask(assemble(grid, (0,), from_points(flat[:0]), flat, tiles, which))


def to_torch(mask: BlockMask, layout: torch.layout = torch.sparse_bsr) -> Tensor:
    """Converts a mask to a sparse tensor of torch.

    Args:
        mask: A mask of one head.
        layout: torch.sparse_bsr for whole blocks, torch.sparse_csr for pairs.

    Returns:
        A bool tensor, (nq * bq, nk * bk) for sparse_bsr, (q_len, k_len) for sparse_csr.

    Raises:
        TypeError: `mask` is not a BlockMask.
        ValueError: Another layout is given, or the mask has several heads.
    """
    check_block_mask(mask)
    blocks = mask.to_scipy()
    if layout == torch.sparse_bsr:
        parts, shape = (blocks.indptr, blocks.indices, blocks.data), blocks.shape
        make = torch.sparse_bsr_tensor
    elif layout == torch.sparse_csr:
        elements = blocks.tocsr()[: mask.seq_len[0], : mask.seq_len[1]]
        elements.eliminate_zeros()
        parts, shape = (elements.indptr, elements.indices, elements.data), elements.shape
        make = torch.sparse_csr_tensor
    else:
        raise ValueError(f"layout must be torch.sparse_bsr or torch.sparse_csr, got {layout}")
    # New tensors: an array without elements has stride 0 in numpy, which torch 2.11 refuses.
    crow, column = (
        torch.empty(len(part), dtype=torch.int64).copy_(torch.from_numpy(part))
        for part in parts[:2]
    )
    values = torch.from_numpy(parts[2])
    return make(crow, column, values, size=shape, device=mask.device, check_invariants=True)


def from_torch(matrix: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
    """Converts a sparse tensor of torch: stored non-zero entries attend.

    A sparse_bsr tensor has whole blocks. If it was made by to_torch from a mask with clipped
    blocks, crop the result to the lengths of that mask.

    Args:
        matrix: A tensor (q_len, k_len) with layout sparse_bsr, sparse_csr or sparse_coo.
        block_size: Block size in tokens, one number or (bq, bk).

    Returns:
        A mask on the device of `matrix`.

    Raises:
        TypeError: `matrix` is not a tensor.
        ValueError: `matrix` has another layout.
    """
    import scipy.sparse  # here, because it takes longer to import than all of masks

    if not isinstance(matrix, Tensor):
        raise TypeError(f"matrix must be a sparse tensor, got {type(matrix).__name__}")
    if matrix.layout in (torch.sparse_bsr, torch.sparse_csr):
        values, column, crow = (
            x.cpu().numpy() for x in (matrix.values(), matrix.col_indices(), matrix.crow_indices())
        )
        make = (
            scipy.sparse.bsr_array if matrix.layout == torch.sparse_bsr else scipy.sparse.csr_array
        )
        found = make((values, column, crow), shape=tuple(matrix.shape))
    elif matrix.layout == torch.sparse_coo:
        matrix = matrix.coalesce()
        index = tuple(matrix.indices().cpu().numpy())
        found = scipy.sparse.coo_array(
            (matrix.values().cpu().numpy(), index), shape=tuple(matrix.shape)
        )
    else:
        raise ValueError(
            f"matrix must be sparse_bsr, sparse_csr or sparse_coo, got {matrix.layout}"
        )
    return BlockMask.from_scipy(found, block_size).to(matrix.device)


def _mask_mod(mask: BlockMask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    g, bit_tiles = mask.grid, mask.block_set.tiles_by_code()
    tile = mask.block_set.tile_code_grid().int()
    first_row = torch.tensor(mask.head_to_mask, dtype=torch.int32, device=mask.device) * g.nq
    one_head = mask.num_heads == 1

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = q // g.bq if one_head else first_row[h] + q // g.bq
        word = bit_tiles[tile[row, k // g.bk], q % g.bq, k % g.bk // WORD_BITS]
        return ((word >> (k % g.bk % WORD_BITS)) & 1) != 0

    return mask_mod


def _check_lists(name: str, lists: Any, expected: type) -> None:
    if not isinstance(lists, expected):
        raise TypeError(f"{name} must be {expected.__name__}, got {type(lists).__name__}")


def _check_counts_and_columns(lists: Any, count: str, index: str) -> None:
    """Raises unless both fields have integers, for the same batch elements, heads and rows."""
    rows = ("batch", "heads", "rows")
    counts = _check_integers(count, getattr(lists, count), rows)
    columns = _check_integers(index, getattr(lists, index), (*rows, "columns"))
    if columns.shape[:3] != counts.shape:
        raise ValueError(
            f"{index} must be ({', '.join(map(str, counts.shape))}, columns) like {count}, got "
            f"{tuple(columns.shape)}"
        )


def _check_integers(name: str, tensor: Any, dims: tuple[str, ...]) -> Tensor:
    """Raises unless a tensor has integers and these dims."""
    check_dtype(name, tensor, *INTEGERS)
    if tensor.dim() != len(dims):
        raise ValueError(f"{name} must be ({', '.join(dims)}), got {tuple(tensor.shape)}")
    return tensor


def _keys_of_blocks(grid: Grid) -> Tensor:
    """int32 (nk,): the number of keys in each block column, on the CPU."""
    first = torch.arange(grid.nk, dtype=torch.int32, device="cpu") * grid.bk
    return (grid.k_len - first).clamp(max=grid.bk)


def _endpoints(dense: Tensor) -> Tensor:
    """int32 (heads, odd number, rows): beginnings and ends of the runs of keys of bool rows."""
    dense = dense.view(-1, *dense.shape[-2:])
    padded = torch.nn.functional.pad(dense, (1, 1))
    changes = padded[..., 1:] != padded[..., :-1]
    # The first interval begins at 0, which is not stored. If no run begins at 0, it is empty.
    changes[..., 0] ^= True
    head, row, position = changes.nonzero(as_tuple=True)
    count = changes.sum(-1)
    slot = changes.cumsum(-1)[head, row, position] - 1
    last = (changes * torch.arange(changes.shape[-1], device=dense.device)).amax(-1)
    found = last.unsqueeze(1).repeat(1, int(count.max()), 1)
    found[head, slot, row] = position
    return found.int()


def _padded_lists(blocks: BlockSet, flat: Tensor) -> tuple[Tensor, Tensor]:
    """(counts, columns) of the blocks with these ascending flat indices, for every head."""
    g = blocks.grid
    row = g.stacked_row(flat)
    count = torch.bincount(row, minlength=blocks.num_masks * g.nq)
    slot = torch.arange(len(row), device=g.device) - (count.cumsum(0) - count)[row]
    columns = torch.zeros(len(count), g.nk, dtype=torch.int32, device=g.device)
    columns[row, slot] = (flat % g.row_stride).int()
    heads = list(blocks.head_to_mask)
    count = count.int().view(1, -1, g.nq)[:, heads]
    return count, columns.view(1, -1, g.nq, g.nk)[:, heads]


def _from_lists(
    lists: BlockSparseTensors,
    seq_len: int | tuple[int, int],
    attends: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
) -> BlockMask:
    """The mask of the lists of one batch element.

    attends(head, q, k) is true for pairs of partial blocks that attend; None if all do.
    """
    grid = Grid.of(seq_len, lists.block_size, lists.full_block_cnt.device)
    if lists.full_block_cnt.shape[-1] != grid.nq:
        raise ValueError(
            f"lists must have {grid.nq} block rows for seq_len {grid.seq_len} in blocks of "
            f"{grid.block_size}, got {lists.full_block_cnt.shape[-1]}"
        )
    heads = []
    for head in range(lists.full_block_cnt.shape[1]):
        full = _flat(grid, lists.full_block_cnt[0, head], lists.full_block_idx[0, head])
        partial = _flat(grid, lists.mask_block_cnt[0, head], lists.mask_block_idx[0, head])
        if attends is None:
            bit_tiles, tile = grid.inbounds_tiles[:1], torch.zeros_like(partial)
        else:
            bit_tiles, tile = _evaluated(grid, partial, head, attends)
        blocks = assemble(grid, (0,), from_points(full), partial, bit_tiles, tile)
        heads.append(BlockMask(blocks))
    return stack(heads)


def _flat(grid: Grid, count: Tensor, index: Tensor) -> Tensor:
    """The ascending flat indices of the listed blocks.

    Raises:
        ValueError: A count exceeds the list, or a column is outside of the grid or listed twice.
    """
    most = index.shape[1]
    if bool(((count < 0) | (count > most)).any()):
        raise ValueError(f"counts must be 0 to {most}, the length of the lists, got {count}")
    listed = torch.arange(most, device=index.device) < count[:, None]
    row, slot = listed.nonzero(as_tuple=True)
    return _sorted_blocks(grid, row, index[row, slot])[0]


def _sorted_blocks(grid: Grid, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """(ascending flat indices of the blocks, the permutation that sorts them)

    Raises:
        ValueError: A column is outside of the grid, or a block is listed twice.
    """
    wrong = (column < 0) | (column >= grid.nk)
    if bool(wrong.any()):
        raise ValueError(f"columns must be 0 to {grid.nk - 1}, got {int(column[wrong][0])}")
    flat, order = grid.flat_index(0, row, column.long()).sort()
    twice = (flat.diff() == 0).nonzero()
    if len(twice):
        _, at, block = (int(x) for x in grid.locate(flat[twice[0, 0]]))
        raise ValueError(f"a row must list a column once, got column {block} twice in row {at}")
    return flat, order


def _evaluated(
    grid: Grid, flat: Tensor, head: int, attends: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(bit_tiles, tile) of the pairs of these blocks for which attends(head, q, k) is true."""
    by_key = torch.vmap(attends, in_dims=(None, None, 0))
    by_query = torch.vmap(by_key, in_dims=(None, 0, None))
    by_block = torch.vmap(by_query, in_dims=(None, 0, 0))
    _, row, column = grid.locate(flat)
    queries = row[:, None] * grid.bq + torch.arange(grid.bq, device=grid.device)
    keys = column[:, None] * grid.bk + torch.arange(grid.bk, device=grid.device)
    # A function may index tensors of the sequence's length, and bits outside it are cleared.
    queries, keys = queries.clamp(max=grid.q_len - 1), keys.clamp(max=grid.k_len - 1)
    which = torch.tensor(head, device=grid.device)
    step = max(1, STRIP // (grid.bq * grid.bk))
    words = [
        pack(by_block(which, q, k).expand(-1, grid.bq, grid.bk))
        for q, k in zip(queries.split(step), keys.split(step), strict=True)
        if len(q)
    ]
    return deduplicate(torch.cat([grid.inbounds_tiles[:0], *words]))
