"""The host side of the kernels that merge and add rows."""

from typing import Any

import triton
from torch import Tensor

from sparseflash.backends.triton import configs
from sparseflash.backends.triton.kernels.merge import add_rows_kernel, merge_rows_kernel
from sparseflash.backends.triton.launch import launch_with_layout

ROWS = 32  # of a program; with 128 dims in 16 bits a warp reads four rows at a time


def merge_rows(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, rows: Tensor | None
) -> None:
    """Merges a part into rows of (out, lse); see sparseflash.merge.merge_in_place.

    Args:
        out, lse: (batch, heads, tokens, value_dim) and float32 (batch, heads, tokens).
        part_out, part_lse: The same for q_len rows; part_out has the dtype of out.
        rows: int64 (q_len,), the token of each row of the part, all different; None if the part
            has all tokens.
    """
    batch, heads, q_len, value_dim = part_out.shape
    launch_with_layout(
        merge_rows_kernel,
        (triton.cdiv(q_len, ROWS), heads, batch),
        (out, part_out),
        # Not among the tensors above: token strides of 1 would leave them a common alignment of 1.
        (lse, *lse.stride(), part_lse, *part_lse.stride(), rows, q_len),
        _constants(value_dim),
    )


def add_rows(total: Tensor, part: Tensor, rows: Tensor) -> None:
    """Adds rows of one dtype to others; see sparseflash.merge.add_in_place.

    Args:
        total: (batch, heads, tokens, dims).
        part: (batch, heads, q_len, dims), of the same dtype.
        rows: As in merge_rows.
    """
    batch, heads, q_len, dims = part.shape
    launch_with_layout(
        add_rows_kernel,
        (triton.cdiv(q_len, ROWS), heads, batch),
        (total, part),
        (rows, q_len),
        _constants(dims),
    )


def _constants(dims: int) -> dict[str, Any]:
    return {
        "VALUE_DIM": dims,
        "VALUE_DIMS": configs.padded_dims(dims),
        "ROWS": ROWS,
        "enable_fp_fusion": True,
    }
