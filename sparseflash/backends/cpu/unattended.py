"""Both passes if keys or values that a query does not attend contain NaN or infinity.

P of a masked pair is 0, but 0 times NaN is NaN. Such values are rare, and if they affect a result,
it is NaN. So the passes first run as usual. If a result is NaN, they run again with zeros in these
keys and values. The second run gives the results of all queries that attend none of them, and in
the backward pass of all keys that only these queries attend.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from sparseflash.backends.cpu import few_queries, passes
from sparseflash.dispatch.call import Call, Gradients, Needs, Saved


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.base."""
    results = few_queries.forward(call, query, key, value)
    if results is not None:  # it reads attended keys only
        return results
    out, lse = passes.forward(call, query, key, value)
    if not _multiplies_masked_pairs(call) or not math.isnan(out.sum().item()):
        return out, lse
    finite = _finite_keys(key, value)
    reached = _queries_that_attend(call, ~finite)[0]
    zeroed = (torch.where(finite, x, 0) for x in (key, value))
    max_logits = None if call.max_logits is None else call.max_logits.clone()
    clean_out, clean_lse = passes.forward(call, query, *zeroed)
    row_reached = reached.squeeze(-1)
    if call.max_logits is not None and max_logits is not None:
        call.max_logits.copy_(torch.where(row_reached, max_logits, call.max_logits))
    return torch.where(reached, out, clean_out), torch.where(row_reached, lse, clean_lse)


def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, needs: Needs
) -> Gradients:
    """The gradients of one call; see sparseflash.backends.base."""
    grads = passes.backward(call, grad_out, grad_lse, saved, needs)
    if not _multiplies_masked_pairs(call):
        return grads
    # dQ = dS K is NaN if dS or K is, so the others need not be read.
    checked = grads if grads[0] is None else grads[:1]
    if not any(grad is not None and math.isnan(grad.sum().item()) for grad in checked):
        return grads
    query, key, value, out, lse = saved
    finite = _finite_keys(key, value)
    reached, touched = _queries_that_attend(call, ~finite)
    # Queries that attend such a key do not contribute to the second run: their P is 0.
    zeroed = (torch.where(finite, x, 0) for x in (key, value))
    results = (out.masked_fill(reached, 0), lse.masked_fill(reached.squeeze(-1), torch.inf))
    clean = passes.backward(
        call,
        grad_out.masked_fill(reached, 0),
        None if grad_lse is None else grad_lse.masked_fill(reached.squeeze(-1), 0),
        (query, *zeroed, *results),
        needs,
    )
    # Each entry of the other gradients is a sum over many queries.
    any_query = reached.any()
    affected = (reached, touched, touched, any_query, any_query, any_query)
    return tuple(
        None if grad is None else torch.where(where, grad, other)
        for where, grad, other in zip(affected, grads, clean, strict=True)
    )


def _multiplies_masked_pairs(call: Call) -> bool:
    """Whether some pair of the blocks that are computed may be masked."""
    return call.key_lengths is not None or call.table.by_query.has_partial


def _finite_keys(key: Tensor, value: Tensor) -> Tensor:
    """bool (batch, kv_heads, k_len, 1): whether a key and its value are finite."""
    return key.isfinite().all(-1, keepdim=True) & value.isfinite().all(-1, keepdim=True)


def _queries_that_attend(call: Call, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The queries that attend any of some keys, and the keys that these queries attend.

    Attention with equal scores counts them, forward and backward.

    Args:
        keys: bool (batch, kv_heads, k_len, 1).

    Returns:
        bool (batch, heads, q_len, 1), and bool like `keys`.
    """
    plain = replace(call.spec, dropout_p=0.0, softcap=None, score=None, bias=False)
    counting = Call(replace(call.plan, spec=plain), call.key_lengths)
    query, value = keys.new_zeros(call.spec.batch, call.spec.heads, call.spec.q_len, 1), keys
    query, value = query.float(), value.float()
    key = torch.zeros_like(value)
    out, lse = passes.forward(counting, query, key, value)
    reached = out > 0
    saved = (query, key, value, torch.zeros_like(out), lse)
    needs = (False, False, True, False, False, False)
    touched = passes.backward(counting, reached.float(), None, saved, needs)[2]
    return reached, touched > 0
