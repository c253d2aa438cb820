"""Which calls the backend can compute, in which tiles, and which it leaves to other backends."""

import math
import re
from functools import cache, lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from masks import BlockMask, DynamicMask, MaskBatch
from masks.lookup_table import BlockLists, LookupTable
from masks.mask_batch import CompiledMask
from sparseflash.backends.hopper import configs
from sparseflash.dispatch.call import Call
from sparseflash.dispatch.spec import AttentionSpec
from sparseflash.score import find_score_function

TILE = (128, 128)  # (queries, keys) of a block of the table, in tokens
HIGH_TILE = (192, 128)  # of the forward pass at 64 dims, if the mask fills these tiles
SMALL_TILE = (64, 64)  # used if smaller blocks leave too much of a tile of 128 empty
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = range(8, 257, 8)  # TMA needs strides of whole 16 bytes
CAPABILITY = (9, 0)
# Functions of Triton that make a tile from scalars. In Gluon such a tile needs a layout.
TILE_CONSTRUCTORS = re.compile(r"\b(arange|full|full_like|zeros|zeros_like)\(")


def why_not(spec: AttentionSpec, mask: CompiledMask) -> list[str]:
    """The reasons for which the kernels cannot compute a call; empty if they can."""
    if find_spec("triton") is None:
        return ["triton is not installed"]
    reasons = []
    if spec.device.type != "cuda":
        reasons.append(f"device is {spec.device}, needs cuda")
    elif (capability := _capability(spec.device)) != CAPABILITY:
        got, needed = ("{}.{}".format(*version) for version in (capability, CAPABILITY))
        reasons.append(f"compute capability is {got}, needs {needed}")
    if spec.dtype not in DTYPES:
        reasons.append(f"dtype is {spec.dtype}, needs one of {DTYPES}")
    for name, dim in (("head_dim", spec.head_dim), ("value_dim", spec.value_dim)):
        if dim not in HEAD_DIMS and (name == "head_dim" or dim != spec.head_dim):
            needed = f"a multiple of {HEAD_DIMS.step} up to {HEAD_DIMS[-1]}"
            reasons.append(f"{name} is {dim}, needs {needed}")
    widest = configs.MAX_WIDER_VALUE_DIM
    if spec.value_dim > widest >= configs.tile_width(spec.head_dim):
        reasons.append(
            f"value_dim is {spec.value_dim}, needs at most {widest}, or a head_dim above {widest}"
        )
    reasons += _why_not_score(spec.score)
    if mask.coverage(TILE) is None and block_size_for(spec, mask) != spec.block_size:
        reasons.append(
            f"block_size of a dynamic mask is {spec.block_size}, needs {TILE}, or {SMALL_TILE} if "
            f"head_dim and value_dim are at most {max(configs.MIN_COVERAGE_RATIO_FOR_128)}"
        )
    return reasons


def _why_not_score(score: str | None) -> list[str]:
    if score is None:
        return []
    function = find_score_function(score).triton
    if function is None:
        return [f"score is {score!r}, which has no function for Triton"]
    constructor = TILE_CONSTRUCTORS.search(getattr(function, "src", ""))
    if constructor is None:
        return []
    called = constructor[1]
    return [f"score is {score!r}, which calls {called}: its tiles have no layout in Gluon"]


def block_size_for(spec: AttentionSpec, mask: CompiledMask) -> tuple[int, int]:
    """The block size (bq, bk), in tokens, of the table that the kernels read.

    128 x 128, or 64 x 64 if the blocks of the mask leave too much of tiles of 128 empty.
    """
    min_ratio = configs.MIN_COVERAGE_RATIO_FOR_128.get(configs.tile_width(spec.widest_dim))
    if min(spec.block_size) >= min(TILE) or min_ratio is None:
        return TILE
    coverage, small_coverage = mask.coverage(TILE), mask.coverage(SMALL_TILE)
    if coverage is None or small_coverage is None:  # the device chooses the blocks
        return SMALL_TILE
    return SMALL_TILE if coverage < min_ratio * small_coverage else TILE


def forward_block_size_for(spec: AttentionSpec, mask: CompiledMask) -> tuple[int, int]:
    """The block size (bq, bk), in tokens, of the table that the forward kernel reads.

    192 x 128 at 64 dims, if the kernel is predicted to be faster in these tiles.
    """
    block_size = block_size_for(spec, mask)
    widths = {configs.tile_width(dim) for dim in (spec.head_dim, spec.value_dim)}
    # Three warpgroups have no registers for dropout. Changes of scores are not measured there.
    changed = spec.dropout_p > 0 or spec.softcap is not None or spec.score or spec.bias
    if block_size != TILE or widths != {configs.MIN_TILE_WIDTH} or changed:
        return block_size
    # The mask is re-blocked for its coverage only where tiles that its blocks fill are faster.
    ratios = (ratio(spec, mask) for ratio in (_time_ratio_if_filled, time_ratio_of_high_tiles))
    fast = all(ratio <= configs.MAX_TIME_RATIO_OF_192 for ratio in ratios)
    return HIGH_TILE if fast else block_size


def packed_heads(spec: AttentionSpec, block: int) -> int:
    """The query heads of a work tile of the forward kernel: 2 if heads are packed, else 1.

    Heads of one key head are packed in tiles of 64 queries if they share their mask and are even
    in number, at the tile widths of configs.PACKED_WIDTHS, if there are MIN_PACKED_WAVES waves of
    work tiles. Results have the same bits.

    Args:
        spec: The spec of the call.
        block: Queries of a block of the table that the kernel reads.
    """
    group = spec.heads // spec.kv_heads
    shares_mask = spec.mask_heads == 1 or spec.mask_group % configs.PACKED_HEADS == 0
    width = configs.tile_width(spec.widest_dim)
    work_tiles = spec.batch * (spec.heads // configs.PACKED_HEADS) * -(-spec.q_len // block)
    packs = (
        block == SMALL_TILE[0]
        and width in configs.PACKED_WIDTHS
        and group % configs.PACKED_HEADS == 0
        and shares_mask
        and work_tiles >= configs.MIN_PACKED_WAVES * configs.MULTIPROCESSORS
    )
    return configs.PACKED_HEADS if packs else 1


def time_ratio_of_high_tiles(spec: AttentionSpec, mask: CompiledMask) -> float:
    """Predicted time of the forward kernel at 64 dims in high tiles, over that in tiles of 128.

    It is infinite if the device chooses the blocks, if there are no work tiles, or if rows of
    different lengths make fewer waves of them than MIN_WAVES_OF_192: CTAs then wait long for the
    last ones.
    """
    ratio = _time_ratio_if_filled(spec, mask)
    coverage = None if math.isinf(ratio) else mask.coverage(HIGH_TILE)
    return math.inf if coverage is None else ratio / coverage


def _time_ratio_if_filled(spec: AttentionSpec, mask: CompiledMask) -> float:
    """time_ratio_of_high_tiles, if the blocks of the mask filled these tiles."""
    tiles = (spec.batch * spec.heads * -(-spec.q_len // tile[0]) for tile in (HIGH_TILE, TILE))
    waves, waves_of_128 = (count / configs.MULTIPROCESSORS for count in tiles)
    coverage_of_128 = mask.coverage(TILE)
    if not waves or coverage_of_128 is None or isinstance(mask, DynamicMask):
        return math.inf
    ratio = configs.TIME_RATIO_OF_192 * coverage_of_128
    if _imbalance(mask) <= configs.MIN_DYNAMIC_IMBALANCE:
        # All work tiles take about equally long, so the last wave takes as long as a whole one.
        filled, filled_of_128 = (count / math.ceil(count) for count in (waves, waves_of_128))
        return ratio * filled_of_128 / filled
    return ratio if waves >= configs.MIN_WAVES_OF_192 else math.inf


def _imbalance(mask: BlockMask | MaskBatch) -> float:
    """Number of blocks in the longest block row over the mean, by query, in blocks of the mask."""
    counts = (mask.stacked if isinstance(mask, MaskBatch) else mask).blocks_per_row()
    return int(counts.max()) * counts.numel() / max(int(counts.sum()), 1)


def describe(
    call: Call, mask: CompiledMask, query: Tensor, key: Tensor, value: Tensor
) -> dict[str, str]:
    """The tiles of the kernels and the fused backward kernel, if used; see backends.base."""
    notes, spec = {}, call.spec
    tile = call.table.block_size
    if spec.block_size != tile or tile == SMALL_TILE:
        notes["tiles"] = f"{tile}"
    if spec.block_size != tile:
        covered = f"{mask.coverage(tile):.0%} of them covered by blocks of {spec.block_size}"
        notes["tiles"] += f", {covered}"
    if tile == SMALL_TILE:
        notes["tiles"] += ", of which several CTAs share a multiprocessor"
    if call.plan.forward is not None and call.plan.forward.table.block_size != tile:
        notes["tiles of the forward pass"] = f"{call.plan.forward.table.block_size}"
    elif packed_heads(spec, tile[0]) > 1:
        notes["forward"] = "two query heads of a key head in one CTA for each multiprocessor"
    if uses_fused_backward(call.table, spec):
        order = "a planned" if spec.deterministic else "no fixed"
        notes["backward"] = f"one kernel, which adds to the gradient of query in {order} order"
    if spec.planned_order:
        reason = why_not_planned(call.table, spec)
        if not spec.deterministic:
            reason = "deterministic is False"
        notes["planned order"] = "used" if reason is None else f"not used: {reason}"
    return notes


def uses_fused_backward(table: LookupTable, spec: AttentionSpec) -> bool:
    """Whether the fused kernel runs if the gradients of query, key and value are all needed."""
    if spec.deterministic:
        return spec.planned_order and why_not_planned(table, spec) is None
    if _why_not_fused(table, spec) is not None:
        return False
    blocks = table.by_key.mean_blocks
    least = configs.MIN_FUSED_BLOCKS[_gpu(table.device)][configs.tile_width(spec.head_dim)]
    return blocks is not None and blocks >= least


def _why_not_fused(table: LookupTable, spec: AttentionSpec) -> str | None:
    """Why the fused kernel cannot compute a call; None if it can."""
    widths = configs.FUSED_WIDTHS[spec.dropout_p > 0]
    width = configs.tile_width(spec.head_dim)
    if width not in widths:
        return f"head_dim is {spec.head_dim}, needs at most {max(widths)}"
    if table.block_size != TILE:
        return f"tiles are {table.block_size}, needs {TILE}"
    if configs.tile_width(spec.value_dim) != width:
        return f"value_dim is {spec.value_dim}, needs tiles of {width} dims as head_dim does"
    if spec.softcap is not None or spec.score is not None or spec.bias:
        # The initial accumulator of S^T is LSE there, and no registers are left.
        return "there is a soft cap, a score function or a bias"
    return None


def why_not_planned(table: LookupTable, spec: AttentionSpec) -> str | None:
    """Why a deterministic call does not add to dQ in a planned order; None if it may.

    The fused kernel adds in the order that the host plans, see order.py. Rows of keys past a key
    length have no steps, and CTAs that other kernels delay would delay those that wait for them.
    """
    reason = _why_not_fused(table, spec)
    if reason is not None:
        return reason
    if spec.head_dim > configs.MAX_DQ_WARPGROUP_DIMS:
        return f"head_dim is {spec.head_dim}, needs at most {configs.MAX_DQ_WARPGROUP_DIMS}"
    if spec.has_key_lengths:
        return "there are key lengths"
    if spec.shares_device:
        return "other kernels run at the same time"
    lists, gpu = table.by_key, _gpu(table.device)
    if lists.mean_blocks is None or lists.total_blocks is None:
        return "the device selects the blocks of the mask"
    least = configs.MIN_PLANNED_BLOCKS.get(gpu)
    if least is None:
        return f"it is not measured on an {gpu}"
    if lists.mean_blocks < least:
        mean = f"a block row of keys has {lists.mean_blocks:.3g} blocks on average"
        return f"{mean}, it is faster from {least:g} on"
    blocks = lists.total_blocks * spec.batch * spec.heads // lists.row_ptr.shape[0]
    if blocks > configs.MAX_ORDINALS:
        return f"all heads have {blocks} blocks, needs at most {configs.MAX_ORDINALS}"
    return None


@cache
def _gpu(device: torch.device) -> str:
    """The GPU in configs.MIN_FUSED_BLOCKS whose thresholds hold for a device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    named = (gpu for gpu in configs.MIN_FUSED_BLOCKS if gpu in name)
    return next(named, configs.GPU_OF_OTHER_NAMES)


def compiled_for(spec: AttentionSpec, table: LookupTable) -> tuple[bool, ...]:
    """Partial blocks and tile scheduler in both directions, and the fused kernel."""
    directions = [computed_rows(table, spec, by_key) for by_key in (False, True)]
    return (
        *(rows.has_partial for rows in directions),
        *(is_dynamic(rows, spec) for rows in directions),
        uses_fused_backward(table, spec),
    )


def computes_in_place(spec: AttentionSpec) -> bool:
    """Whether the table has the blocks of the mask, in every pass."""
    return spec.block_size == TILE


def computed_rows(table: LookupTable, spec: AttentionSpec, by_key: bool) -> BlockLists:
    """The block lists that a kernel reads, with the rows that it computes in their schedule."""
    if by_key:
        return table.by_key
    return table.by_query.without_empty_rows if spec.skips_empty_rows else table.by_query


def is_dynamic(rows: BlockLists, spec: AttentionSpec) -> bool:
    """Whether the tile scheduler is dynamic.

    Other kernels that run at the same time, such as those of an exchange, occupy multiprocessors.
    CTAs that cannot start before these end would begin their equal share of work tiles then.
    """
    return rows.imbalance > configs.MIN_DYNAMIC_IMBALANCE or spec.shares_device


def auto_skip(spec: AttentionSpec, mask: CompiledMask) -> list[str]:
    """The reasons for which "auto" asks another backend; empty if this one is faster."""
    reasons, tile, side = [], block_size_for(spec, mask), min(spec.block_size)
    coverage = mask.coverage(tile)
    min_coverage = configs.MIN_COVERAGE
    if tile == SMALL_TILE:
        min_coverage = configs.MIN_COVERAGE_OF_64[configs.tile_width(spec.widest_dim)]
    if coverage is not None and coverage < min_coverage.get(side, 0.0):
        reasons.append(
            f"blocks of {spec.block_size} cover {coverage:.0%} of the {tile} tiles with a block; "
            f"it is faster from {min_coverage[side]:.0%} on"
        )
    if spec.head_dim <= configs.MAX_NARROW_HEAD_DIM:
        reasons.append(
            f"head_dim is {spec.head_dim}, which leaves at least half of the smallest tile width, "
            f"{configs.MIN_TILE_WIDTH}, unused"
        )
    if spec.few_queries:
        reasons.append(f"q_len is {spec.q_len}, which leaves most of a tile unused")
    return reasons


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
