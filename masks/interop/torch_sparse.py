"""Masks as sparse tensors of torch."""

import torch
from torch import Tensor

from masks.block_mask import BlockMask
from masks.mask_batch import check_block_mask


def to_torch(mask: BlockMask, layout: torch.layout = torch.sparse_bsr) -> Tensor:
    """Converts a mask to a sparse tensor of torch.

    Args:
        mask: A mask of one head.
        layout: torch.sparse_bsr for whole blocks, torch.sparse_csr for pairs.

    Returns:
        A bool tensor, (nq * bq, nk * bk) for sparse_bsr, (q_len, k_len) for sparse_csr.

    Raises:
        TypeError: `mask` is not a BlockMask.
        ValueError: Another layout is given, or the mask has several heads.
    """
    check_block_mask(mask)
    blocks = mask.to_scipy()
    if layout == torch.sparse_bsr:
        parts, shape = (blocks.indptr, blocks.indices, blocks.data), blocks.shape
        make = torch.sparse_bsr_tensor
    elif layout == torch.sparse_csr:
        elements = blocks.tocsr()[: mask.seq_len[0], : mask.seq_len[1]]
        elements.eliminate_zeros()
        parts, shape = (elements.indptr, elements.indices, elements.data), elements.shape
        make = torch.sparse_csr_tensor
    else:
        raise ValueError(f"layout must be torch.sparse_bsr or torch.sparse_csr, got {layout}")
    # New tensors: an array without elements has stride 0 in numpy, which torch 2.11 refuses.
    crow, column = (
        torch.empty(len(part), dtype=torch.int64).copy_(torch.from_numpy(part))
        for part in parts[:2]
    )
    values = torch.from_numpy(parts[2])
    return make(crow, column, values, size=shape, device=mask.device, check_invariants=True)


def from_torch(matrix: Tensor, block_size: int | tuple[int, int] = 128) -> BlockMask:
    """Converts a sparse tensor of torch: stored non-zero entries attend.

    A sparse_bsr tensor has whole blocks. If it was made by to_torch from a mask with clipped
    blocks, crop the result to the lengths of that mask.

    Args:
        matrix: A tensor (q_len, k_len) with layout sparse_bsr, sparse_csr or sparse_coo.
        block_size: Block size in tokens, one number or (bq, bk).

    Returns:
        A mask on the device of `matrix`.

    Raises:
        TypeError: `matrix` is not a tensor.
        ValueError: `matrix` has another layout.
    """
    import scipy.sparse  # here, because it takes longer to import than all of masks

    if not isinstance(matrix, Tensor):
        raise TypeError(f"matrix must be a sparse tensor, got {type(matrix).__name__}")
    if matrix.layout in (torch.sparse_bsr, torch.sparse_csr):
        values, column, crow = (
            x.cpu().numpy() for x in (matrix.values(), matrix.col_indices(), matrix.crow_indices())
        )
        make = (
            scipy.sparse.bsr_array if matrix.layout == torch.sparse_bsr else scipy.sparse.csr_array
        )
        found = make((values, column, crow), shape=tuple(matrix.shape))
    elif matrix.layout == torch.sparse_coo:
        matrix = matrix.coalesce()
        index = tuple(matrix.indices().cpu().numpy())
        found = scipy.sparse.coo_array(
            (matrix.values().cpu().numpy(), index), shape=tuple(matrix.shape)
        )
    else:
        raise ValueError(
            f"matrix must be sparse_bsr, sparse_csr or sparse_coo, got {matrix.layout}"
        )
    return BlockMask.from_scipy(found, block_size).to(matrix.device)
