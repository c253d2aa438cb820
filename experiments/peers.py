"""Who is measured: sparseflash and its peers, each as a function (query, key, value) -> out."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

import sparseflash
from experiments.check import Attend
from masks import BlockMask
from masks.lookup_table import LookupTable

Predicate = Callable[[Tensor, Tensor], Tensor]

# A bank of tiles of a new size is a new shape to torch.compile; padded, nearly all masks share
# one.
BANK_TILES = 256
RECOMPILE_LIMIT = 64


class Peer(StrEnum):
    """sdpa: torch's choice · flash, cudnn: that backend of scaled_dot_product_attention · flex:
    FlexAttention, compiled · standard: attention with materialised scores."""

    SDPA = "sdpa"
    FLASH = "flash"
    CUDNN = "cudnn"
    FLEX = "flex"
    STANDARD = "standard"


DEVICES = {
    Peer.SDPA: ("cpu", "cuda"),
    Peer.FLASH: ("cuda",),
    Peer.CUDNN: ("cuda",),
    Peer.FLEX: ("cuda",),
    Peer.STANDARD: ("cpu", "cuda"),
}


@dataclass(frozen=True)
class Problem:
    """A compiled mask and what a dense peer can know of it: dense is "full" or "causal" where the
    mask is just that.

    predicate: (q, k) -> bool of tokens, with which FlexAttention computes partial blocks; without
    it, it looks them up.
    """

    mask: BlockMask
    dense: str | None = None
    predicate: Predicate | None = None


def attend_sparseflash(problem: Problem, backend: str = "auto") -> Attend:
    return lambda query, key, value: sparseflash.attention(
        query, key, value, problem.mask, backend=backend
    )


def attend_peer(peer: Peer, problem: Problem, device: torch.device) -> Attend:
    """The peer on this mask. Raises ValueError for a dense peer and a mask it does not know."""
    if peer is Peer.FLEX:
        return attend_flex(flex_mask(problem, device))
    if problem.dense is None:
        raise ValueError(f"{peer} computes full and causal masks only")
    causal = problem.dense == "causal"
    return attend_standard(causal) if peer is Peer.STANDARD else attend_sdpa(peer, causal)


def attend_sdpa(peer: Peer, causal: bool) -> Attend:
    backends = {Peer.FLASH: [SDPBackend.FLASH_ATTENTION], Peer.CUDNN: [SDPBackend.CUDNN_ATTENTION]}
    if peer not in backends:
        return lambda query, key, value: scaled_dot_product_attention(
            query, key, value, is_causal=causal
        )

    def attend(query, key, value):
        with sdpa_kernel(backends[peer]):
            return scaled_dot_product_attention(query, key, value, is_causal=causal)

    return attend


def attend_standard(causal: bool) -> Attend:
    def attend(query, key, value):
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ value

    return attend


def attend_flex(block_mask: flex.BlockMask) -> Attend:
    compiled = _compiled_flex()
    return lambda query, key, value: compiled(query, key, value, block_mask=block_mask)


@cache
def _compiled_flex():
    # A backward pass that is timed runs more than once on the same saved tensors, which donated
    # buffers rule out.
    functorch_config.donated_buffer = False
    dynamo_config.recompile_limit = RECOMPILE_LIMIT
    # With fullgraph, passing the limit is an error and not a silent fall to the quadratic eager
    # form.
    return torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)


def flex_mask(problem: Problem, device: torch.device) -> flex.BlockMask:
    """Exactly the same mask for FlexAttention: full blocks, and the pairs of partial ones."""
    table = problem.mask.table(device)
    bounds = table.by_query.bounds[table.head_layer.long()]
    full_start, full_count, partial_start, partial_count = bounds.unbind(-1)
    columns = -(-table.seq_len[1] // table.block_size[1])
    return flex.BlockMask.from_kv_blocks(
        partial_count[None],
        _rows(table.by_query.partial_index, partial_start, partial_count, columns)[None],
        full_count[None],
        _rows(table.by_query.full_index, full_start, full_count, columns)[None],
        BLOCK_SIZE=table.block_size,
        mask_mod=_mask_mod(problem, table, bounds),
        seq_lengths=table.seq_len,
    )


def _mask_mod(problem: Problem, table: LookupTable, bounds: Tensor):
    """What FlexAttention asks about the pairs of partial blocks.

    None where there are none, so that it compiles no code for them.
    """
    if not bool(bounds[..., 3].any()):
        return None
    if (predicate := problem.predicate) is None:
        return _looked_up(table, bounds)
    return lambda batch, head, q, k: predicate(q, k)


def _looked_up(table: LookupTable, bounds: Tensor):
    """A mask_mod that reads every pair of a mask from a bank of tiles.

    FlexAttention asks it for partial blocks alone when compiled, and for all pairs when not.
    """
    bq, bk = table.block_size
    tile_of = _tile_of(table, bounds)
    empty_and_full = torch.stack(
        [torch.zeros_like(table.bank[0]), -torch.ones_like(table.bank[0])]
    )
    padding = table.bank.new_zeros(-(len(table.bank) + 2) % BANK_TILES, *table.bank.shape[1:])
    bank = torch.cat([empty_and_full, table.bank, padding])
    shared = table.mask_heads == 1

    def mask_mod(batch, head, q, k):
        block = tile_of[0 if shared else head, q // bq, k // bk]
        word = bank[block, q % bq, (k % bk) // 32]
        return (word >> (k % bk % 32)) & 1 == 1

    return mask_mod


def _tile_of(table: LookupTable, bounds: Tensor) -> Tensor:
    """int32 (mask heads, rows, columns): 0 for an empty block, 1 for a full one, 2 + tile for a
    partial one."""
    full_start, full_count, partial_start, partial_count = bounds.unbind(-1)
    rows, columns = table.by_query, -(-table.seq_len[1] // table.block_size[1])
    # Entries past the end of a row's list go to one more column, which is cut off.
    full = _rows(rows.full_index, full_start, full_count, columns, padding=columns)
    partial = _rows(rows.partial_index, partial_start, partial_count, columns, padding=columns)
    tile = _rows(rows.partial_tile, partial_start, partial_count, columns) + 2
    tile_of = tile.new_zeros(*bounds.shape[:2], columns + 1)
    tile_of.scatter_(-1, full.long(), 1).scatter_(-1, partial.long(), tile)
    return tile_of[..., :columns].contiguous()


def _rows(index: Tensor, start: Tensor, count: Tensor, width: int, padding: int = 0) -> Tensor:
    """index[start : start + count] of each row, filled up to `width` columns with `padding`."""
    place = torch.arange(width, device=index.device)
    taken = index[(start[..., None] + place).clamp(max=len(index) - 1).long()]
    return torch.where(place < count[..., None], taken, padding)
