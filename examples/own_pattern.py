"""Patterns of your own: from a rule for tokens, from a rule for blocks, from data."""

import torch

import masks
import sparseflash

TOKENS, BLOCK = 1024, 64


@masks.pattern
def summaries_or_near(q, k):
    """Tokens nearby, and the first 8 of every 256, which sum up their part."""
    return ((q - k).abs() < 64) | (k % 256 < 8)


@masks.block_pattern
def powers_of_two(i, j):
    """Blocks that are 0, 1, 2, 4, 8, ... away."""
    distance = (i - j).abs()
    return (distance & (distance - 1)) == 0


adjacency = torch.rand(TOKENS // BLOCK, TOKENS // BLOCK) < 0.2
learned = masks.BlockMask.from_blocks(adjacency, BLOCK)

choices = {
    "rule for tokens": (summaries_or_near & masks.causal())(TOKENS, BLOCK),
    "rule for blocks": powers_of_two(TOKENS, BLOCK),
    "matrix of blocks": learned,
    "each head its own": masks.stack([summaries_or_near, powers_of_two])(TOKENS, BLOCK),
}
query, key, value = torch.randn(3, 1, 2, TOKENS, 32).unbind()
for name, mask in choices.items():
    out = sparseflash.attention(query, key, value, mask)
    print(f"{name}: density {mask.density:.3f}, {mask.partial_blocks} partial blocks, {out.shape}")
