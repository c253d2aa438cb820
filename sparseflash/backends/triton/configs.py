"""Launch configurations of each architecture, pass and head dim, the fastest first.

The configurations for Hopper were found on an H200 by `python -m experiments.instruments.tune`.
Those for Ampere were not measured: they are large tiles that compile without notable spills.
"""

import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton

from sparseflash.backends.triton.kernels.block_lists import work_tile
from sparseflash.backends.triton_common import launcher
from sparseflash.score import find_score_function


@dataclass(frozen=True)
class Config:
    """The launch configuration of one pass.

    Args:
        bm, bn: Number of queries and of keys of a tile.
        warps: Number of warps of a program.
        stages: Number of pipeline stages.
        tma: Whether the loop loads by TMA.
        registers: Largest number of registers of a thread; fewer let more programs share a
            multiprocessor. None for no limit.
    """

    bm: int
    bn: int
    warps: int
    stages: int
    tma: bool = False
    registers: int | None = None


def ptr(bm: int, bn: int, warps: int, stages: int, registers: int | None = None) -> Config:
    """A configuration whose loop loads by pointers."""
    return Config(bm, bn, warps, stages, False, registers)


def tma(bm: int, bn: int, warps: int, stages: int, registers: int | None = None) -> Config:
    """A configuration whose loop loads by TMA."""
    return Config(bm, bn, warps, stages, True, registers)


PASSES = ("forward", "dq", "dkdv")  # passes that every call needs; "decode" is another forward
MAX_ACCUMULATORS_WITH_DROPOUT = 112  # of a thread
MAX_PACKED_ROWS = 64  # of a tile of "decode", the forward pass of few queries
WARPS_PER_MULTIPROCESSOR = 16  # at most, because of its registers

# By pass and head dim, the fastest first: (bm, bn, warps, stages, registers).
SMALL = (ptr(32, 32, 2, 3), ptr(16, 16, 1, 3))
SMALL_FLOAT32 = (ptr(32, 32, 4, 2), ptr(16, 16, 4, 2))
SMALL_DECODE = (ptr(16, 32, 1, 4), ptr(16, 16, 1, 3), ptr(64, 32, 4, 3), ptr(64, 16, 4, 3))
# For blocks of 32 and 16: a program of one warp waits for no other warp, and many programs share a
# multiprocessor.
SMALL_HOPPER = {
    ("forward", 32): (tma(32, 32, 1, 3, 128), ptr(32, 32, 1, 2, 168), ptr(16, 16, 1, 3)),
    ("forward", 64): (tma(32, 32, 1, 2, 168), ptr(32, 32, 1, 2, 168), ptr(16, 16, 1, 3)),
    ("forward", 128): (
        tma(32, 32, 1, 2),
        ptr(32, 16, 1, 2),
        tma(16, 16, 1, 3, 168),
        ptr(16, 16, 1, 3),
    ),
    ("forward", 256): (tma(32, 32, 2, 2), ptr(32, 32, 2, 2), tma(16, 16, 1, 2), ptr(16, 16, 1, 2)),
    ("dq", 32): (tma(32, 32, 1, 2), ptr(32, 32, 1, 2), ptr(16, 16, 1, 3)),
    ("dq", 64): (tma(32, 32, 1, 2), ptr(32, 32, 1, 2), ptr(16, 16, 1, 3)),
    ("dq", 128): (tma(32, 16, 1, 2), ptr(32, 32, 2, 3), ptr(16, 16, 1, 3)),
    ("dq", 256): (tma(32, 32, 2, 2), ptr(32, 32, 2, 2), tma(16, 16, 1, 2), ptr(16, 16, 1, 2)),
    ("dkdv", 32): (tma(32, 32, 1, 2), ptr(32, 32, 1, 2), ptr(16, 16, 1, 3)),
    ("dkdv", 64): (tma(32, 32, 1, 2), ptr(32, 32, 1, 2), ptr(16, 16, 1, 3, 128)),
    ("dkdv", 128): (tma(32, 32, 2, 2), ptr(32, 32, 2, 2), ptr(16, 16, 1, 3)),
    ("dkdv", 256): (tma(32, 16, 2, 2), ptr(32, 16, 2, 2), tma(16, 16, 2, 2), ptr(16, 16, 2, 2)),
}

HOPPER = {
    ("forward", 32): (ptr(128, 64, 4, 3, 128), tma(64, 64, 4, 3), ptr(64, 64, 4, 3)),
    ("forward", 64): (
        tma(64, 128, 4, 2, 168),
        tma(64, 64, 4, 2, 128),
        ptr(128, 64, 4, 3),
        ptr(64, 64, 4, 3),
    ),
    ("forward", 128): (tma(128, 64, 4, 2), tma(64, 64, 4, 3), ptr(64, 64, 4, 3)),
    ("forward", 256): (
        tma(128, 64, 8, 2),
        ptr(128, 64, 8, 2),
        tma(64, 32, 4, 2),
        ptr(64, 32, 4, 2),
    ),
    ("dq", 32): (ptr(128, 32, 4, 3, 128), ptr(64, 64, 4, 3)),
    ("dq", 64): (tma(64, 64, 4, 2, 128), ptr(64, 64, 4, 2, 168)),
    ("dq", 128): (tma(64, 64, 4, 2), ptr(128, 64, 8, 3), ptr(64, 64, 4, 2)),
    ("dq", 256): (tma(64, 64, 4, 2), ptr(128, 32, 8, 2), tma(64, 32, 4, 2), ptr(64, 32, 4, 2)),
    ("dkdv", 32): (ptr(64, 64, 4, 3, 128),),
    ("dkdv", 64): (tma(128, 64, 4, 2), ptr(32, 64, 4, 3, 128)),
    ("dkdv", 128): (tma(64, 64, 4, 2), ptr(64, 128, 8, 3), ptr(32, 64, 4, 3)),
    ("dkdv", 256): (tma(64, 64, 8, 2), ptr(64, 64, 8, 2)),
    ("decode", 32): (ptr(16, 64, 1, 2), tma(64, 128, 4, 4, 168), tma(64, 64, 4, 3)),
    ("decode", 64): (
        tma(16, 128, 4, 4, 128),
        tma(16, 64, 4, 4),
        ptr(16, 64, 4, 4),
        tma(64, 128, 4, 4, 168),
        tma(64, 64, 4, 3),
    ),
    ("decode", 128): (tma(16, 64, 4, 3), ptr(16, 64, 4, 3), tma(64, 64, 4, 3)),
    ("decode", 256): (tma(16, 64, 4, 3), ptr(16, 32, 4, 3), tma(64, 32, 4, 4)),
}
AMPERE = {
    ("forward", 32): (ptr(128, 64, 4, 3), ptr(64, 64, 4, 3)),
    ("forward", 64): (ptr(128, 64, 4, 3), ptr(64, 64, 4, 3)),
    ("forward", 128): (ptr(128, 64, 8, 2), ptr(64, 64, 4, 2)),
    ("forward", 256): (ptr(64, 32, 4, 2),),
    ("dq", 32): (ptr(64, 64, 4, 3),),
    ("dq", 64): (ptr(64, 64, 4, 2),),
    ("dq", 128): (ptr(64, 64, 8, 2), ptr(64, 32, 4, 2)),
    ("dq", 256): (ptr(64, 32, 8, 2),),
    ("dkdv", 32): (ptr(64, 64, 4, 3),),
    ("dkdv", 64): (ptr(32, 64, 4, 3),),
    ("dkdv", 128): (ptr(64, 64, 8, 2), ptr(32, 64, 4, 2)),
    ("dkdv", 256): (ptr(32, 64, 8, 2),),
    ("decode", 32): (ptr(16, 64, 4, 4), ptr(64, 64, 4, 3)),
    ("decode", 64): (ptr(16, 64, 4, 4), ptr(64, 64, 4, 3)),
    ("decode", 128): (ptr(16, 64, 4, 3), ptr(64, 64, 4, 2)),
    ("decode", 256): (ptr(16, 32, 4, 3), ptr(64, 32, 8, 2)),
}
FLOAT32 = {
    ("forward", 32): (ptr(64, 32, 8, 2),),
    ("forward", 64): (ptr(64, 32, 8, 2),),
    ("forward", 128): (ptr(32, 32, 8, 2),),
    ("forward", 256): (ptr(16, 32, 8, 2),),
    ("dq", 32): (ptr(64, 32, 8, 2),),
    ("dq", 64): (ptr(64, 32, 8, 2),),
    ("dq", 128): (ptr(32, 32, 8, 2),),
    ("dq", 256): (ptr(16, 32, 8, 2),),
    ("dkdv", 32): (ptr(32, 32, 8, 2),),
    ("dkdv", 64): (ptr(32, 32, 8, 2),),
    ("dkdv", 128): (ptr(32, 32, 8, 2),),
    ("dkdv", 256): (ptr(16, 32, 8, 2),),
    ("decode", 32): (ptr(16, 32, 4, 2),),
    ("decode", 64): (ptr(16, 32, 4, 2),),
    ("decode", 128): (ptr(16, 32, 8, 2),),
    ("decode", 256): (ptr(16, 32, 8, 2),),
}


def padded_dims(head_dim: int) -> int:
    """The head dim of a tile: tl.dot needs powers of two from 16 on."""
    return max(16, triton.next_power_of_2(head_dim))


def candidates(
    architecture: int, pass_name: str, dtype: torch.dtype, head_dim: int
) -> tuple[Config, ...]:
    """Configurations of one pass, best first.

    Args:
        architecture: Compute capability times ten.
        pass_name: "forward", "dq", "ds_sums", "dkdv" or "decode".
        dtype: Dtype of query, key and value.
        head_dim: Dims of a head.
    """
    bucket = ("dq" if pass_name == "ds_sums" else pass_name, max(32, padded_dims(head_dim)))
    if dtype == torch.float32:
        return FLOAT32[bucket] + SMALL_FLOAT32
    if architecture >= 90:
        return HOPPER[bucket] + SMALL_HOPPER.get(bucket, SMALL_DECODE)
    return AMPERE[bucket] + (SMALL_DECODE if pass_name == "decode" else SMALL)


def shared_memory(config: Config, pass_name: str, dtype: torch.dtype, head_dim: int) -> int:
    """Upper bound of the shared memory of a program, in bytes."""
    row = padded_dims(head_dim) * dtype.itemsize
    resident, streamed = (config.bn, config.bm) if pass_name == "dkdv" else (config.bm, config.bn)
    operands = _products(pass_name) * resident * row + config.stages * 2 * streamed * row
    vectors = config.stages * config.bm * 4 * (max(1, config.bn // 32) + 2)
    # Of an element mask; the transposed one of dropout is exchanged in two halves and as a whole.
    mask = config.bm * config.bn * (2 if pass_name == "dkdv" else 1)
    return operands + vectors + mask


def _products(pass_name: str) -> int:
    """Number of products (BM, BN) of a step: S, and dP in the backward pass."""
    return 1 if pass_name in ("forward", "decode") else 2


def accumulators(config: Config, pass_name: str, head_dim: int) -> float:
    """Number of float32 accumulators of a thread: of the result, S and dP."""
    dims = padded_dims(head_dim)
    resident = 2 * config.bn if pass_name == "dkdv" else config.bm
    products = _products(pass_name) * config.bm * config.bn
    return (resident * dims + products) / (config.warps * 32)


def with_more_warps(config: Config, pass_name: str, head_dim: int) -> Config:
    """The configuration, with twice the warps if dropout or a score function would spill."""
    warps = config.warps
    if accumulators(config, pass_name, head_dim) > MAX_ACCUMULATORS_WITH_DROPOUT:
        warps *= 2
    return replace(config, warps=warps, registers=None)


def divides(config: Config, block_size: tuple[int, int]) -> bool:
    """Whether the tiles of a configuration divide a block."""
    return config.bm <= block_size[0] and config.bn <= block_size[1]


def min_shared_memory(
    pass_name: str,
    architecture: int,
    dtype: torch.dtype,
    head_dim: int,
    block_size: tuple[int, int],
) -> int:
    """The least shared memory of all configurations of a pass, in bytes.

    Args:
        pass_name: "forward", "dq", "dkdv", "ds_sums" or "decode".
        architecture: Compute capability times ten.
        dtype: Dtype of query, key and value.
        head_dim: Dims of a head.
        block_size: (bq, bk) of the table, in tokens.
    """
    return min(
        shared_memory(config, pass_name, dtype, head_dim)
        for config in candidates(architecture, pass_name, dtype, head_dim)
        if divides(config, block_size)
    )


@lru_cache(maxsize=4096)
def choose(
    pass_name: str,
    architecture: int,
    memory: int,
    dtype: torch.dtype,
    head_dim: int,
    block_size: tuple[int, int],
    tma: bool,
    packed_rows: int = 0,
) -> Config | None:
    """The best configuration whose tiles divide the block and whose shared memory fits.

    Args:
        memory: Largest shared memory of a program, in bytes.
        packed_rows: Number of rows of several heads for a tile of "decode". Configurations whose
            tile has space for all of them are preferred.
    """
    bm_limit = max(block_size[0], MAX_PACKED_ROWS) if packed_rows else block_size[0]
    found = [
        config
        for config in candidates(architecture, pass_name, dtype, head_dim)
        if divides(config, (bm_limit, block_size[1]))
        and shared_memory(config, pass_name, dtype, head_dim) <= memory
        and tma >= config.tma
    ]
    tall = [config for config in found if config.bm >= min(packed_rows, MAX_PACKED_ROWS)]
    return next(iter(tall or found), None)


def interpreted() -> bool:
    """Whether Triton interprets the kernels instead of compiling them."""
    return not isinstance(work_tile, triton.JITFunction)


@lru_cache(maxsize=64)
def limits(device: torch.device) -> tuple[int, int]:
    """(compute capability times ten, largest shared memory of a program in bytes)."""
    if interpreted():
        return 80, sys.maxsize
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.shared_memory_per_block_optin


def resident_programs(
    device: torch.device, config: Config, pass_name: str, dtype: torch.dtype, head_dim: int
) -> int:
    """About the number of programs of a pass that the device runs at a time."""
    _, memory = limits(device)
    num_sms = 1 if interpreted() else launcher.multiprocessors(device)
    return num_sms * programs_per_multiprocessor(memory, config, pass_name, dtype, head_dim)


def programs_per_multiprocessor(
    memory: int, config: Config, pass_name: str, dtype: torch.dtype, head_dim: int
) -> int:
    """About the number of programs that share the registers and `memory` bytes."""
    by_memory = memory // shared_memory(config, pass_name, dtype, head_dim)
    by_warps = WARPS_PER_MULTIPROCESSOR // config.warps
    return max(1, min(by_memory, by_warps))


@dataclass(frozen=True, eq=False)
class KernelVariant:
    """A configuration, and the constants and options with which a kernel is compiled.

    It is cached by its arguments, so the object is part of the key of a compiled kernel.
    """

    config: Config
    constants: dict[str, Any]


@lru_cache(maxsize=4096)
def kernel_variant(
    pass_name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    block_size: tuple[int, int],
    dropout: bool,
    softcap: bool,
    score: str | None,
    bias: bool,
    precision: str,
    tma: bool,
    packed_rows: int,
    adds_reads: bool,
) -> KernelVariant:
    """The configuration of one pass, with the compile-time constants that follow from it.

    Args:
        pass_name: "forward", "dq", "dkdv", "ds_sums" or "decode".
        device: Device on which it runs.
        dtype: Dtype of query, key and value.
        head_dim: Head dim of query and key.
        value_dim: Head dim of value. The larger of both selects the configuration.
        block_size: (bq, bk) of the table, in tokens.
        dropout, softcap, bias: Whether the call has dropout, a soft cap, a bias.
        score: Name of its score function, or None.
        precision: Precision of float32 products.
        tma: Whether TMA can read the tensors that the loop reads.
        packed_rows: As in choose.
        adds_reads: Whether "ds_sums" adds up the gradients of score tensors.

    Raises:
        ValueError: No configuration fits the device.
    """
    has_derivative = softcap or score is not None
    widest = max(head_dim, value_dim)
    config = choose(pass_name, *limits(device), dtype, widest, block_size, tma, packed_rows)
    if config is None:
        raise ValueError(f"no configuration of {pass_name} fits {device}; why_not reports it")
    if has_derivative and pass_name == "dkdv":
        # S and its derivative are in registers at the same time: a wider tile spills.
        config = replace(config, bm=min(config.bm, 64), registers=None)
    if dropout or has_derivative:
        config = with_more_warps(config, pass_name, widest)
    reads = bias or (score is not None and bool(find_score_function(score).tensors))
    if reads and (pass_name != "decode" or config.bm > 16):
        # Values that are read for every pair of a tile take registers, and a pipeline would store
        # them in shared memory for every stage.
        bm, warps = min(config.bm, 64), max(8, config.warps)
        config = replace(config, bm=bm, warps=warps, stages=1, registers=None)
    constants = {
        "DROPOUT": dropout,
        "SOFTCAP": softcap,
        "SCORE": None if score is None else find_score_function(score).triton,
        "PRECISION": precision if dtype == torch.float32 else None,
        "HEAD_DIM": head_dim,
        "DIMS": padded_dims(head_dim),
        "VALUE_DIM": value_dim,
        "VALUE_DIMS": padded_dims(value_dim),
        "BLOCK_Q": block_size[0],
        "BLOCK_K": block_size[1],
        "BM": config.bm,
        "BN": config.bn,
        # A loop over partial blocks pipelines their masks too, which needs the memory of a stage.
        "MASK_STAGES": min(config.stages, max(2, config.stages - 1)),
        "num_warps": config.warps,
        "num_stages": config.stages,
        "maxnreg": config.registers,
        "enable_fp_fusion": True,
    }
    if pass_name == "ds_sums":
        reads = find_score_function(score).reads if score is not None and adds_reads else None
        constants["ADD_READS"] = None if reads is None else reads.triton
    return KernelVariant(config, constants)
