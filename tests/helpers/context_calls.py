"""Masks, inputs and plans of tests of attention over a sequence that ranks share."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import masks
from masks import BlockMask, MaskBatch
from sparseflash.distributed import ContextPlan, make_plan

BATCH, HEADS, KV_HEADS, LENGTH, DIMS, BLOCK = 2, 4, 2, 210, 8, 16
STRATEGIES = ("contiguous", "zigzag", "shuffled")
WHOLE = 13 * BLOCK  # tokens of whole blocks


@cache
def mask_of(name: str, length: int = LENGTH) -> BlockMask:
    """The mask of a case."""
    causal, near = masks.causal(), masks.local((20, 0))
    patterns = {
        "causal": causal,
        "window and sink": (masks.local((40, 0)) | masks.global_tokens([0, 1])) & causal,
        "random": masks.random(0.2, seed=1),
        "global tokens": masks.local(10) | masks.global_tokens([3, 100]),
        "butterfly": masks.butterfly(),
        "dense": masks.full(),
        "documents": masks.documents([16] * 13 + [2] * (length > 208)),
        "head masks": masks.stack([causal, near, near, masks.random(0.3, seed=2)]),
        "key head masks": masks.stack([causal, masks.random(0.3, seed=2)]),
        "nothing": masks.full() - masks.full(),
    }
    if name == "empty rows":
        dense = masks.random(0.2, seed=3)(length, BLOCK).to_dense()
        dense[10:70] = False
        dense[150] = False
        return BlockMask.from_dense(dense, BLOCK)
    return patterns[name](length, BLOCK)


@cache
def masks_of(name: str) -> BlockMask | MaskBatch:
    """The mask of a case, or those of each batch element."""
    batches = {
        "batch": ["causal", "random"],
        "batch of documents": ["documents", "global tokens"],
        "batch with an empty mask": ["nothing", "empty rows"],
        "batch of equal masks": ["butterfly", "butterfly"],
        "batch of head masks": ["head masks", "causal"],
    }
    if name not in batches:
        return mask_of(name)
    return MaskBatch.from_masks([mask_of(each) for each in batches[name]])


def inputs(dtype: torch.dtype, value_dim: int = DIMS, length: int = LENGTH) -> tuple[Tensor, ...]:
    """query, key, value and the gradients of out and lse."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, length, DIMS) for heads in (HEADS, KV_HEADS)]
    shapes += [(BATCH, heads, length, value_dim) for heads in (KV_HEADS, HEADS)]
    shapes.append((BATCH, HEADS, length))
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def plan_of(mask: BlockMask | MaskBatch, ranks: int, strategy: str, split: str) -> ContextPlan:
    """A plan; split "rounds" is by keys, in several rounds, "shared" has rows that ranks share."""
    options: dict[str, Any] = {"split": split}
    if split in ("rounds", "shared rounds"):
        options = {"round_tokens": 48}
    if split in ("shared rows", "shared rounds"):
        options |= {"split": "auto", "shared_rows": (0, 6, 13)}
    return make_plan(mask, ranks, _strategy(strategy, ranks), **options)


def _strategy(name: str, ranks: int, length: int = LENGTH) -> str | list[int]:
    if name != "shuffled":
        return name
    units = -(-length // BLOCK)
    return [*range(ranks), *(unit * unit % 7 % ranks for unit in range(units - ranks))]


def plan_in_groups(
    mask_name: str, strategy: str, shared_rows: tuple[int, ...], groups: int
) -> ContextPlan:
    whole = plan_in_place(mask_name, strategy, shared_rows)
    return plan_in_place(mask_name, strategy, shared_rows, round_of_groups(whole, groups))


def round_of_groups(whole: ContextPlan, groups: int) -> int:
    """round_tokens with which heads are in about so many groups, of a plan without it."""
    most = int(whole.costs.receive.max()) // BLOCK
    return BLOCK * max(1, -(-most // groups))


@cache
def plan_in_place(
    mask_name: str,
    strategy: str,
    shared_rows: tuple[int, ...],
    round_tokens: int | None = None,
) -> ContextPlan:
    mask, ranks = mask_of(mask_name, WHOLE), dist.get_world_size()
    chosen = _strategy(strategy, ranks, WHOLE)
    options: dict[str, Any] = {"split": "in place", "shared_rows": shared_rows}
    return make_plan(mask, ranks, chosen, round_tokens=round_tokens, **options)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference. LSE of empty rows is -inf in both; nothing may be NaN."""
    assert not found.isnan().any(), "a result was not written, or was added to unwritten memory"
    assert torch.equal(found.isinf(), expected.isinf())
    return float((found - expected).detach().masked_fill(expected.isinf(), 0).abs().max())
