"""Checks outputs and gradients against float64 standard attention on a sample of query rows.

Only checked results are timed. The gradient that goes into the backward pass is zero outside of
the sampled query rows. So these rows alone determine all of dK and dV, and the reference takes
O(rows x keys) at any sequence length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from masks import BlockMask
from sparseflash.dropout import keep_mask, keep_probability

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

SAMPLED_ROWS = 64
DROPOUT_SEED = 7
# Largest error of a kernel: this factor times the error of materialised attention in its dtype,
ERROR_FACTOR = 3
# plus this share of the largest value. It is for exp(score - LSE): the rounding of float32 scores
# and LSEs of about 10 is some 6 eps, which the softmax of materialised scores does not have. The
# error of an LSE is the same along its row, so it stays in sums of gradients that nearly cancel.
ROUNDING = 64 * torch.finfo(torch.float32).eps


class CheckError(Exception):
    """A result differs from the reference by more than rounding explains."""


@dataclass(frozen=True)
class Extras:
    """The arguments of an implementation besides the mask.

    Attributes:
        dropout_p: Probability of dropout; ours uses DROPOUT_SEED.
        key_lengths: Integers (batch,), the number of keys of each batch element.
    """

    dropout_p: float = 0.0
    key_lengths: Tensor | None = None

    def keys(self, k_len: int, device: torch.device) -> Tensor:
        """The keys that are not padding: bool, broadcastable to (batch, heads, rows, k_len)."""
        if self.key_lengths is None:
            return torch.ones((), dtype=torch.bool, device=device)
        key = torch.arange(k_len, device=device)
        return key < self.key_lengths.to(device).view(-1, 1, 1, 1)

    def keep(self, query: Tensor, rows: Tensor, k_len: int) -> Tensor | None:
        """(batch, heads, rows, k_len): the factor of each probability in our dropout."""
        if self.dropout_p == 0:
            return None
        batch, heads = query.shape[:2]
        bh = torch.arange(batch * heads, device=query.device).view(batch, heads, 1, 1)
        pairs = (rows[:, None], torch.arange(k_len, device=query.device))
        return keep_mask(DROPOUT_SEED, bh, *pairs, self.dropout_p) / keep_probability(
            self.dropout_p
        )


class SampledRows(NamedTuple):
    """Sampled queries of a mask. To find their keys takes longer than the rest of a check.

    Attributes:
        rows: Numbers of the queries.
        allowed: See dense_rows.
    """

    rows: Tensor
    allowed: Tensor

    @classmethod
    def of(cls, mask: BlockMask, device: torch.device) -> "SampledRows":
        rows = sample_rows(mask.seq_len[0]).to(device)
        return cls(rows, dense_rows(mask, rows))


def check(
    attend: Attend,
    inputs: Sequence[Tensor],
    sample: SampledRows,
    what: str,
    backward: bool = True,
    extras: Extras | None = None,
) -> None:
    """Compares a function, and its gradients if `backward`, with float64 standard attention.

    Args:
        inputs: query (batch, heads, q_len, head_dim), key and value (batch, kv_heads, k_len,
            head_dim), which require gradients.
        sample: The queries that are compared.

    Raises:
        CheckError: An error is too large; the message names `what`, the tensor and its worst row.
    """
    query = inputs[0]
    rows, allowed = sample
    keep = None
    if extras is not None:
        allowed = allowed & extras.keys(inputs[1].shape[2], query.device)
        keep = extras.keep(query, rows, inputs[1].shape[2])
    grad_out = torch.zeros_like(query).index_copy_(2, rows, torch.randn_like(query[:, :, rows]))
    facts = (inputs, allowed, keep, rows, grad_out)
    expected = _standard(*facts, torch.float64, backward)
    standard = _standard(*facts, query.dtype, backward)
    actual = _attended(attend, inputs, rows, grad_out, backward)
    for name, ours, theirs, truth in zip(
        ("out", "dq", "dk", "dv"), actual, standard, expected, strict=False
    ):
        _compare(f"{what}, {name}", ours, theirs, truth, rows if name in ("out", "dq") else None)


def sample_rows(q_len: int) -> Tensor:
    """The first and the last query, and random ones between them, at most SAMPLED_ROWS."""
    inner = torch.randperm(q_len)[: SAMPLED_ROWS - 2]
    return torch.unique(torch.cat([torch.tensor([0, q_len - 1]), inner]))


def dense_rows(mask: BlockMask, rows: Tensor) -> Tensor:
    """bool (mask heads, rows, k_len): the keys that the queries `rows` attend."""
    k_len = mask.seq_len[1]
    slices = (mask.slice_queries(row, row + 1).to_dense() for row in rows.tolist())
    return torch.cat([dense.reshape(-1, 1, k_len) for dense in slices], 1).to(rows.device)


def _attended(
    attend: Attend, inputs: Sequence[Tensor], rows: Tensor, grad_out: Tensor, backward: bool
):
    out = attend(*inputs)
    results = [out.detach()[:, :, rows]]
    if backward:
        grad_query, grad_key, grad_value = torch.autograd.grad(out, inputs, grad_out)
        results += [grad_query[:, :, rows], grad_key, grad_value]
    return results


def _standard(
    inputs,
    allowed: Tensor,
    keep: Tensor | None,
    rows: Tensor,
    grad_out: Tensor,
    dtype: torch.dtype,
    backward: bool,
):
    """Standard attention of the sampled rows in `dtype`, every intermediate rounded to it.

    keep: the factor of each probability in dropout; None without dropout.
    """
    leaves = [t.detach().to(dtype).requires_grad_() for t in (inputs[0][:, :, rows], *inputs[1:])]
    query, key, value = leaves
    products = _product(query, key.mT)
    scores = (products * query.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
    # P of a query without keys is 0, not the NaN of softmax.
    weights = scores.softmax(-1).masked_fill(~allowed, 0)
    out = _product(weights if keep is None else weights * keep.to(dtype), value)
    results = [out.detach()]
    if backward:
        results += torch.autograd.grad(out, leaves, grad_out[:, :, rows].to(dtype))
    return results


def _product(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """The product of query head h and key head h // (heads // kv_heads)."""
    (heads, rows), kv_heads = of_queries.shape[1:3], of_keys.shape[1]
    grouped = of_queries.reshape(-1, kv_heads, heads // kv_heads * rows, of_queries.shape[3])
    return (grouped @ of_keys).reshape(-1, heads, rows, of_keys.shape[3])


def _compare(
    what: str, actual: Tensor, standard: Tensor, expected: Tensor, rows: Tensor | None
) -> None:
    rounding = ROUNDING * expected.abs().max()
    allowed = ERROR_FACTOR * (standard - expected).abs().max() + rounding
    error = (actual - expected).abs().nan_to_num(nan=torch.inf).amax(-1)
    if error.max() <= allowed:
        return
    batch, head, row = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    token = row if rows is None else int(rows[row])
    raise CheckError(
        f"{what}: error {error.max():.3g} at batch {batch}, head {head}, token {token}, "
        f"where at most {allowed:.3g} is allowed"
    )
