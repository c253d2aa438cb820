from collections.abc import Sequence

import torch
from torch import Tensor

from masks.block_mask import BlockMask
from masks.build import from_intervals
from masks.grid import Grid
from masks.pattern import Pattern


def documents(lengths: Sequence[int], k_lengths: Sequence[int] | None = None) -> Pattern:
    """Packed sequences: the queries of document n attend the keys of document n, and no others.

    lengths: tokens of each document, summing to q_len; k_lengths: the same for the keys when they
        differ.
    Raises ValueError for lengths below 0, for lists of different lengths, and for sums other than
    the sequence length.
    """
    q_lengths = [int(n) for n in lengths]
    k_lengths = q_lengths if k_lengths is None else [int(n) for n in k_lengths]
    if len(q_lengths) != len(k_lengths) or min([0, *q_lengths, *k_lengths]) < 0:
        raise ValueError(
            f"lengths must be >= 0 and as many as k_lengths, got {q_lengths} and {k_lengths}"
        )

    def build(grid: Grid) -> BlockMask:
        if (sum(q_lengths), sum(k_lengths)) != grid.seq_len:
            raise ValueError(
                f"lengths must sum to seq_len {grid.seq_len}, got "
                f"{(sum(q_lengths), sum(k_lengths))}"
            )
        per_query = torch.tensor(q_lengths, device=grid.device)
        keys = torch.tensor(k_lengths, device=grid.device)
        end = keys.cumsum(0)
        return from_intervals(grid, _spread(end - keys, per_query), _spread(end, per_query))

    return Pattern(f"documents({len(q_lengths)} of {min(q_lengths)} to {max(q_lengths)})", build)


def _spread(value: Tensor, times: Tensor) -> Tensor:
    return torch.repeat_interleave(value, times)
