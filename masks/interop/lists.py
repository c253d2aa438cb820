"""Lists of blocks in the forms of several libraries: their checks, and their order."""

from typing import Any

import torch
from torch import Tensor

from masks._core.block_set import BlockSet
from masks._core.grid import Grid
from masks.arguments import check_dtype

INTEGERS = (torch.int32, torch.int64)


def check_lists(name: str, lists: Any, expected: type) -> None:
    if not isinstance(lists, expected):
        raise TypeError(f"{name} must be {expected.__name__}, got {type(lists).__name__}")


def check_counts_and_columns(lists: Any, count: str, index: str) -> None:
    """Raises unless both fields have integers, for the same batch elements, heads and rows."""
    rows = ("batch", "heads", "rows")
    counts = check_integers(count, getattr(lists, count), rows)
    columns = check_integers(index, getattr(lists, index), (*rows, "columns"))
    if columns.shape[:3] != counts.shape:
        raise ValueError(
            f"{index} must be ({', '.join(map(str, counts.shape))}, columns) like {count}, got "
            f"{tuple(columns.shape)}"
        )


def check_integers(name: str, tensor: Any, dims: tuple[str, ...]) -> Tensor:
    """Raises unless a tensor has integers and these dims."""
    check_dtype(name, tensor, *INTEGERS)
    if tensor.dim() != len(dims):
        raise ValueError(f"{name} must be ({', '.join(dims)}), got {tuple(tensor.shape)}")
    return tensor


def padded_lists(blocks: BlockSet, flat: Tensor) -> tuple[Tensor, Tensor]:
    """(counts, columns) of the blocks with these ascending flat indices, for every head."""
    g = blocks.grid
    row = g.stacked_row(flat)
    count = torch.bincount(row, minlength=blocks.num_masks * g.nq)
    slot = torch.arange(len(row), device=g.device) - (count.cumsum(0) - count)[row]
    columns = torch.zeros(len(count), g.nk, dtype=torch.int32, device=g.device)
    columns[row, slot] = (flat % g.row_stride).int()
    heads = list(blocks.head_to_mask)
    count = count.int().view(1, -1, g.nq)[:, heads]
    return count, columns.view(1, -1, g.nq, g.nk)[:, heads]


def sorted_blocks(grid: Grid, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """(ascending flat indices of the blocks, the permutation that sorts them)

    Raises:
        ValueError: A column is outside of the grid, or a block is listed twice.
    """
    wrong = (column < 0) | (column >= grid.nk)
    if bool(wrong.any()):
        raise ValueError(f"columns must be 0 to {grid.nk - 1}, got {int(column[wrong][0])}")
    flat, order = grid.flat_index(0, row, column.long()).sort()
    twice = (flat.diff() == 0).nonzero()
    if len(twice):
        _, at, block = (int(x) for x in grid.locate(flat[twice[0, 0]]))
        raise ValueError(f"a row must list a column once, got column {block} twice in row {at}")
    return flat, order
