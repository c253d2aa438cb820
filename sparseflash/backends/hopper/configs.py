"""Measured constants: pipeline stages and occupancy of every kernel, and thresholds of dispatch.

This module does not import Triton, so that dispatch works where Triton is not installed.
"""

from functools import lru_cache
from typing import NamedTuple


class KernelConfig(NamedTuple):
    """How a kernel is built.

    ctas_per_sm: CTAs that share a multiprocessor
    constants:   of the kernel: the stages of its pipelines
    dq_bytes:    bytes of one dim of a token's dQ, to which the fused kernel adds in L2; else 0
    """

    ctas_per_sm: int
    constants: dict[str, int]
    dq_bytes: int = 0


# Configurations by block size and tile width (dims).
# Shared memory, at most 227 KiB a CTA, bounds the stages. At 128 dims the forward kernel takes
# 128 KiB for two stages of K and V and 64 for two of Q. That of dK and dV takes 96 KiB for three
# stages of Q and dO and 128 for two of K and V.
# STAGES: of K and V; QUERY_STAGES: of Q.
FORWARD_CONFIGS = {
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
# By tile width, for blocks of 128; stages as for dK and dV.
FUSED_CONFIGS = {
    64: KernelConfig(1, {"STAGES": 4, "KEY_STAGES": 2}, dq_bytes=4),
    # One row of K and V: the exchange of dS and the buffers of dQ take 64 KiB.
    128: KernelConfig(1, {"STAGES": 3, "KEY_STAGES": 1}, dq_bytes=4),
}
# By tile width: the most keys of one tile where work tiles are rows of queries.
MAX_KV_TILE = {64: 128, 128: 128, 256: 64}
# The widest tiles of which registers hold both dK and dV.
MAX_DKDV_DIMS = 128
# The widest tiles of which a warpgroup of the fused kernel has the registers to add all dims of
# dQ, of every other tile; there are none left for dropout.
MAX_ALTERNATE_DQ_DIMS = 64

REGISTERS_PER_SM = 65536
L2_OPERAND_BYTES = 50_000_000  # of the heads that are scheduled together
MAX_TAIL = 0.05  # of a kernel's time, in which the longest row of the last group runs alone
MIN_DYNAMIC_IMBALANCE = 1.25  # most blocks in a row over the mean: above, the scheduler is dynamic

# By tile width, where several CTAs on tiles of 64 share a multiprocessor: coverage of tiles of
# 128, over that of tiles of 64, from which on tiles of 128 take less time.
MIN_COVERAGE_RATIO_FOR_128 = {64: 0.96, 128: 0.9}
# Coverage from which on tiles take less time than the blocks themselves do on another backend: by
# the shorter side of the mask's blocks; of tiles of 64 by tile width as well.
MIN_COVERAGE = {16: 0.4, 32: 0.5, 64: 0.9}
MIN_COVERAGE_OF_64 = {
    64: {16: 0.4, 32: 0.65},
    128: {16: 0.35, 32: 0.52},
}
# Mean blocks in a row of keys from which on the fused backward kernel takes less time than that of
# dQ and that of dK and dV: it does at 8, and does not at 6.
MIN_FUSED_BLOCKS = 7
# Tile widths of the fused kernel, without and with dropout; wider ones have too few registers.
FUSED_WIDTHS = {False: (64, 128), True: (64,)}
MIN_TILE_WIDTH = 64
# Up to this value dim values may be in wider tiles than keys: the kernel of dQ loads 64 rows of O
# into a stage of K, of which tiles of 256 dims leave too little.
MAX_WIDER_VALUE_DIM = 128
# Up to this head dim the backend triton multiplies tiles of half the width. Which of both takes
# less time is not measured.
MAX_NARROW_HEAD_DIM = 32


@lru_cache(maxsize=256)
def tile_width(head_dim: int) -> int:
    """Dims of a tile: 64, 128 or 256. What lies past head_dim is zero in shared memory alone."""
    return max(MIN_TILE_WIDTH, 1 << (head_dim - 1).bit_length())
