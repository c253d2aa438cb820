"""Launches every kernel of a backend on small inputs; a program for a sanitizer to watch.

python -m tests.helpers.every_kernel BACKEND HEAD_DIM
"""

import sys

import torch

import masks
import sparseflash
from sparseflash.testing import make_inputs

HEADS, KV_HEADS = 4, 2
LOCAL = masks.local(90, align="bottom-right")
WIDE = masks.local(450)  # whose rows are long enough to sum all gradients in one kernel
BEFORE = LOCAL & masks.causal(align="bottom-right")
SCATTERED = masks.random(0.3, seed=0)
UNEVEN = masks.global_tokens(1)  # whose rows programs take as they are done
OPTIONS = {
    "triton": ({}, {"dropout_p": 0.1, "seed": 1}, {"softcap": 5.0, "bias": True, "chosen": True}),
    "hopper": ({}, {"dropout_p": 0.1, "seed": 1}, {"softcap": 5.0, "bias": "constant"}),
}


def passes(
    backend: str,
    pattern: masks.Pattern,
    lengths: tuple[int, int],
    head_dim: int,
    block_size: int = 128,
    **options,
) -> None:
    """The forward and, for more than a few queries, the backward pass of one call."""
    inputs = make_inputs(
        2, HEADS, *lengths, head_dim, kv_heads=KV_HEADS, dtype=torch.float16, device="cuda"
    )
    leaves = [x.requires_grad_() for x in inputs[:3]]
    mask = pattern(lengths, block_size=block_size, device="cuda")
    wanted = list(leaves)
    if bias := options.pop("bias", False):
        options["bias"] = torch.randn(HEADS, sum(lengths) - 1, device="cuda")
        if bias != "constant":
            wanted.append(options["bias"].requires_grad_())
    if options.pop("chosen", False):
        rows, columns = mask.grid.nq, mask.grid.nk
        scores = torch.rand(2, HEADS, rows, columns, device="cuda", requires_grad=True)
        mask = mask.select_topk(scores, 2)
        wanted.append(scores)
    out, lse = sparseflash.attention(*leaves, mask, backend=backend, return_lse=True, **options)
    torch.autograd.grad((out, lse), wanted, (inputs[3], torch.ones_like(lse)))


def main(backend: str, head_dim: int) -> None:
    key_lengths = torch.tensor([0, 170], device="cuda")
    for pattern in (masks.full(), BEFORE, UNEVEN):
        for options in OPTIONS[backend]:
            passes(backend, pattern, (200, 330), head_dim, **options)
    passes(backend, LOCAL, (200, 330), head_dim, key_lengths=key_lengths)
    passes(backend, masks.full(), (3, 2000), head_dim)
    for block_size in (32, 64):
        passes(backend, SCATTERED, (200, 330), head_dim, block_size=block_size)
    passes(backend, UNEVEN, (200, 330), head_dim, block_size=64, dropout_p=0.1, seed=1)
    if backend == "hopper":
        for pattern in (masks.full(), masks.causal()):
            for options in OPTIONS[backend]:
                passes(backend, pattern, (1700, 1700), head_dim, deterministic=False, **options)
        # more rows than programs, in all passes: they take several each
        for block_size in (64, 128):
            passes(backend, LOCAL, (4300, 4300), head_dim, block_size=block_size)
        passes(backend, WIDE, (4300, 4300), head_dim, deterministic=False)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
