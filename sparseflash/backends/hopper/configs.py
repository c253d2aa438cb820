"""Measured constants: pipeline stages and occupancy of every kernel, and thresholds of dispatch.

This module does not import Triton, so that dispatch works where Triton is not installed.
"""

from functools import lru_cache
from typing import NamedTuple


class KernelConfig(NamedTuple):
    """Occupancy and compile-time constants of a kernel.

    ctas_per_sm: CTAs that share a multiprocessor
    constants:   numbers of pipeline stages, by the name of the kernel's constant
    dq_bytes:    bytes of an element of the accumulator of dQ, which the fused kernel updates in
        L2; 0 for other kernels
    """

    ctas_per_sm: int
    constants: dict[str, int]
    dq_bytes: int = 0


class OrderTimes(NamedTuple):
    """Times with which order.py plans, in steps of 64 queries x 128 keys.

    handover:  from one addition to a tile of dQ to the next
    slack:     how much later than it is computed a tile may be added without delay
    work_tile: from the last step of a work tile to the first of the next
    """

    handover: float
    slack: float
    work_tile: float


# Configurations by queries of a tile, or keys where a row is of keys, and tile width (dims).
# Shared memory, at most 227 KiB per CTA, bounds the stages. At 128 dims the forward kernel takes
# 128 KiB for two stages of K and V and 64 KiB for two of Q. The kernel of dK and dV takes 96 KiB
# for three stages of Q and dO and 128 KiB for two of K and V.
# STAGES: of K and V; QUERY_STAGES: of Q.
FORWARD_CONFIGS = {
    192: {64: KernelConfig(1, {"STAGES": 3, "QUERY_STAGES": 2})},
    128: {
        64: KernelConfig(1, {"STAGES": 4, "QUERY_STAGES": 3}),
        128: KernelConfig(1, {"STAGES": 2, "QUERY_STAGES": 2}),
        256: KernelConfig(1, {"STAGES": 2, "QUERY_STAGES": 1}),
    },
    64: {
        64: KernelConfig(3, {"STAGES": 3, "QUERY_STAGES": 2}),
        128: KernelConfig(2, {"STAGES": 3, "QUERY_STAGES": 1}),
    },
}
# Two query heads that share a key head and its mask, in a CTA of two consumer warpgroups: by tile
# width, for blocks of 64. At 128 dims as much memory as above for tiles of 128: 128 KiB for four
# stages of K and V, 64 KiB for two of Q.
PACKED_CONFIGS = {
    64: KernelConfig(1, {"STAGES": 4, "QUERY_STAGES": 3}),
    128: KernelConfig(1, {"STAGES": 4, "QUERY_STAGES": 2}),
}
PACKED_HEADS = 2  # the heads of such a CTA
# Tile widths at which heads are packed, see select.packed_heads, and the fewest waves of work
# tiles, each a block row of a pair. Tests alone pack heads at other widths.
# Notebook, 2026-11-28, 03:10: 1.10 to 1.15 times as fast at 128 dims from two waves on, with one
# wave 0.97 to 1.00, with half a wave 0.90. At 64 dims 0.90 to 0.94.
PACKED_WIDTHS: tuple[int, ...] = (128,)
MIN_PACKED_WAVES = 2.0
# STAGES: of K and V.
DQ_CONFIGS = {
    128: {
        64: KernelConfig(1, {"STAGES": 4}),
        128: KernelConfig(1, {"STAGES": 2}),
        256: KernelConfig(1, {"STAGES": 1}),
    },
    64: {
        64: KernelConfig(3, {"STAGES": 3}),
        128: KernelConfig(2, {"STAGES": 2}),
    },
}
# STAGES: of Q and dO; KEY_STAGES: of K and V.
DKDV_CONFIGS = {
    128: {
        64: KernelConfig(1, {"STAGES": 4, "KEY_STAGES": 2}),
        128: KernelConfig(1, {"STAGES": 3, "KEY_STAGES": 2}),
        256: KernelConfig(1, {"STAGES": 1, "KEY_STAGES": 1}),
    },
    64: {
        64: KernelConfig(2, {"STAGES": 4, "KEY_STAGES": 2}),
        128: KernelConfig(2, {"STAGES": 2, "KEY_STAGES": 1}),
    },
}
# By tile width, for blocks of 128. Stages as for dK and dV.
FUSED_CONFIGS = {
    64: KernelConfig(1, {"STAGES": 4, "KEY_STAGES": 2}, dq_bytes=4),
    # One stage of K and V: the buffers of dS and of dQ take 64 KiB.
    128: KernelConfig(1, {"STAGES": 3, "KEY_STAGES": 1}, dq_bytes=4),
}
# By tile width: the most keys of a tile of the forward and dQ kernels.
MAX_KV_TILE = {64: 128, 128: 128, 256: 64}
# The widest tiles for which registers hold both dK and dV.
MAX_DKDV_DIMS = 128
# The widest tiles for which registers suffice for the dQ warpgroup of the fused kernel.
MAX_DQ_WARPGROUP_DIMS = 64

REGISTERS_PER_SM = 65536
L2_OPERAND_BYTES = 50_000_000  # most bytes of operands of heads that are scheduled together
# Most share of a kernel's time in which the longest row of the last group of heads runs alone.
MAX_TAIL = 0.05
# Of the rows of queries of a mask whose blocks the device chooses. Its rows of keys are assumed to
# have the imbalance that they have if all rows of queries, each of ASSUMED_BLOCKS blocks, choose
# one key block.
ASSUMED_IMBALANCE = 2.0
ASSUMED_BLOCKS = 8
MIN_DYNAMIC_IMBALANCE = 1.25  # of block rows; above it the tile scheduler is dynamic

# Tiles of 128 are faster than tiles of 64 if coverage(128) / coverage(64) is at least this, by
# tile width. Widths that are not listed have no tiles of 64.
MIN_COVERAGE_RATIO_FOR_128 = {64: 0.96, 128: 0.9}
# At 64 dims the forward kernel reads high tiles, of 192 x 128, if its predicted time in them over
# that in tiles of 128 x 128 is at most MAX_TIME_RATIO_OF_192. Without idle CTAs this ratio is
# TIME_RATIO_OF_192, divided by coverage(192 x 128) / coverage(128 x 128).
TIME_RATIO_OF_192 = 0.93
MAX_TIME_RATIO_OF_192 = 0.98
MIN_WAVES_OF_192 = 4  # of work tiles, for masks whose rows have different lengths
MULTIPROCESSORS = 132  # of an H100 SXM or H200, for predictions
# This backend is faster than `triton`, which computes the blocks themselves, if the coverage of
# its tiles is at least this, by the shorter side of the mask's blocks (tokens). The second table
# is that of tiles of 64, by tile width as well.
MIN_COVERAGE = {16: 0.4, 32: 0.5, 64: 0.9}
MIN_COVERAGE_OF_64 = {
    64: {16: 0.4, 32: 0.65},
    128: {16: 0.35, 32: 0.52},
}
# The fused backward kernel is faster than the two others if a block row of keys has at least this
# many blocks on average, by a part of the name of the GPU, and by tile width. The sums of dQ in
# float32 pass through memory. So an H100, whose memory has 0.7 of the bandwidth of an H200's,
# needs more blocks.
MIN_FUSED_BLOCKS = {
    # docs/notebook/2026-11.md, 2026-11-26, 18:25: time 0.99 and 1.00 of that of two kernels.
    "H100": {64: 6.0, 128: 14.0},
    # 2026-11-27, 05:50: 0.94, of the fewest blocks that were measured, and 0.993 to 0.999.
    "H200": {64: 4.8, 128: 8.0},
}
# With the option planned_order the fused kernel adds to dQ in a planned order where it has a dQ
# warpgroup, if a block row of keys has at least this many blocks on average. Notebook, 2026-11-27,
# 18:45: full, causal from 4,096 tokens on and random masks of 16 blocks a row take less time than
# with two kernels, a butterfly of 8 takes more. At 128 dims nothing was gained. An H100 is not
# measured.
MIN_PLANNED_BLOCKS = {"H200": 12.0}
# Assumed except for the 1.75 us from one addition to the next, which are 2 us here: steps of
# 1.24 us, and half of the time until one of two buffers of dQ is needed again.
ORDER_TIMES = OrderTimes(handover=1.6, slack=0.75, work_tile=1.0)
# Most blocks of all heads whose order is planned: 4 MiB of ordinals, some 3 s on the host.
MAX_ORDINALS = 2**20
GPU_OF_OTHER_NAMES = "H200"  # whose thresholds hold for GPUs that the table does not name
# Tile widths of the fused kernel by whether there is dropout. Registers do not suffice for others.
FUSED_WIDTHS = {False: (64, 128), True: (64,)}
MIN_TILE_WIDTH = 64
# Up to this value dim, tiles of V may be wider than tiles of K. The kernel of dQ loads 64 rows of
# O through a stage of K or V; with wider tiles of V no shared memory is left for stages of that
# size.
MAX_WIDER_VALUE_DIM = 128
# Up to this head dim the backend `triton` is chosen, whose tiles are half as wide. Which of the
# two is faster is not measured.
MAX_NARROW_HEAD_DIM = 32


@lru_cache(maxsize=256)
def tile_width(head_dim: int) -> int:
    """Dims of a tile: 64, 128 or 256. TMA fills the dims past head_dim with zeros."""
    return max(MIN_TILE_WIDTH, 1 << (head_dim - 1).bit_length())
