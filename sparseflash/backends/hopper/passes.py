"""The host side of both passes of one call.

    P  = exp2(scale * log2(e) * Q K^T - log2(e) * LSE)
    dS = P * (dO V^T - delta),    delta = rowsum(dO * O) - dLSE
    dQ = scale dS K,    dK = scale dS^T Q,    dV = P^T dO

There are two backward passes. By default the kernel of dQ runs over block rows of queries, and
then the kernel of dK and dV over block rows of keys. Each recomputes P; the first also writes LSE
and delta for the second (kernels/lse_delta.py). No CTA adds to memory that another CTA writes, so
equal inputs give equal bits. The fused kernel runs over block rows of keys and adds to dQ in no
fixed order, or with planned_order in that of order.py; see select.uses_fused_backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from masks._core.grid import is_captured
from masks.lookup_table import LookupTable
from sparseflash.backends.hopper import configs, launch
from sparseflash.backends.hopper.device.layouts import WARPGROUP_M
from sparseflash.backends.hopper.kernels.backward_dkdv import backward_dkdv_kernel
from sparseflash.backends.hopper.kernels.backward_dq import backward_dq_kernel
from sparseflash.backends.hopper.kernels.backward_fused import backward_fused_kernel
from sparseflash.backends.hopper.kernels.clipped_block import clipped_block_kernel
from sparseflash.backends.hopper.kernels.dq_accumulator import convert_dq_kernel
from sparseflash.backends.hopper.kernels.forward import forward_kernel
from sparseflash.backends.hopper.kernels.lse_delta import lse_delta_kernel
from sparseflash.backends.hopper.launch import OPTIONS, WARPGROUP_TILE, PreparedKernel, TmaBox2D
from sparseflash.backends.hopper.order import plan_order
from sparseflash.backends.hopper.select import packed_heads, uses_fused_backward
from sparseflash.backends.triton_common.launcher import Launch, is_compile_only, launch_and_store
from sparseflash.backends.triton_common.launcher import launch as launch_kernel
from sparseflash.backends.triton_common.relaunch import try_relaunch
from sparseflash.dispatch.call import (
    NO_MEMORY,
    Call,
    Gradients,
    Needs,
    OutputLayout,
    Plan,
    Saved,
    empty_like,
    empty_out_and_lse,
    empty_tensors,
    layouts_of,
    prepare_once,
)
from sparseflash.dispatch.spec import AttentionSpec

LSE_DELTA_BOX = TmaBox2D(WARPGROUP_M.value)
NOTHING_MORE = (None, None)  # keys and values beside those of a call
NO_ORDER = (None,) * 4  # of the sums of dQ
DQ_COLUMNS = 256  # columns of the accumulator of dQ as a matrix: the most of a TMA box


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.base."""
    query, key, value = [launch.addressable(x) for x in (query, key, value)]
    more = _more(call, key, value)
    inputs = (query, key, value, *more)
    prepared = prepare_once(call.plan, _prepare_forward, inputs, call.max_logits is None)
    results = call.results or empty_tensors(prepared.outputs, call.plan.spec.device)
    out, lse = results
    prepared.launch(call, *inputs, *NOTHING_MORE[len(more) :], out, lse, call.max_logits)
    return out, lse


def _prepare_forward(
    spec: AttentionSpec, block: int, query: Tensor, key: Tensor, value: Tensor, *_: Tensor | bool
) -> PreparedKernel:
    kv_tile = launch.kv_tile(block, spec.widest_dim)
    access = (WARPGROUP_TILE, *[kv_tile] * 4, WARPGROUP_TILE, None, None)
    outputs = layouts_of(empty_out_and_lse(query, value))
    heads = packed_heads(spec, block)
    by_width = configs.PACKED_CONFIGS if heads > 1 else configs.FORWARD_CONFIGS[block]
    config = by_width[configs.tile_width(spec.widest_dim)]
    return PreparedKernel(forward_kernel, access, config, outputs, packed_heads=heads)


def _more(call: Call, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The further keys and values of a call as kernels read them; none of most calls."""
    if call.key_lengths is not None:
        return _clipped_blocks(call.plan, key, value, call.key_lengths)
    return () if call.more is None else tuple([launch.addressable(x) for x in call.more])


def _clipped_blocks(
    plan: Plan, key: Tensor, value: Tensor, key_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """K and V of the key block in which each key length ends, with zeros past that length.

    Each is (batch, kv_heads, tokens of a block, dim).
    """
    (batch, kv_heads, *_), block = key.shape, plan.table.block_size[1]
    copies = [x.new_empty(batch, kv_heads, block, x.shape[3]) for x in (key, value)]
    tensors = (key, value, *copies)
    signature = (clipped_block_kernel, key.stride(), value.stride())
    addresses = tuple([x.data_ptr() for x in (*tensors, key_lengths)])
    if not try_relaunch(plan.cache, signature, addresses):
        grid = (batch * kv_heads * (block // WARPGROUP_M.value), 1, 1)
        tiles = [WARPGROUP_TILE.descriptor(x) for x in tensors]
        variant = (key.device, key.dtype, key.shape[3], value.shape[3], block)
        changing = clipped_block_kernel.arg_names[: len(addresses)]
        arguments, constants = (*tiles, key_lengths, kv_heads), {"BLOCK": block} | OPTIONS
        prepared = Launch(grid, arguments, variant, constants, changing)
        launch_and_store(plan.cache, signature, clipped_block_kernel, prepared)
    return copies[0], copies[1]


def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, needs: Needs
) -> Gradients:
    """The gradients of one call; see sparseflash.backends.base."""
    query, key, value, out, lse = saved
    needs_query, needs_key, needs_value, *_ = needs
    spec, table = call.spec, call.table
    inputs = (query, grad_out, out, key, value)
    query, grad_out, out, key, value = inputs = tuple([launch.addressable(x) for x in inputs])
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    grad_query = grad_key = grad_value = None
    if all(needs[:3]) and uses_fused_backward(table, spec):
        lse_delta = _lse_delta(call, grad_out, out, lse, grad_lse)
        return *_fused(call, query, grad_out, key, value, lse_delta), None, None, None
    # dQ first: its kernel writes LSE and delta, which the kernel of dK and dV reads.
    if needs_query:
        grad_query, lse_delta = _dq(call, inputs, lse, grad_lse)
    elif call.shared:
        lse_delta = call.shared[0]
    else:
        lse_delta = _lse_delta(call, grad_out, out, lse, grad_lse)
    if call.shared is not None:
        call.shared[:] = [lse_delta]
    tensors = (query, grad_out, key, value, lse_delta)
    if configs.tile_width(spec.widest_dim) <= configs.MAX_DKDV_DIMS:
        if needs_key or needs_value:
            grad_key, grad_value = _dkdv(call, *tensors)
    else:  # registers hold only one of the two accumulators, so S is computed twice
        if needs_key:
            grad_key, _ = _dkdv(call, *tensors, with_value=False)
        if needs_value:
            _, grad_value = _dkdv(call, *tensors, with_key=False)
    grad_key, grad_value = (grad_key if needs_key else None, grad_value if needs_value else None)
    return grad_query, grad_key, grad_value, None, None, None


def empty_lse_delta(query: Tensor, block: int) -> Tensor:
    """Memory for LSE and delta: float32 (2 * batch * heads, q_len rounded up to whole blocks)."""
    batch, heads, q_len, _ = query.shape
    padded_len = -(-q_len // block) * block
    return query.new_empty(2 * batch * heads, padded_len, dtype=torch.float32)


def _lse_delta(
    call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """LSE and delta of all queries; zeros past the sequence."""
    lse_delta = empty_lse_delta(out, call.table.block_size[0])
    _, heads, q_len, head_dim = out.shape
    tiles = (WARPGROUP_TILE.descriptor(x) for x in (grad_out, out))
    arguments = (*tiles, lse, grad_lse, lse_delta, heads, q_len, lse_delta.shape[1])
    grid = (lse_delta.numel() // (2 * WARPGROUP_M.value), 1, 1)
    variant = (out.device, out.dtype, head_dim, grad_lse is None)
    launch_kernel(lse_delta_kernel, grid, arguments, variant, OPTIONS)
    return lse_delta


def _fused(
    call: Call, query: Tensor, grad_out: Tensor, key: Tensor, value: Tensor, lse_delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dq_accumulator = _zero_dq_accumulator(query, call.table)
    every = (True, True, True)
    given, new = _memory_of_gradients(call, slice(0, 3), every)
    inputs = (query, grad_out, key, value, *given)
    ordered = call.spec.deterministic
    prepared = prepare_once(call.plan, _prepare_fused, inputs, *new, ordered)
    more = _more(call, key, value)
    found = empty_tensors(prepared.outputs, call.spec.device)
    grad_query, grad_key, grad_value = _or_given(found, call, slice(0, 3), every)
    inputs = (query, grad_out, lse_delta, key, value, *more, *NOTHING_MORE[len(more) :])
    order = _order_and_counters(call.plan) if ordered else NO_ORDER
    prepared.launch(call, *inputs, dq_accumulator, grad_key, grad_value, *order)
    _convert_dq(dq_accumulator, call.spec.scale, grad_query)
    return grad_query, grad_key, grad_value


def _memory_of_gradients(
    call: Call, inputs: slice, needs: Sequence[bool]
) -> tuple[Sequence[Tensor], Sequence[bool]]:
    """(the memory that is given for needed gradients, whether each one needs a new tensor)

    inputs: which of query, key and value the gradients are of
    """
    if call.gradients is NO_MEMORY:
        return (), needs
    each = list(zip(call.gradients[inputs], needs, strict=True))
    given = [memory for memory, needed in each if needed and memory is not None]
    return given, [needed and memory is None for memory, needed in each]


def _or_given(new: list[Any], call: Call, inputs: slice, needs: Sequence[bool]) -> list[Any]:
    """The tensors of needed gradients: new ones, or the memory that is given for them."""
    if call.gradients is NO_MEMORY:
        return new
    each = zip(new, call.gradients[inputs], needs, strict=True)
    return [memory if needed and found is None else found for found, memory, needed in each]


def _prepare_fused(spec: AttentionSpec, _: int, *inputs_and_new: Any) -> PreparedKernel:
    query, _grad_out, key, value, *_given, new_query, new_key, new_value, ordered = inputs_and_new
    tile = WARPGROUP_TILE
    access = (tile, tile, LSE_DELTA_BOX, *[tile] * 4, _dq_box(spec), tile, tile, *NO_ORDER)
    outputs = _new_outputs((query, new_query), (key, new_key), (value, new_value))
    config = configs.FUSED_CONFIGS[configs.tile_width(spec.head_dim)]
    return PreparedKernel(
        backward_fused_kernel, access, config, outputs, by_key=True, ordered=ordered
    )


def _order_and_counters(plan: Plan) -> tuple[Tensor, ...]:
    """The order of the sums of dQ, planned once, and new counters of tiles of dQ."""
    spec, table = plan.spec, plan.table
    rows = spec.batch * spec.heads * table.by_query.num_rows
    tiles = rows * (table.block_size[0] // WARPGROUP_M.value)
    counters = torch.zeros(tiles, dtype=torch.int32, device=spec.device)
    if is_compile_only():  # nothing is read, and the table may be of another mask
        return counters, counters, counters, counters
    order = plan.cache.get(plan_order)
    if order is None:
        if is_captured(spec.device):
            raise RuntimeError(
                "with planned_order, a CUDA graph cannot capture the first backward pass with a "
                "mask and size, in which the order is planned: run both passes once before"
            )
        config = configs.FUSED_CONFIGS[configs.tile_width(spec.head_dim)]
        ctas = config.ctas_per_sm * launch.multiprocessors(spec.device)
        num_bh = spec.batch * spec.kv_heads
        group = launch.heads_per_group_of(
            spec, table.by_key, num_bh, ctas, config.dq_bytes, by_key=True
        )
        order = plan.cache[plan_order] = plan_order(table, spec, ctas, group)
    return *order, counters


def _dq_box(spec: AttentionSpec) -> TmaBox2D:
    """The TMA box that a warpgroup of the fused kernel adds to the accumulator of dQ."""
    dims = configs.tile_width(spec.head_dim)
    if dims > configs.MAX_DQ_WARPGROUP_DIMS:
        dims //= 2
    return TmaBox2D(DQ_COLUMNS, WARPGROUP_M.value * dims // DQ_COLUMNS)


def _zero_dq_accumulator(query: Tensor, table: LookupTable) -> Tensor:
    """The accumulator of dQ: zeros for all block rows of queries, float32 (rows, DQ_COLUMNS)."""
    batch, heads, _, head_dim = query.shape
    tokens = batch * heads * table.by_query.num_rows * table.block_size[0]
    shape = (tokens * configs.tile_width(head_dim) // DQ_COLUMNS, DQ_COLUMNS)
    return torch.zeros(shape, dtype=torch.float32, device=query.device)


def _convert_dq(dq_accumulator: Tensor, scale: float, grad_query: Tensor) -> None:
    """Writes scale * dq_accumulator to grad_query."""
    batch, heads, _, head_dim = grad_query.shape
    tiles = dq_accumulator.numel() // (WARPGROUP_M.value * configs.tile_width(head_dim))
    tiles_per_head = tiles // max(batch * heads, 1)
    gradient = WARPGROUP_TILE.descriptor(grad_query)
    arguments = (dq_accumulator, gradient, scale, heads, tiles_per_head)
    variant = (grad_query.device, grad_query.dtype, head_dim)
    launch_kernel(convert_dq_kernel, (tiles, 1, 1), arguments, variant, OPTIONS)


def _dq(
    call: Call, inputs: tuple[Tensor, ...], lse: Tensor, grad_lse: Tensor | None
) -> list[Tensor]:
    """The gradient of query, and LSE and delta of all queries."""
    more = _more(call, *inputs[-2:])
    inputs, memory = (*inputs, *more), call.gradients[0]
    given, new = (() if memory is None else (memory,)), memory is None
    prepared = prepare_once(call.plan, _prepare_dq, (*inputs, *given), grad_lse is None, new)
    created, lse_delta = empty_tensors(prepared.outputs, call.spec.device)
    grad_query = created if memory is None else memory
    results = (grad_query, lse, grad_lse, lse_delta)
    prepared.launch(call, *inputs, *NOTHING_MORE[len(more) :], *results)
    return [grad_query, lse_delta]


def _prepare_dq(
    spec: AttentionSpec, block: int, query: Tensor, *inputs_and_properties: Tensor | bool
) -> PreparedKernel:
    new = bool(inputs_and_properties[-1])
    tile, kv_tile = WARPGROUP_TILE, launch.kv_tile(block, spec.widest_dim)
    access = (tile, tile, tile, *[kv_tile] * 4, tile, None, None, None)
    outputs = layouts_of((empty_like(query) if new else None, empty_lse_delta(query, block)))
    config = configs.DQ_CONFIGS[block][configs.tile_width(spec.widest_dim)]
    return PreparedKernel(backward_dq_kernel, access, config, outputs)


def _dkdv(
    call: Call,
    query: Tensor,
    grad_out: Tensor,
    key: Tensor,
    value: Tensor,
    lse_delta: Tensor,
    with_key: bool = True,
    with_value: bool = True,
) -> list[Tensor | None]:
    needs = (with_key, with_value)
    given, new = _memory_of_gradients(call, slice(1, 3), needs)
    inputs = (query, grad_out, key, value, *given)
    prepared = prepare_once(call.plan, _prepare_dkdv, inputs, *needs, *new)
    found = empty_tensors(prepared.outputs, call.spec.device)
    gradients = _or_given(found, call, slice(1, 3), needs)
    prepared.launch(call, query, grad_out, lse_delta, key, value, *gradients)
    return gradients


def _prepare_dkdv(spec: AttentionSpec, block: int, *inputs_and_new: Any) -> PreparedKernel:
    _query, _grad_out, key, value, *_given_and_needs, new_key, new_value = inputs_and_new
    tile = WARPGROUP_TILE
    access = (tile, tile, LSE_DELTA_BOX, tile, tile, tile, tile)
    outputs = _new_outputs((key, new_key), (value, new_value))
    config = configs.DKDV_CONFIGS[block][configs.tile_width(spec.widest_dim)]
    return PreparedKernel(backward_dkdv_kernel, access, config, outputs, by_key=True)


def _new_outputs(*each: tuple[Tensor, bool]) -> tuple[OutputLayout | None, ...]:
    """The layouts of new tensors like these where they are needed, else None."""
    return layouts_of([empty_like(x) if new else None for x, new in each])
