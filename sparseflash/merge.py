"""Merges attention over disjoint sets of keys."""

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import threshold

from masks.arguments import check_floating


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the (out, lse) of each set.

    lse = log sum_i exp(lse_i),    O = sum_i exp(lse_i - lse) O_i

    Exact up to rounding, in any order and grouping; differentiable, any number of times.

    Args:
        outs: Each (..., q_len, value_dim), of one dtype.
        lses: Each (..., q_len), natural logarithms, float32 or float64. A query without a key in
            any set gets out 0, lse -inf and zero gradients. A query with an lse of inf or NaN
            gets NaN.

    Returns:
        (out, lse) with the shapes and dtypes of one of the parts, computed in the dtype of lses.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.

    Reference:
        Rabe, Staats, "Self-attention does not need O(n^2) memory", 2021.
    """
    _check(outs, lses)
    lse = torch.stack(list(lses))
    empty = (lse == -math.inf).all(dim=0)
    lse = lse.masked_fill(empty, 0.0)
    # Not exp(lse - merged): of a large lse the logarithm loses digits that the weights would miss.
    weights = torch.softmax(lse, dim=0).masked_fill(empty, 0.0).unsqueeze(-1)
    out = (weights * torch.stack(list(outs))).sum(dim=0)
    merged = torch.logsumexp(lse, dim=0).masked_fill(empty, -math.inf)
    return out.to(outs[0].dtype), merged


def merge_in_place(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    rows: Tensor | slice = slice(None),
    part_rows: Tensor | slice = slice(None),
) -> None:
    """Writes merge_attention((out, part_out), (lse, part_lse)) to out and lse, without gradients.

    It reads and writes less memory: on a GPU each row once.

    Args:
        out, lse: (batch, heads, tokens, value_dim) and (batch, heads, tokens).
        part_out, part_lse: The same of a part, with tokens of its own.
        rows: The tokens of out that are merged: int64, all different, or a slice.
        part_rows: As many tokens of the part, one for each of them.

    The part may have another dtype than out.
    """
    (out, lse), index = _views((out, lse), rows)
    (part_out, part_lse), part_index = _views((part_out, part_lse), part_rows)
    if _has_kernels(out, part_out) and lse.dtype == torch.float32:
        from sparseflash.backends.triton.merge import merge_rows  # imports Triton

        merge_rows(out, lse, part_out, part_lse, index, part_index)
        return
    if part_index is not None:
        part_out, part_lse = part_out[:, :, part_index], part_lse[:, :, part_index]
    if index is not None:
        merged = out[:, :, index], lse[:, :, index]
        merge_in_place(*merged, part_out, part_lse)
        out[:, :, index], lse[:, :, index] = merged
        return
    # Of two empty sets the difference is NaN: the query stays without a key.
    gap = (part_lse - lse).nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    total = out * torch.sigmoid(-gap).unsqueeze(-1)
    out.copy_(total.addcmul_(part_out, torch.sigmoid(gap).unsqueeze(-1)))
    lse.copy_(torch.logaddexp(lse, part_lse))


def add_in_place(
    total: Tensor, part: Tensor, rows: Tensor | slice, part_rows: Tensor | slice = slice(None)
) -> None:
    """Adds tokens of a part to tokens of `total`, without gradients; see merge_in_place."""
    (total,), index = _views((total,), rows)
    (part,), part_index = _views((part,), part_rows)
    if index is None and part_index is None:
        total += part
    elif _has_kernels(total, part):
        from sparseflash.backends.triton.merge import add_rows  # imports Triton

        add_rows(total, part, index, part_index)
    else:
        part = part if part_index is None else part.index_select(2, part_index)
        if index is None:
            total += part
        elif torch.promote_types(total.dtype, part.dtype) == total.dtype:
            total.index_add_(2, index, part.to(total.dtype))
        else:  # rounded once, as the kernel does
            total.index_copy_(2, index, (total.index_select(2, index) + part).to(total.dtype))


def copy_in_place(
    total: Tensor, part: Tensor, rows: Tensor | slice, part_rows: Tensor | slice = slice(None)
) -> None:
    """Copies tokens of a part to tokens of `total`, without gradients; see merge_in_place."""
    (total,), index = _views((total,), rows)
    (part,), part_index = _views((part,), part_rows)
    if index is None and part_index is None:
        total.copy_(part)
    elif _has_kernels(total, part):
        from sparseflash.backends.triton.merge import copy_rows  # imports Triton

        copy_rows(total, part, index, part_index)
    elif index is None and total.dtype == part.dtype:
        torch.index_select(part, 2, cast(Tensor, part_index), out=total)
    else:
        part = part if part_index is None else part.index_select(2, part_index)
        if index is None:
            total.copy_(part)
        else:
            total.index_copy_(2, index, part.to(total.dtype))


def add_both_in_place(
    totals: Sequence[Tensor],
    parts: Sequence[Tensor],
    rows: Tensor | slice,
    part_rows: Tensor | slice = slice(None),
) -> None:
    """add_in_place of keys and of values, or gradients of them: on a GPU in one launch."""
    _write_both(True, totals, parts, rows, part_rows)


def copy_both_in_place(
    totals: Sequence[Tensor],
    parts: Sequence[Tensor],
    rows: Tensor | slice,
    part_rows: Tensor | slice = slice(None),
) -> None:
    """copy_in_place of keys and of values, or gradients of them: on a GPU in one launch."""
    _write_both(False, totals, parts, rows, part_rows)


def _write_both(
    adds: bool,
    totals: Sequence[Tensor],
    parts: Sequence[Tensor],
    rows: Tensor | slice,
    part_rows: Tensor | slice,
) -> None:
    each = list(zip(totals, parts, strict=True))
    if not all(_has_kernels(total, part) for total, part in each):
        write = add_in_place if adds else copy_in_place
        for total, part in each:
            write(total, part, rows, part_rows)
        return
    from sparseflash.backends.triton.merge import write_rows_of_both  # imports Triton

    (key, value), index = _views(tuple(totals), rows)
    (key_part, value_part), part_index = _views(tuple(parts), part_rows)
    write_rows_of_both((key, value), (key_part, value_part), index, part_index, adds)


def _views(
    tensors: tuple[Tensor, ...], rows: Tensor | slice
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(views of the tokens of a slice, None), or (the tensors, the indices of tokens)."""
    if isinstance(rows, slice):
        return tuple(x[:, :, rows] for x in tensors), None
    return tensors, rows


def _has_kernels(total: Tensor, part: Tensor) -> bool:
    """Whether Triton kernels add and copy rows of these tensors."""
    return total.is_cuda and torch.float64 not in (total.dtype, part.dtype)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) after adding one key with score sinks[head] and value 0 to each query.

    Args:
        out: (batch, heads, q_len, value_dim).
        lse: (batch, heads, q_len).
        sinks: (1 or heads,); -inf for no sink.

    Reference:
        Xiao et al., "Efficient streaming language models with attention sinks", 2023.
    """
    # The least number instead of -inf: the difference of two scores of -inf would be NaN.
    least = torch.finfo(lse.dtype).min
    sinks = sinks.to(lse.dtype).clamp(min=least).view(-1, 1)
    share = torch.sigmoid(lse - sinks).unsqueeze(-1)
    lse = torch.logaddexp(lse, sinks.expand_as(lse))
    return (out * share).to(out.dtype), threshold(lse, least, -math.inf)


def attention_of_empty_inputs(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call with an empty batch, no query or no key.

    Empty sums in torch have the right values and gradients.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = query @ key.mT
    wide = torch.promote_types(query.dtype, torch.float32)
    return scores @ value, scores.to(wide).logsumexp(-1)


def _layout(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, tensors in (("outs", outs), ("lses", lses)):
        if not isinstance(tensors, Sequence):
            raise TypeError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(
            f"outs and lses must have one length of at least 1, got {len(outs)}, {len(lses)}"
        )
    for name, tensors in (("outs", outs), ("lses", lses)):
        for i, tensor in enumerate(tensors):
            check_floating(f"{name}[{i}]", tensor)
            first, layout = tensors[0], (tensor.shape, tensor.dtype, tensor.device)
            if layout != (first.shape, first.dtype, first.device):
                raise ValueError(
                    f"{name}[{i}] must be {_layout(first)} like {name}[0], got {_layout(tensor)}"
                )
    if lses[0].dtype not in (torch.float32, torch.float64):
        raise TypeError(f"lses must be float32 or float64, got {lses[0].dtype}")
    if outs[0].shape[:-1] != lses[0].shape or outs[0].device != lses[0].device:
        raise ValueError(
            f"lses must be {tuple(outs[0].shape[:-1])} on {outs[0].device} like outs, got "
            f"{tuple(lses[0].shape)} on {lses[0].device}"
        )
