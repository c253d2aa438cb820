"""One attention call: from its tensors and options to the backend that runs it, with its table."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from masks import BlockMask, DynamicMask, Pattern
from masks.cache import Cache
from masks.lookup_table import LookupTable
from sparseflash.arguments import AnyMask
from sparseflash.backends import Backend, select
from sparseflash.dispatch.spec import SMALL_TILE, TILE, AttentionSpec

Shared = tuple[AttentionSpec, Backend, LookupTable]


@dataclass(slots=True)
class Call:
    """Everything about a call but its floating-point tensors."""

    spec: AttentionSpec
    backend: Backend
    table: LookupTable
    key_lengths: Tensor | None
    seed: int
    bias: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse)"""
        return self.backend.forward(
            *(query, key, value, self.table, self.key_lengths, self.seed, self.spec),
            **self._bias(),
        )

    def backward(
        self,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        saved: tuple[Tensor, ...],
        needs: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """The gradients of query, key, value, bias and blocks, None where needs says no.

        saved: query, key, value, out, lse
        """
        if grad_out is None:
            grad_out = torch.zeros_like(saved[3])
        *grads, grad_blocks = self.backend.backward(
            *(grad_out, grad_lse, *saved),
            *(self.table, self.key_lengths, self.seed, self.spec, needs),
            **self._bias(),
        )
        if grad_blocks is not None:
            masks = (self.spec.mask_batch, self.spec.mask_heads)
            grad_blocks = grad_blocks.sum_to_size(*masks, *grad_blocks.shape[2:])
        return *grads, grad_blocks

    def _bias(self) -> dict[str, Tensor]:
        return {} if self.bias is None else {"bias": self.bias}


def prepare(
    query: Tensor,
    key: Tensor,
    mask: AnyMask,
    key_lengths: Tensor | None = None,
    seed: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    score: str | None = None,
    dropout_p: float = 0.0,
    precision: str = "ieee",
    deterministic: bool = True,
    backend: str = "auto",
    bias: Tensor | None = None,
    differentiates_bias: bool = False,
    differentiates_blocks: bool = False,
) -> Call:
    """The call of checked tensors and options.

    Raises ValueError for a mask of another shape and for key_lengths out of range, and what
    `select` raises.
    """
    if isinstance(mask, Pattern):
        mask = block_mask(mask, query, key)
    options = (scale, softcap, score, dropout_p, precision, deterministic, bias is not None)
    differentiated = (differentiates_bias, differentiates_blocks)
    facts = (key_lengths is not None, *options, *differentiated)
    kind = (query.shape, key.shape, query.dtype, query.device, *facts, backend)
    shared = mask.cache.get(kind)
    if shared is None:
        shared = mask.cache[kind] = _shared(query, key, mask, facts, backend)
    return call_of(shared, key, key_lengths, seed, bias)


def kind_of(query: Tensor, key: Tensor, value: Tensor, *facts: Hashable) -> tuple:
    """What the checks of tensors and options find is the same for all calls of a kind, and so is
    what they share; for calls that nobody traces. facts: the options, and what else was given.
    """
    return (
        *(query.shape, key.shape, value.shape),
        *(query.dtype, key.dtype, value.dtype),
        *(query.device, key.device, value.device),
        *(torch.are_deterministic_algorithms_enabled(), *facts),
    )


def known(cache: Cache, kind: tuple) -> Shared | None:
    """What calls of a kind share, if one of them was checked before; cache: that of the mask."""
    try:
        return cache.get(kind)
    except TypeError:  # an option that cannot be hashed: the checks say more
        return None


def call_of(
    shared: Shared, key: Tensor, key_lengths: Tensor | None, seed: int, bias: Tensor | None = None
) -> Call:
    """A call of what all of its kind share, and of what it has for itself."""
    spec, backend, table = shared
    if key_lengths is not None:
        key_lengths = in_range(key_lengths, key.shape[2], key.device)
    return Call(spec, backend, table, key_lengths, seed, bias)


def _shared(
    query: Tensor, key: Tensor, mask: BlockMask | DynamicMask, facts: tuple, backend: str
) -> Shared:
    """What all calls of a kind have in common. facts: those of spec_of after the mask."""
    mask = block_mask(mask, query, key)
    spec = spec_of(query, key, mask, *facts)
    chosen = select(backend, spec)
    return spec, chosen, mask.table(query.device, chosen.tiling(spec))


def spec_of(
    query: Tensor,
    key: Tensor,
    mask: BlockMask | DynamicMask,
    has_key_lengths: bool,
    scale: float | None,
    softcap: float,
    score: str | None,
    dropout_p: float,
    precision: str,
    deterministic: bool = True,
    bias: bool = False,
    differentiates_bias: bool = False,
    differentiates_blocks: bool = False,
) -> AttentionSpec:
    """The facts of a call of checked arguments."""
    tensors = (query.shape, key.shape, query.dtype, query.device)
    options = (has_key_lengths, scale, softcap, score, dropout_p, precision, deterministic, bias)
    differentiated = (differentiates_bias, differentiates_blocks)
    masks = (mask.block_size, mask.num_batches, mask.num_heads)
    fills = (mask.coverage(TILE), mask.coverage(SMALL_TILE))
    return _spec(*tensors, *masks, *fills, *options, *differentiated)


@lru_cache(maxsize=4096)
def _spec(
    query_shape: torch.Size,
    key_shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    block_size: tuple[int, int],
    mask_batch: int,
    mask_heads: int,
    fill: float | None,
    small_fill: float | None,
    has_key_lengths: bool,
    scale: float | None,
    softcap: float,
    score: str | None,
    dropout_p: float,
    precision: str,
    deterministic: bool,
    bias: bool,
    differentiates_bias: bool,
    differentiates_blocks: bool,
) -> AttentionSpec:
    batch, heads, q_len, head_dim = query_shape
    kv_heads, k_len = key_shape[1:3]
    return AttentionSpec(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        k_len=k_len,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        block_size=block_size,
        mask_heads=mask_heads,
        scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
        dropout_p=dropout_p,
        has_key_lengths=has_key_lengths,
        precision=precision,
        deterministic=deterministic,
        softcap=softcap,
        score=score,
        bias=bias,
        differentiates_bias=differentiates_bias,
        mask_batch=mask_batch,
        differentiates_blocks=differentiates_blocks,
        fill=fill,
        small_fill=small_fill,
    )


def block_mask(mask: AnyMask, query: Tensor, key: Tensor) -> BlockMask | DynamicMask:
    """The mask of a call; a pattern is compiled in blocks of its own size.

    Raises ValueError for a mask of other lengths, heads or batch elements.
    """
    batch, heads, q_len, k_len = *query.shape[:3], key.shape[2]
    if isinstance(mask, Pattern):
        mask = _compiled(mask, q_len, k_len, query.device)
    if mask.seq_len != (q_len, k_len):
        raise ValueError(f"mask must have seq_len {(q_len, k_len)}, got {mask.seq_len}")
    if mask.num_heads not in (1, heads):
        raise ValueError(f"mask must have 1 or {heads} heads, got {mask.num_heads}")
    if mask.num_batches not in (1, batch):
        raise ValueError(f"mask must be of 1 or {batch} batch elements, got {mask.num_batches}")
    return mask


@lru_cache(maxsize=128)
def _compiled(pattern: Pattern, q_len: int, k_len: int, device: torch.device) -> BlockMask:
    return pattern((q_len, k_len), device=device)


def in_range(lengths: Tensor, k_len: int, device: torch.device) -> Tensor:
    """Key lengths as backends read them: int32 on the device.

    Raises ValueError for lengths past the keys; while a CUDA graph is captured they are clamped.
    """
    if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
        lengths = lengths.clamp(0, k_len)
    elif bool(((lengths < 0) | (lengths > k_len)).any()):
        raise ValueError(f"key_lengths must be 0 to {k_len}, got {lengths.tolist()}")
    return lengths.to(device, torch.int32)
