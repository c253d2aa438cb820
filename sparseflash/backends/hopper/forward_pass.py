"""The forward pass: host side of one call."""

import torch
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.backends.hopper import launch
from sparseflash.backends.hopper.configs import FORWARD_CONFIGS, tile_width
from sparseflash.backends.hopper.kernels.forward import forward_kernel
from sparseflash.backends.hopper.launch import WARPGROUP_TILE
from sparseflash.backends.triton_common.launcher import on_device
from sparseflash.dispatch.spec import AttentionSpec


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.base."""
    query = launch.addressable(query)
    key = launch.addressable(launch.zero_padding(key, key_lengths))
    value = launch.addressable(launch.zero_padding(value, key_lengths))
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    block = table.block_size[0]
    kv_tile = launch.kv_tile(block, spec.head_dim)
    config = FORWARD_CONFIGS[block][tile_width(spec.head_dim)]
    tensors = (query, key, value, out, lse)
    access = (WARPGROUP_TILE, kv_tile, kv_tile, WARPGROUP_TILE, None)
    with on_device(query.device):
        launch.launch_pass(forward_kernel, tensors, access, table, key_lengths, seed, spec, config)
    return out, lse
