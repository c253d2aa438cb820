"""The backend "hopper": Gluon kernels for GPUs of compute capability 9.0.

The functions make a sparseflash.backends.Backend. Triton is imported by the first call that needs
it, so this package can be imported where Triton is not installed.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.spec import TILE, AttentionSpec

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 96, 128, 192, 256)
SMALL_TILE = (64, 64)  # tokens, as TILE
SMALL_HEAD_DIMS = (64, 96, 128)  # of which several programs fit on a multiprocessor
CAPABILITY = (9, 0)
# By the shorter side of the mask's blocks: the fill of TILEs from which on they take less time
# than the blocks themselves do, elsewhere or as SMALL_TILEs here.
LEAST_FILL = {16: 0.4, 32: 0.5, 64: 0.9}
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
    if spec.fill is None:
        reasons.append(
            f"block_size is {spec.block_size}, needs {TILE} where the device chooses the blocks"
        )
    return reasons


def tiling(spec: AttentionSpec) -> tuple[int, int]:
    """The blocks of the table that the kernels read: TILEs, or SMALL_TILEs where blocks of 64
    leave more of a TILE empty than pays.
    """
    if min(spec.block_size) != SMALL_TILE[0] or spec.head_dim not in SMALL_HEAD_DIMS:
        return TILE
    return SMALL_TILE if _hardly_fills(spec) else TILE


def _hardly_fills(spec: AttentionSpec) -> bool:
    """Whether the blocks of a mask leave more of TILEs empty than pays."""
    return spec.fill is not None and spec.fill < LEAST_FILL.get(min(spec.block_size), 0.0)


def describe(
    query: Tensor, key: Tensor, value: Tensor, table: LookupTable, spec: AttentionSpec
) -> dict[str, str]:
    """How a mask of other blocks is served, and gradients in no fixed order; see
    sparseflash.backends.Backend.
    """
    found = {}
    tile = tiling(spec)
    if tile == SMALL_TILE:
        found["tiles"] = f"{tile}, of which several programs share a multiprocessor"
    elif spec.block_size != tile and spec.fill is not None:
        found["tiles"] = f"{tile}, {spec.fill:.0%} of them covered by blocks of {spec.block_size}"
    if fuses(table, spec):
        found["backward"] = "one kernel, which adds to the gradient of query in no fixed order"
    return found


def fuses(table: LookupTable, spec: AttentionSpec) -> bool:
    """Whether all gradients are computed by one kernel, if all are wanted."""
    head_dims = FUSED_HEAD_DIMS[spec.dropout_p > 0]
    if spec.deterministic or spec.head_dim not in head_dims or table.block_size != TILE:
        return False
    blocks = table.by_key.mean_count
    return blocks is not None and blocks >= FUSED_BLOCKS


def pass_over(spec: AttentionSpec) -> list[str]:
    """The reasons for which "auto" should look for another backend; empty when this is faster."""
    reasons = []
    if tiling(spec) == TILE and _hardly_fills(spec):
        reasons.append(
            f"blocks of {spec.block_size} cover {spec.fill:.0%} of the {TILE} tiles that they "
            f"touch, which pays from {LEAST_FILL[min(spec.block_size)]:.0%} on"
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
