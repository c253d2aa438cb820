"""What torch.utils.flop_counter counts: the useful FLOPs of both passes."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import masks
import sparseflash
from masks import DynamicMask, MaskBatch
from sparseflash.dispatch import flops, operators

BATCH, HEADS, KV_HEADS, Q_LEN, K_LEN, DIM, VALUE_DIM = 2, 4, 2, 40, 50, 16, 8
LENGTHS = (Q_LEN, K_LEN)
FORWARD, BACKWARD = operators._FLOPS
NEAR = masks.local(5, align="top-left")
BLOCKS = torch.rand(BATCH, HEADS, 3, 4) < 0.5
MASKS = {
    "pattern": NEAR.with_block_size(16),
    "empty rows": masks.block_pattern(lambda i, j: i == 1).with_block_size((16, 32)),
    "block mask": NEAR(LENGTHS, 16),
    "heads": masks.stack([NEAR, masks.full()])(LENGTHS, 16),
    "batch": MaskBatch.from_masks([NEAR(LENGTHS, 16), masks.full()(LENGTHS, 16)]),
    "dynamic": DynamicMask.from_blocks(BLOCKS, 16, LENGTHS),
    "dynamic, of a support": NEAR(LENGTHS, 16).select(BLOCKS[:1, :1]),
}


def inputs(requires_grad=(True, True, True)):
    shapes = (HEADS, Q_LEN, DIM), (KV_HEADS, K_LEN, DIM), (KV_HEADS, K_LEN, VALUE_DIM)
    return [
        torch.randn(BATCH, *shape).requires_grad_(needed)
        for shape, needed in zip(shapes, requires_grad, strict=True)
    ]


def counted(attend, *tensors):
    """FLOPs of the forward and of the backward pass."""
    with FlopCounterMode(display=False) as counter:
        attend(*tensors).sum().backward()
    found = counter.get_flop_counts()["Global"]
    assert found.keys() <= {FORWARD, BACKWARD}
    return found[FORWARD], found[BACKWARD]


def pairs(mask):
    """In non-zero blocks inside the sequence, of all batch elements and heads."""
    mask = mask(LENGTHS) if isinstance(mask, masks.Pattern) else mask
    bq, bk = mask.block_size
    dense = mask.to_blocks().repeat_interleave(bq, -2).repeat_interleave(bk, -1)
    dense = dense[..., :Q_LEN, :K_LEN]
    dense = dense.view(*(1,) * (4 - dense.dim()), *dense.shape)
    masks_of_all = dense.shape[0] * dense.shape[1]
    return int(dense.sum()) * BATCH * HEADS // masks_of_all


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_pairs_of_non_zero_blocks_are_counted(mask):
    for _ in range(2):  # the second time from caches
        forward, backward = counted(lambda *x: sparseflash.attention(*x, mask), *inputs())
        assert forward == 2 * pairs(mask) * (DIM + VALUE_DIM)
        assert backward == 2 * pairs(mask) * (3 * DIM + 2 * VALUE_DIM)


@pytest.mark.parametrize(
    ("needs", "dims"),
    [
        ((True, False, False), 2 * DIM + VALUE_DIM),
        ((False, True, True), 2 * DIM + 2 * VALUE_DIM),
        ((False, False, True), DIM + VALUE_DIM),
    ],
)
def test_products_of_gradients_that_are_not_needed_are_not_counted(needs, dims):
    mask = MASKS["heads"]
    _, backward = counted(lambda *x: sparseflash.attention(*x, mask), *inputs(needs))
    assert backward == 2 * pairs(mask) * dims


def test_dense_attention_has_the_flops_of_the_attention_of_torch():
    tensors = inputs()
    query, *_ = shapes = [x.shape for x in tensors]
    backward = sdpa_backward_flop_count((*query[:3], VALUE_DIM), *shapes)
    assert counted(sparseflash.attention, *tensors) == (sdpa_flop_count(*shapes), backward)


@pytest.mark.parametrize("symbols", [False, True])
@pytest.mark.parametrize("name", ["pattern", "heads", "dynamic, of a support"])
def test_tensors_without_values_have_the_same_flops(name, symbols):
    mask = MASKS[name]
    mode = FakeTensorMode(shape_env=ShapeEnv() if symbols else None)
    kind = DimDynamic.DYNAMIC if symbols else DimDynamic.STATIC
    context = StatelessSymbolicContext([DimDynamic.STATIC, DimDynamic.STATIC, kind, kind])
    context = context if symbols else None
    fake = [mode.from_tensor(x, symbolic_context=context) for x in inputs()]
    if isinstance(mask, DynamicMask):  # the most that the blocks can be is the support
        bound = {"query": fake[0], "key": fake[1], "value": fake[2], "mask": mask.support.handle}
        with mode:
            forward = flops.of_forward(bound | {"blocks": mode.from_tensor(mask.blocks)})
        mask = mask.support
    else:
        with mode:
            forward, _ = counted(lambda *x: sparseflash.attention(*x, mask), *fake)
    assert forward == 2 * pairs(mask) * (DIM + VALUE_DIM)


def test_a_length_that_is_not_known_may_have_all_pairs():
    mode = FakeTensorMode(shape_env=(environment := ShapeEnv()))
    length = environment.create_unbacked_symint()
    with mode:
        query = torch.empty(2, 3, length, 8)
    bound = dict.fromkeys(("query", "key", "value"), query)
    found: Any = flops.of_forward(bound | {"blocks": None, "mask": NEAR.handle})
    assert found.node.expr == 2 * 2 * 3 * 16 * length.node.expr**2


def test_counters_that_are_made_before_the_first_call_count_too(monkeypatch):
    for operator in (FORWARD, BACKWARD):
        monkeypatch.delitem(flop_registry, operator, raising=False)
    counters = [FlopCounterMode(display=False) for _ in range(2)]
    for counter in counters:
        with counter:
            sparseflash.attention(*inputs()).sum().backward()
        assert counter.get_total_flops() == 2 * BATCH * HEADS * Q_LEN * K_LEN * (64 + 24)


def test_modules_have_their_flops():
    module = sparseflash.nn.SparseAttention(32, 2, NEAR)
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(1, 40, 32)).sum().backward()
    found = counter.get_flop_counts()["SparseAttention"]
    assert found[FORWARD] == found[BACKWARD] / 2.5 == 4 * 40 * 40 * 32
