"""The public function: block-sparse attention, exact, for any mask."""

from collections.abc import Sequence
from typing import Literal, Unpack, cast, overload

import torch
from torch import Tensor

from sparseflash.arguments import (
    AnyMask,
    autocast,
    check_key_lengths,
    check_sinks,
    check_tensors,
    checked_bias,
    checked_block_scores,
    checked_mask,
    checked_seed,
    lengths_in_range,
    requires_gradient,
)
from sparseflash.dispatch.autograd import run
from sparseflash.dispatch.call import Call, empty_max_logits
from sparseflash.dispatch.operators import is_traced, traced_attention
from sparseflash.dispatch.plan import find_plan
from sparseflash.dispatch.spec import FACTS_OF_ONE_DEVICE
from sparseflash.merge import add_sinks, attention_of_empty_inputs
from sparseflash.options import AttentionKeywords, AttentionOptions, OptionKeywords
from sparseflash.score import any_requires_grad, checked_score_tensors


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: AnyMask | None = None, *,
    return_lse: Literal[False] = False, return_max_logits: Literal[False] = False,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: AnyMask | None = None, *,
    return_lse: Literal[True], return_max_logits: Literal[False] = False,
    **keywords: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: AnyMask | None = None, *,
    return_lse: bool = False, return_max_logits: Literal[True],
    **keywords: Unpack[AttentionKeywords],
) -> tuple[Tensor, ...]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask | None = None,
    *,
    key_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: int | None = None,
    score_tensors: Sequence[Tensor] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **options: Unpack[OptionKeywords],
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention that skips every zero block of `mask`, forward and backward.

    S = score(softcap(scale Q K^T)) + bias, -inf where masked;  P = softmax over keys and the sink;
    O = dropout(P) V

    Extra memory is O(q_len) in both passes, and O(n) for the gradient of a bias or of score
    tensors with n numbers. Equal inputs give equal bits unless `deterministic` is False. Under
    autocast, query, key and value are cast as in torch's own attention. With torch.compile and
    torch.export, make a Pattern or BlockMask outside the graph. A DynamicMask may be made in the
    graph, of a BlockMask that was made outside.

    NaN and infinity: Keys and values past key_lengths may contain any value. On the CPU this also
    holds for all keys and values that a query does not attend. On a GPU masked pairs inside a
    non-zero block are multiplied by P = 0, which gives NaN. So a NaN or infinity in a key or value
    affects all queries of the block rows with a non-zero block at that key, in blocks of the size
    that the kernel reads. In a key it affects the gradients of these queries and, with a soft cap
    or score function, the gradient of the key; it never affects out and lse. In a value it affects
    out, the gradients of these queries, and the gradients of the keys in their blocks; it never
    affects lse.

    Args:
        query: (batch, heads, q_len, head_dim), any strides.
        key: (batch, kv_heads, k_len, head_dim), any strides. heads is a multiple of kv_heads;
            query head h reads key head h // (heads // kv_heads).
        value: (batch, kv_heads, k_len, value_dim), any strides; value_dim may differ from
            head_dim.
        mask: A Pattern, or a BlockMask, MaskBatch or DynamicMask of lengths (q_len, k_len), or
            None for all pairs; True means attend. It has one head for all heads, one for each
            query head, or one for each key head, which the query heads of its group share. A
            Pattern is compiled once per length and device, in blocks of its own size. The scores
            of a DynamicMask get a gradient if they require one; the backend hopper does not
            compute it.
        key_lengths: Integers (batch,), 0 to k_len, in tokens: keys at or past the length of their
            batch element are masked. Lengths on the CPU are checked without waiting for the
            device. For lengths on a CUDA device the host waits in the first call with this
            tensor, and after a change in place that torch counts. In later calls, and while a
            CUDA graph is captured, they are clamped; lengths on the CPU cannot be captured. For
            other padding see MaskBatch.with_keys and unpad.
        bias: (1 or heads, q_len + k_len - 1), one number for each distance: entry
            [h, k - q + q_len - 1] is added to the score of query q and key k. See alibi. It gets
            a gradient if it requires one; if "auto" selects the backend hopper, triton computes
            this gradient.
        sinks: (1 or heads,), the score of one additional key for every query, whose value is 0.
            The lse includes it. A query without any key gets out 0 and the sink as its lse.
        seed: Seed of dropout. Equal seeds drop the same pairs on every backend. By default it is
            drawn from torch's default generator.
        score_tensors: The tensors that the score function reads, floating-point or integers as it
            declares: see ScoreFunction.from_torch. None, or an empty list, if it reads none.
            Each gets a gradient if it requires one, from the same backend as that of a bias.
        return_lse: Also return the LSE.
        return_max_logits: Also return, last, the maximum logit of every query, without gradient:
            the largest of its masked scores S, without sinks. QK-Clip compares its maximum over
            batch and queries with a threshold for each head.
        **options: scale, softcap, score, dropout_p, precision, deterministic, planned_order and
            backend: see AttentionOptions.

    Returns:
        out (batch, heads, q_len, value_dim) in the dtype of query. With return_lse also the
        natural log-sum-exp of the masked scores, (batch, heads, q_len), float32 (float64 for
        float64 inputs); its gradient is supported. With return_max_logits also the maximum
        logits, with shape and dtype of lse. A query without any key gets out 0, lse and maximum
        logit -inf, and zero gradients. An empty batch, no query or no key at all are allowed.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.
        BackendError: No backend can compute the call. Every error is raised before anything
            is computed.

    Reference:
        Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022, Algorithm 5 (block-sparse); Kimi Team,
        "Kimi K2", 2025 (QK-Clip).
    """
    query, key, value = autocast(query, key, value)
    mask = checked_mask(mask)
    block_scores = checked_block_scores(mask)
    traced = is_traced(query, key, value)
    if traced or not (query.numel() and key.numel()):
        plan, resolved = None, AttentionOptions(**options)
        check_tensors(query, key, value)
    else:
        facts = (
            *(key_lengths is not None, bias is not None),
            *(requires_gradient(bias), requires_gradient(block_scores)),
            *(False, return_max_logits, any_requires_grad(score_tensors)),
            *FACTS_OF_ONE_DEVICE,
        )
        plan = find_plan(query, key, value, mask, options, facts)
        resolved = plan.spec
    lengths = None
    if key_lengths is not None:
        check_key_lengths(key_lengths, query)
        if not traced:
            lengths = lengths_in_range(key_lengths, key.shape[2], key.device)
    bias = checked_bias(bias, query, query.shape[2], key.shape[2])
    check_sinks(sinks, query)
    score_inputs = checked_score_tensors(
        *(resolved.score, score_tensors, query, (query.shape[2], key.shape[2])),
        padded=key_lengths is not None,
    )
    seed_tensor = checked_seed(seed, resolved.dropout_p)
    if plan is not None:
        call = Call(plan, lengths, 0 if seed_tensor is None else int(seed_tensor), bias)
        call.score_tensors = score_inputs
        if return_max_logits:
            call.max_logits = empty_max_logits(query)
        out, lse = run(call, query, key, value, block_scores)
        max_logits = call.max_logits
    elif query.numel() and key.numel():
        arguments = (bias, block_scores, key_lengths, seed_tensor, return_max_logits, score_inputs)
        out, lse, max_logits = traced_attention(query, key, value, mask, *arguments, resolved)
    else:
        out, lse = attention_of_empty_inputs(query, key, value)
        max_logits = torch.full_like(lse, -torch.inf, requires_grad=False)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    results = (out, lse) if return_lse else (out,)
    if return_max_logits:
        results = (*results, cast(Tensor, max_logits))
    return results if len(results) > 1 else out
