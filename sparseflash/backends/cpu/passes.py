"""Forward and backward of block-sparse attention in vectorised PyTorch.

Whole rows of scores are computed at once, so the softmax needs no running row max:

    S = log2(e) * (score(softcap(scale * Q K^T)) + bias), -inf where masked
    P = exp2(S - max S),  l = sum P,  O = dropout(P) V / l,  LSE = ln(2) * max S + ln(l)

The backward pass recomputes P = exp2(S - log2(e) * LSE), one batch of block rows after another:

    dS = P * (dropout(dO V^T) - delta)        delta = rowsum(dO * O) - dLSE
    dQ = scale dS K,    dK = scale dS^T Q,    dV = dropout(P)^T dO

Score function and soft cap multiply dS by their derivatives. The sum of dS over each distance is
the gradient of the bias, and the sum over each block that of the block scores.

Sequences are handled as blocks, (batch * heads * blocks, block, width), in float32 (float64 for
float64 inputs).
"""

import math
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from sparseflash.backends.cpu.plan import has_empty_rows, layout_of, rows_of_block
from sparseflash.backends.cpu.problem import LOG2E, problems
from sparseflash.backends.cpu.workspace import workspace
from sparseflash.dispatch.call import Call, Gradients, Needs, Saved
from sparseflash.dropout import keep_probability


def without_autocast(function: Callable) -> Callable:
    """Decorator: disables autocast. Entering the context takes time, so only if it is enabled."""

    @wraps(function)
    def run(*arguments):
        if not torch.is_autocast_enabled("cpu"):
            return function(*arguments)
        with torch.autocast("cpu", enabled=False):
            return function(*arguments)

    return run


@without_autocast
def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.base."""
    q_rows, k_rows, _ = layout_of(call.plan)
    block_q, block_k = rows_of_block(call.table, call.spec), call.table.block_size[1]
    q = _blocks(query, block_q, q_rows)
    k, v = _blocks(key, block_k, k_rows), _blocks(value, block_k, k_rows)
    # Without clipped blocks these are the results themselves: a user must not get views.
    batch, heads, q_len, _ = query.shape
    sizes = (batch, heads, -(-q_len // block_q) * block_q)
    whole_out, whole_lse = q.new_empty((*sizes, v.shape[2])), q.new_empty(sizes)
    whole_max = None if call.max_logits is None else torch.full_like(whole_lse, -math.inf)
    if has_empty_rows(call.table):
        whole_out.zero_()
        whole_lse.fill_(-math.inf)
    out, lse = whole_out.view(-1, q_rows, v.shape[2]), whole_lse.view(-1, q_rows, 1)
    row_maxima = None if whole_max is None else whole_max.view(-1, q_rows, 1)
    for problem in problems(call):
        q_chunk, out_chunk = problem.queries_of(q), problem.results_of_queries("out", out)
        lse_chunk = problem.results_of_queries("lse", lse)
        k_chunk, v_chunk = problem.keys_of("key", k), problem.keys_of("value", v)
        max_chunk = None
        if row_maxima is not None:
            max_chunk = problem.results_of_queries("row max", row_maxima)
        for part in problem.parts:
            q_part, out_part, lse_part = (_rows(x, part) for x in (q_chunk, out_chunk, lse_chunk))
            scores, _, _ = problem.scores(part, problem.to_segments(q_part), k_chunk)
            row_max = problem.max_of_rows(scores)
            if max_chunk is not None:
                max_chunk[:, part] = row_max / LOG2E
            # A row of only -inf gets a finite maximum, so that its P is 0 and not NaN.
            row_max.clamp_(min=torch.finfo(row_max.dtype).min)
            p = scores.sub_(problem.to_segments(row_max)).exp2_()
            row_sum = problem.sum_of_segments(p.sum(-1, keepdim=True))
            torch.log(row_sum, out=lse_part).add_(row_max, alpha=1 / LOG2E)
            # In any other row the maximum adds 1, so the clamp changes only rows without a key.
            row_sum.clamp_(min=1)
            if call.spec.dropout_p > 0:
                p = _drop(p, problem.dropout_keep_mask(part))
                row_sum *= keep_probability(call.spec.dropout_p)
            torch.div(problem.multiply(p, v_chunk), row_sum, out=out_part)
        problem.write_queries(out, out_chunk)
        problem.write_queries(lse, lse_chunk)
        if row_maxima is not None and max_chunk is not None:
            problem.write_queries(row_maxima, max_chunk)
    if whole_max is not None and call.max_logits is not None:
        call.max_logits.copy_(whole_max[:, :, :q_len])
    return _cut(whole_out, q_len).to(query.dtype), _cut(whole_lse, q_len)


@without_autocast
def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, needs: Needs
) -> Gradients:
    """The gradients of one call; see sparseflash.backends.base."""
    query, key, value, out, lse = saved
    needs_query, needs_key, needs_value, needs_bias, needs_blocks, needs_reads = needs
    spec, table, bias = call.spec, call.table, call.bias
    q_rows, k_rows, all_keys = layout_of(call.plan)
    sizes_q, sizes_k = (rows_of_block(table, spec), q_rows), (table.block_size[1], k_rows)
    q, grad_o = _blocks(query, *sizes_q), _blocks(grad_out, *sizes_q)
    k, v = _blocks(key, *sizes_k), _blocks(value, *sizes_k)
    products = workspace.take("delta", tuple(grad_o.shape), grad_o.dtype)
    delta = torch.mul(grad_o, _blocks(out, *sizes_q), out=products).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta -= _blocks(grad_lse.unsqueeze(-1), *sizes_q)
    # A query without a key has only scores of -inf: any finite LSE makes its P 0.
    lse = _blocks(lse.unsqueeze(-1), *sizes_q).clamp(min=torch.finfo(lse.dtype).min / 2)
    if spec.dropout_p > 0:
        grad_o = grad_o / keep_probability(spec.dropout_p)
    grad_q = q.new_zeros(q.shape) if has_empty_rows(table) else q.new_empty(q.shape)
    grad_k, grad_v = (x.new_empty(x.shape) if all_keys else x.new_zeros(x.shape) for x in (k, v))
    grad_bias = q.new_zeros(bias.numel()) if needs_bias and bias is not None else None
    grad_blocks = None
    if needs_blocks:
        blocks = (spec.batch, spec.heads, table.by_query.num_rows, table.by_key.num_rows)
        grad_blocks = q.new_zeros(blocks)
    grad_reads, read_sums = None, {}
    if needs_reads and call.score_tensors is not None:
        grad_reads = call.score_tensors.zero_gradient()
        parts = call.score_tensors.split_gradient(grad_reads)
        read_sums = {i: part.view(-1) for i, part in enumerate(parts) if part is not None}

    writes_sums = all_keys
    for problem in problems(call):
        q_chunk, grad_o_chunk = problem.queries_of(q), problem.queries_of(grad_o)
        lse_chunk, delta_chunk = problem.queries_of(lse), problem.queries_of(delta)
        k_chunk, v_chunk = problem.keys_of("key", k), problem.keys_of("value", v)
        grad_q_chunk = problem.results_of_queries("grad_query", grad_q)
        grad_k_chunk = problem.sums_of_keys("grad_key", grad_k)
        grad_v_chunk = problem.sums_of_keys("grad_value", grad_v)
        beta = 0 if writes_sums or not problem.adds_to_keys else 1
        writes_sums = False
        for part in problem.parts:
            keep_mask = problem.dropout_keep_mask(part)
            q_part, grad_o_part, lse_part, delta_part = (
                problem.to_segments(_rows(x, part))
                for x in (q_chunk, grad_o_chunk, lse_chunk, delta_chunk)
            )
            scores, derivative, reads = problem.scores(part, q_part, k_chunk, True, needs_reads)
            p = scores.sub_(lse_part, alpha=LOG2E).exp2_()
            if needs_value:
                grad_v_chunk.baddbmm_(_drop(p, keep_mask).mT, grad_o_part, beta=beta)
            if needs_query or needs_key or needs_bias or needs_blocks or needs_reads:
                dp = _drop(problem.product("grad", grad_o_part, v_chunk.mT), keep_mask)
                ds = dp.sub_(delta_part).mul_(p)
                if grad_bias is not None and bias is not None:
                    grad_bias.index_add_(0, problem.bias_index(bias, part).flatten(), ds.flatten())
                if grad_blocks is not None:
                    problem.add_block_sums(grad_blocks, ds, part)
                for number, entry, read_derivative in reads:
                    sums = (ds * read_derivative).sum_to_size(entry.shape)
                    read_sums[number].index_add_(0, entry.flatten(), sums.flatten())
                if derivative is not None:
                    ds.mul_(derivative)
                if needs_query:
                    problem.multiply(ds, k_chunk, spec.scale, _rows(grad_q_chunk, part))
                if needs_key:
                    grad_k_chunk.baddbmm_(ds.mT, q_part, beta=beta, alpha=spec.scale)
            beta = 1
        problem.write_queries(grad_q, grad_q_chunk)
        problem.add_keys(grad_k, grad_k_chunk)
        problem.add_keys(grad_v, grad_v_chunk)
    return (
        _sequence(grad_q, query) if needs_query else None,
        _sequence(grad_k, key) if needs_key else None,
        _sequence(grad_v, value) if needs_value else None,
        grad_bias.view_as(bias) if grad_bias is not None and bias is not None else None,
        grad_blocks,
        grad_reads,
    )


def _drop(x: Tensor, keep_mask: Tensor | None) -> Tensor:
    return x if keep_mask is None else x * keep_mask


def _rows(x: Tensor, part: slice) -> Tensor:
    """x[:, part]. Slicing takes time, so it is skipped if `part` is all of x."""
    return x if part.stop - part.start == x.shape[1] else x[:, part]


def _cut(x: Tensor, length: int) -> Tensor:
    return x if x.shape[2] == length else x[:, :, :length].contiguous()


def _blocks(x: Tensor, block: int, rows: int) -> Tensor:
    """(batch, heads, seq, width) -> (n, rows, width), whole blocks with zeros past the end."""
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    missing = -x.shape[2] % block
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.reshape(-1, rows, x.shape[3])


def _sequence(blocks: Tensor, like: Tensor) -> Tensor:
    """The inverse of _blocks: contiguous, with the shape and dtype of `like`."""
    batch, heads, seq, _ = like.shape
    x = blocks.view(batch, heads, -1, blocks.shape[2])
    if x.shape[2] > seq:
        x = x[:, :, :seq].contiguous()
    return x if x.dtype == like.dtype else x.to(like.dtype)
