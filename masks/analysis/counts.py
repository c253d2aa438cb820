"""Counts of a mask: keys of each query, attended pairs, computed pairs."""

import torch
from torch import Tensor

from masks._core.bit_tiles import unpack
from masks.block_mask import BlockMask


def keys_per_query(mask: BlockMask) -> Tensor:
    """The number of keys that each query attends: int64 (num_heads, q_len)."""
    blocks, g = mask.block_set, mask.grid
    _, _, first, last = g.locate_runs(blocks.full)
    keys = (last * g.bk).clamp(max=g.k_len) - first * g.bk
    by_block = torch.zeros(blocks.num_masks * g.nq, dtype=torch.int64, device=g.device)
    by_block.index_add_(0, g.stacked_row(blocks.full.begin), keys)
    count = by_block[:, None].repeat(1, g.bq)
    by_row = unpack(blocks.bit_tiles, g.bk).sum(2)
    count.index_add_(0, g.stacked_row(blocks.partial), by_row[blocks.partial_bit_tile])
    heads = count.view(blocks.num_masks, -1)[:, : g.q_len]
    return heads[list(blocks.head_to_mask)]


def attended_pairs(mask: BlockMask) -> int:
    """The number of pairs that attend, summed over heads."""
    return int(keys_per_query(mask).sum())


def computed_pairs(mask: BlockMask) -> int:
    """The number of pairs in non-zero blocks, inside the sequence, summed over heads."""
    g, blocks = mask.grid, mask.block_set
    # Runs are not expanded: a full mask has as many blocks as its length squared.
    _, _, first, last = g.locate_runs(blocks.full)
    of_runs = (last * g.bk).clamp(max=g.k_len) - first * g.bk
    of_partial = (g.k_len - blocks.partial % g.row_stride * g.bk).clamp(max=g.bk)
    keys = torch.cat([of_runs, of_partial])
    stacked = g.stacked_row(torch.cat([blocks.full.begin, blocks.partial]))
    queries = (g.q_len - stacked % g.nq * g.bq).clamp(max=g.bq)
    per_mask = torch.bincount(stacked // g.nq, (keys * queries).double(), blocks.num_masks)
    return int(per_mask[list(blocks.head_to_mask)].sum())
