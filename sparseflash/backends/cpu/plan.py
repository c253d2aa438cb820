"""Groups block rows for batched matrix products.

A batched product needs problems of one shape. So the block rows of a table are grouped by their
numbers of full and of partial blocks. Rows that share one list (all rows of a dense mask, the rows
of one document) are merged into one taller problem. In a call, a group is cut into chunks whose
scores fit in the cache.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from masks.analysis.counts import computed_pairs
from masks.block_mask import BlockMask, DynamicMask
from masks.lookup_table import LookupTable
from masks.mask_batch import CompiledMask, MaskBatch
from sparseflash.dispatch.call import Plan
from sparseflash.dispatch.spec import AttentionSpec

# Largest sizes in floats: the best of 2^18 to 2^21 on two cores for full, causal, butterfly and
# random masks.
PROBLEM_FLOATS = 2**20  # scores of one problem; longer rows are cut into parts
CHUNK_FLOATS = 3 * 2**19  # scores of a chunk, with the keys and values that are gathered for it
# Largest number of blocks of all heads for which the chunks of a call are cached with its plan.
CACHED_BLOCKS = 2**14
# Largest number of pairs of all heads for which the element masks of chunks are cached too.
CACHED_PAIRS = 2**18
MERGED_QUERIES = 256  # rows are merged up to so many queries; a taller product is not faster
PART_QUERIES = 16  # a part has at least so many queries; a thinner product is slow
START_PAIRS = 2**16  # pairs of all heads that take as long as starting one product
MIN_SIDE = 16  # of a block
SIDES = (32, 64, 128, 256)  # sides of the blocks in which a mask may be read
PARTIAL_SHARE = 0.25  # smaller blocks are considered if this share of the blocks is partial
# Range of the number of keys in a segment of a long row. In longer rows of scores, consecutive
# rows are a page apart, which makes the product up to twice as slow.
SEGMENT_KEYS = (128, 512)
# Most keys of a row that is not divided if at most PART_QUERIES queries read it: their product is
# not slower, and dividing it takes as long as the product.
SHORT_ROW = 2**12


@dataclass(frozen=True)
class Group:
    """Lists with equal numbers of full blocks, of partial blocks and of block rows.

    head:          int64 (lists,)         mask head, counted over the batch elements of the mask
    full_start:    int64 (lists,)         first entry of the list in full_index of the table
    partial_start: int64 (lists,)         first entry of the list in partial_index
    rows:          int64 (lists, merged)  the block rows that read the list
    """

    full_count: int
    partial_count: int
    head: Tensor
    full_start: Tensor
    partial_start: Tensor
    rows: Tensor


class StridedBlocks(NamedTuple):
    """Blocks at equal steps: problem i has `count` consecutive blocks, from first + i * step on.

    Args:
        first: Number of the first block of the first problem.
        step: Blocks from the beginning of a problem to that of the next.
        count: Number of blocks of a problem.
        problems: Number of problems.
        tokens: Number of tokens of a problem.
        whole: Whether these are all blocks, in their order.
    """

    first: int
    step: int
    count: int
    problems: int
    tokens: int
    whole: bool


@dataclass(frozen=True)
class Chunk:
    """Problems of one shape: each has `merged` query blocks and `count` key blocks.

    The query blocks are of one head, or of all query heads of a key head. Blocks are numbered over
    all heads: block i of head h of batch element b is (b * heads + h) * (blocks of a head) + i.
    Full key blocks come before partial ones.

    bh:              int64 (problems,)          batch element * heads + (first) head
    query_blocks:    int64 (problems, merged)
    key_blocks:      int64 (problems, count)
    tiles:           int32 (problems, partial)  the bit tile of each of the last key blocks
    strided_queries: the query blocks if they are at equal steps, else None
    strided_keys:    the key blocks of segments if they are at equal steps, else None
    width:           keys of a segment; a long row of scores is divided into several
    parts:           slices of the queries, usually one, whose scores fit in the cache
    cache:           tensors that later calls of a small plan reuse
    """

    bh: Tensor
    query_blocks: Tensor
    key_blocks: Tensor
    tiles: Tensor
    strided_queries: StridedBlocks | None
    strided_keys: StridedBlocks | None
    width: int
    parts: list[slice]
    cache: dict[str, Tensor] = field(default_factory=dict)


def block_size_for(spec: AttentionSpec, mask: CompiledMask) -> tuple[int, int]:
    """The block size in which the mask is computed in the least time.

    With larger blocks fewer products are started. With smaller blocks fewer masked pairs are
    computed.
    """
    own = spec.block_size
    if spec.positions or isinstance(mask, DynamicMask):
        return own
    if 2 * spec.k_len <= own[1] > MIN_SIDE:  # one block of keys, half of it past the end
        return own[0], max(MIN_SIDE, 2 ** (spec.k_len - 1).bit_length())
    pairs = spec.batch * spec.heads * spec.q_len * spec.k_len * mask.density
    rows = -(-spec.q_len // own[0])
    if pairs >= START_PAIRS * rows:
        return _smaller_block_size(spec, mask, pairs) if isinstance(mask, BlockMask) else own
    return _larger_block_size(spec, mask, pairs)


def _larger_block_size(
    spec: AttentionSpec, mask: BlockMask | MaskBatch, pairs: float
) -> tuple[int, int]:
    own, longest = spec.block_size, max(spec.q_len, spec.k_len)
    sides = [side for side in SIDES if min(own) < side < 2 * longest]
    groups = len(_groups(mask.table(spec.device))) if sides else 1
    if groups == 1:
        return own

    def cost(size: tuple[int, int]) -> float:
        started = min(groups, -(-spec.q_len // size[0]))
        return START_PAIRS * started + pairs / (mask.coverage(size) or 1)

    return min([own, *((max(own[0], side), max(own[1], side)) for side in sides)], key=cost)


def _smaller_block_size(spec: AttentionSpec, mask: BlockMask, pairs: float) -> tuple[int, int]:
    own = spec.block_size
    if mask.partial_blocks < PARTIAL_SHARE * mask.nnz_blocks:
        return own
    if "cpu computed pairs" not in mask.cache:  # once per mask, not for every shape of a call
        blocks = {own: mask} | {(s, s): mask.reblock(s) for s in SIDES if s < min(own)}
        mask.cache["cpu computed pairs"] = {
            size: computed_pairs(same) for size, same in blocks.items()
        }
    computed = mask.cache["cpu computed pairs"]

    def cost(size: tuple[int, int]) -> float:
        started = -(-spec.q_len // size[0])
        return START_PAIRS * started + pairs * computed[size] / max(computed[own], 1)

    return min(computed, key=cost)


def rows_of_block(table: LookupTable, spec: AttentionSpec) -> int:
    """The number of queries of a block that are computed; few queries do not fill a block."""
    return min(table.block_size[0], spec.q_len)


def chunks(plan: Plan) -> Iterable[Chunk]:
    """Chunks that contain every non-empty block row of every head of a call exactly once.

    If they are cached, one with all keys in their order is the first: it writes the sums over keys
    to which the others add.
    """
    spec, table = plan.spec, plan.table
    blocks = spec.batch * spec.heads * table.by_query.num_rows * table.by_key.num_rows
    if blocks > CACHED_BLOCKS:
        return _chunks(table, spec)
    if "chunks" not in plan.cache:
        plan.cache["chunks"] = sorted(_chunks(table, spec), key=lambda c: not _has_all_keys(c))
    return plan.cache["chunks"]


def _has_all_keys(chunk: Chunk) -> bool:
    return chunk.strided_keys is not None and chunk.strided_keys.whole


def _chunks(table: LookupTable, spec: AttentionSpec) -> Iterator[Chunk]:
    lists = table.by_query
    size = (rows_of_block(table, spec), table.block_size[1])
    readers = _readers_of_masks(table, spec)
    copies = len(readers)
    for group in _groups(table):
        bh = readers[:, group.head].flatten()
        heads = _heads_of_problem(group, table, spec)
        first = bh % heads == 0
        bh, rows = bh[first], group.rows.repeat(copies, 1)[first]
        head = bh.unsqueeze(1) + torch.arange(heads, device="cpu")
        query_blocks = (head.unsqueeze(2) * lists.num_rows + rows.unsqueeze(1)).flatten(1)
        key_head = bh // (spec.heads // spec.kv_heads)
        first_key_block = (key_head * table.by_key.num_rows).unsqueeze(1)
        full_start = group.full_start.repeat(copies)[first].unsqueeze(1)
        partial_start = group.partial_start.repeat(copies)[first].unsqueeze(1)
        count = group.full_count + group.partial_count
        queries, keys = query_blocks.shape[1] * size[0], count * size[1]
        sizes = _keys_at_once(queries, count, size[1]), _parts(queries, size[0], keys)
        in_place = _reads_in_place(group, heads, table, spec)
        at_once = _problems_at_once(queries, keys, in_place, spec)
        for here in _slices(len(bh), at_once):
            full = full_start[here] + torch.arange(group.full_count, device="cpu")
            partial = partial_start[here] + torch.arange(group.partial_count, device="cpu")
            columns = torch.cat([lists.full_index[full], lists.partial_index[partial]], dim=1)
            key_blocks = first_key_block[here] + columns
            tiles = lists.partial_bit_tile[partial]
            segments = key_blocks.reshape(-1, sizes[0] // size[1])
            strided = (
                _strided(query_blocks[here], size[0], spec.batch * spec.heads * lists.num_rows),
                _strided(segments, size[1], spec.batch * spec.kv_heads * table.by_key.num_rows),
            )
            yield Chunk(bh[here], query_blocks[here], key_blocks, tiles, *strided, *sizes)


def _strided(blocks: Tensor, size: int, total: int) -> StridedBlocks | None:
    """The blocks (problems, count), if they are at equal steps; else None.

    Args:
        blocks: Numbers of blocks.
        size: Tokens of a block.
        total: Number of blocks of all heads.
    """
    problems, count = blocks.shape
    first = int(blocks[0, 0])
    step = int(blocks[1, 0]) - first if problems > 1 else count
    begins = first + step * torch.arange(problems, device="cpu").unsqueeze(1)
    # A view cannot have a negative stride.
    if step < 0 or not torch.equal(blocks, begins + torch.arange(count, device="cpu")):
        return None
    whole = first == 0 and step == count and problems * count == total
    return StridedBlocks(first, step, count, problems, count * size, whole)


class Layout(NamedTuple):
    """How a call handles its sequences: as problems if one chunk has them all, else as blocks.

    Args:
        query_rows: Queries of a problem if one chunk has all queries in their order, so that its
            problems need no views; else those of a block.
        key_rows: The same of keys.
        all_keys: Whether the first chunk has all keys in their order.
    """

    query_rows: int
    key_rows: int
    all_keys: bool


def layout_of(plan: Plan) -> Layout:
    """The layout of the calls of a plan, cached with it."""
    found = plan.cache.get("layout")
    if found is None:
        here = chunks(plan)
        only = here[0] if isinstance(here, list) and len(here) == 1 else None
        strided_queries, strided_keys = (
            (only.strided_queries, only.strided_keys) if only else (None, None)
        )
        query_rows, key_rows = rows_of_block(plan.table, plan.spec), plan.table.block_size[1]
        if strided_queries and strided_queries.whole:
            query_rows = strided_queries.tokens
        if strided_keys and strided_keys.whole:
            key_rows = strided_keys.tokens
        all_keys = isinstance(here, list) and any(map(_has_all_keys, here))
        found = Layout(query_rows, key_rows, all_keys)
        plan.cache["layout"] = found
    return found


def has_empty_rows(table: LookupTable) -> bool:
    """Whether a block row of any head has no block, so that no chunk contains it."""
    if "cpu empty rows" not in table.cache:
        rows = sum(group.rows.numel() for group in _groups(table))
        expected = table.head_to_mask.numel() * table.by_query.num_rows
        table.cache["cpu empty rows"] = rows < expected
    return table.cache["cpu empty rows"]


def _readers_of_masks(table: LookupTable, spec: AttentionSpec) -> Tensor:
    """The heads that read each mask head, as batch element * heads + head.

    int64 (copies, mask heads of all mask batch elements)
    """
    mask_batch, mask_heads = table.head_to_mask.shape
    bh = torch.arange(spec.batch * spec.heads, device="cpu")
    sizes = {"mb": mask_batch, "mh": mask_heads, "heads": spec.heads // mask_heads}
    return rearrange(bh, "(batch mb heads mh) -> (batch heads) (mb mh)", **sizes)


def _parts(queries: int, block_q: int, keys: int) -> list[slice]:
    """Slices of the queries of a problem: each is made of whole block rows, or a part of one."""
    # A power of two, so it is a multiple of a block or divides it.
    step = max(PART_QUERIES, 2 ** int(math.log2(max(1, PROBLEM_FLOATS // keys))))
    rows = max(step - step % block_q, block_q)
    return [
        slice(start, min(start + step, begin + rows, queries))
        for begin in range(0, queries, rows)
        for start in range(begin, min(begin + rows, queries), step)
    ]


def _keys_at_once(queries: int, count: int, block_k: int) -> int:
    """The largest number of keys for which a row of `count` blocks has equal segments.

    A row is not cut if equal segments would be too narrow, or if it is short and of few queries.
    """
    if queries <= PART_QUERIES and block_k * count <= SHORT_ROW:
        return block_k * count
    least, most = SEGMENT_KEYS
    widths = (block_k * count // n for n in range(1, count + 1) if count % n == 0)
    width = next((w for w in widths if w <= most), block_k)
    return width if width >= least else block_k * count


def _groups(table: LookupTable) -> list[Group]:
    """The groups of all rows of a table, cached with the table."""
    if "cpu groups" not in table.cache:
        table.cache["cpu groups"] = _group_rows(table)
    return table.cache["cpu groups"]


def _group_rows(table: LookupTable) -> list[Group]:
    entries = defaultdict(list)
    for (head, full_start, full, partial_start, partial), rows in _readers(table).items():
        for here in _slices(len(rows), max(1, MERGED_QUERIES // table.block_size[0])):
            merged = rows[here]
            shape = full, partial, len(merged)
            entries[shape].append((head, full_start, partial_start, *merged))
    return [_group(full, partial, lists) for (full, partial, _), lists in entries.items()]


def _readers(table: LookupTable) -> dict[tuple[int, ...], list[int]]:
    """The block rows that read each non-empty list, by (mask head, *bounds)."""
    readers = defaultdict(list)
    bounds = table.by_query.row_ptr.tolist()
    for head, layer in enumerate(table.head_to_mask.flatten().tolist()):
        for row, (full_start, full, partial_start, partial) in enumerate(bounds[layer]):
            if full + partial:
                readers[head, full_start, full, partial_start, partial].append(row)
    return readers


def _group(full_count: int, partial_count: int, lists: list[tuple[int, ...]]) -> Group:
    head, full_start, partial_start, *rows = torch.tensor(lists, device="cpu").unbind(1)
    return Group(
        full_count, partial_count, head, full_start, partial_start, torch.stack(rows, dim=1)
    )


def _heads_of_problem(group: Group, table: LookupTable, spec: AttentionSpec) -> int:
    """The number of query heads of one problem.

    It is the number of query heads of a key head, if they have the same mask and nothing else
    depends on the head, and if their rows fit; else 1.
    """
    heads = spec.heads // spec.kv_heads
    queries = heads * group.rows.shape[1] * rows_of_block(table, spec)
    own_mask = spec.mask_heads > 1 and spec.mask_group == 1
    differ = own_mask or spec.dropout_p > 0 or spec.bias or spec.score is not None
    return 1 if differ or queries > MERGED_QUERIES else heads


def _reads_in_place(group: Group, heads: int, table: LookupTable, spec: AttentionSpec) -> bool:
    """Whether consecutive problems read all keys of consecutive key heads, so none are copied."""
    full, partial = group.full_count, group.partial_count
    all_in_order = full + partial == table.by_key.num_rows and not (full and partial)
    return all_in_order and heads * spec.kv_heads == spec.heads


def _problems_at_once(queries: int, keys: int, in_place: bool, spec: AttentionSpec) -> int:
    copied = 0 if in_place else spec.head_dim + spec.value_dim
    return max(1, CHUNK_FLOATS // (keys * (queries + copied)))


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
