"""AttentionSpec: the hashable properties of a call by which a backend is selected."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from masks.mask_batch import CompiledMask
from sparseflash.arguments import AnyMask, checked_block_scores, requires_gradient
from sparseflash.options import AttentionOptions
from sparseflash.score import any_requires_grad, find_score_function

FEW_QUERIES = 16  # the smallest side of a block: up to 16 queries are one block row of any mask


class CallFacts(NamedTuple):
    """Properties of a call besides those of query, key, value, mask and options.

    Args:
        has_key_lengths: Whether keys are masked past the length of their batch element.
        bias: Whether there is a bias.
        differentiates_bias: Whether the bias may need a gradient.
        differentiates_blocks: Whether the blocks of a DynamicMask may need a gradient.
        positions: Whether the tokens are part of a longer sequence; see Positions.
        max_logits: Whether the maximum logits are computed.
        differentiates_score_tensors: Whether a score tensor may need a gradient.
        shares_device: Whether other kernels run at the same time, such as those of an exchange
            between ranks.
        skips_empty_rows: Whether out and LSE, and the gradient of query, are not read where a
            block row attends no block. A backend that computes in place does not write them
            there; others may.
    """

    has_key_lengths: bool = False
    bias: bool = False
    differentiates_bias: bool = False
    differentiates_blocks: bool = False
    positions: bool = False
    max_logits: bool = False
    differentiates_score_tensors: bool = False
    shares_device: bool = False
    skips_empty_rows: bool = False

    @classmethod
    def of(
        cls,
        mask: AnyMask,
        has_key_lengths: bool,
        bias: Tensor | None,
        max_logits: bool,
        score_tensors: Sequence[Tensor] | None,
    ) -> Self:
        """The facts of a call of `attention` with these arguments."""
        gradients = (requires_gradient(bias), requires_gradient(checked_block_scores(mask)))
        score_gradients = any_requires_grad(score_tensors)
        return cls(
            has_key_lengths, bias is not None, *gradients, False, max_logits, score_gradients
        )


# The last facts, which context parallelism alone changes.
FACTS_OF_ONE_DEVICE = CallFacts()[CallFacts._fields.index("shares_device") :]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(AttentionOptions):
    """The options of one call, with resolved scale, and the properties of its tensors and mask.

    query is (batch, heads, q_len, head_dim), key (batch, kv_heads, k_len, head_dim), value (batch,
    kv_heads, k_len, value_dim). Query head h reads key head h // (heads // kv_heads). Lengths are
    in tokens.

    Args:
        block_size: (bq, bk) of the mask, in tokens.
        mask_heads: 1 if all heads share one mask, else heads.
        mask_group: Number of query heads that share the mask of their key head; 1 if masks belong
            to query heads or to all heads.
        mask_batch: 1 if all batch elements share one mask, else batch.
        has_key_lengths, bias, differentiates_bias, differentiates_blocks, max_logits,
            differentiates_score_tensors, shares_device, skips_empty_rows: As in CallFacts.
        positions: As in CallFacts, but False if the result does not depend on positions: only
            dropout, score functions and biases do.
    """

    scale: float  # pyright: ignore[reportGeneralTypeIssues]  (resolved, so it has no default)
    score: str | None = None
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: tuple[int, int]
    mask_heads: int = 1
    mask_group: int = 1
    mask_batch: int = 1
    has_key_lengths: bool = False
    bias: bool = False
    differentiates_bias: bool = False
    differentiates_blocks: bool = False
    positions: bool = False
    max_logits: bool = False
    differentiates_score_tensors: bool = False
    shares_device: bool = False
    skips_empty_rows: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        AttentionOptions.__post_init__(self)
        values = tuple(getattr(self, each.name) for each in fields(self) if each.compare)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def from_call(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: CompiledMask,
        options: AttentionOptions,
        facts: CallFacts | None = None,
    ) -> Self:
        """The spec of checked arguments.

        Args:
            query, key, value: Checked tensors.
            mask: The mask of the call, at its lengths.
            options: The options of the call.
            facts: Its other properties; None for the defaults of CallFacts.
        """
        facts = facts or CallFacts()
        needs_positions = options.dropout_p > 0 or options.score is not None or facts.bias
        batch, heads, q_len, head_dim = query.shape
        resolved_options = options.as_dict()
        if options.scale is None:
            resolved_options["scale"] = 1.0 / math.sqrt(head_dim)
        return cls(
            **resolved_options,
            batch=batch,
            heads=heads,
            kv_heads=key.shape[1],
            q_len=q_len,
            k_len=key.shape[2],
            head_dim=head_dim,
            value_dim=value.shape[3],
            dtype=query.dtype,
            device=query.device,
            block_size=mask.block_size,
            mask_heads=1 if mask.num_heads == 1 else heads,
            mask_group=1 if mask.num_heads == 1 else heads // mask.num_heads,
            mask_batch=mask.num_batches,
            **facts._replace(positions=facts.positions and needs_positions)._asdict(),
        )

    @property
    def widest_dim(self) -> int:
        """The larger of head_dim and value_dim."""
        return max(self.head_dim, self.value_dim)

    @property
    def few_queries(self) -> bool:
        """Whether all queries are in one block row, as in a decoding step."""
        return self.q_len <= FEW_QUERIES

    @property
    def extras(self) -> frozenset[str]:
        """The extras that the call needs: a subset of EVERY_EXTRA."""
        return frozenset(name for name, has_extra in _HAS_EXTRA.items() if has_extra(self))

    @property
    def without_sums_of_ds(self) -> "AttentionSpec":
        """The same call without gradients of a bias and of score tensors."""
        return replace(self, **dict.fromkeys(SUMS_OF_DS, False))

    def __str__(self) -> str:
        keys = f"{self.batch}, {self.kv_heads}, {self.k_len}"
        key, value = f"({keys}, {self.head_dim})", f"({keys}, {self.value_dim})"
        return (
            f"query ({self.batch}, {self.heads}, {self.q_len}, {self.head_dim}), key "
            + (f"and value {key}, " if key == value else f"{key}, value {value}, ")
            + f"{self.dtype} on {self.device}, block size {self.block_size}"
        )


# Gradients that another backend may compute than those of query, key and value. That of block
# scores is not one of them: a forward pass on another backend than the whole backward pass took
# longer (measured on an H200), and to compute their sums alone on another one is not measured.
SUMS_OF_DS = ("differentiates_bias", "differentiates_score_tensors")
POSITIONS = "dropout, score function or bias of a part of a sequence"
_HAS_EXTRA: dict[str, Callable[[AttentionSpec], bool]] = {
    "softcap": lambda spec: spec.softcap is not None,
    "score function": lambda spec: spec.score is not None,
    "score tensors": lambda spec: (
        spec.score is not None and bool(find_score_function(spec.score).tensors)
    ),
    "gradient of score tensors": lambda spec: spec.differentiates_score_tensors,
    "bias": lambda spec: spec.bias,
    "gradient of bias": lambda spec: spec.differentiates_bias,
    "mask of each batch element": lambda spec: spec.mask_batch > 1,
    "gradient of blocks": lambda spec: spec.differentiates_blocks,
    POSITIONS: lambda spec: spec.positions,
    "maximum logits": lambda spec: spec.max_logits,
}
EVERY_EXTRA = frozenset(_HAS_EXTRA)
