"""warmup: compiles kernels before the first call that needs them."""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from masks import Pattern
from masks._core.grid import checked_seq_len
from masks.arguments import check_bool, check_floating_dtype, check_sizes, checked_device
from sparseflash.arguments import AnyMask, checked_bias, checked_mask
from sparseflash.dispatch.call import Call, empty_max_logits
from sparseflash.dispatch.compile import compile_passes
from sparseflash.dispatch.plan import find_plan
from sparseflash.dispatch.spec import CallFacts
from sparseflash.options import OptionKeywords
from sparseflash.score import checked_score_tensors


def warmup(
    *masks: AnyMask | None,
    heads: int,
    head_dim: int,
    seq_len: int | tuple[int, int] | None = None,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    backward: bool = True,
    key_lengths: bool = False,
    bias: Tensor | None = None,
    max_logits: bool = False,
    score_tensors: Sequence[Tensor] | None = None,
    **options: Unpack[OptionKeywords],
) -> None:
    """Compiles the kernels of `attention` in parallel, before a call needs them.

    Without warmup, the first call that needs new kernels compiles those of both passes in
    parallel: in a process for each kernel, or in threads on a host with less than four processor
    threads. Meanwhile other processes compile the kernels that masks with and without partial
    blocks, and with rows of equal and of unequal lengths, would need. These are started up to a
    number of processes in all, the environment variable SPARSEFLASH_COMPILE_WORKERS; 0 turns all
    processes off. By default it is one for every two processor threads, at most twelve. Ranks that
    torchrun, srun or Lightning starts on one host share its threads. A program that embeds or
    freezes Python cannot start processes, and compiles in threads.

    The compiled kernels depend on dtype, head dim, block size, options, the number of
    query heads per key head, and on whether a mask has partial blocks. They hardly ever depend on
    lengths, and on strides only if tensors are not contiguous. Triton stores them on disk for
    later processes. They are loaded, and none is launched. Tensors of these shapes are allocated
    during the compilation, and the tables of the masks are cached as in a call. For a CPU nothing
    is compiled.

    Args:
        *masks: Any number of masks as in `attention`; None or no mask for all pairs.
        heads: Number of query heads.
        head_dim: Head dim of query and key.
        seq_len: Length in tokens, or (q_len, k_len), for a Pattern. Other masks have a length.
        kv_heads: Number of key heads; by default as many as query heads.
        value_dim: Head dim of value; by default head_dim.
        batch: Number of batch elements.
        dtype: Dtype of query, key and value.
        device: Device of the calls.
        backward: Whether gradients of query, key and value will be needed.
        key_lengths: Whether the calls will have key lengths, a bool.
        bias, score_tensors: As in `attention`.
        max_logits: Whether the calls will ask for the maximum logits.
        **options: As in `attention`.

    Raises:
        TypeError, ValueError, BackendError: As `attention` for such a call. Also ValueError if
            seq_len is missing.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    sizes = {"heads": heads, "kv_heads": kv_heads, "batch": batch}
    check_sizes(**sizes, head_dim=head_dim, value_dim=value_dim)
    flags = {"backward": backward, "key_lengths": key_lengths, "max_logits": max_logits}
    for name, flag in flags.items():
        check_bool(name, flag)
    given = None if seq_len is None else checked_seq_len(seq_len)
    device = checked_device(device)
    check_floating_dtype("dtype", dtype)
    calls = []
    for mask in map(checked_mask, masks or (None,)):
        lengths = given if isinstance(mask, Pattern) else mask.seq_len
        if lengths is None:
            raise ValueError("seq_len must be given with a Pattern or with no mask, got None")
        q_len, k_len = lengths
        dtype_and_device = {"dtype": dtype, "device": device}
        query = torch.empty(batch, heads, q_len, head_dim, **dtype_and_device)
        key = torch.empty(batch, kv_heads, k_len, head_dim, **dtype_and_device)
        value = torch.empty(*key.shape[:3], value_dim, **dtype_and_device)
        facts = CallFacts.of(mask, key_lengths, bias, max_logits, score_tensors)
        plan = find_plan(query, key, value, mask, options, facts)
        call = Call(plan)
        call.score_tensors = checked_score_tensors(
            plan.spec.score, score_tensors, query, lengths, key_lengths
        )
        if max_logits:
            call.max_logits = empty_max_logits(query)
        if key_lengths:
            call.key_lengths = torch.full((batch,), k_len, dtype=torch.int32, device=device)
        call.bias = checked_bias(bias, query, q_len, k_len)
        sums = (facts.differentiates_bias, facts.differentiates_blocks)
        needs = (*[backward] * 3, *sums, facts.differentiates_score_tensors)
        calls.append((call, (query, key, value), needs))
    compile_passes(calls)
