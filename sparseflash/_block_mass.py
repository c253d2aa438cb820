"""The attention mass of each block."""

import torch
from einops import reduce
from torch import Tensor

from masks import BlockMask, MaskBatch
from masks.mask_batch import CompiledMask
from sparseflash._attention import attention
from sparseflash.arguments import (
    AnyMask,
    checked_bias,
    checked_mask,
    checked_tensors,
    lengths_in_range,
)
from sparseflash.dispatch.plan import compiled_mask


@torch.no_grad()
def block_mass(
    query: Tensor,
    key: Tensor,
    mask: AnyMask | None = None,
    *,
    key_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """The mean attention mass that the queries of a block row give to each block of keys.

    mass[i, j] = mean over the queries q in row i that have a key of sum_{k in j} P[q, k]

    Computed in float32 in about the time of one forward pass, without a gradient.

    Args:
        query, key, mask, key_lengths, bias, scale, softcap, backend: As in sparseflash.attention.

    Returns:
        float32 (batch, heads, nq, nk) for a mask of nq x nk blocks. A row sums to 1, or to 0 if
        none of its queries has a key.

    Raises:
        TypeError, ValueError, BackendError: As sparseflash.attention does.

    Reference:
        Jiang et al., "MInference 1.0", 2024 (patterns are chosen by their attention mass).
    """
    query, key, _ = checked_tensors(query, key, key, key_lengths)
    query, key = query.float(), key.float()
    bias = checked_bias(bias, query, query.shape[2], key.shape[2])
    # Clamped to each part of the keys below.
    key_lengths = lengths_in_range(key_lengths, key.shape[2], key.device)
    block_mask = compiled_mask(checked_mask(mask), query, key)
    bq, bk = block_mask.block_size
    q_len, k_len, head_dim = query.shape[2], key.shape[2], query.shape[3]
    # With values that are one-hot in the block of the key, attention sums P over the keys of each
    # block: of as many blocks at a time as a value has entries.
    width = head_dim * bk
    parts, lses = [], []
    for start in range(0, k_len, width):
        end = min(start + width, k_len)
        with torch.autocast(query.device.type, enabled=False):
            out, lse = attention(
                query,
                key[:, :, start:end],
                _block_of_key(end - start, bk, head_dim, key),
                _mask_of_keys(block_mask, start, end),
                scale=scale,
                softcap=softcap,
                bias=None if bias is None else bias[:, start : start + q_len + end - start - 1],
                key_lengths=None
                if key_lengths is None
                else (key_lengths - start).clamp(0, end - start),
                return_lse=True,
                backend=backend,
            )
        parts.append(out[..., : -(-(end - start) // bk)])
        lses.append(lse)
    shares = torch.stack(lses).softmax(0).nan_to_num(0.0)
    mass = torch.cat([p * s.unsqueeze(-1) for p, s in zip(parts, shares, strict=True)], dim=-1)
    return _mean_of_rows(mass, torch.stack(lses).amax(0) > -torch.inf, bq)


def _mask_of_keys(mask: CompiledMask, start: int, end: int) -> CompiledMask:
    """The mask of the keys `start` to `end - 1`; `start` is the first key of a block."""
    q_len, k_len = mask.seq_len
    if (start, end) == (0, k_len):
        return mask
    if isinstance(mask, BlockMask):
        return mask.crop(q_len, end).T.slice_queries(start, end).T
    if isinstance(mask, MaskBatch):
        part = _mask_of_keys(mask.stacked, start, end)
        assert isinstance(part, BlockMask)
        return MaskBatch(part, mask.num_batches)
    bk = mask.block_size[1]
    support = _mask_of_keys(mask.support, start, end)
    assert isinstance(support, BlockMask)
    return support.select(mask.blocks[..., start // bk : -(-end // bk)])


def _block_of_key(tokens: int, bk: int, head_dim: int, like: Tensor) -> Tensor:
    """1 at [., ., k, k // bk], 0 elsewhere, in the shape of keys."""
    block = torch.arange(tokens, device=like.device) // bk
    one_hot = torch.nn.functional.one_hot(block, head_dim).to(like.dtype)
    return one_hot.expand(*like.shape[:2], -1, -1)


def _mean_of_rows(mass: Tensor, has_key: Tensor, bq: int) -> Tensor:
    """(batch, heads, q_len, nk) -> (batch, heads, nq, nk), over the queries that have a key."""
    missing = -mass.shape[2] % bq
    mass = torch.nn.functional.pad(mass, (0, 0, 0, missing))
    count = torch.nn.functional.pad(has_key.float(), (0, missing))
    total = reduce(mass, "b h (i q) j -> b h i j", "sum", q=bq)
    return total / reduce(count, "b h (i q) -> b h i 1", "sum", q=bq).clamp(min=1)
