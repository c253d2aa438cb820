"""The forward pass: host side of one call."""

import torch
from torch import Tensor

from sparseflash.backends.hopper import launch
from sparseflash.backends.hopper.configs import FORWARD_CONFIGS, tile_width
from sparseflash.backends.hopper.kernels.forward import forward_kernel
from sparseflash.backends.hopper.launch import WARPGROUP_TILE
from sparseflash.dispatch.call import Call, empty_out


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.base."""
    spec, key_lengths = call.spec, call.key_lengths
    query = launch.addressable(query)
    key = launch.addressable(launch.zero_padding(key, key_lengths))
    value = launch.addressable(launch.zero_padding(value, key_lengths))
    out = empty_out(query, value)
    lse = query.new_empty(*query.shape[:3], dtype=torch.float32)
    block = call.table.block_size[0]
    kv_tile = launch.kv_tile(block, spec.widest_dim)
    config = FORWARD_CONFIGS[block][tile_width(spec.widest_dim)]
    tensors = (query, key, value, out, lse, call.max_logits)
    access = (WARPGROUP_TILE, kv_tile, kv_tile, WARPGROUP_TILE, None, None)
    launch.launch_pass(forward_kernel, tensors, access, call, config)
    return out, lse
