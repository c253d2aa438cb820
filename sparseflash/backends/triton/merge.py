"""The host side of the kernels that merge, add and copy rows."""

from typing import Any

import triton
from torch import Tensor

from sparseflash.backends.triton import configs
from sparseflash.backends.triton.kernels.merge import (
    merge_rows_kernel,
    write_rows_kernel,
    write_rows_of_both_kernel,
)
from sparseflash.backends.triton.launch import launch_with_layout

ROWS = 32  # of a program; with 128 dims in 16 bits a warp reads four rows at a time


def merge_rows(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    rows: Tensor | None,
    part_rows: Tensor | None = None,
) -> None:
    """Merges rows of a part into rows of (out, lse); see sparseflash.merge.merge_in_place.

    Args:
        out, lse: (batch, heads, tokens, value_dim) and float32 (batch, heads, tokens).
        part_out, part_lse: The same of the part; part_out may have another dtype than out.
        rows: int64, the token of each row in out, all different; None if they are all in order.
        part_rows: int64, the token of each row in part_out; None if they are all in order.

    Raises:
        ValueError: There are not as many rows of the part as of the result.
    """
    # Strides of the LSE are passed as they are: with token strides of 1 among those of the tensors
    # the common alignment would be 1.
    lses = (lse, *lse.stride(), part_lse, *part_lse.stride())
    _launch(merge_rows_kernel, (out, part_out), lses, rows, part_rows)


def add_rows(
    total: Tensor, part: Tensor, rows: Tensor | None, part_rows: Tensor | None = None
) -> None:
    """Adds rows of a part to rows of a total; see sparseflash.merge.add_in_place.

    Args:
        total, part: (batch, heads, tokens, dims), with numbers of tokens and dtypes of their own.
        rows, part_rows: As in merge_rows.
    """
    _launch(write_rows_kernel, (total, part), (), rows, part_rows, ADDS=True)


def copy_rows(
    total: Tensor, part: Tensor, rows: Tensor | None, part_rows: Tensor | None = None
) -> None:
    """Copies rows of a part to rows of a total; arguments as in add_rows."""
    _launch(write_rows_kernel, (total, part), (), rows, part_rows, ADDS=False)


def write_rows_of_both(
    totals: tuple[Tensor, Tensor],
    parts: tuple[Tensor, Tensor],
    rows: Tensor | None,
    part_rows: Tensor | None,
    adds: bool,
) -> None:
    """Adds or copies rows of keys and of values, or gradients of them, in one launch.

    Args:
        totals, parts: Two tensors each as in add_rows, with as many heads; their dims may differ.
        rows, part_rows: As in merge_rows.
        adds: Whether rows are added, not copied.
    """
    (key, value), (key_part, value_part) = totals, parts
    sizes = {"KEY_DIM": key.shape[3], "KEY_DIMS": configs.padded_dims(key.shape[3])}
    tensors = (key, key_part, value, value_part)
    _launch(write_rows_of_both_kernel, tensors, (), rows, part_rows, ADDS=adds, **sizes)


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    others: tuple[Tensor | int, ...],
    rows: Tensor | None,
    part_rows: Tensor | None,
    **constants: int,
) -> None:
    """Launches a kernel of one or several totals, each followed by its part."""
    total, part = tensors[-2:]
    batch, heads, _, dims = part.shape
    merged = ((total, rows), (part, part_rows))
    q_len, of_part = (x.shape[2] if index is None else len(index) for x, index in merged)
    if q_len != of_part:
        raise ValueError(f"part_rows must be as many as rows, got {of_part} and {q_len}")
    sizes = {"VALUE_DIM": dims, "VALUE_DIMS": configs.padded_dims(dims), "ROWS": ROWS}
    launch_with_layout(
        kernel,
        (triton.cdiv(q_len, ROWS), heads, batch * len(tensors) // 2),
        tensors,
        (*others, rows, part_rows, q_len),
        constants | sizes | {"enable_fp_fusion": True},
    )
