"""AttentionSpec: the hashable facts of one call, by which a backend says whether it can serve
it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch

TILE = (128, 128)  # tokens: the (queries, keys) that kernels of large tiles compute at a time
SMALL_TILE = (64, 64)  # likewise those of small ones
FEW_QUERIES = 16  # the least side of a block: so many queries are one row of blocks in any mask


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The facts of one attention call. Lengths in tokens.

    query is (batch, heads, q_len, head_dim), key and value are (batch, kv_heads, k_len, head_dim);
    query head h reads key head h // (heads // kv_heads). mask_heads is 1 (all heads share one
    mask) or heads, mask_batch likewise 1 or batch. precision, "ieee" or "tf32", is that of float32
    products. softcap is 0 for none; score names a ScoreFunction; bias says whether there is one,
    differentiates_bias whether its gradient may be wanted, differentiates_blocks whether that of
    the blocks of a DynamicMask may be. fill is the share that blocks of the mask cover of the
    TILEs that they touch, None where only the device knows; small_fill likewise of SMALL_TILEs.
    deterministic says whether the same inputs must give the same bits.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: tuple[int, int]
    mask_heads: int
    scale: float
    dropout_p: float
    has_key_lengths: bool
    precision: str = "ieee"
    softcap: float = 0.0
    score: str | None = None
    bias: bool = False
    differentiates_bias: bool = False
    mask_batch: int = 1
    differentiates_blocks: bool = False
    fill: float | None = 1.0
    small_fill: float | None = 1.0
    deterministic: bool = True
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        facts = tuple(getattr(self, fact.name) for fact in fields(self) if fact.compare)
        object.__setattr__(self, "_hash", hash(facts))

    def __hash__(self) -> int:
        return self._hash  # a call looks up by its facts what is known of them, several times

    @property
    def few_queries(self) -> bool:
        """Whether all queries lie in one row of blocks, as in a step of decoding."""
        return self.q_len <= FEW_QUERIES

    @property
    def extras(self) -> frozenset[str]:
        """What the call asks for that not every backend knows: some of EVERY_EXTRA."""
        return frozenset(name for name, asked in _ASKS_FOR.items() if asked(self))

    def __str__(self) -> str:
        return (
            f"query ({self.batch}, {self.heads}, {self.q_len}, {self.head_dim}), "
            f"key and value ({self.batch}, {self.kv_heads}, {self.k_len}, {self.head_dim}), "
            f"{self.dtype} on {self.device}, block size {self.block_size}"
        )


_ASKS_FOR: dict[str, Callable[[AttentionSpec], bool]] = {
    "softcap": lambda spec: spec.softcap > 0,
    "score function": lambda spec: spec.score is not None,
    "bias": lambda spec: spec.bias,
    "gradient of bias": lambda spec: spec.differentiates_bias,
    "mask of each batch element": lambda spec: spec.mask_batch > 1,
    "gradient of blocks": lambda spec: spec.differentiates_blocks,
}
EVERY_EXTRA = frozenset(_ASKS_FOR)
