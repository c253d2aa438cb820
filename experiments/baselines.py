"""sparseflash and its baselines, each as a function (query, key, value) -> out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import dropout, scaled_dot_product_attention

import sparseflash
from experiments.attention import AttentionFunction, attended, linear, sdpa, standard
from experiments.check import DROPOUT_SEED, Attend, Extras
from experiments.cli import Baseline
from experiments.packaged import without_projections
from experiments.pattern_families import Problem
from experiments.record import OPTIONS_OF_SUFFIX
from masks import BlockMask, MaskBatch
from masks.interop import (
    to_block_lists,
    to_cudnn_blocks,
    to_cudnn_intervals,
    to_flashinfer,
    to_flex,
)

RECOMPILE_LIMIT = 64
FLASHINFER_BYTES = 128 * 2**20  # of its workspace, as it recommends
NO_EXTRAS = Extras()
WITH_DROPOUT = (
    Baseline.SDPA,
    Baseline.FLASH,
    Baseline.CUDNN,
    Baseline.STANDARD,
    Baseline.LINFORMER,
    Baseline.REFORMER,
    Baseline.LOCAL,
    Baseline.LONGFORMER,
    Baseline.ROUTING,
    Baseline.SINKHORN,
)
# A CUDA graph cannot contain these, and a capture that fails leaves torch in a state in which
# later runs fail, too. BigBird draws its random blocks on the host.
NOT_CAPTURED = (Baseline.LONGFORMER, Baseline.BIGBIRD)
STANDARD_PARTS = ("product", "mask", "softmax", "dropout", "product with V")
# Errors of libraries, besides RuntimeError, for problems that they do not support.
REFUSALS = (AssertionError, ImportError, TypeError, ValueError)


class BaselineError(RuntimeError):
    """A baseline cannot compute a problem on this machine."""


def attend_sparseflash(
    problem: Problem, named: str = "auto", extras: Extras = NO_EXTRAS
) -> Attend:
    """Our implementation; named: a backend, and perhaps a suffix of record.OPTIONS_OF_SUFFIX."""
    backend, slash, suffix = named.partition("/")
    options = {
        "backend": backend,
        "deterministic": True,
        **OPTIONS_OF_SUFFIX.get(slash + suffix, {}),
    }
    if extras.key_lengths is not None:
        options["key_lengths"] = extras.key_lengths
    if extras.dropout_p > 0:
        options |= {"dropout_p": extras.dropout_p, "seed": DROPOUT_SEED}
    return lambda query, key, value: sparseflash.attention(
        query, key, value, problem.mask, **options
    )


def attend_baseline(baseline: Baseline, problem: Problem, extras: Extras = NO_EXTRAS) -> Attend:
    """The baseline for this mask.

    Raises:
        ValueError: The baseline is dense, and the mask is sparse.
        BaselineError: The baseline does not support the extras, or not with this mask.
    """
    padded = extras.key_lengths is not None
    padded_full = baseline in (Baseline.SDPA, Baseline.STANDARD, Baseline.FLASH4)
    padded_any = baseline in (Baseline.FLEX, Baseline.CUDNN_FLEX) or baseline.approximate
    if padded and padded_full and problem.dense != "full":
        raise BaselineError(f"{baseline} is measured with padding on full masks only")
    if padded and not (padded_full or padded_any):
        raise BaselineError(f"{baseline} is measured without padding")
    if extras.dropout_p > 0 and baseline not in WITH_DROPOUT:
        raise BaselineError(f"{baseline} has no dropout")
    if baseline is Baseline.FLEX:
        # Without a block mask FlexAttention computes the full mask.
        every = problem.dense == "full" and not padded
        return attend_flex(None if every else flex_mask(problem, extras.key_lengths))
    if baseline is Baseline.CUDNN_FLEX:
        return attend_cudnn_flex(problem, extras.key_lengths)
    if extras.key_lengths is not None and baseline is Baseline.FLASH4:
        return attend_flash4_padded(problem, extras.key_lengths)
    if baseline in ON_INSTALLED:
        return ON_INSTALLED[baseline](problem)
    if problem.dense is None:
        raise ValueError(f"{baseline} computes full and causal masks only")
    causal = problem.dense == "causal"
    if baseline.approximate:
        return attend_approximate(baseline, causal, extras)
    if padded:
        return attend_padded({"sdpa": sdpa, "standard": standard}[baseline], extras)
    if baseline is Baseline.STANDARD:
        return attend_standard(causal, extras.dropout_p)
    return attend_sdpa(baseline, causal, extras.dropout_p)


def attend_sdpa(baseline: Baseline, causal: bool, dropout_p: float = 0.0) -> Attend:
    backends = {
        Baseline.FLASH: [SDPBackend.FLASH_ATTENTION],
        Baseline.CUDNN: [SDPBackend.CUDNN_ATTENTION],
    }

    def attend(query, key, value):
        with sdpa_kernel(backends[baseline]) if baseline in backends else nullcontext():
            return scaled_dot_product_attention(
                *(query, key, value, None, dropout_p, causal), enable_gqa=_grouped(query, key)
            )

    return attend


def _grouped(query: Tensor, key: Tensor) -> bool:
    """Whether several query heads share a key head."""
    return query.shape[1] != key.shape[1]


def attend_standard(causal: bool, dropout_p: float = 0.0) -> Attend:
    def attend(query, key, value):
        result = query
        for part in standard_parts(query, key, value, causal, dropout_p).values():
            result = part(result)
        return result

    return attend


def standard_parts(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout_p: float
) -> dict[str, Callable[[Tensor], Tensor]]:
    """STANDARD_PARTS in order, each as a function of the previous result.

    The argument of the first one is ignored.
    """

    def mask(scores):
        if not causal:
            return scores
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(hidden, -torch.inf)

    parts = (
        lambda _: query * query.shape[-1] ** -0.5 @ key.mT,  # scaled while it is N x d
        mask,
        lambda scores: scores.softmax(-1),
        lambda weights: dropout(weights, dropout_p),
        lambda weights: weights @ value,
    )
    return dict(zip(STANDARD_PARTS, parts, strict=True))


def attend_padded(attention: AttentionFunction, extras: Extras) -> Attend:
    """A function of `experiments.attention` with key lengths."""
    lengths = extras.key_lengths
    return lambda query, key, value: attention(
        query, key, value, lengths if lengths is None else lengths.to(key.device), extras.dropout_p
    )


def attend_approximate(baseline: Baseline, causal: bool, extras: Extras) -> Attend:
    """Approximate attention with the full mask: a layer of a package without its projections.

    Raises:
        BaselineError: The mask is causal. The returned function raises it if the package is not
            installed or does not support the problem.
    """
    if causal:
        raise BaselineError(f"{baseline} is measured on full masks only")
    if baseline is Baseline.LINEAR:
        return attend_padded(linear, extras)
    layers = {}

    def attend(query, key, value):
        lengths, inside = extras.key_lengths, None
        if lengths is not None:
            inside = attended(lengths, key)
        with refusals(baseline):
            if query.shape not in layers:
                layers[query.shape] = without_projections(baseline, query, extras.dropout_p)
            return layers[query.shape](query, key, value, inside)

    return attend


def attend_flash4(problem: Problem) -> Attend:
    """FlashAttention-4. Its tensors are (batch, seq, heads, dim), here transposed views of ours.

    Raises:
        BaselineError: It is not installed, or the mask has partial blocks, for which it needs code
            in its own language.
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


def attend_flash4_padded(problem: Problem, key_lengths: Tensor) -> Attend:
    """FlashAttention-4 with the full mask and all queries, on keys and values without padding.

    It takes packed keys and values, as its varlen function documents. Each pass includes the
    copies: of keys and values, and of their gradients back, with zeros for padding.

    Raises:
        BaselineError: It is not installed. The returned function raises it if the package
            refuses the problem.
    """
    with refusals("FlashAttention-4"):
        from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore

    (q_len, k_len), device = problem.mask.seq_len, problem.mask.device
    lengths = key_lengths.tolist()  # the function takes the longest one as a number
    inside = torch.arange(k_len) < torch.tensor(lengths)[:, None]
    where = tuple(index.to(device) for index in inside.nonzero(as_tuple=True))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    options = {
        "seqused_q": torch.full((len(lengths),), q_len, dtype=torch.int32, device=device),
        "cu_seqlens_k": ends.to(device, torch.int32),
        "max_seqlen_q": q_len,
        "max_seqlen_k": max(lengths),
        "causal": False,
    }

    def attend(query, key, value):
        packed = [Packed.apply(t, *where) for t in (key, value)]
        with refusals("FlashAttention-4"):
            out, _ = flash_attn_varlen_func(query.transpose(1, 2), *packed, **options)
        return out.transpose(1, 2)

    return attend


class Packed(torch.autograd.Function):
    """Packs tokens of (batch, heads, seq_len, dim) into (total, heads, dim).

    The derivative of indexing would add up the gradients of equal indices. There are none here.
    """

    @staticmethod
    def forward(ctx, x, batch, token):
        ctx.save_for_backward(batch, token)
        ctx.shape = x.shape
        return x.transpose(1, 2)[batch, token]

    @staticmethod
    def backward(ctx, grad):
        x_grad = grad.new_zeros(ctx.shape)
        x_grad.transpose(1, 2)[ctx.saved_tensors] = grad
        return x_grad, None, None


def flash4_blocks(mask: BlockMask) -> dict:
    """The blocks of a mask as arguments of FlashAttention-4, by query and by key."""
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


def attend_cudnn_bsa(problem: Problem) -> Attend:
    """cuDNN's block-sparse attention with block lists; its backward pass runs by autograd.

    Raises:
        BaselineError: It is not installed, or its lists cannot represent the mask.
    """
    with refusals("cuDNN's block-sparse attention"):
        from cudnn import block_sparse_attention as bsa  # pyright: ignore

        own, lists = to_cudnn_blocks(problem.mask), {}
        options = {"allow_empty_block_nums": bool((own.q2k_block_nums == 0).any())}

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):
            batch, heads = query.shape[:2]
            if (batch, heads) not in lists:
                lists[batch, heads] = to_cudnn_blocks(problem.mask, batch, heads)._asdict()
            blocks = lists[batch, heads]
            with refusals("cuDNN's block-sparse attention"):
                found = bsa.block_sparse_attention_forward(query, key, value, **blocks, **options)
            ctx.save_for_backward(query, key, value, found["o_tensor"], found["lse_tensor"])
            return found["o_tensor"]

        @staticmethod
        def backward(ctx, grad_out):
            saved, batch, heads = ctx.saved_tensors, *grad_out.shape[:2]
            with refusals("cuDNN's block-sparse attention"):
                found = bsa.block_sparse_attention_backward(
                    grad_out, *saved, **lists[batch, heads]
                )
            return tuple(found[f"d{name}_tensor"] for name in "qkv")

    return Attention.apply


def attend_cudnn_flex(problem: Problem, key_lengths: Tensor | None = None) -> Attend:
    """cuDNN's flex attention with intervals of keys, which end at the key lengths.

    Its tensors are (batch, seq, heads, dim), here transposed views of ours. The first call makes
    its plan, with a backward pass if inputs require gradients.

    Raises:
        BaselineError: It is not installed.
    """
    with refusals("cuDNN's flex attention"):
        from cudnn.flex_attention import create_mask_plan, flex_attn_func  # pyright: ignore

    mask, batch, plans = problem.mask, None, {}
    if key_lengths is not None:
        mask, batch = within_lengths(mask, key_lengths), 1

    def attend(query, key, value):
        own = [t.transpose(1, 2) for t in (query, key, value)]
        with refusals("cuDNN's flex attention"):
            if not plans:
                intervals = to_cudnn_intervals(mask.to(query.device), batch or len(query))
                plans["mask_plan"] = create_mask_plan(intervals, *own)
            return flex_attn_func(*own, **plans).transpose(1, 2)

    return attend


def attend_flashinfer(problem: Problem) -> Attend:
    """FlashInfer's block-sparse attention, which has no backward pass.

    Its tensors are (tokens, heads, dim), here views of ours with the heads of all batch elements.
    The first call makes its plan. A mask with partial blocks is given with its pairs.

    Raises:
        BaselineError: It is not installed, or its blocks cannot represent the mask.
    """
    with refusals("FlashInfer's block-sparse attention"):
        from flashinfer import BlockSparseAttentionWrapper  # pyright: ignore

        blocks, plans = to_flashinfer(problem.mask), {}

    def planned(query: Tensor, key: Tensor) -> Any:
        workspace = torch.empty(FLASHINFER_BYTES, dtype=torch.uint8, device=query.device)
        plan = BlockSparseAttentionWrapper(workspace)
        heads = (x.shape[0] * x.shape[1] for x in (query, key))
        dtypes = {"q_data_type": query.dtype, "o_data_type": query.dtype}
        lists = [x if isinstance(x, int) else x.to(query.device) for x in blocks[:-1]]
        mask = None if blocks.mask is None else blocks.mask.to(query.device)
        plan.plan(*lists, *heads, query.shape[-1], mask=mask, **dtypes)
        return plan

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            query, key, _ = tensors
            with refusals("FlashInfer's block-sparse attention"):
                if query.shape not in plans:
                    plans[query.shape] = planned(query, key)
                own = [x.permute(2, 0, 1, 3).flatten(1, 2) for x in tensors]
                out = plans[query.shape].run(*own)
            return out.unflatten(1, query.shape[:2]).permute(1, 2, 0, 3)

        @staticmethod
        def backward(ctx, grad_out):
            raise NotImplementedError("FlashInfer's block-sparse attention has no backward pass")

    return Attention.apply


@contextmanager
def refusals(library: str) -> Iterator[None]:
    """Turns errors of a library into a BaselineError of one line."""
    try:
        yield
    except REFUSALS as error:
        reason = " ".join(f"{error}".split()) or type(error).__name__
        raise BaselineError(f"{library}: {reason}") from error


def attend_flex(block_mask: flex.BlockMask | None) -> Attend:
    """FlexAttention with a block mask, or without one for the full mask."""
    compiled = _compiled_flex()
    return lambda query, key, value: compiled(
        query, key, value, block_mask=block_mask, enable_gqa=_grouped(query, key)
    )


@cache
def _compiled_flex():
    # A timed backward pass runs several times on the same saved tensors, so buffers must not be
    # donated.
    functorch_config.donated_buffer = False
    dynamo_config.recompile_limit = RECOMPILE_LIMIT
    # With fullgraph, exceeding the recompile limit is an error. Otherwise the quadratic eager form
    # would run silently.
    return torch.compile(flex.flex_attention, fullgraph=True, dynamic=False)


def within_lengths(mask: BlockMask, key_lengths: Tensor) -> MaskBatch:
    """The mask of each batch element, without keys past its length."""
    keys = torch.arange(mask.seq_len[1], device=key_lengths.device)
    return MaskBatch.with_keys(mask, keys < key_lengths.unsqueeze(1))


def flex_mask(problem: Problem, key_lengths: Tensor | None = None) -> flex.BlockMask:
    """The same mask for FlexAttention: full blocks, and the pairs of partial blocks.

    Without partial blocks no code is compiled for them. A predicate is faster than a look-up.
    """
    mask, predicate = problem.mask, problem.predicate
    if key_lengths is not None:
        return padded_flex_mask(problem, key_lengths.to(mask.device))
    if mask.partial_blocks and predicate is None:
        return to_flex(mask)
    return flex.BlockMask.from_kv_blocks(
        *to_block_lists(mask)[:4],
        BLOCK_SIZE=mask.block_size,
        mask_mod=predicate and (lambda batch, head, q, k: predicate(q, k)),
        seq_lengths=mask.seq_len,
    )


def padded_flex_mask(problem: Problem, key_lengths: Tensor) -> flex.BlockMask:
    """flex_mask of a batch whose keys end at these lengths."""
    batch, unpadded = within_lengths(problem.mask, key_lengths), flex_mask(problem).mask_mod
    lists = [to_block_lists(batch[b])[:4] for b in range(len(batch))]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return unpadded(b, h, q, k) & (k < key_lengths[b])

    return flex.BlockMask.from_kv_blocks(
        *map(torch.cat, zip(*lists, strict=True)),
        BLOCK_SIZE=batch.block_size,
        mask_mod=mask_mod,
        seq_lengths=batch.seq_len,
    )


ON_INSTALLED: dict[Baseline, Callable[[Problem], Attend]] = {
    Baseline.FLASH4: attend_flash4,
    Baseline.CUDNN_BSA: attend_cudnn_bsa,
    Baseline.FLASHINFER: attend_flashinfer,
}
