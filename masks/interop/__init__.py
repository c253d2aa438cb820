"""Exact conversion of masks to and from other libraries.

The libraries are FlexAttention, FlashAttention-4, cuDNN, FlashInfer and torch.sparse. BlockMask
itself converts dense matrices and those of scipy.
"""

from masks.interop.cudnn import (
    CudnnBlocks,
    from_cudnn_blocks,
    from_cudnn_intervals,
    to_cudnn_blocks,
    to_cudnn_intervals,
)
from masks.interop.flash_attention import BlockSparseTensors, from_block_lists, to_block_lists
from masks.interop.flashinfer import FlashInferBlocks, from_flashinfer, to_flashinfer
from masks.interop.flex import from_flex, to_flex
from masks.interop.torch_sparse import from_torch, to_torch

__all__ = [
    "BlockSparseTensors",
    "CudnnBlocks",
    "FlashInferBlocks",
    "from_block_lists",
    "from_cudnn_blocks",
    "from_cudnn_intervals",
    "from_flashinfer",
    "from_flex",
    "from_torch",
    "to_block_lists",
    "to_cudnn_blocks",
    "to_cudnn_intervals",
    "to_flashinfer",
    "to_flex",
    "to_torch",
]
