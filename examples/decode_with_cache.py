"""Generate with a key-value cache: a prompt at once, then a token at a time."""

import torch
from torch import nn

from sparseflash.nn import KeyValueCache, Rotary, SparseAttention

VOCABULARY, DIM, HEADS, KV_HEADS, LAYERS, MAX_LEN = 100, 64, 4, 2, 2, 1024
PATTERN = "(local(64) | global_tokens(4)) & causal()"


class Decoder(nn.Module):
    """A small decoder of attention layers alone."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        rotary = Rotary(DIM // HEADS)
        self.layers = nn.ModuleList(
            SparseAttention(DIM, HEADS, PATTERN, kv_heads=KV_HEADS, rotary=rotary)
            for _ in range(LAYERS)
        )

    def forward(self, tokens, caches=None):
        x = self.embed(tokens)
        for layer, cache in zip(self.layers, caches or [None] * LAYERS, strict=True):
            x = x + layer(x, cache=cache)
        return x @ self.embed.weight.T


model = Decoder().eval()
caches = [KeyValueCache(1, KV_HEADS, MAX_LEN, DIM // HEADS) for _ in range(LAYERS)]
tokens = torch.randint(VOCABULARY, (1, 200))
with torch.no_grad():
    logits = model(tokens, caches)
    for _ in range(8):
        following = logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, following], 1)
        logits = model(following, caches)
    whole = model(tokens)[:, -1]  # the same without a cache
print("generated", tokens[0, 200:].tolist())
print(f"difference from the pass over all tokens: {(logits[:, -1] - whole).abs().max():.1e}")
