"""The forward pass of a few queries that attend the same keys, such as one query that is decoded.

No pair of these queries and keys is masked, and no gradient is needed. So torch's own attention
computes the result, in one operation instead of a dozen, of a view of the keys if they are
consecutive. For inputs of 16 bits it adds in float32 and rounds P to 16 bits, so its errors are
those of attention in PyTorch operations. passes.forward keeps P in float32, for which it converts
the keys, and reads and writes more bytes.
"""

import torch
from torch import Tensor

from masks._core.bit_tiles import unpack
from sparseflash.backends.cpu.passes import without_autocast
from sparseflash.backends.cpu.plan import CHUNK_FLOATS, rows_of_block
from sparseflash.dispatch.call import Call, Plan
from sparseflash.dispatch.spec import AttentionSpec

MAX_RUNS = 8  # of consecutive keys, which are copied together; copies of more take longer
# The operation of scaled_dot_product_attention on a CPU, which returns LSE too.
_attention_of_torch = torch._scaled_dot_product_flash_attention_for_cpu  # pyright: ignore[reportPrivateImportUsage]

Runs = list[tuple[int, int]]  # of consecutive keys, [begin, end) in tokens


@without_autocast
def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a call; None if this module does not compute it."""
    if any(x.requires_grad for x in (query, key, value)):
        # A backward pass computes P again and needs the LSE of equal scores. Those of torch are
        # rounded in another way, which large scores show.
        return None
    runs = attended_runs(call.plan)
    if runs and call.key_lengths is not None:
        length, *others = set(call.key_lengths.tolist())
        runs = [] if others else [(b, min(e, length)) for b, e in runs if b < length]
    if not runs:
        return None
    batch, heads, q_len, head_dim = query.shape
    # The query heads of one key head are further queries of it.
    grouped = query.reshape(batch, key.shape[1], -1, head_dim).contiguous()
    keys, values = _keys_of(runs, key), _keys_of(runs, value)
    out, lse = _attention_of_torch(grouped, keys, values, scale=call.spec.scale)
    # torch's LSE is 0, and not -inf, if all scores of a query are -inf.
    if torch.count_nonzero(lse).item() < lse.numel():
        return None
    out = out.contiguous().view(batch, heads, q_len, head_dim)
    return out, lse.contiguous().view(batch, heads, q_len)


def attended_runs(plan: Plan) -> Runs:
    """The keys that every query of a call attends, cached with its plan.

    Empty if this module does not compute such calls.
    """
    found = plan.cache.get("attended runs")
    if found is None:
        found = plan.cache["attended runs"] = _find_runs(plan) if _is_plain(plan.spec) else []
    return found


def _is_plain(spec: AttentionSpec) -> bool:
    """Whether the queries are few, of one mask, and nothing but the mask changes scores."""
    changed = spec.softcap is not None or spec.score is not None or spec.bias
    return (
        spec.few_queries
        and spec.head_dim == spec.value_dim
        and spec.mask_heads == spec.mask_batch == 1
        and not (changed or spec.dropout_p > 0 or spec.max_logits)
    )


def _find_runs(plan: Plan) -> Runs:
    spec, table = plan.spec, plan.table
    lists, rows = table.by_query, rows_of_block(table, spec)
    layer = int(table.head_to_mask[0, 0])
    full_start, full, partial_start, partial = lists.row_ptr[layer, 0].tolist()
    here = slice(partial_start, partial_start + partial)
    attends = torch.zeros(rows, table.by_key.num_rows, table.block_size[1], dtype=torch.bool)
    attends[:, lists.full_index[full_start : full_start + full]] = True
    tiles = table.bit_tiles[lists.partial_bit_tile[here], :rows]
    attends[:, lists.partial_index[here]] = unpack(tiles, table.block_size[1]).transpose(0, 1)
    first, *others = attends.flatten(1)
    if any(not torch.equal(first, other) for other in others):
        return []
    bounds = torch.diff(first.int(), prepend=first.new_zeros(1), append=first.new_zeros(1))
    begins, ends = ((bounds == change).nonzero().flatten().tolist() for change in (1, -1))
    copied = 0 if len(begins) == 1 else int(first.sum()) * (spec.head_dim + spec.value_dim)
    if len(begins) > MAX_RUNS or spec.batch * spec.kv_heads * copied > CHUNK_FLOATS:
        return []
    return list(zip(begins, ends, strict=True))


def _keys_of(runs: Runs, x: Tensor) -> Tensor:
    """The tokens of some runs, with dims that are consecutive in memory: a view if possible."""
    if len(runs) > 1:
        return torch.cat([x[:, :, begin:end] for begin, end in runs], dim=2)
    ((begin, end),) = runs
    if end - begin < x.shape[2]:
        x = x[:, :, begin:end]
    return x if x.stride(3) == 1 else x.contiguous()
