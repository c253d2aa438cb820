"""Launches every kernel of a backend on small inputs: a program for a sanitizer to watch.

python -m tests.helpers.every_kernel BACKEND HEAD_DIM [PART/PARTS]

With PART/PARTS, such as 0/4, only every PARTS-th call from number PART on is made, so that several
processes can share the calls.
"""

import math
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch

import masks
import sparseflash
from sparseflash.backends.hopper import configs
from sparseflash.testing import make_inputs

BATCH, HEADS, KV_HEADS = 2, 4, 2
SHORT, LONG, LONGER = (200, 330), (1700, 1700), (4300, 4300)
LOCAL = masks.local(90, align="bottom-right")
WIDE = masks.local(450)  # with so many blocks of each key that the fused backward kernel runs
BEFORE = LOCAL & masks.causal(align="bottom-right")
SCATTERED = masks.random(0.3, seed=0)
IMBALANCED = masks.global_tokens(1)  # for which the tile scheduler is dynamic
DROPOUT = {"dropout_p": 0.1, "seed": 1}


def _in_documents(score, batch, head, query, key, document, weight):
    same = document[batch, query] == document[batch, key]
    return torch.where(same, score * weight[head], -torch.inf)


IN_DOCUMENTS = sparseflash.ScoreFunction.from_torch(
    "in documents, watched by a sanitizer", _in_documents, (int, float)
)


class KernelCall(NamedTuple):
    """One call of attention, whose forward and backward pass are computed.

    options: keyword arguments of attention, and these of this module: key_lengths, a list; bias,
        whether there is one; select, whether the device selects blocks of the mask; per_batch,
        whether every batch element has a mask of its own; high_tiles, whether the forward kernel
        reads tiles of 192 queries, which are otherwise selected by predicted time
    """

    pattern: masks.Pattern
    lengths: tuple[int, int] = SHORT
    block_size: int = 128
    value_dim: int | None = None
    options: Mapping[str, Any] = MappingProxyType({})


def kernel_calls(backend: str, head_dim: int) -> list[KernelCall]:
    """Calls that launch all kernels of a backend, with and without all that is optional."""
    changed = {"softcap": 5.0, "bias": True} | ({"select": True} if backend == "triton" else {})
    variants = ({}, DROPOUT, changed)
    patterns = (masks.full(), BEFORE, IMBALANCED)
    calls = [KernelCall(pattern, options=each) for pattern in patterns for each in variants]
    calls += [KernelCall(SCATTERED, block_size=block_size) for block_size in (32, 64)]
    calls += [
        KernelCall(LOCAL, options={"key_lengths": [0, 170]}),
        KernelCall(masks.full(), (3, 2000)),
        KernelCall(IMBALANCED, block_size=64, options=DROPOUT),
        KernelCall(BEFORE, options={"return_max_logits": True}),
        KernelCall(BEFORE, options={"score": IN_DOCUMENTS}),
        KernelCall(BEFORE, value_dim=128 if head_dim != 128 else 64),
        KernelCall(BEFORE, options={"per_batch": True}),
    ]
    if backend == "hopper":
        calls += [
            KernelCall(pattern, LONG, options={"deterministic": False, **dropout})
            for pattern in (masks.full(), masks.causal())
            for dropout in ({}, DROPOUT)
            if head_dim in configs.FUSED_WIDTHS[bool(dropout)]
        ]
        calls.append(KernelCall(BEFORE, options={"select": True}))
        # More block rows than CTAs, in all passes: a CTA computes several.
        calls += [KernelCall(LOCAL, LONGER, block_size) for block_size in (64, 128)]
        calls.append(KernelCall(WIDE, LONGER, options={"deterministic": False}))
    if backend == "hopper" and head_dim == configs.MIN_TILE_WIDTH:
        # More block rows of all heads than CTAs. An H100, for which no order is planned, runs the
        # kernels of dQ and of dK and dV here.
        calls += [
            KernelCall(pattern, LONG, options={"planned_order": True, **dropout})
            for pattern in (masks.full(), masks.local(1000))
            for dropout in ({}, DROPOUT)
        ]
        high = {"high_tiles": True}
        calls += [KernelCall(pattern, options=high) for pattern in patterns]
        calls += [
            KernelCall(BEFORE, options=high | {"return_max_logits": True}),
            KernelCall(LOCAL, options=high | {"key_lengths": [0, 170]}),
            KernelCall(LOCAL, LONGER, options=high),
        ]
    return calls


def run(call: KernelCall, backend: str, head_dim: int, device: str) -> None:
    """Computes both passes of a call."""
    options, lengths = dict(call.options), call.lengths
    inputs = make_inputs(
        BATCH, HEADS, *lengths, head_dim, value_dim=call.value_dim, kv_heads=KV_HEADS,
        dtype=torch.float16, device=device,
    )  # fmt: skip
    leaves = [tensor.requires_grad_() for tensor in inputs[:3]]
    mask = block_mask = call.pattern(lengths, block_size=call.block_size, device=device)
    gradients = backend != "hopper"  # of biases and of block scores, which hopper does not compute
    if options.pop("bias", False):
        distances = (HEADS, sum(lengths) - 1)
        options["bias"] = torch.randn(distances, device=device, requires_grad=gradients)
        leaves += [options["bias"]] * gradients
    if options.pop("select", False):
        blocks = (BATCH, HEADS, block_mask.grid.nq, block_mask.grid.nk)
        scores = torch.rand(blocks, device=device, requires_grad=gradients)
        mask = block_mask.select_topk(scores, 2)
        leaves += [scores] * gradients
    if options.pop("per_batch", False):
        mask = masks.MaskBatch.from_masks([block_mask, ~block_mask])
    if "key_lengths" in options:
        options["key_lengths"] = torch.tensor(options["key_lengths"], device=device)
    if "score" in options:
        document = torch.arange(max(lengths), device=device).expand(BATCH, -1) // 100
        options["score_tensors"] = [document, torch.ones(HEADS, device=device)]
    limit = math.inf if options.pop("high_tiles", False) else configs.MAX_TIME_RATIO_OF_192
    with mock.patch.object(configs, "MAX_TIME_RATIO_OF_192", limit):
        out, lse, *_ = sparseflash.attention(
            *inputs[:3], mask, backend=backend, return_lse=True, **options
        )
    torch.autograd.grad((out, lse), leaves, (inputs[3], torch.ones_like(lse)))


def main(backend: str, head_dim: int, part: int = 0, parts: int = 1) -> None:
    for call in kernel_calls(backend, head_dim)[part::parts]:
        run(call, backend, head_dim, "cuda")
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    backend, head_dim, *share = sys.argv[1:]
    main(backend, int(head_dim), *(int(number) for each in share for number in each.split("/")))
