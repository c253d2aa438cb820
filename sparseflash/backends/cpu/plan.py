"""Which block rows one product computes.

A batched matrix product needs problems of one shape, so the block rows of a table are grouped by
how many full and how many partial blocks they list. Rows that share one list (every row of a
dense mask, the rows of one document) are merged into one taller problem. At call time a group is
cut into chunks whose scores fit in the cache.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from einops import rearrange
from torch import Tensor

from masks.analysis.counts import computed_pairs
from masks.block_mask import BlockMask, DynamicMask
from masks.lookup_table import LookupTable
from masks.mask_batch import CompiledMask, MaskBatch
from sparseflash.dispatch.call import Plan
from sparseflash.dispatch.spec import AttentionSpec

# Two sizes in floats, the best of 2^18 ... 2^21 on two cores over full, causal, butterfly and
# random masks. The scores of one problem: longer rows are cut into parts.
PROBLEM_FLOATS = 2**20
# The scores of a chunk together with the keys and values gathered for it.
CHUNK_FLOATS = 3 * 2**19
# Blocks of all heads up to which the chunks of a call are cached with its plan.
CACHED_BLOCKS = 2**14
# Pairs of all heads up to which these chunks hold the element masks of their partial blocks too.
CACHED_PAIRS = 2**18
# Queries up to which rows are merged; a taller product is no faster.
MERGED_QUERIES = 256
# Queries below which no part is cut; a thinner product is slow.
PART_QUERIES = 16
# Pairs of all heads that take as long as it takes to start one more product.
START_PAIRS = 2**16
LEAST_SIDE = 16  # of a block
# Sides of the blocks in which others may be read.
SIDES = (32, 64, 128, 256)
# Partial blocks, of all non-zero ones, from which on smaller blocks are considered.
PARTIAL_SHARE = 0.25
# Keys in a segment of a long row, at most and at least. Scores in longer rows are written one page
# apart from one another, which makes the product up to twice as slow.
SEGMENT_KEYS = (128, 512)


@dataclass(frozen=True)
class Group:
    """Lists of equally many full and partial blocks, each read by equally many block rows.

    head:          int64 (lists,)         mask head, counted over the mask's batch elements
    full_start:    int64 (lists,)         where the list starts in the table's full_index
    partial_start: int64 (lists,)         where it starts in partial_index
    rows:          int64 (lists, merged)  the block rows that read it
    """

    full_count: int
    partial_count: int
    head: Tensor
    full_start: Tensor
    partial_start: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Chunk:
    """Problems of one shape: `merged` query blocks, of one head or of all heads of a group,
    against `count` key blocks each.

    Blocks are numbered through all heads: block i of head h of batch element b is
    (b * heads + h) * (blocks of a head) + i. Full key blocks come before partial ones.

    bh:           int64 (problems,)          batch element * heads + (first) head
    query_blocks: int64 (problems, merged)
    key_blocks:   int64 (problems, count)
    tiles:        int32 (problems, partial)  the bit tile of each of the last key blocks
    query_run:    the query blocks where they are consecutive, else None
    key_run:      the key blocks where they are consecutive, else None
    cache:        what the calls of a plan that is small share
    """

    bh: Tensor
    query_blocks: Tensor
    key_blocks: Tensor
    tiles: Tensor
    query_run: slice | None
    key_run: slice | None
    cache: dict[str, Tensor] = field(default_factory=dict)


def block_size_for(spec: AttentionSpec, mask: CompiledMask) -> tuple[int, int]:
    """The block size of the mask, or the one in which the same elements take least time.

    Larger blocks have fewer rows, each of which takes time to start; smaller ones have fewer pairs
    that are computed and masked.
    """
    own = spec.block_size
    if spec.positions or isinstance(mask, DynamicMask):
        return own
    if 2 * spec.k_len <= own[1] > LEAST_SIDE:  # one block of keys, half of it past the end
        return own[0], max(LEAST_SIDE, 2 ** (spec.k_len - 1).bit_length())
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
    """Queries of a block that are computed: few queries do not fill one."""
    return min(table.block_size[0], spec.q_len)


def chunks(plan: Plan) -> Iterable[Chunk]:
    """Every non-empty block row of every head of a call exactly once."""
    spec, table = plan.spec, plan.table
    blocks = spec.batch * spec.heads * table.by_query.num_rows * table.by_key.num_rows
    if blocks > CACHED_BLOCKS:
        return _chunks(table, spec)
    if "chunks" not in plan.cache:
        plan.cache["chunks"] = list(_chunks(table, spec))
    return plan.cache["chunks"]


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
        for here in _slices(len(bh), _problems_at_once(group, heads * size[0], size[1], spec)):
            full = full_start[here] + torch.arange(group.full_count, device="cpu")
            partial = partial_start[here] + torch.arange(group.partial_count, device="cpu")
            columns = torch.cat([lists.full_index[full], lists.partial_index[partial]], dim=1)
            key_blocks = first_key_block[here] + columns
            tiles = lists.partial_bit_tile[partial]
            runs = _run_of(query_blocks[here]), _run_of(key_blocks)
            yield Chunk(bh[here], query_blocks[here], key_blocks, tiles, *runs)


def _run_of(blocks: Tensor) -> slice | None:
    """The blocks as a slice where they are consecutive."""
    begin, count = int(blocks[0, 0]), blocks.numel()
    run = torch.arange(begin, begin + count, device="cpu")
    return slice(begin, begin + count) if torch.equal(blocks.flatten(), run) else None


def _readers_of_masks(table: LookupTable, spec: AttentionSpec) -> Tensor:
    """int64 (copies, mask heads of all mask batch elements): batch element * heads + head of those
    that read each.
    """
    mask_batch, mask_heads = table.head_to_mask.shape
    bh = torch.arange(spec.batch * spec.heads, device="cpu")
    sizes = {"mb": mask_batch, "mh": mask_heads, "heads": spec.heads // mask_heads}
    return rearrange(bh, "(batch mb heads mh) -> (batch heads) (mb mh)", **sizes)


def queries_at_once(keys: int) -> int:
    """How many queries of a problem to compute at once against its `keys`: a power of two.

    So a part of a problem is made of whole blocks, or lies within one.
    """
    return max(PART_QUERIES, 2 ** int(math.log2(max(1, PROBLEM_FLOATS // keys))))


def keys_at_once(count: int, block_k: int) -> int:
    """Keys in each segment of a row of `count` blocks: the most that cut it into equal segments.

    Rows of which only narrow segments are equal stay whole.
    """
    least, most = SEGMENT_KEYS
    widths = (block_k * count // n for n in range(1, count + 1) if count % n == 0)
    width = next((w for w in widths if w <= most), block_k)
    return width if width >= least else block_k * count


def _groups(table: LookupTable) -> list[Group]:
    """The groups of all rows of a table, which are stored with it."""
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
    """(mask head, *bounds) of every non-empty list -> the block rows that read it."""
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
    """How many query heads one problem has: those that read the same keys by the same mask, where
    nothing else differs between heads and their rows fit.
    """
    heads = spec.heads // spec.kv_heads
    queries = heads * group.rows.shape[1] * rows_of_block(table, spec)
    own_mask = spec.mask_heads > 1 and spec.mask_group == 1
    differ = own_mask or spec.dropout_p > 0 or spec.bias or spec.score is not None
    return 1 if differ or queries > MERGED_QUERIES else heads


def _problems_at_once(group: Group, bq: int, bk: int, spec: AttentionSpec) -> int:
    keys = (group.full_count + group.partial_count) * bk
    queries = group.rows.shape[1] * bq
    return max(1, CHUNK_FLOATS // (keys * (queries + spec.head_dim + spec.value_dim)))


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
