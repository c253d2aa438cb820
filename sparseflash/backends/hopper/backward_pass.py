"""The backward pass: dQ by query rows, then dK and dV by key columns; or all by key columns.

    P  = exp2(scale * log2(e) * Q K^T - log2(e) * LSE)
    dS = P * (dO V^T - delta)
    dQ = scale dS K,    dK = scale dS^T Q,    dV = P^T dO

P is computed anew, tile by tile, by both kernels. The first writes LSE and delta for the second;
see row_terms. Neither adds to memory that another program writes, so the same inputs give the same
bits. The kernel of all gradients does; see `fuses`.
"""

import torch
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.backends.compiled import on_device
from sparseflash.backends.hopper import fuses, launch, query_sums, row_terms
from sparseflash.backends.hopper.device import PART
from sparseflash.backends.hopper.fused_gradient import fused_gradient_kernel
from sparseflash.backends.hopper.key_value_gradient import key_value_gradient_kernel
from sparseflash.backends.hopper.launch import PART_TILES, Pieces, Room
from sparseflash.backends.hopper.query_gradient import query_gradient_kernel
from sparseflash.dispatch.spec import AttentionSpec

# By the side of blocks and the width of tiles: buffers of keys and values for dQ; those of queries
# and dO, and of keys and values, for dK and dV.
QUERY_ROOMS = {
    128: {
        64: Room(1, {"STAGES": 4}),
        128: Room(1, {"STAGES": 2}),
        256: Room(1, {"STAGES": 1}),
    },
    64: {
        64: Room(3, {"STAGES": 3}),
        128: Room(2, {"STAGES": 2}),
    },
}
KEY_ROOMS = {
    128: {
        64: Room(1, {"STAGES": 4, "KEY_STAGES": 2}),
        128: Room(1, {"STAGES": 3, "KEY_STAGES": 2}),
        256: Room(1, {"STAGES": 1, "KEY_STAGES": 1}),
    },
    64: {
        64: Room(2, {"STAGES": 4, "KEY_STAGES": 2}),
        128: Room(2, {"STAGES": 2, "KEY_STAGES": 1}),
    },
}
TERMS = Pieces(PART.value)  # as queries come
# By the width of tiles: buffers of the kernel of all gradients, likewise.
FUSED_ROOMS = {
    64: Room(1, {"STAGES": 4, "KEY_STAGES": 2}),
    128: Room(1, {"STAGES": 3, "KEY_STAGES": 1}),
}
# Registers do not hold both dK and dV of tiles that are wider.
WIDEST_TOGETHER = 128


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
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(grad_query, grad_key, grad_value) of one call; see sparseflash.backends.Backend."""
    needs_query, needs_key, needs_value = needs
    query, grad_out, out = (
        launch.addressable(query),
        launch.addressable(grad_out),
        launch.addressable(out),
    )
    key, value = (launch.addressable(launch.unpadded(x, key_lengths)) for x in (key, value))
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    grad_query = grad_key = grad_value = None
    with on_device(query.device):
        terms = row_terms.empty(query, table.block_size[0])
        call = (query, grad_out, key, value, terms, table, key_lengths, seed, spec)
        if all(needs) and fuses(table, spec):
            row_terms.compute(grad_out, out, lse, grad_lse, terms)
            return _fused_gradients(*call)
        if needs_query:
            grad_query = _query_gradient(out, lse, grad_lse, *call)
        else:
            row_terms.compute(grad_out, out, lse, grad_lse, terms)
        if launch.width(spec.head_dim) <= WIDEST_TOGETHER:
            if needs_key or needs_value:
                grad_key, grad_value = _key_value_gradient(*call)
        else:
            if needs_key:
                grad_key, _ = _key_value_gradient(*call, with_value=False)
            if needs_value:
                _, grad_value = _key_value_gradient(*call, with_key=False)
    return grad_query, grad_key if needs_key else None, grad_value if needs_value else None


def _fused_gradients(
    query, grad_out, key, value, terms, table, key_lengths, seed, spec
) -> tuple[Tensor, Tensor, Tensor]:
    sums = query_sums.zeros(query, table)
    grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
    tensors = (query, grad_out, terms, key, value, sums, grad_key, grad_value)
    shares = query_sums.shares(spec)
    read = (PART_TILES, PART_TILES, TERMS, PART_TILES, PART_TILES, shares, PART_TILES, PART_TILES)
    room = FUSED_ROOMS[launch.width(spec.head_dim)]
    launch.launch_pass(
        fused_gradient_kernel, tensors, read, table, key_lengths, seed, spec, room, by_key=True
    )
    query_sums.finish(sums, spec.scale, grad_query)
    return grad_query, grad_key, grad_value


def _query_gradient(
    out, lse, grad_lse, query, grad_out, key, value, terms, table, key_lengths, seed, spec
) -> Tensor:
    """The gradient of query; also writes the terms."""
    grad_query = torch.empty_like(query)
    block = table.block_size[0]
    keys = launch.key_tiles(block, spec.head_dim)
    tensors = (query, grad_out, out, key, value, grad_query, lse, grad_lse, terms)
    read = (PART_TILES, PART_TILES, PART_TILES, keys, keys, PART_TILES, None, None, None)
    room = QUERY_ROOMS[block][launch.width(spec.head_dim)]
    launch.launch_pass(query_gradient_kernel, tensors, read, table, key_lengths, seed, spec, room)
    return grad_query


def _key_value_gradient(
    query,
    grad_out,
    key,
    value,
    terms,
    table,
    key_lengths,
    seed,
    spec,
    with_key=True,
    with_value=True,
) -> tuple[Tensor | None, Tensor | None]:
    grad_key = torch.empty_like(key) if with_key else None
    grad_value = torch.empty_like(value) if with_value else None
    tensors = (query, grad_out, terms, key, value, grad_key, grad_value)
    read = (PART_TILES, PART_TILES, TERMS, PART_TILES, PART_TILES, PART_TILES, PART_TILES)
    room = KEY_ROOMS[table.block_size[0]][launch.width(spec.head_dim)]
    launch.launch_pass(
        key_value_gradient_kernel,
        tensors,
        read,
        table,
        key_lengths,
        seed,
        spec,
        room,
        by_key=True,
    )
    return grad_key, grad_value
