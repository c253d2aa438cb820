from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from masks._core.grid import Grid
from masks._pattern import Pattern, builtin
from masks.arguments import check_integer, check_integers
from masks.block_mask import BlockMask
from masks.builders import from_cross


@builtin()
def global_tokens(tokens: int | Sequence[int]) -> Pattern:
    """Global tokens attend every key and are attended by every query: q in tokens or k in tokens.

    Args:
        tokens: The number of global tokens, which are the first ones, or their indices. Indices
            past the end of a sequence are ignored.

    Raises:
        TypeError: `tokens` are not integers.
        ValueError: The number is below 1, an index is negative, or there is no index.

    Reference:
        Beltagy et al. 2020, Longformer; Zaheer et al. 2020, BigBird.
    """
    if isinstance(tokens, Integral):
        tokens = indices = check_integer("tokens", tokens, least=1)
    else:
        tokens = check_integers("tokens", tokens, least=0)
        indices = torch.tensor(tokens, dtype=torch.int64, device="cpu")
    if not tokens:
        raise ValueError("tokens must be at least 1, or indices of at least 0, got none")

    def chosen(length: int, device: torch.device) -> Tensor:
        """bool (length,)"""
        among = torch.zeros(length, dtype=torch.bool, device=device)
        index = (
            slice(indices) if isinstance(indices, int) else indices[indices < length].to(device)
        )
        among[index] = True
        return among

    def build(grid: Grid) -> BlockMask:
        queries, keys = (chosen(length, grid.device) for length in grid.seq_len)
        return from_cross(grid, queries, keys)

    return Pattern(f"global_tokens({tokens})", build, of_tokens=True)
