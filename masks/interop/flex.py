"""Masks as masks of FlexAttention."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from masks._core.bit_tiles import WORD_BITS
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.interop.flash_attention import BlockSparseTensors, from_lists, to_block_lists


def to_flex(mask: BlockMask) -> flex_attention.BlockMask:
    """Converts a mask to a mask of FlexAttention with the same pairs and block size.

    Its mask_mod looks pairs up in the bit tiles, with an index of 4 bytes for every block.

    Args:
        mask: The mask.

    Returns:
        A BlockMask of FlexAttention.

    Raises:
        TypeError: `mask` is not a BlockMask.
    """
    lists = to_block_lists(mask)
    return flex_attention.BlockMask.from_kv_blocks(
        *lists[:4], BLOCK_SIZE=mask.block_size, mask_mod=_mask_mod(mask), seq_lengths=mask.seq_len
    )


def from_flex(mask: flex_attention.BlockMask, batch: int | None = None) -> BlockMask:
    """Converts a mask of FlexAttention.

    All pairs of its full blocks attend, and the pairs of its partial blocks for which mask_mod is
    true.

    Args:
        mask: A BlockMask of FlexAttention. It must not be the result of indexing another one,
            because indexing drops mask_mod.
        batch: Index of the batch element, if there are several. masks.MaskBatch.from_masks joins
            the results.

    Returns:
        The mask of the batch element.

    Raises:
        TypeError: `mask` is not a BlockMask of FlexAttention, or `batch` is not an integer.
        ValueError: The mask has several batch elements, and `batch` is not the index of one.
    """
    if not isinstance(mask, flex_attention.BlockMask):
        raise TypeError(f"mask must be a BlockMask of FlexAttention, got {type(mask)}")
    batches = mask.kv_num_blocks.shape[0]
    if batch is None and batches != 1:
        raise ValueError(
            f"batch must be from 0 to {batches - 1}, because mask has {batches}, got None"
        )
    b = check_integer("batch", 0 if batch is None else batch, least=0, most=batches - 1)
    full_count, full_index = mask.full_kv_num_blocks, mask.full_kv_indices
    if full_count is None or full_index is None:
        full_count, full_index = torch.zeros_like(mask.kv_num_blocks), mask.kv_indices
    (bq, bk), (q_len, k_len), mask_mod = mask.BLOCK_SIZE, mask.seq_lengths, mask.mask_mod
    own = slice(b, b + 1)
    lists = BlockSparseTensors(
        mask.kv_num_blocks[own], mask.kv_indices[own], full_count[own], full_index[own], (bq, bk)
    )
    element = torch.tensor(b, device="cpu")
    return from_lists(lists, (q_len, k_len), lambda h, q, k: mask_mod(element, h, q, k))


def _mask_mod(mask: BlockMask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    g, bit_tiles = mask.grid, mask.block_set.tiles_by_code()
    tile = mask.block_set.tile_code_grid().int()
    first_row = torch.tensor(mask.head_to_mask, dtype=torch.int32, device=mask.device) * g.nq
    one_head = mask.num_heads == 1

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = q // g.bq if one_head else first_row[h] + q // g.bq
        word = bit_tiles[tile[row, k // g.bk], q % g.bq, k % g.bk // WORD_BITS]
        return ((word >> (k % g.bk % WORD_BITS)) & 1) != 0

    return mask_mod
