"""The backend "hopper": Gluon kernels for GPUs of compute capability 9.0.

The module is a sparseflash.backends.base.Backend. Triton is imported by the first call that needs
it, so this package can be imported where Triton is not installed.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from masks import BlockMask, DynamicMask
from masks.lookup_table import LookupTable
from sparseflash.dispatch.call import Call
from sparseflash.dispatch.spec import AttentionSpec

name = "hopper"
extras: frozenset[str] = frozenset()
TILE = (128, 128)  # tokens: the (queries, keys) that kernels of large tiles compute at a time
SMALL_TILE = (64, 64)  # likewise those of small ones
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


def why_not(spec: AttentionSpec, mask: BlockMask | DynamicMask) -> list[str]:
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
    if mask.coverage(TILE) is None and block_size_for(spec, mask) != spec.block_size:
        reasons.append(
            f"block_size is {spec.block_size}, needs {TILE}, or {SMALL_TILE} for one of the head "
            f"dims {tuple(TILE_PAYS)}, where the device chooses the blocks"
        )
    return reasons


def block_size_for(spec: AttentionSpec, mask: BlockMask | DynamicMask) -> tuple[int, int]:
    """The blocks of the table that the kernels read: TILEs, or SMALL_TILEs where smaller blocks
    leave more of a TILE empty than pays.
    """
    if min(spec.block_size) >= min(TILE) or spec.head_dim not in TILE_PAYS:
        return TILE
    fill, small_fill = mask.coverage(TILE), mask.coverage(SMALL_TILE)
    if fill is None or small_fill is None:  # the device chooses the blocks
        return SMALL_TILE
    return SMALL_TILE if fill < TILE_PAYS[spec.head_dim] * small_fill else TILE


def _fill(
    spec: AttentionSpec, mask: BlockMask | DynamicMask, tile: tuple[int, int]
) -> tuple[float | None, float]:
    """The fill of the tiles that the kernels read, and the least that pays."""
    side = min(spec.block_size)
    if tile == TILE:
        return mask.coverage(tile), LEAST_FILL.get(side, 0.0)
    return mask.coverage(tile), LEAST_SMALL_FILL[spec.head_dim].get(side, 0.0)


def describe(
    call: Call, mask: BlockMask | DynamicMask, query: Tensor, key: Tensor, value: Tensor
) -> dict[str, str]:
    """How a mask of other blocks is served, and gradients in no fixed order; see
    sparseflash.backends.base.
    """
    found, spec = {}, call.spec
    tile = call.table.block_size
    if spec.block_size != tile or tile == SMALL_TILE:
        found["tiles"] = f"{tile}"
    if spec.block_size != tile:
        covered = f"{mask.coverage(tile):.0%} of them covered by blocks of {spec.block_size}"
        found["tiles"] += f", {covered}"
    if tile == SMALL_TILE:
        found["tiles"] += ", of which several programs share a multiprocessor"
    if fuses(call.table, spec):
        found["backward"] = "one kernel, which adds to the gradient of query in no fixed order"
    return found


def fuses(table: LookupTable, spec: AttentionSpec) -> bool:
    """Whether all gradients are computed by one kernel, if all are wanted."""
    head_dims = FUSED_HEAD_DIMS[spec.dropout_p > 0]
    if spec.deterministic or spec.head_dim not in head_dims or table.block_size != TILE:
        return False
    blocks = table.by_key.mean_blocks
    return blocks is not None and blocks >= FUSED_BLOCKS


def auto_skip(spec: AttentionSpec, mask: BlockMask | DynamicMask) -> list[str]:
    """The reasons for which "auto" should look for another backend; empty when this is faster."""
    reasons, tile = [], block_size_for(spec, mask)
    filled, least = _fill(spec, mask, tile)
    if filled < least:
        reasons.append(
            f"blocks of {spec.block_size} cover {filled:.0%} of the {tile} tiles that "
            f"they touch, which pays from {least:.0%} on"
        )
    if spec.few_queries:
        reasons.append(f"q_len is {spec.q_len}, which leaves most of a tile empty")
    return reasons


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse); see sparseflash.backends.base."""
    forward_pass, _ = _passes()
    rest = (call.table, call.key_lengths, call.seed, call.spec)
    return forward_pass.forward(query, key, value, *rest)


def backward(
    call: Call,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    saved: tuple[Tensor, ...],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients; see sparseflash.backends.base."""
    _, backward_pass = _passes()
    rest = (call.table, call.key_lengths, call.seed, call.spec, needs[:3])
    return *backward_pass.backward(grad_out, grad_lse, *saved, *rest), None, None


@lru_cache(maxsize=1)
def _passes():
    """(forward_pass, backward_pass): to import them in every call would take 0.4 microseconds."""
    from sparseflash.backends.hopper import backward_pass, forward_pass

    return forward_pass, backward_pass
