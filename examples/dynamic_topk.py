"""The device chooses the blocks: the best k of every row, with a gradient to their scores."""

import torch
from torch import nn

import masks
import sparseflash

TOKENS, BLOCK, HEADS, DIM, K = 512, 64, 4, 32, 3


class RoutedAttention(nn.Module):
    """Causal attention to the K best blocks, scored by pooled queries and keys."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(DIM, DIM)
        self.support = masks.causal()(TOKENS, BLOCK)

    def forward(self, query, key, value):
        pooled = [x.unflatten(2, (-1, BLOCK)).mean(3) for x in (query, key)]
        scores = self.route(pooled[0]) @ pooled[1].mT  # (batch, heads, rows, columns) of blocks
        mask = self.support.select_topk(scores, K)
        return sparseflash.attention(query, key, value, mask)


torch.manual_seed(0)
model = RoutedAttention()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
query, key, value = torch.randn(3, 2, HEADS, TOKENS, DIM).unbind()
target = sparseflash.attention(query, key, value, masks.causal())
for step in range(5):
    loss = (model(query, key, value) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: distance from dense attention {loss.item():.5f}")
