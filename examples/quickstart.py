"""Attention with a sparsity pattern, forward and backward, on the CPU or a GPU."""

import torch

import masks
import sparseflash

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOKENS = 1024

# A window of 128 tokens, and 16 tokens that all see, in a causal model.
pattern = (masks.local(128) | masks.global_tokens(16)) & masks.causal()
mask = pattern(TOKENS, block_size=64)  # attention takes the pattern, too, and does this
print(f"{mask.density:.1%} of the blocks are computed")

# (batch, heads, tokens, head dim); keys and values may have fewer heads.
query = torch.randn(2, 8, TOKENS, 64, device=DEVICE, dtype=DTYPE, requires_grad=True)
key = torch.randn(2, 2, TOKENS, 64, device=DEVICE, dtype=DTYPE, requires_grad=True)
value = torch.randn_like(key, requires_grad=True)

out, lse = sparseflash.attention(query, key, value, mask, return_lse=True)
out.float().square().mean().backward()
print("output", tuple(out.shape), "log-sum-exp", tuple(lse.shape), "dK", tuple(key.grad.shape))

print(sparseflash.explain(query, key, value, mask))
