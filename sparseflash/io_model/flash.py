"""The cost of FlashAttention under a mask, in the tiles that the backends choose."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from masks import BlockMask
from masks.arguments import check_floating_dtype
from masks.lookup_table import BlockLists, LookupTable
from masks.mask_batch import check_block_mask
from sparseflash.backends import hopper, triton
from sparseflash.backends.hopper import configs as hopper_configs
from sparseflash.backends.hopper import select as hopper_select
from sparseflash.dispatch.plan import compiled_mask
from sparseflash.dispatch.spec import AttentionSpec
from sparseflash.io_model import l2_reuse
from sparseflash.io_model.cost import Cost, KernelCost, check_case
from sparseflash.io_model.device import Device, device_named
from sparseflash.options import AttentionOptions

BACKENDS = {"hopper": hopper, "triton": triton}
WARPGROUP_ROWS = 64  # rows of one wgmma, which reads its right operand from shared memory once
LSE_BYTES = 4
WAVES = 4  # the simulation of L2 has at least so many waves


class _Kernel(NamedTuple):
    """One kernel of FlashAttention.

    Args:
        name: The name of the kernel in the backends.
        by_key: Whether its work tiles are block rows of keys.
        products: Number of matrix products (queries x keys x dims) of a block.
        left_in_shared: How many of these read the left operand from shared memory too, besides
            those of _WorkTiles.
        resident: Number of tensors (tokens x dims) that are read or written once for a row.
        resident_bytes: Further bytes for each token of a row.
        streamed_bytes: Bytes for each token of a listed block besides those of two tensors.
    """

    name: str
    by_key: bool
    products: int
    left_in_shared: int
    resident: int
    resident_bytes: int
    streamed_bytes: int

    def rows(self, table: LookupTable) -> BlockLists:
        """The direction of a table whose rows are its work tiles."""
        return table.by_key if self.by_key else table.by_query

    def row_heads(self, spec: AttentionSpec) -> int:
        """Number of heads in its direction: key heads if by_key, else query heads."""
        return spec.kv_heads if self.by_key else spec.heads


# forward: Q, O; LSE. S = Q K^T, O = P V.
# dq: Q, O, dO, dQ; LSE read, LSE and delta written. S, dP = dO V^T, dQ = dS K.
# dkdv: K, V, dK, dV; LSE and delta with every query. S, dP, dV = P^T dO, dK = dS^T Q.
KERNELS = {
    "forward": (_Kernel("forward", False, 2, 0, 2, LSE_BYTES, 0),),
    "backward": (
        _Kernel("dq", False, 3, 2, 4, 3 * LSE_BYTES, 0),
        _Kernel("dkdv", True, 4, 2, 4, 0, 2 * LSE_BYTES),
    ),
}


class _WorkTiles(NamedTuple):
    """The work tiles of a kernel.

    Args:
        rows: Tokens of the row of a work tile.
        rows_per_block: Number of work tiles of a block row.
        dims: Dims of a tile.
        per_wave: Number of rows of a head that run at a time.
        heads_per_group: Number of heads whose work tiles are scheduled together.
        reads_of_query: How many times the forward kernel reads Q of a work tile from shared memory
            for each block; 0 if registers hold Q.
        packed_heads: Number of query heads for which a streamed tile is loaded once.
    """

    rows: int
    rows_per_block: int
    dims: int
    per_wave: int
    heads_per_group: int
    reads_of_query: int = 0
    packed_heads: int = 1


def attention(
    mask: BlockMask,
    head_dim: int,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    direction: str = "forward",
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    device: str | Device = "H200",
) -> Cost:
    """The cost of FlashAttention with a mask, of which only non-zero blocks are computed.

    A work tile is a row of B tokens. Its kernel reads two tensors (K and V, or Q and dO) of the n
    blocks of b tokens that the row lists. With nnz, the sum of n over all rows of B tokens:

        FLOPs         2 B b d nnz for each product: 2 forward, 3 for dQ and 4 for dK and dV
        L2            resident tensors once, 2 nnz b d elements streamed
        device memory resident tensors once, and the streamed tiles that L2 does not hold
                      when they are loaded (simulated by l2_reuse)
        shared memory a streamed tile is written once, and read by each product of 64 rows

    Where the forward kernel packs two query heads of a key head, they stream tiles once for both.
    The backward pass is the one of `deterministic=True`.

    Args:
        mask: The mask; `masks.full()(seq_len)` for dense FlashAttention.
        head_dim: d.
        batch, heads: Number of batch elements and of query heads.
        kv_heads: Number of heads of keys and values, by default `heads`.
        direction: "forward" or "backward".
        dtype: Dtype of the inputs. Rates are those of 16-bit operands; others take longer.
        backend: "hopper", "triton", or "auto" for the one that `attention` would choose.
        device: Name of one of DEVICES, or a Device.

    Returns:
        A Cost with one kernel for the forward pass, two for the backward pass.

    Raises:
        TypeError: `mask` is not a BlockMask, or `dtype` is not a torch.dtype.
        ValueError: The direction, backend or device is unknown, or the backend has no kernel for
            the sizes; a size is not positive; `heads` is not a multiple of `kv_heads` or of the
            heads of the mask; there are so few queries that the decoding kernel would run.

    Reference:
        Dao et al. 2022, Theorem 2, Theorem 5, Proposition 4; the order of loops is that of Dao
        2023, FlashAttention-2.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    check_floating_dtype("dtype", dtype)
    check_case(direction, head_dim=head_dim, batch=batch, heads=heads, kv_heads=kv_heads)
    check_block_mask(mask)
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    chosen, (q_len, k_len) = device_named(device), mask.seq_len
    shapes = (batch, heads, q_len, head_dim), (batch, kv_heads, k_len, head_dim)
    query, key = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    mask_of_call = compiled_mask(mask, query, key)
    spec = AttentionSpec.from_call(query, key, key, mask_of_call, AttentionOptions())
    spec = replace(spec, device=torch.device("cuda"))
    if spec.few_queries:
        raise ValueError(
            f"mask must have more than {q_len} queries: so few use the decoding kernel, which "
            "is not modelled"
        )
    name = _backend_for(spec, mask, chosen) if backend == "auto" else backend
    if name not in BACKENDS:
        raise ValueError(f"backend must be auto or one of {', '.join(BACKENDS)}, got {backend!r}")
    of_pass = "forward_block_size_for" if direction == "forward" else "block_size_for"
    block_size = getattr(BACKENDS[name], of_pass)(spec, mask)
    table = mask.table(block_size=block_size).for_groups(spec.mask_group)
    work_tiles = _hopper_work_tiles if name == "hopper" else _triton_work_tiles
    kernels = (
        _cost_of(kernel, table, spec, work_tiles(kernel, table, spec, chosen), chosen)
        for kernel in KERNELS[direction]
    )
    return Cost(chosen, tuple(kernels))


def _backend_for(spec: AttentionSpec, mask: BlockMask, device: Device) -> str:
    """The backend that "auto" would choose on the device."""
    supported = (
        device.capability == hopper_select.CAPABILITY
        and spec.dtype in hopper_select.DTYPES
        and spec.head_dim in hopper_select.HEAD_DIMS
    )
    return "hopper" if supported and not hopper.auto_skip(spec, mask) else "triton"


def _hopper_work_tiles(
    kernel: _Kernel, table: LookupTable, spec: AttentionSpec, device: Device
) -> _WorkTiles:
    from sparseflash.backends.hopper.kernels.forward import holds_query_in_registers
    from sparseflash.backends.hopper.launch import heads_per_group_of, kv_tile

    side, dims = table.block_size[kernel.by_key], hopper_configs.tile_width(spec.head_dim)
    configs = {
        "forward": hopper_configs.FORWARD_CONFIGS,
        "dq": hopper_configs.DQ_CONFIGS,
        "dkdv": hopper_configs.DKDV_CONFIGS,
    }
    heads = hopper_select.packed_heads(spec, side) if kernel.name == "forward" else 1
    by_width = configs[kernel.name].get(side, {}) if heads == 1 else hopper_configs.PACKED_CONFIGS
    config = by_width.get(dims)
    if config is None:
        raise ValueError(
            f"backend hopper has no {kernel.name} kernel for head_dim {spec.head_dim} in tiles "
            f"of {side}"
        )
    ctas = config.ctas_per_sm * device.multiprocessors
    num_bh = spec.batch * kernel.row_heads(spec) // heads
    heads_per_group = heads_per_group_of(spec, kernel.rows(table), num_bh, ctas) * heads
    reads_of_query = 0
    if kernel.name == "forward" and not holds_query_in_registers(side * heads, dims):
        reads_of_query = table.block_size[1] // kv_tile(side, spec.head_dim).rows
    return _WorkTiles(side, 1, dims, ctas * heads, heads_per_group, reads_of_query, heads)


def _triton_work_tiles(
    kernel: _Kernel, table: LookupTable, spec: AttentionSpec, device: Device
) -> _WorkTiles:
    from sparseflash.backends.triton import configs
    from sparseflash.backends.triton_common.constants import LONGEST_FIRST_IMBALANCE

    block_size, num_bh = table.block_size, spec.batch * kernel.row_heads(spec)
    major, minor = device.capability
    properties = (10 * major + minor, device.shared_bytes, spec.dtype, spec.head_dim, block_size)
    config = configs.choose(kernel.name, *properties, device.capability >= (9, 0))
    if config is None:
        raise ValueError(
            f"backend triton has no {kernel.name} kernel for head_dim {spec.head_dim} in blocks "
            f"of {block_size} on {device.name}"
        )
    programs = configs.programs_per_multiprocessor(
        device.shared_bytes, config, kernel.name, spec.dtype, spec.head_dim
    )
    height = config.bn if kernel.by_key else config.bm
    return _WorkTiles(
        rows=height,
        rows_per_block=block_size[kernel.by_key] // height,
        dims=configs.padded_dims(spec.head_dim),
        per_wave=programs * device.multiprocessors,
        heads_per_group=num_bh if kernel.rows(table).imbalance > LONGEST_FIRST_IMBALANCE else 1,
    )


def _cost_of(
    kernel: _Kernel, table: LookupTable, spec: AttentionSpec, work: _WorkTiles, device: Device
) -> KernelCost:
    rows, columns = kernel.rows(table), table.by_query if kernel.by_key else table.by_key
    row_len, column_len = (spec.k_len, spec.q_len) if kernel.by_key else (spec.q_len, spec.k_len)
    row_side, column_side = table.block_size[::-1] if kernel.by_key else table.block_size
    row_heads = kernel.row_heads(spec)
    passes = work.rows_per_block  # over the blocks of a row
    token = 2 * spec.head_dim * spec.dtype.itemsize + kernel.streamed_bytes
    # Number of (batch, query head) that read each mask.
    mask_of_head = table.head_to_mask[0].cpu().expand(spec.heads)
    readers = torch.bincount(mask_of_head, minlength=len(rows.row_ptr)) * spec.batch
    listed = rows.row_ptr[..., [1, 3]].sum((1, 2)).cpu()  # blocks of all rows of each mask
    tokens = _listed_tokens(columns, column_len, column_side)

    resident = (
        spec.batch
        * row_heads
        * row_len
        * (kernel.resident * spec.head_dim * spec.dtype.itemsize + kernel.resident_bytes)
    )
    streamed = float((readers * tokens).sum()) * passes * token / work.packed_heads
    blocks = float((readers * listed).sum())
    bit_tile_bytes = table.bit_tiles[0].numel() * 4
    partial = float((readers * rows.row_ptr[..., 3].sum(1).cpu()).sum())
    read_table = passes * (4 * blocks + partial * (4 + bit_tile_bytes))
    words = (rows.row_ptr, rows.full_index, rows.partial_index, table.bit_tiles)
    table_bytes = min(read_table, 4 * sum(x.numel() for x in words))
    once = _memory_reads(kernel, rows, mask_of_head, spec, work, column_side * token, device)

    pairs = blocks * row_side * column_side
    right = kernel.products * row_side * column_side / WARPGROUP_ROWS
    left = (kernel.left_in_shared + work.reads_of_query) * row_side
    operand = blocks * work.dims * spec.dtype.itemsize
    loads = 2 * passes * column_side / work.packed_heads
    return KernelCost(
        name=kernel.name,
        flops=2.0 * kernel.products * pairs * work.dims,
        exponentials=pairs,
        memory_bytes=resident + min(once, streamed) + table_bytes,
        l2_bytes=resident + streamed + read_table,
        shared_bytes=operand * (loads + right + left),
        waves=spec.batch * row_heads * rows.num_rows * passes / work.per_wave,
    )


def _listed_tokens(columns: BlockLists, column_len: int, side: int) -> Tensor:
    """(masks,): tokens of all listed blocks, without those past the end of the sequence."""
    tokens = torch.full((columns.num_rows,), side)
    tokens[-1] = column_len - (columns.num_rows - 1) * side
    return (columns.row_ptr[..., [1, 3]].sum(-1).cpu() * tokens).sum(1)


def _memory_reads(
    kernel: _Kernel,
    rows: BlockLists,
    mask_of_head: Tensor,
    spec: AttentionSpec,
    work: _WorkTiles,
    block_bytes: int,
    device: Device,
) -> float:
    """Bytes of streamed tensors that are read from device memory; see l2_reuse.

    Simulates a few waves of the first heads and scales the result to all heads.
    """
    group, heads = spec.heads // spec.kv_heads, spec.heads
    if kernel.by_key:  # a row of keys streams the queries of all heads of its group
        block_bytes, heads, mask_of_head = (
            block_bytes * group,
            spec.kv_heads,
            mask_of_head[::group],
        )
    heads_per_group = work.heads_per_group
    tiles_of_group = rows.num_rows * work.rows_per_block * heads_per_group
    simulated = heads_per_group * math.ceil(WAVES * work.per_wave / tiles_of_group)
    if len(rows.row_ptr) > 1:
        simulated = max(simulated, heads)
    simulated = min(simulated, spec.batch * heads)
    mask_of_simulated = mask_of_head.repeat(-(-simulated // heads))[:simulated]
    streams = [head if kernel.by_key else head // group for head in range(simulated)]
    capacity = max(int(l2_reuse.USABLE_SHARE * device.l2_bytes / block_bytes), 1)
    tiles, share = l2_reuse.tiles_of(
        *(rows, mask_of_simulated, streams, heads_per_group, work.rows_per_block),
        *(work.per_wave, capacity),
    )
    row_bytes = kernel.resident * spec.head_dim * spec.dtype.itemsize + kernel.resident_bytes
    found = l2_reuse.reads(tiles, work.per_wave, capacity, work.rows * row_bytes / block_bytes)
    return found / (share or 1.0) * block_bytes * spec.batch * heads / simulated
