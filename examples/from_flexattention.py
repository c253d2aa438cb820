"""Masks of FlexAttention and back, exactly; the result against attention with a dense mask."""

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

import masks
import sparseflash
from masks import interop

TOKENS = 512


def prefix_lm(b, h, q, k):
    """The first 100 tokens see one another; the rest is causal."""
    return (k <= q) | (k < 100)


flex_mask = create_block_mask(prefix_lm, None, None, TOKENS, TOKENS, device="cpu")
mask = interop.from_flex(flex_mask)
print(f"density {mask.density:.3f}, {mask.partial_blocks} partial blocks")


@masks.pattern
def prefix(q, k):
    return (k <= q) | (k < 100)


print("the pattern is the same mask:", prefix(TOKENS, mask.block_size) == mask)
print("and converts back:", interop.from_flex(interop.to_flex(mask)) == mask)

query, key, value = torch.randn(3, 1, 2, TOKENS, 64).unbind()
ours = sparseflash.attention(query, key, value, prefix)
theirs = scaled_dot_product_attention(query, key, value, attn_mask=mask.to_dense())
print(f"largest difference of the outputs: {(ours - theirs).abs().max():.1e}")
