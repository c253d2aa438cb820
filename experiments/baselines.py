"""Sparseflash and its baselines, each as a function (query, key, value) -> out."""

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
from experiments.cli import Baseline
from experiments.pattern_families import Problem
from experiments.record import ANY_ORDER
from masks import BlockMask
from masks.interop import to_block_lists, to_flex

RECOMPILE_LIMIT = 64


class BaselineError(RuntimeError):
    """A baseline cannot compute a problem here."""


def attend_sparseflash(problem: Problem, named: str = "auto") -> Attend:
    """named: a backend, with ANY_ORDER where its gradients need no fixed order of sums."""
    backend = named.removesuffix(ANY_ORDER)
    deterministic = backend == named
    return lambda query, key, value: sparseflash.attention(
        query, key, value, problem.mask, backend=backend, deterministic=deterministic
    )


def attend_baseline(baseline: Baseline, problem: Problem) -> Attend:
    """The baseline on this mask. Raises ValueError for a dense baseline and a sparse mask."""
    if baseline is Baseline.FLEX:
        # A full mask is what FlexAttention computes without a block mask.
        return attend_flex(None if problem.dense == "full" else flex_mask(problem))
    if baseline is Baseline.FLASH4:
        return attend_flash4(problem)
    if problem.dense is None:
        raise ValueError(f"{baseline} computes full and causal masks only")
    causal = problem.dense == "causal"
    return (
        attend_standard(causal) if baseline is Baseline.STANDARD else attend_sdpa(baseline, causal)
    )


def attend_sdpa(baseline: Baseline, causal: bool) -> Attend:
    backends = {
        Baseline.FLASH: [SDPBackend.FLASH_ATTENTION],
        Baseline.CUDNN: [SDPBackend.CUDNN_ATTENTION],
    }
    if baseline not in backends:
        return lambda query, key, value: scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=_grouped(query, key)
        )

    def attend(query, key, value):
        with sdpa_kernel(backends[baseline]):
            return scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=_grouped(query, key)
            )

    return attend


def _grouped(query: Tensor, key: Tensor) -> bool:
    """Whether several query heads read one key head."""
    return query.shape[1] != key.shape[1]


def attend_standard(causal: bool) -> Attend:
    def attend(query, key, value):
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ value

    return attend


def attend_flash4(problem: Problem) -> Attend:
    """FlashAttention-4 on (batch, seq, heads, dim) tensors, here seen as ours are.

    Raises BaselineError where it is not installed, and for masks with partial blocks, whose
    elements it takes as code of its own language.
    """
    try:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BaselineError(f"FlashAttention-4 is not installed: {error}") from None
    options = {"causal": problem.dense == "causal"}
    if problem.dense is None:
        options |= flash4_blocks(problem.mask)

    def attend(query, key, value):
        out, _ = flash_attn_func(*(t.transpose(1, 2) for t in (query, key, value)), **options)
        return out.transpose(1, 2)

    return attend


def flash4_blocks(mask: BlockMask) -> dict:
    """The blocks of a mask as FlashAttention-4's arguments, by query and by key."""
    from flash_attn.cute.block_sparsity import (  # pyright: ignore[reportMissingImports]
        BlockSparseTensorsTorch,
    )

    if mask.partial_blocks:
        raise BaselineError("FlashAttention-4 is given no masks with partial blocks")
    names = ("block_sparse_tensors", "block_sparse_tensors_bwd")
    lists = (to_block_lists(mask), to_block_lists(mask, by_key=True))
    return {
        name: BlockSparseTensorsTorch(**blocks._asdict())
        for name, blocks in zip(names, lists, strict=True)
    }


def attend_flex(block_mask: flex.BlockMask | None) -> Attend:
    """FlexAttention with a block mask; with none, of the full mask."""
    compiled = _compiled_flex()
    return lambda query, key, value: compiled(
        query, key, value, block_mask=block_mask, enable_gqa=_grouped(query, key)
    )


@cache
def _compiled_flex():
    # A backward pass that is timed runs more than once on the same saved tensors, which donated
    # buffers rule out.
    functorch_config.donated_buffer = False
    dynamo_config.recompile_limit = RECOMPILE_LIMIT
    # With fullgraph, passing the limit is an error and not a silent fall to the quadratic eager
    # form.
    return torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)


def flex_mask(problem: Problem) -> flex.BlockMask:
    """Exactly the same mask for FlexAttention: full blocks, and the pairs of partial ones.

    Without partial blocks it compiles no code for them; a predicate is faster than looking up.
    """
    mask, predicate = problem.mask, problem.predicate
    if mask.partial_blocks and predicate is None:
        return to_flex(mask)
    return flex.BlockMask.from_kv_blocks(
        *to_block_lists(mask)[:4],
        BLOCK_SIZE=mask.block_size,
        mask_mod=predicate and (lambda batch, head, q, k: predicate(q, k)),
        seq_lengths=mask.seq_len,
    )
