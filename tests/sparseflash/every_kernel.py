"""Launches every kernel of a backend on small inputs; a script for a sanitizer to watch.

python every_kernel.py BACKEND
"""

import sys

import torch

import masks
import sparseflash
from sparseflash.testing import make_inputs

HEADS, KV_HEADS = 4, 2
OPTIONS = {
    "triton": ({}, {"dropout_p": 0.1, "seed": 1}, {"softcap": 5.0, "bias": True, "chosen": True}),
    "hopper": ({}, {"dropout_p": 0.1, "seed": 1}),
}


def passes(backend: str, mask: str, lengths: tuple[int, int], head_dim: int, **options) -> None:
    """The forward and, for more than a few queries, the backward pass of one call."""
    inputs = make_inputs(
        2, HEADS, *lengths, head_dim, kv_heads=KV_HEADS, dtype=torch.float16, device="cuda"
    )
    leaves = [x.requires_grad_() for x in inputs[:3]]
    attended = masks.parse(mask)(lengths, device="cuda")
    wanted = list(leaves)
    if options.pop("bias", False):
        options["bias"] = torch.randn(HEADS, sum(lengths) - 1, device="cuda", requires_grad=True)
        wanted.append(options["bias"])
    if options.pop("chosen", False):
        grid = attended.grid
        scores = torch.rand(2, HEADS, grid.nq, grid.nk, device="cuda", requires_grad=True)
        attended = attended.keep_topk(scores, 2)
        wanted.append(scores)
    out, lse = sparseflash.attention(
        *leaves, attended, backend=backend, return_lse=True, **options
    )
    torch.autograd.grad((out, lse), wanted, (inputs[3], torch.ones_like(lse)))


def main(backend: str) -> None:
    key_lengths = torch.tensor([0, 170], device="cuda")
    for head_dim in (64, 128):
        for mask in ("full()", "causal() & local(90)"):
            for options in OPTIONS[backend]:
                passes(backend, mask, (200, 330), head_dim, **options)
        passes(backend, "local(90)", (200, 330), head_dim, key_lengths=key_lengths)
        passes(backend, "full()", (3, 2000), head_dim)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main(sys.argv[1])
