from collections.abc import Sequence
from numbers import Integral

import torch

from masks._core.grid import Grid
from masks.arguments import check_integer, check_integers
from masks.block_mask import BlockMask
from masks.builders import from_intervals
from masks.pattern import Pattern, builtin


@builtin()
def global_tokens(tokens: int | Sequence[int]) -> Pattern:
    """Chosen tokens attend every key and are attended by every query: q in tokens or k in tokens.

    tokens: how many of the first tokens, or their indices. Indices past the end of a sequence are
        left out.
    Raises TypeError or ValueError for a number below 1, a negative index, no index at all, or what
    is no integer.
    Source: Beltagy et al. 2020, Longformer; Zaheer et al. 2020, BigBird.
    """
    if isinstance(tokens, Integral):
        tokens = check_integer("tokens", tokens, least=1)
        spans = [(0, tokens)]
    else:
        tokens = check_integers("tokens", tokens, least=0)
        spans = _spans(tokens)
    if not spans:
        raise ValueError("tokens must be at least 1, or indices of at least 0, got none")

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
