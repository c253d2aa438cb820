"""MaskBatch: one block mask for each batch element."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from masks._core.grid import Grid, OnGrid
from masks.arguments import check_dtype, check_index, check_integer, checked_device
from masks.block_mask import BlockMask, DynamicMask, Size, stack
from masks.builders import from_cross
from masks.lookup_table import LookupTable
from masks.registry import Caching, Handled


@dataclass(frozen=True, eq=False, repr=False)
class MaskBatch(OnGrid, Caching, Handled):
    """One block mask for each batch element, all with the same number of heads.

    A MaskBatch is immutable. All masks are in one lookup table, which stores equal masks once.
    `==` compares all pairs. To save a batch, save `stacked`: MaskBatch(stacked, num_batches) is
    equal to the batch.

    Attributes:
        stacked: The masks of all heads of the first batch element, then those of the next one.
        num_batches: Number of batch elements.

    Raises:
        TypeError: `stacked` is not a BlockMask, or `num_batches` is not an integer.
        ValueError: `num_batches` does not divide the number of heads of `stacked`.
    """

    stacked: BlockMask
    num_batches: int

    def __post_init__(self) -> None:
        if not isinstance(self.stacked, BlockMask):
            raise TypeError(f"stacked must be a BlockMask, got {type(self.stacked).__name__}")
        check_integer("num_batches", self.num_batches, least=1)
        if self.stacked.num_heads % self.num_batches:
            raise ValueError(
                f"num_batches must divide the {self.stacked.num_heads} heads of stacked, got "
                f"{self.num_batches}"
            )
        super().__post_init__()

    @staticmethod
    def from_masks(masks: Sequence[BlockMask]) -> "MaskBatch":
        """A batch with one mask for each batch element.

        Args:
            masks: Batch element b gets masks[b]. The masks have the same lengths, block size,
                device and number of heads; a mask of one head applies to all heads.

        Returns:
            The batch.

        Raises:
            TypeError: `masks` is not a list of block masks.
            ValueError: `masks` is empty, or the masks differ in length, block size, device, or
                number of heads other than 1.
        """
        if not isinstance(masks, Sequence) or not all(isinstance(m, BlockMask) for m in masks):
            raise TypeError(f"masks must be a list of block masks, got {masks!r}")
        if not masks:
            raise ValueError("masks must have at least 1 entry, got none")
        grids = {mask.grid for mask in masks}
        heads = {mask.num_heads for mask in masks} - {1}
        if len(grids) > 1 or len(heads) > 1:
            raise ValueError(
                "masks must share lengths, block size, device and heads, got "
                f"{', '.join(dict.fromkeys(map(repr, masks)))}"
            )
        each = range(max(heads, default=1))
        own = {mask: [mask.head(h % mask.num_heads) for h in each] for mask in masks}
        return MaskBatch(stack([head for mask in masks for head in own[mask]]), len(masks))

    @staticmethod
    def with_keys(mask: "BlockMask | MaskBatch", keys: Tensor) -> "MaskBatch":
        """Restricts a mask to the valid keys of each batch element, for padding at any position.

        It waits for the device. If all padding comes after the keys, key_lengths of attention is
        faster.

        Args:
            mask: The mask of all batch elements, or a batch with a mask for each.
            keys: bool (batch, k_len), false at padding.

        Returns:
            The batch of restricted masks.

        Raises:
            TypeError: `mask` is not a BlockMask or a MaskBatch, or `keys` is not a bool tensor.
            ValueError: `keys` has another shape.
        """
        if not isinstance(mask, BlockMask | MaskBatch):
            raise TypeError(f"mask must be a BlockMask or a MaskBatch, got {type(mask).__name__}")
        check_dtype("keys", keys, torch.bool)
        q_len, k_len = mask.seq_len
        batch = mask.num_batches if isinstance(mask, MaskBatch) else max([1, *keys.shape[:1]])
        if keys.shape != (batch, k_len):
            any_batch = "batch" if isinstance(mask, BlockMask) else batch
            raise ValueError(f"keys must be ({any_batch}, {k_len}), got {tuple(keys.shape)}")
        distinct, which = torch.unique(keys.to(mask.device), dim=0, return_inverse=True)
        no_query = torch.zeros(q_len, dtype=torch.bool, device=mask.device)
        having = [from_cross(mask.grid, no_query, row) for row in distinct]
        masks = [mask] * batch if isinstance(mask, BlockMask) else [mask[b] for b in range(batch)]
        pairs = list(zip(masks, which.tolist(), strict=True))
        restricted = {(own, row): own & having[row] for own, row in dict.fromkeys(pairs)}
        return MaskBatch.from_masks([restricted[pair] for pair in pairs])

    @property
    def grid(self) -> Grid:
        """Lengths, block size, device, and the numbers nq and nk of block rows and columns."""
        return self.stacked.grid

    @property
    def num_heads(self) -> int:
        """Number of heads; masks with 1 head apply to any number of heads."""
        return self.stacked.num_heads // self.num_batches

    @property
    def density(self) -> float:
        """The density s: non-zero blocks over all blocks."""
        return self.stacked.density

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, batch_index: int) -> BlockMask:
        """The mask of a batch element.

        Raises:
            TypeError: `batch_index` is not an integer.
            IndexError: There is no such batch element.
        """
        batch_index = check_index("batch_index", batch_index, self.num_batches, "masks")
        first = batch_index * self.num_heads
        return stack([self.stacked.head(first + h) for h in range(self.num_heads)])

    def to_blocks(self) -> Tensor:
        """The non-zero blocks: bool (batch, heads or 1, nq, nk).

        Raises:
            ValueError: They would take more memory than the machine has.
        """
        return self._by_element(self.stacked.to_blocks())

    def to_dense(self) -> Tensor:
        """The dense masks: bool (batch, heads or 1, q_len, k_len).

        Raises:
            ValueError: They would take more memory than the machine has.
        """
        return self._by_element(self.stacked.to_dense())

    def to(self, device: torch.device | str) -> "MaskBatch":
        """The same masks on another device.

        Args:
            device: A torch device or its name.

        Returns:
            A batch; this object if it is on the device already.
        """
        same = checked_device(device) == self.device
        return self if same else MaskBatch(self.stacked.to(device), self.num_batches)

    def table(
        self, device: torch.device | str | None = None, block_size: Size | None = None
    ) -> LookupTable:
        """The lookup table that kernels read.

        Args:
            device: As in BlockMask.table.
            block_size: As in BlockMask.table.

        Returns:
            The table.
        """
        table = self.stacked.table(device, block_size)
        key = (table.device, table.block_size)
        if key not in self.tables:
            heads = table.head_to_mask.view(self.num_batches, self.num_heads)
            self.tables[key] = replace(table, head_to_mask=heads)
        return self.tables[key]

    def coverage(self, block_size: Size) -> float:
        """The share of larger blocks that the blocks of these masks cover; see BlockMask.coverage.

        Args:
            block_size: Size of the larger blocks in tokens, one number or (bq, bk).

        Returns:
            A number from 0 to 1.
        """
        return self.stacked.coverage(block_size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskBatch):
            return NotImplemented
        return self.num_batches == other.num_batches and self.stacked == other.stacked

    def __hash__(self) -> int:
        return hash((self.num_batches, self.stacked))

    def __repr__(self) -> str:
        return f"MaskBatch(num_batches={self.num_batches}, stacked={self.stacked})"

    def _by_element(self, stacked: Tensor) -> Tensor:
        return stacked.view(self.num_batches, self.num_heads, *stacked.shape[-2:])


_HINTS = {
    "Pattern": "pass pattern(seq_len)",
    "MaskBatch": "pass mask[b], the mask of one batch element",
    "DynamicMask": "pass mask.to_block_mask()",
}


def check_block_mask(mask: Any, allowed: str = "a BlockMask") -> None:
    """Raises TypeError for other types than BlockMask, with a hint how to convert them.

    allowed: what the error says is allowed, where the caller accepts another type, too
    """
    if not isinstance(mask, BlockMask):
        kind = type(mask).__name__
        hint = f"; {_HINTS[kind]}" if kind in _HINTS else ""
        raise TypeError(f"mask must be {allowed}, got {kind}{hint}")


CompiledMask = BlockMask | MaskBatch | DynamicMask  # all that has a lookup table
