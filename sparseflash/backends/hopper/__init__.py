"""The backend "hopper": Gluon kernels for GPUs of compute capability 9.0.

The functions make a sparseflash.backends.Backend. Triton is imported by the first call that needs
it, so this package can be imported where Triton is not installed.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.dispatch.spec import SMALL_TILE, TILE, AttentionSpec

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 96, 128, 192, 256)
CAPABILITY = (9, 0)
# By head dim, where several programs on SMALL_TILEs fit on a multiprocessor: the fill of TILEs, as
# a share of that of SMALL_TILEs, from which on TILEs take less time.
TILE_PAYS = {64: 0.96, 96: 0.9, 128: 0.9}
# By the shorter side of the mask's blocks: the fill of tiles from which on they take less time
# than the blocks themselves do elsewhere. Of SMALL_TILEs by head dim as well: 96 dims take 128.
LEAST_FILL = {16: 0.4, 32: 0.5, 64: 0.9}
LEAST_SMALL_FILL = {
    64: {16: 0.4, 32: 0.65},
    96: {16: 0.35, 32: 0.52},
    128: {16: 0.35, 32: 0.52},
}
# The blocks of a row of keys, on average, from which on one kernel of all gradients takes less
# time than that of dQ and that of dK and dV: it does at 8, and does not at 6.
FUSED_BLOCKS = 7
# By whether there is dropout, for which wider tiles leave no registers.
FUSED_HEAD_DIMS = {False: (64, 96, 128), True: (64,)}


def why_not(spec: AttentionSpec) -> list[str]:
    """The reasons for which the kernels cannot serve a call; empty when they can."""
    if find_spec("triton") is None:
        return ["triton is not installed"]
    reasons = []
    if spec.device.type != "cuda":
        reasons.append(f"device is {spec.device}, needs cuda")
    elif (found := _capability(spec.device)) != CAPABILITY:
        found, needed = ("{}.{}".format(*version) for version in (found, CAPABILITY))
        reasons.append(f"compute capability is {found}, needs {needed}")
    if spec.dtype not in DTYPES:
        reasons.append(f"dtype is {spec.dtype}, needs one of {DTYPES}")
    if spec.head_dim not in HEAD_DIMS:
        reasons.append(f"head_dim is {spec.head_dim}, needs one of {HEAD_DIMS}")
    if spec.fill is None and tiling(spec) != spec.block_size:
        reasons.append(
            f"block_size is {spec.block_size}, needs {TILE}, or {SMALL_TILE} for one of the head "
            f"dims {tuple(TILE_PAYS)}, where the device chooses the blocks"
        )
    return reasons


def tiling(spec: AttentionSpec) -> tuple[int, int]:
    """The blocks of the table that the kernels read: TILEs, or SMALL_TILEs where smaller blocks
    leave more of a TILE empty than pays.
    """
    if min(spec.block_size) >= min(TILE) or spec.head_dim not in TILE_PAYS:
        return TILE
    if spec.fill is None or spec.small_fill is None:  # the device chooses the blocks
        return SMALL_TILE
    return SMALL_TILE if spec.fill < TILE_PAYS[spec.head_dim] * spec.small_fill else TILE


def _fill(spec: AttentionSpec) -> tuple[float | None, float]:
    """The fill of the tiles that the kernels read, and the least that pays."""
    side = min(spec.block_size)
    if tiling(spec) == TILE:
        return spec.fill, LEAST_FILL.get(side, 0.0)
    return spec.small_fill, LEAST_SMALL_FILL[spec.head_dim].get(side, 0.0)


def describe(
    query: Tensor, key: Tensor, value: Tensor, table: LookupTable, spec: AttentionSpec
) -> dict[str, str]:
    """How a mask of other blocks is served, and gradients in no fixed order; see
    sparseflash.backends.Backend.
    """
    found = {}
    tile = tiling(spec)
    if spec.block_size != tile or tile == SMALL_TILE:
        found["tiles"] = f"{tile}"
    if spec.block_size != tile:
        found["tiles"] += f", {_fill(spec)[0]:.0%} of them covered by blocks of {spec.block_size}"
    if tile == SMALL_TILE:
        found["tiles"] += ", of which several programs share a multiprocessor"
    if fuses(table, spec):
        found["backward"] = "one kernel, which adds to the gradient of query in no fixed order"
    return found


def fuses(table: LookupTable, spec: AttentionSpec) -> bool:
    """Whether all gradients are computed by one kernel, if all are wanted."""
    head_dims = FUSED_HEAD_DIMS[spec.dropout_p > 0]
    if spec.deterministic or spec.head_dim not in head_dims or table.block_size != TILE:
        return False
    blocks = table.by_key.mean_blocks
    return blocks is not None and blocks >= FUSED_BLOCKS


def pass_over(spec: AttentionSpec) -> list[str]:
    """The reasons for which "auto" should look for another backend; empty when this is faster."""
    reasons = []
    filled, least = _fill(spec)
    if filled < least:
        reasons.append(
            f"blocks of {spec.block_size} cover {filled:.0%} of the {tiling(spec)} tiles that "
            f"they touch, which pays from {least:.0%} on"
        )
    if spec.few_queries:
        reasons.append(f"q_len is {spec.q_len}, which leaves most of a tile empty")
    return reasons


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """(out, lse); see sparseflash.backends.Backend."""
    forward_pass, _ = _passes()
    return forward_pass.forward(query, key, value, table, key_lengths, seed, spec)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients; see sparseflash.backends.Backend."""
    _, backward_pass = _passes()
    saved = (query, key, value, out, lse)
    call = (table, key_lengths, seed, spec, needs[:3])
    return *backward_pass.backward(grad_out, grad_lse, *saved, *call), None, None


@lru_cache(maxsize=1)
def _passes():
    """(forward_pass, backward_pass): to import them in every call would take 0.4 microseconds."""
    from sparseflash.backends.hopper import backward_pass, forward_pass

    return forward_pass, backward_pass
