"""The host side of the kernels that merge and add rows."""

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
        (out, part_out, lse.unsqueeze(-1), part_lse.unsqueeze(-1)),
        (rows, q_len),
        {
            "VALUE_DIM": value_dim,
            "VALUE_DIMS": configs.padded_dims(value_dim),
            "ROWS": ROWS,
            "enable_fp_fusion": True,
        },
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
        {
            "VALUE_DIM": dims,
            "VALUE_DIMS": configs.padded_dims(dims),
            "ROWS": ROWS,
            "enable_fp_fusion": True,
        },
    )
