"""The host side of the kernel that merges rows."""

import triton
from torch import Tensor

from sparseflash.backends.triton import configs
from sparseflash.backends.triton.kernels.merge import merge_rows_kernel
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
