"""Finds the plan of a call in the cache of its mask, or builds and stores it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from masks import BlockMask, DynamicMask, Pattern
from masks.lookup_table import LookupTable
from masks.mask_batch import CompiledMask
from masks.registry import Cache
from sparseflash.arguments import AnyMask, check_tensors
from sparseflash.backends.base import Backend
from sparseflash.backends.select import select_passes
from sparseflash.block_hint import hint_at_better_blocks
from sparseflash.compiled import stores_masks
from sparseflash.dispatch.call import Plan
from sparseflash.dispatch.spec import AttentionSpec, CallFacts
from sparseflash.options import BOOLEANS, AttentionOptions


@dataclass(frozen=True, slots=True, eq=False)
class _Checked:
    """Lengths and device of tensors that check_tensors accepted.

    Calls with equal shapes, dtypes and devices share one object. Signatures compare its identity,
    because comparing these properties takes longer.
    """

    q_len: int
    k_len: int
    device: torch.device


Size = tuple[int, int]

# Many: without its object a signature no longer finds the plans that were cached with it.
_checked = Cache(most=2**16)


def find_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask,
    options: Mapping[str, Any],
    facts: tuple[bool, ...],
) -> Plan:
    """The plan of a call, built by the first call of its signature.

    A DynamicMask is often new in every call. So spec and backend are also stored in the cache of
    its support, and only the table is built for each.

    Args:
        query, key, value: Unchecked tensors.
        mask: The mask of the call.
        options: Keywords of AttentionOptions.
        facts: Its other properties: CallFacts, or a plain tuple of its fields, which takes less
            time to construct.

    Raises:
        TypeError, ValueError: A tensor, an option or the mask is wrong; the message names it.
        BackendError: No backend can compute the call.
    """
    tensor_properties = (
        query.shape, key.shape, value.shape,
        query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device,
    )  # fmt: skip
    checked = _checked.get(tensor_properties)
    if checked is None:
        check_tensors(query, key, value)
        checked = _Checked(query.shape[2], key.shape[2], query.device)
        _checked[tensor_properties] = checked
    if isinstance(mask, Pattern):
        mask = compiled_pattern(mask, checked.q_len, checked.k_len, checked.device)
    deterministic = torch.are_deterministic_algorithms_enabled()
    kinds = [type(options.get(name)) for name in BOOLEANS]  # 1 equals True but is refused
    signature = (checked, facts, deterministic, *kinds, _fixed_sizes.get(), *options.items())
    try:
        plan = mask.cache.get(signature)
    except TypeError:  # an option cannot be hashed; its check names it
        AttentionOptions(**options)
        raise
    if plan is not None:
        return plan
    selections = mask.support.cache if isinstance(mask, DynamicMask) else {}
    shared = (*signature, mask.num_batches, mask.num_heads)
    if shared not in selections:
        compiled = compiled_mask(mask, query, key)
        spec = AttentionSpec.from_call(
            query, key, value, compiled, AttentionOptions(**options), CallFacts(*facts)
        )
        selections[shared] = spec, *select_passes(spec, compiled)
    spec, backend, of_sums = selections[shared]
    hint_at_better_blocks(spec, backend, mask)
    plan = mask.cache[signature] = make_plan(spec, backend, of_sums, mask)
    return plan


_fixed_sizes: ContextVar[tuple[Size, Size] | None] = ContextVar("fixed sizes", default=None)


@contextmanager
def fixed_block_sizes(forward: Size, backward: Size) -> Iterator[None]:
    """A context in which plans are made for tables with these blocks, whatever the masks.

    Otherwise two masks may be computed in tiles of different sizes, and then the difference of
    their times is also that of the tiles.

    Args:
        forward: Block size (bq, bk) of the table that the forward pass reads, in tokens.
        backward: Block size of the table that the backward pass reads.
    """
    token = _fixed_sizes.set((forward, backward))
    try:
        yield
    finally:
        _fixed_sizes.reset(token)


def make_plan(
    spec: AttentionSpec, backend: Backend, of_sums: Backend | None, mask: CompiledMask
) -> Plan:
    """The plan of a call whose forward pass may read another table.

    Args:
        spec: The spec of the call.
        backend: The backend of both passes.
        of_sums: The backend of the gradients of a bias and of score tensors, if it is another one.
        mask: The mask of the call.
    """
    sums = None
    if of_sums is not None:
        sums = Plan(spec, of_sums, _table(spec, of_sums.block_size_for(spec, mask), mask))
        spec = spec.without_sums_of_ds
    forward_size, block_size = _fixed_sizes.get() or (
        backend.forward_block_size_for(spec, mask),
        backend.block_size_for(spec, mask),
    )
    forward = None
    if forward_size != block_size:
        forward = Plan(spec, backend, _table(spec, forward_size, mask))
    return Plan(spec, backend, _table(spec, block_size, mask), forward=forward, sums=sums)


def _table(spec: AttentionSpec, block_size: Size, mask: CompiledMask) -> LookupTable:
    return mask.table(spec.device, block_size).for_groups(spec.mask_group)


def compiled_mask(mask: AnyMask, query: Tensor, key: Tensor) -> CompiledMask:
    """The mask of a call. A pattern is compiled in blocks of its own size.

    Raises:
        ValueError: The mask has other lengths, heads or batch elements than the call.
    """
    batch, heads, q_len = query.shape[:3]
    kv_heads, k_len = key.shape[1:3]
    if isinstance(mask, Pattern):
        mask = compiled_pattern(mask, q_len, k_len, query.device)
    if mask.seq_len != (q_len, k_len):
        raise ValueError(f"mask must have seq_len {(q_len, k_len)}, got {mask.seq_len}")
    _check_count("heads", mask.num_heads, {1, kv_heads, heads})
    _check_count("batch elements", mask.num_batches, {1, batch})
    return mask


def _check_count(name: str, count: int, allowed: set[int]) -> None:
    if count not in allowed:
        names = " or ".join(map(str, sorted(allowed)))
        raise ValueError(f"mask must have {names} {name}, got {count}")


@stores_masks(maxsize=128)
def compiled_pattern(pattern: Pattern, q_len: int, k_len: int, device: torch.device) -> BlockMask:
    """The mask of a pattern. Equal patterns share it, even if each call makes a new pattern."""
    return pattern((q_len, k_len), device=device)
