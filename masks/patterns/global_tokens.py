from collections.abc import Sequence

import torch

from masks.block_mask import BlockMask
from masks.build import from_intervals
from masks.grid import Grid
from masks.pattern import Pattern, builtin


@builtin
def global_tokens(tokens: int | Sequence[int]) -> Pattern:
    """Chosen tokens attend every key and are attended by every query: q in tokens or k in tokens.

    tokens: how many of the first tokens, or their indices. Indices past the end of a sequence are
        left out.
    Raises ValueError for a negative number or index, or none at all.
    Source: Beltagy et al. 2020, Longformer; Zaheer et al. 2020, BigBird.
    """
    spans = [(0, tokens)] if isinstance(tokens, int) else _spans(tokens)
    if not spans or min(low for low, _ in spans) < 0 or max(high for _, high in spans) < 1:
        raise ValueError(f"tokens must be at least 1, or indices of at least 0, got {tokens!r}")

    def build(grid: Grid) -> BlockMask:
        parts = [_span(grid, low, high) for low, high in spans]
        mask = parts[0]
        for part in parts[1:]:
            mask = mask | part
        return mask

    return Pattern(f"global_tokens({tokens})", build)


def _spans(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Indices as ranges [low, high)."""
    spans: list[tuple[int, int]] = []
    for token in sorted(set(tokens)):
        if spans and spans[-1][1] == token:
            spans[-1] = (spans[-1][0], token + 1)
        else:
            spans.append((token, token + 1))
    return spans


def _span(grid: Grid, low: int, high: int) -> BlockMask:
    q = torch.arange(grid.q_len, device=grid.device)
    chosen = (q >= low) & (q < high)
    rows = from_intervals(grid, torch.zeros_like(q), torch.where(chosen, grid.k_len, 0))
    return rows | from_intervals(grid, torch.full_like(q, low), torch.full_like(q, high))
