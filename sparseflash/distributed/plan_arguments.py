"""Checks of what makes a plan: arguments of `make_plan`, and the contents of a saved plan."""

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from masks import BlockMask, MaskBatch
from masks.arguments import check_integer, check_integers
from masks.mask_batch import check_block_mask


def check_plan_mask(mask: Any) -> None:
    """Raises if these are not masks of a sequence that attends itself."""
    if not isinstance(mask, MaskBatch):
        check_block_mask(mask, "a BlockMask or a MaskBatch")
    if mask.grid.q_len != mask.grid.k_len:
        raise ValueError(f"mask must have as many queries as keys, got {mask.seq_len}")


def union_of(batch: MaskBatch) -> BlockMask:
    """The mask of the pairs that attend in any batch element, for each head."""
    if "union" not in batch.cache:
        elements = dict.fromkeys(batch[index] for index in range(len(batch)))
        batch.cache["union"] = reduce(or_, elements)
    return batch.cache["union"]


def ranks_of(ranks: int | ProcessGroup | DeviceMesh, units: int) -> int:
    """The number of ranks; raises if it is not between 1 and the number of units."""
    if isinstance(ranks, (ProcessGroup, DeviceMesh)):
        if isinstance(ranks, DeviceMesh) and ranks.ndim != 1:
            raise ValueError(f"ranks must be a mesh of one dimension, got {ranks}")
        ranks = ranks.size()
    ranks = check_integer("ranks", ranks, least=1)
    if ranks > units:
        raise ValueError(f"ranks must be at most the {units} units of the mask, got {ranks}")
    return ranks


def check_owner(owner: Sequence[int], units: int, ranks: int) -> None:
    """Raises unless each unit is assigned to a rank, and each rank has a unit."""
    if len(owner) != units or set(owner) != set(range(ranks)):
        raise ValueError(
            f"strategy must assign each of {units} units to one of {ranks} ranks, and a unit to "
            f"every rank, got {len(owner)} of {sorted(set(owner))}"
        )


def checked_rounds(
    round_tokens: int | None, split: str, mask: BlockMask | MaskBatch
) -> int | None:
    """The value of round_tokens; raises if it or the split is invalid."""
    if split not in ("auto", "in place", "rows", "keys"):
        raise ValueError(f'split must be "auto", "in place", "rows" or "keys", got {split!r}')
    if round_tokens is None:
        return None
    if split == "rows":
        raise ValueError(f'round_tokens must be None with split "rows", got {round_tokens}')
    return check_integer("round_tokens", round_tokens, least=mask.grid.bk)


def checked_rows(rows: Sequence[int] | Tensor, count: int) -> tuple[int, ...]:
    """Numbers of block rows as integers; raises if they are not ascending or not below `count`."""
    numbers = tuple(check_integers("shared_rows", rows))
    inside = all(0 <= row < count for row in numbers)
    if not inside or any(later <= row for row, later in pairwise(numbers)):
        raise ValueError(
            f"shared_rows must be block rows from 0 to {count - 1}, ascending, got {list(numbers)}"
        )
    return numbers
