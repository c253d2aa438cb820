from collections.abc import Sequence
from itertools import accumulate

import torch

from masks import block_mask
from masks._core.grid import Grid
from masks._core.intervals import empty
from masks._parse import optional_pattern
from masks._pattern import Pattern, builtin
from masks.arguments import check_integers
from masks.block_mask import BlockMask
from masks.builders import from_intervals, from_runs, paste
from masks.patterns.full import full


@builtin(pattern=optional_pattern)
def documents(
    lengths: Sequence[int],
    k_lengths: Sequence[int] | None = None,
    pattern: Pattern | str | None = None,
) -> Pattern:
    """Packed sequences: the queries of document n attend keys of document n, and no others.

    Args:
        lengths: Number of queries of each document, with the sum q_len.
        k_lengths: Number of keys of each document, with the sum k_len; by default `lengths`.
        pattern: A Pattern or its text: which keys of its document a query attends, by default all.
            It is applied to each document, whose first token is the first token of a block. Its
            block size is that of the result. Text is parsed once, when `documents` is called: a
            file that it names is run then, and not when a saved pattern is loaded.

    Raises:
        TypeError: Lengths are not integers, or `pattern` has another type.
        ValueError: `lengths` is empty, a length is below 0, or the lists differ in length. In a
            call of the pattern: the sums are not the sequence length.

    Reference:
        Krell et al. 2021, Efficient sequence packing without cross-contamination.
    """
    assert not isinstance(pattern, str), "the decorator has resolved it"
    q_lengths = check_integers("lengths", lengths, least=0)
    k_lengths = q_lengths if k_lengths is None else check_integers("k_lengths", k_lengths, least=0)
    if not q_lengths or len(q_lengths) != len(k_lengths):
        raise ValueError(
            "lengths must have at least one entry, and as many as k_lengths, got "
            f"{q_lengths} and {k_lengths}"
        )

    def build(grid: Grid) -> BlockMask:
        if (sum(q_lengths), sum(k_lengths)) != grid.seq_len:
            raise ValueError(
                f"lengths must sum to seq_len {grid.seq_len}, got "
                f"{(sum(q_lengths), sum(k_lengths))}"
            )
        if pattern is None:
            return _all_keys(grid, q_lengths, k_lengths)
        return _own_pattern(grid, q_lengths, k_lengths, pattern)

    shown = "" if pattern is None else f", {pattern.name}"
    span = f"{len(q_lengths)} of {min(q_lengths)} to {max(q_lengths)}"
    own = full() if pattern is None else pattern
    name = f"documents({span}{shown})"
    return Pattern(name, build, block_size=own.block_size, of_tokens=own.of_tokens)


def _all_keys(grid: Grid, q_lengths: list[int], k_lengths: list[int]) -> BlockMask:
    per_query = torch.tensor(q_lengths, device=grid.device)
    keys = torch.tensor(k_lengths, device=grid.device)
    end = keys.cumsum(0)
    low, high = (t.repeat_interleave(per_query) for t in (end - keys, end))
    return from_intervals(grid, low, high)


def _own_pattern(
    grid: Grid, q_lengths: list[int], k_lengths: list[int], pattern: Pattern
) -> BlockMask:
    sizes = list(zip(q_lengths, k_lengths, strict=True))
    starts = zip(accumulate(q_lengths, initial=0), accumulate(k_lengths, initial=0), strict=True)
    built = {
        size: pattern(size, grid.block_size, grid.device)
        for size in dict.fromkeys(sizes)
        if min(size) > 0
    }
    if not built:
        return from_runs(grid, empty(grid.device))
    # One object for all documents of a size: paste computes it once.
    heads = [
        {size: mask.head(h) for size, mask in built.items()}
        for h in range(next(iter(built.values())).num_heads)
    ]
    corners = [(size, *start) for size, start in zip(sizes, starts, strict=False) if size in built]
    return block_mask.stack(
        [paste(grid, [(head[size], q, k) for size, q, k in corners]) for head in heads]
    )
