"""Documents of different length in one sequence, without padding and without mixing."""

import torch

import masks
import sparseflash

lengths = [200, 77, 340, 151]
total, heads, dim = sum(lengths), 4, 32
bounds = torch.tensor([0, *lengths]).cumsum(0).int()

# As in FlashAttention's varlen interface: (tokens of all documents, heads, head dim).
query, key, value = torch.randn(3, total, heads, dim).requires_grad_().unbind()
out = sparseflash.attention_varlen(query, key, value, bounds, bounds, mask="local(64) & causal()")
out.sum().backward()

# The same as a pattern, in the usual layout.
packed = masks.documents(lengths, pattern=masks.local(64) & masks.causal())
batched = [x.transpose(0, 1)[None] for x in (query, key, value)]
same = sparseflash.attention(*batched, packed)[0].transpose(0, 1)

print(f"{packed(total, 64).density:.1%} of the blocks are computed")
print(f"largest difference: {(out - same).abs().max():.1e}")
