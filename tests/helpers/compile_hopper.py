"""Compiles the Hopper kernels without a GPU, and reports on them.

What a `Compiler` may ask of it:
    variants HEAD_DIM VALUE_DIM BLOCK NAMES    what the compiler made of calls that CALLS names
    three HEAD_DIM      what it made of forward kernels of three warpgroups
    packed HEAD_DIM     what it made of forward kernels of packed heads
    calls HEAD_DIM      kernels compiled by calls of many lengths
    layouts HEAD_DIM    kernels compiled for tensors of many strides
    second HEAD_DIM     whether the first calls of two masks found their kernels compiled
    refused HEAD_DIM    what is said of score functions that return tiles of other shapes
"""

import os
import re
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton import knobs

import masks
from masks import BlockMask
from sparseflash.backends import hopper
from sparseflash.backends.hopper import configs, launch
from sparseflash.backends.hopper.kernels.backward_dkdv import backward_dkdv_kernel
from sparseflash.backends.hopper.kernels.backward_dq import backward_dq_kernel
from sparseflash.backends.hopper.kernels.backward_fused import backward_fused_kernel
from sparseflash.backends.hopper.kernels.forward import forward_kernel
from sparseflash.backends.triton_common import workers
from sparseflash.dispatch.compile import compile_before_first_call
from sparseflash.score import ScoreFunction
from tests.helpers.calls import ALWAYS_FUSED, call_on
from tests.helpers.compile_only import (
    compile_instead_of_launching,
    compiled,
    count_instead_of_compiling,
    machine_code,
    registers_per_thread,
    stack_bytes,
)
from tests.helpers.operands import unset_operands

KERNELS = {
    "forward": forward_kernel,
    "dq": backward_dq_kernel,
    "dkdv": backward_dkdv_kernel,
    "fused": backward_fused_kernel,
}


def call(
    mask: BlockMask,
    head_dim: int,
    *,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    kv_heads: int = 2,
    key_lengths: torch.Tensor | None = None,
    grad_out: torch.Tensor | None = None,
    with_grad_lse: bool = False,
    dropout_p: float = 0.0,
    deterministic: bool = True,
    **changes,
) -> None:
    """Both passes of one call. The result is also grad_out unless there is one.

    changes: soft cap, score function and its tensors, bias; whether there are maximum logits
    """
    (q_len, k_len), heads = mask.seq_len, 2
    query = torch.empty(batch, heads, q_len, head_dim, dtype=dtype)
    key = value = torch.empty(batch, kv_heads, k_len, head_dim, dtype=dtype)
    if value_dim is not None:
        value = torch.empty(batch, kv_heads, k_len, value_dim, dtype=dtype)
    options = {"scale": 1.0, "dropout_p": dropout_p, "deterministic": deterministic} | changes
    call = call_on(hopper, query, key, mask, value, key_lengths=key_lengths, seed=1, **options)
    out, lse = hopper.forward(call, query, key, value)
    grad_out = out if grad_out is None else grad_out
    grad_lse = lse if with_grad_lse else None
    needs = (True, True, True, False, False, False)
    hopper.backward(call, grad_out, grad_lse, (query, key, value, out, lse), needs)


@triton.jit
def bent(score, batch, head, query, key):
    near = (query - key + batch) % 3 == 0
    slope = 1.0 / (1.0 + head)
    return tl.where(near, slope * score, score), tl.where(near, slope, 1.0)


BENT = ScoreFunction("bent, compiled for Hopper", lambda score, *_: (score, 1.0), bent)
CHANGES = {"softcap": 5.0, "score": BENT, "bias": torch.zeros(2, 1023)}


def in_documents(score, batch, head, query, key, document, weight):
    same = document[batch, query] == document[batch, key]
    return torch.where(same, score * weight[head], -torch.inf)


DOCUMENTS = ScoreFunction.from_torch("documents, compiled for Hopper", in_documents, (int, float))
READS = {
    "score": DOCUMENTS,
    "score_tensors": [torch.zeros(1, 512, dtype=torch.int64), torch.ones(2)],
}


CALLS = {
    "full": (masks.full(), {}),
    "causal": (masks.causal(), {}),
    "causal, with options": (
        masks.causal(),
        {
            "dtype": torch.float16,
            "kv_heads": 1,
            "key_lengths": torch.ones(1, dtype=torch.int32),
            "with_grad_lse": True,
            "dropout_p": 0.1,
            "max_logits": True,
        },
    ),
    "causal, with changed scores": (masks.causal(), CHANGES),
    "full, with changed scores": (masks.full(), READS),
}


def report_variants(head_dim: int, value_dim: int, block: int, *names: str):
    for name in names:
        pattern, options = CALLS[name]
        for kernel in KERNELS.values():
            kernel.device_caches.clear()
        call(pattern(512, block), head_dim, value_dim=value_dim, **options)
        fused = head_dim in configs.FUSED_WIDTHS["dropout_p" in options] and block == 128
        if fused and "score" not in options and value_dim == head_dim:
            call(pattern(512, block), head_dim, deterministic=False, **options)
        for which, made in compiled_passes():
            about = {"mask": name, "head_dim": head_dim, "value_dim": value_dim, "block": block}
            yield {"which": which} | about | report_of(made)


def report_of(made) -> dict:
    code = machine_code(made.asm["cubin"])
    return {
        "shared": made.metadata.shared,
        "registers": registers(made),
        "stack": stack_bytes(made.asm["cubin"]),
        "products": code.count("HGMMA"),
        "waits": code.count("WARPGROUP.DEPBAR"),
        "barriers": sorted(set(re.findall(r"BAR\.(?:SYNC\S*|ARV) ([^;]*?) ;", code))),
        "unset": unset_operands(code),
    }


def report_three(head_dim: int):
    """Forward kernels whose work tiles are of 192 queries."""
    options = {"key_lengths": torch.ones(1, dtype=torch.int32), "max_logits": True}
    for name, pattern, changes in (
        ("full", masks.full(), {}),
        ("causal", masks.causal(), {}),
        ("causal, with lengths", masks.causal(), options),
    ):
        forward_kernel.device_caches.clear()
        query = torch.empty(1, 2, 512, head_dim, dtype=torch.float16)
        tensors = (query, query, pattern(512, 128))
        call = call_on(hopper, *tensors, scale=1.0, forward_tile=(192, 128), **changes)
        call.forward(query, query, query)
        (made,) = compiled(forward_kernel)
        about = {"mask": name, "head_dim": head_dim, "value_dim": head_dim, "block": 192}
        yield {"which": "forward"} | about | report_of(made)


def report_packed(head_dim: int):
    """Forward kernels of two query heads in a CTA."""
    configs.PACKED_WIDTHS, configs.MIN_PACKED_WAVES = (64, 128), 0.0
    options = {"key_lengths": torch.ones(1, dtype=torch.int32), "max_logits": True}
    options |= {"dropout_p": 0.1}
    for name, pattern, changes in (
        ("full", masks.full(), {}),
        ("causal", masks.causal(), {}),
        ("causal, with options", masks.causal(), options),
    ):
        forward_kernel.device_caches.clear()
        query = torch.empty(1, 4, 512, head_dim, dtype=torch.float16)
        key = query[:, :2]
        call = call_on(hopper, query, key, pattern(512, 64), scale=1.0, seed=1, **changes)
        call.forward(query, key, key)
        (made,) = compiled(forward_kernel)
        about = {"mask": name, "head_dim": head_dim, "value_dim": head_dim, "block": 64}
        yield {"which": "packed"} | about | report_of(made)


def registers(made) -> int:
    """Of all threads of a CTA, when it starts."""
    return made.metadata.num_warps * 32 * registers_per_thread(made.asm["cubin"])


def compiled_passes():
    """(name, compiled kernel) of every launch of one call."""
    for which, kernel in KERNELS.items():
        made = compiled(kernel)
        names = ["dk", "dv"] if len(made) == 2 else [which] * len(made)
        yield from zip(names, made, strict=True)


def report_calls(head_dim: int):
    """Numbers of kernels after calls that differ in all that may change from call to call."""
    for block in (64, 128):
        for seq_len in (300, 1000, 2048):
            for batch in (1, 3):
                call(masks.causal()(seq_len, block), head_dim, batch=batch)
    yield {which: len(compiled(kernel)) for which, kernel in KERNELS.items()}


def report_layouts(head_dim: int):
    """For calls that differ in all that a kernel may be compiled for, how many variants were told
    apart, and the most kernels that Triton wanted for one of them."""
    lengths = torch.ones(3, dtype=torch.int32)
    for pattern in (masks.full(), masks.causal(), masks.local(30)):
        for key_lengths in (None, lengths[:1], lengths[1:2]):
            for kv_heads in (1, 2):
                mask = pattern(300, block_size=128)
                call(mask, head_dim, kv_heads=kv_heads, key_lengths=key_lengths)
    call(masks.full()(256, block_size=64), head_dim)
    mask = masks.full()(256, block_size=128)
    call(mask, head_dim, dtype=torch.float16)
    call(mask, head_dim, dropout_p=0.1)
    call(mask, head_dim, with_grad_lse=True)
    call(mask, head_dim, max_logits=True)
    call(mask, head_dim, value_dim=2 * head_dim)
    call(mask, 2 * head_dim, value_dim=head_dim)
    call(mask, head_dim, deterministic=False)
    for heads in (1, 2):
        call(mask, head_dim, bias=torch.zeros(heads, 511))
    for name in ("softcap", "score"):
        call(mask, head_dim, **{name: CHANGES[name]})
    call(mask, head_dim, **READS)
    chosen = torch.ones(2, 1, 2, 2) > 0
    call(mask.select(chosen), head_dim, batch=2)
    for strides in ((2**20, 64, 128, 1), (2**35, 8, 1024, 1), (3, 8, 8, 1)):
        size = (2, 2, 256, head_dim)
        grad_out = torch.empty_strided(size, strides, dtype=torch.bfloat16, device="meta")
        call(mask, head_dim, batch=2, grad_out=grad_out)
    yield VARIANTS.report()


def report_second(head_dim: int):
    """Forward passes whose kernels are compiled in processes, too, with a cache of their own."""
    found = []
    listener: Any = lambda cache_hit, **_: found.append(cache_hit)  # noqa: E731
    knobs.compilation.listener = listener
    with (
        TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {workers.VARIABLE: "1"}),
        mock.patch.object(workers, "MAX_WAIT", 300),  # also on cores that other tests use
    ):
        os.environ["TRITON_CACHE_DIR"] = folder
        for name in ("causal", "full"):
            query = torch.empty(1, 2, 512, head_dim, dtype=torch.float16)
            tensors, pattern = (query, query, query), CALLS[name][0]
            call = call_on(hopper, query, query, pattern(512, 128), scale=1.0)
            found.clear()
            compile_before_first_call(call, tensors, (False,) * 6)
            yield {"mask": name, "found": all(found)}
        process = workers.WORKERS._process
        workers.WORKERS.stop()
        process.wait()


@triton.jit
def of_query(score, batch, head, query, key):
    return 0.1 * query, 0.0


@triton.jit
def of_nothing(score, batch, head, query, key):
    return 1.0, 0.0


def report_refused(head_dim: int):
    """The error of each call."""
    for function in (of_query, of_nothing):
        name = f"{function.__name__}, compiled for Hopper"
        score = ScoreFunction(name, lambda score, *_: (score, 1.0), function)
        try:
            call(masks.causal()(512, 128), head_dim, score=score)
        except ValueError as error:
            yield {"function": function.__name__, "error": str(error)}


def reports(what: str, *choices: int | str):
    global VARIANTS
    VARIANTS = compile_instead_of_launching(90)
    if what in ("calls", "layouts"):
        count_instead_of_compiling()
    launch.multiprocessors = lambda device: 132
    configs.MIN_FUSED_BLOCKS = ALWAYS_FUSED
    yield from globals()[f"report_{what}"](*choices)
