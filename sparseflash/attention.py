"""The public function: block-sparse attention, exact, for any mask."""

from typing import Literal, overload

import torch
from torch import Tensor

from masks import Pattern
from sparseflash.arguments import (
    AnyMask,
    autocast,
    check_key_lengths,
    check_sinks,
    check_tensors,
    checked_bias,
    checked_block_scores,
    checked_mask,
    checked_options,
    checked_seed,
)
from sparseflash.dispatch import operators
from sparseflash.dispatch.autograd import run
from sparseflash.dispatch.call import call_of, kind_of, known, prepare
from sparseflash.merge import with_sinks
from sparseflash.score import ScoreFunction


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_lengths: Tensor | None = None,
    return_lse: Literal[False] = False,
    softcap: float | None = None,
    score: ScoreFunction | str | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    precision: str = "ieee",
    deterministic: bool = True,
    backend: str = "auto",
    seed: int | None = None,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_lengths: Tensor | None = None,
    return_lse: Literal[True],
    softcap: float | None = None,
    score: ScoreFunction | str | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    precision: str = "ieee",
    deterministic: bool = True,
    backend: str = "auto",
    seed: int | None = None,
) -> tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_lengths: Tensor | None = None,
    return_lse: bool = False,
    softcap: float | None = None,
    score: ScoreFunction | str | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    precision: str = "ieee",
    deterministic: bool = True,
    backend: str = "auto",
    seed: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention that skips every zero block of `mask`, forward and backward.

    S = score(softcap(scale Q K^T)) + bias, -inf where masked;  P = softmax over keys and the sink;
    O = dropout(P) V

    query: (batch, heads, q_len, head_dim); key, value: (batch, kv_heads, k_len, head_dim), any
        strides. heads is a multiple of kv_heads; query head h reads key head h // (heads //
        kv_heads).
    mask: a Pattern, a BlockMask or DynamicMask of this length, or None for all pairs; True means
        attend. A Pattern is compiled once per length and device, in blocks of its own size. The
        scores of a DynamicMask get a gradient if they require one.
    scale: 1 / sqrt(head_dim) by default.
    dropout_p, seed: dropout on P, in [0, 1); the same seed drops the same pairs on every backend.
        Without a seed one is drawn from torch's default generator.
    key_lengths: integers (batch,), 0 to k_len: keys at or past the length of their batch element
        are masked. Those on the CPU are checked without waiting for the device; those on a CUDA
        device are waited for, except while a CUDA graph is captured: then they are clamped.
    softcap: c > 0, which keeps scores within (-c, c): softcap(s) = c tanh(s / c).
    score: a function of one's own, or the name of one: see ScoreFunction.
    bias: (1 or heads, q_len + k_len - 1), added to the score of query q and key k at
        [h, k - q + q_len - 1]: one number for each distance. See alibi.
    sinks: (1 or heads,), the score of one more key for every query, whose value is 0. The lse
        counts it, and a query without a key gets out 0 and the sink for its lse.
    precision: of float32 products: "ieee", or "tf32", which lets a backend round their operands to
        10 bits where the device multiplies those faster.
    deterministic: False lets a backend choose a faster backward pass that adds to the gradient of
        query in no fixed order, so that its last bits differ from run to run, and that keeps one
        in float32 meanwhile; without effect under torch.use_deterministic_algorithms.
    backend: "auto", or a name; a named backend never falls back.

    Returns out like query, and with return_lse the natural logsumexp of the masked scores, float32
    (batch, heads, q_len), whose gradient is supported. A query without a key gets out 0, lse -inf
    and zero gradients. Extra memory is O(q_len) in both passes. The same inputs give the same
    bits unless `deterministic` is False. Under autocast, query, key and value are cast as torch's
    own attention casts them. Under torch.compile and torch.export a Pattern or BlockMask must be
    made outside, and a DynamicMask be made, in the graph or outside, of a BlockMask that was.

    Raises TypeError or ValueError naming the argument, and BackendError when no backend can serve
    the call; all before anything is computed.
    Source: Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022, Algorithm 5 (block-sparse).
    """
    query, key, value = autocast(query, key, value)
    mask = checked_mask(mask)
    block_scores = checked_block_scores(mask)
    options = (scale, softcap, score, dropout_p, precision, deterministic)
    traced = operators.is_traced(query)
    kept = None if traced or bias is not None or isinstance(mask, Pattern) else mask.cache
    shared, kind = None, ()
    if kept is not None:
        given = (key_lengths is not None, _wants_gradient(block_scores))
        kind = kind_of(query, key, value, *options, backend, *given)
        shared = known(kept, kind)
    if shared is None:
        check_tensors(query, key, value)
    if key_lengths is not None:
        check_key_lengths(key_lengths, query)
    bias = None if bias is None else checked_bias(bias, query, key)
    if sinks is not None:
        check_sinks(sinks, query)
    drawn = checked_seed(seed, dropout_p)
    if traced:
        out, lse = operators.attention(
            query,
            key,
            value,
            bias,
            block_scores,
            *operators.mask_arguments(mask),
            key_lengths,
            drawn,
            *checked_options(*options),
            backend,
        )
    else:
        drawn = 0 if drawn is None else int(drawn)
        if shared is None:
            facts = (*checked_options(*options), backend)
            wanted = _wants_gradient(bias), _wants_gradient(block_scores)
            call = prepare(query, key, mask, key_lengths, drawn, *facts, bias, *wanted)
            if kept is not None:
                kept[kind] = call.spec, call.backend, call.table
        else:
            call = call_of(shared, key, key_lengths, drawn)
        out, lse = run(call, query, key, value, block_scores)
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _wants_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
