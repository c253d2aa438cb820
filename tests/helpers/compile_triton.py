"""Compiles the Triton kernels for a GPU that need not be there, and reports on them.

What a `Compiler` may ask of it:
    variants ARCHITECTURE    what the compiler made of the first choices
    every ARCHITECTURE       the same of all that ships
    calls ARCHITECTURE       kernels compiled by calls of many lengths
    products ARCHITECTURE    whether float32 products are in TF32
    parameters ARCHITECTURE  bytes of the parameters of kernels, declared and packed
    layouts ARCHITECTURE     kernels compiled for tensors of many strides
    rows ARCHITECTURE        loads and stores of the kernels that merge, add and copy rows
    warmup ARCHITECTURE      kernels compiled by sparseflash.warmup, and by calls after it
    failing ARCHITECTURE     what is said of a kernel that processes cannot compile
"""

import io
import itertools
import logging
import math
import os
import re
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

import sparseflash
from experiments.instruments.tuning import configured
from masks import BlockMask, DynamicMask
from sparseflash.backends import triton as triton_backend
from sparseflash.backends.triton import configs
from sparseflash.backends.triton.kernels.decode import decode_kernel
from sparseflash.backends.triton.kernels.dkdv import key_value_gradient_kernel
from sparseflash.backends.triton.kernels.dq import query_gradient_kernel
from sparseflash.backends.triton.kernels.ds_sums import ds_sums_kernel
from sparseflash.backends.triton.kernels.forward import forward_kernel
from sparseflash.backends.triton.kernels.merge import (
    merge_rows_kernel,
    write_rows_kernel,
    write_rows_of_both_kernel,
)
from sparseflash.backends.triton.merge import (
    ROWS,
    add_rows,
    copy_rows,
    merge_rows,
    write_rows_of_both,
)
from sparseflash.backends.triton_common import launcher, relaunch, workers
from sparseflash.dispatch.call import Positions
from sparseflash.dispatch.compile import _compiled
from sparseflash.score import ScoreFunction
from tests.helpers.calls import call_on
from tests.helpers.compile_only import (
    SHARED_MEMORY,
    compile_instead_of_launching,
    compiled,
    count_instead_of_compiling,
    stack_bytes,
)

KERNELS = {
    "forward": forward_kernel,
    "dq": query_gradient_kernel,
    "dkdv": key_value_gradient_kernel,
    "ds_sums": ds_sums_kernel,
    "decode": decode_kernel,
}


def bent(score, batch, head, query, key):
    return score + torch.where((query - key) % 7 > 3, 0.1 * score**2, torch.exp2(-(head + 1)))


BENT = ScoreFunction.from_torch("bent", bent)


def reading(score, batch, head, query, key, table, document):
    near = score + table[head, key - query]
    return torch.where(document[batch, query] == document[batch, key], near, -torch.inf)


READING = ScoreFunction.from_torch("reads tensors", reading, (float, int))


def call(
    which, query, mask, *, key_lengths=None, kv_heads=None, value_dim=None, bias=None, **facts
):
    """One pass over a query (for "decode" its first token) that is also the key (its first heads)
    and the value (its first dims).

    facts: of AttentionSpec, where they are not those of a plain call
    """
    seq_len = query.shape[2]
    key, out = query[:, :kv_heads], query[..., :value_dim]
    value = key[..., :value_dim]
    if which == "decode":
        query, mask = query[:, :, :1], of_last_query(mask)
        bias = None if bias is None else bias[:, :seq_len]
    given = {"key_lengths": key_lengths, "seed": 1, "bias": bias, "scale": 1.0}
    if facts.get("score") == READING.name:
        given["score_tensors"] = [torch.zeros(2, 9), torch.zeros(2, 9).long()]
    call = call_on(triton_backend, query, key, mask, value=value, **given, **facts)
    if call.spec.positions:
        blocks = [torch.arange(n) for n in (mask.grid.nq, mask.grid.nk)]
        call.positions = Positions(*blocks, 2 * seq_len)
    if which in ("forward", "decode"):
        triton_backend.forward(call, query, key, value)
    else:
        lse = torch.empty(query.shape[:3])
        sums = which == "ds_sums"
        reads = call.spec.differentiates_score_tensors
        needs = (which == "dq", which == "dkdv", which == "dkdv")
        needs = (*needs, sums and bias is not None, sums and not reads, sums and reads)
        triton_backend.backward(call, out, None, (query, key, value, out, lse), needs)


def of_last_query(mask: BlockMask | DynamicMask) -> BlockMask | DynamicMask:
    end = mask.seq_len[0]
    if isinstance(mask, DynamicMask):
        return mask.support.slice_queries(end - 1, end).select(mask.blocks[..., -1:, :])
    return mask.slice_queries(end - 1, end)


def causal(seq_len: int, block_size: tuple[int, int]) -> BlockMask:
    return BlockMask.from_dense(torch.ones(seq_len, seq_len, dtype=torch.bool).tril(), block_size)


# Configurations of every head dim, of which one is enough.
SHARED = (*configs.SMALL, *configs.SMALL_DECODE)


ON_BOTH = 2  # architectures: the first so many of the options below, on every pass


def first_choices(architecture: int, every: bool = False):
    """(pass, dtype, head dim, configuration, options) of the first choices of calls, at one head
    dim that is common or one that needs much memory. What is rarer is compiled in two passes for
    one architecture and in the other two for the other, unless `every` is asked for.
    """

    def best(which, dtype, head_dim):
        return configs.candidates(architecture, which, dtype, head_dim)[0]

    choices = (
        (torch.bfloat16, 64, {}),
        (torch.bfloat16, 256, {}),
        (torch.bfloat16, 192, {"value_dim": 128, "max_logits": True}),
        (torch.float32, 64, {}),
        (torch.float16, 40, {"dropout_p": 0.1}),
        (torch.bfloat16, 64, {"softcap": 20.0, "bias": True}),
        (torch.bfloat16, 64, {"score": BENT.name}),
        (torch.bfloat16, 128, {"score": READING.name}),
        (torch.bfloat16, 128, {"dropout_p": 0.1, "bias": True, "positions": True}),
    )
    for row, which in enumerate((*configs.PASSES, "decode")):
        for column, (dtype, head_dim, options) in enumerate(choices):
            if every or column < ON_BOTH or (row + column + architecture // 10) % 2:
                yield which, dtype, head_dim, best(which, dtype, head_dim), options
    sums = ("ds_sums", torch.bfloat16, 64, best("dq", torch.bfloat16, 64))
    reads = {"score": READING.name, "differentiates_score_tensors": True}
    choices = ({"bias": True}, {**reads, "deterministic": False})
    choices += ({"bias": True, "positions": True}, {**reads, "softcap": 20.0})
    for row, options in enumerate(choices):
        if every or (row + architecture // 10) % 2:
            yield *sums, options


def every_choice(architecture: int):
    """The same of all kernels that ship."""
    yield from first_choices(architecture, every=True)
    for which in (*configs.PASSES, "decode"):
        for head_dim in (32, 64, 128, 256):
            listed = configs.candidates(architecture, which, torch.bfloat16, head_dim)
            shared = SHARED if head_dim != 64 else ()
            for config in (config for config in listed if config not in shared):
                yield which, torch.bfloat16, head_dim, config, {}
            best, *_ = configs.candidates(architecture, which, torch.float32, head_dim)
            yield which, torch.float32, head_dim, best, {}
        for head_dim in (40, 128):
            best, *_ = configs.candidates(architecture, which, torch.float16, head_dim)
            yield which, torch.float16, head_dim, best, {"dropout_p": 0.1}
        for head_dim in (64, 128):
            best, *_ = configs.candidates(architecture, which, torch.bfloat16, head_dim)
            yield which, torch.bfloat16, head_dim, best, {"softcap": 20.0}
            yield which, torch.bfloat16, head_dim, best, {"score": BENT.name}
            yield which, torch.bfloat16, head_dim, best, {"bias": True}
    for head_dim, options in itertools.product((64, 128), ({}, {"bias": True})):
        best, *_ = configs.candidates(architecture, "dq", torch.bfloat16, head_dim)
        yield "ds_sums", torch.bfloat16, head_dim, best, options


def report_variants(architecture: int):
    yield from report(architecture, first_choices(architecture))


def report_every(architecture: int):
    yield from report(architecture, every_choice(architecture))


def report(architecture: int, choices):
    for which, dtype, head_dim, config, options in choices:
        KERNELS[which].device_caches.clear()
        side = max(config.bm, config.bn)
        query = torch.empty(1, 1, 2 * side, head_dim, dtype=dtype)
        tensors = {}
        if "dropout_p" in options:
            tensors["key_lengths"] = torch.ones(1, dtype=torch.int32)
        if "bias" in options:
            tensors["bias"] = torch.zeros(1, 4 * side - 1)
        mask = causal(2 * side, (side, side))
        with configured(config, which):
            call(which, query, mask, **(options | tensors))
        kernels = compiled(KERNELS[which])
        assert len(kernels) == 1 + (which == "ds_sums" and "softcap" in options)
        for kernel in kernels:
            yield {
                "variant": f"{which} {dtype} d{head_dim} {config} {options}",
                "shared": kernel.metadata.shared,
                "estimate": configs.shared_memory(config, which, dtype, head_dim),
                "limit": SHARED_MEMORY[architecture],
                "stack": stack_bytes(kernel.asm["cubin"]),
                "warpgroup_products": kernel.asm["ptx"].count("wgmma.mma_async"),
                "wants_warpgroups": dtype != torch.float32 and min(config.bm, config.bn) >= 64,
            }


def report_calls(architecture: int):
    """Numbers of kernels after calls that differ in all that may change from call to call."""
    block_size = (64, 64)
    for head_dim in (20, 64):
        for seq_len in (1, 16, 63, 128, 257, 1000):
            i = torch.arange(math.ceil(seq_len / 64))
            blocks = (i[:, None] + i) % 2 == 0
            for mask in (
                causal(seq_len, block_size),
                DynamicMask.from_blocks(blocks, block_size, seq_len),
                DynamicMask.from_blocks(blocks | True, block_size, seq_len),
            ):
                for batch in (1, 3):
                    query = torch.empty(batch, 2, seq_len, head_dim, dtype=torch.float16)
                    for which in KERNELS:
                        call(which, query, mask)
        yield {which: len(compiled(kernel)) for which, kernel in KERNELS.items()}


def report_products(architecture: int):
    for precision in ("ieee", "tf32"):
        for kernel in KERNELS.values():
            kernel.device_caches.clear()
        query = torch.empty(1, 1, 64, 32)
        for which in KERNELS:
            call(which, query, causal(64, (64, 64)), precision=precision)
        ptx = {which: compiled(KERNELS[which])[0].asm["ptx"] for which in KERNELS}
        yield {which: ".tf32" in text for which, text in ptx.items()}


def report_parameters(architecture: int):
    """Bytes of the parameters of each pass: what its kernel declares, what relaunch packs.

    With descriptors, where the architecture has TMA.
    """
    stored = []
    relaunch.TensorMap.__init__ = lambda self, descriptor, metadata: None
    launcher.store = lambda cache, signature, launched, changing: stored.append(launched)
    query = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16)
    for which in KERNELS:
        config = configs.Config(64, 64, 4, 2, tma=architecture >= 90)
        with configured(config, which):
            call(which, query, causal(128, (64, 64)))
        (launched,) = [x for x in stored if x.compiled.name == KERNELS[which].__name__]
        packed = relaunch.pack_parameters(launched)
        assert packed is not None, which
        yield {
            "pass": which,
            "declared": declared_sizes(launched.compiled.asm["ptx"]),
            "packed": [relaunch.size_of(parameter) for parameter in packed[0]],
        }


def declared_sizes(ptx: str) -> list[int]:
    """Bytes of the parameters of a kernel in PTX."""
    header = ptx[ptx.index(".entry") :].split(")", 1)[0]
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+).*?(?:\[(\d+)\])?,?$", header, re.M)
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


def report_layouts(architecture: int):
    """For calls that differ in all that a kernel may be compiled for: how many variants there are,
    and the most kernels that Triton would compile for one of them.
    """
    mask = causal(40, (16, 16))
    storage = torch.empty(1 << 20, dtype=torch.float16)
    sizes = (1, 2, 40, 16)
    contiguous = (1280, 640, 16, 1)
    layouts = {
        "contiguous": (contiguous, 0),
        "misaligned": (contiguous, 1),
        "transposed": ((1280, 16, 32, 1), 0),
        "odd": ((1280, 641, 16, 1), 0),
        "scattered": ((2560, 1280, 32, 2), 0),
        "wide": ((2**40, 640, 16, 1), 0),
        "wide and odd": ((2**31 + 1, 640, 16, 1), 0),
    }
    for (strides, offset), which in itertools.product(layouts.values(), KERNELS):
        query = storage.as_strided(sizes, strides, offset)
        lengths = torch.ones(3, dtype=torch.int32)
        for key_lengths in (None, lengths[:1], lengths[1:2]):
            call(which, query, mask, key_lengths=key_lengths)
        call(which, query, mask, kv_heads=1)
    of_rows = torch.empty(1, 2, 40), storage.float().as_strided((1, 2, 40), (2**40, 41, 2))
    for (strides, offset), lse in itertools.product(layouts.values(), of_rows):
        out = storage.as_strided(sizes, strides, offset)
        merge_rows(out, lse, out, torch.empty(1, 2, 40), None)
        merge_rows(out, torch.empty(1, 2, 40), out, lse, torch.arange(40))
        for total in (out, out.float()):
            add_rows(total, out, torch.arange(40))
            copy_rows(total, out, None, torch.arange(40))
            both = (total, total), (out, out)
            write_rows_of_both(*both, torch.arange(40), None, adds=True)
    yield VARIANTS.report()


def report_rows(architecture: int):
    """How wide the loads and stores are of parts that lie by head, and by token.

    Values have other dims than keys: else the compiler may join the code of both.
    """
    for dtype, dims in ((torch.bfloat16, 128), (torch.bfloat16, 40), (torch.float32, 64)):
        total, lse = torch.empty(1, 4, 100, dims, dtype=dtype), torch.empty(1, 4, 100)
        by_token = torch.empty(50, 1, 4, dims, dtype=dtype).permute(1, 2, 0, 3)
        value_dims = -(-dims // 16) * 8
        one, other = (
            ROWS * configs.padded_dims(n) // 128 * dtype.itemsize // 16 for n in (dims, value_dims)
        )
        parts, of_both = (
            (total[:, :, 50:], by_token),
            (write_rows_of_both, write_rows_of_both_kernel),
        )
        for part, rows in itertools.product(parts, (None, torch.arange(50))):
            some, lses = total[:, :, :50], (lse[:, :, :50], torch.empty(1, 4, 50))
            both = [(x, x[..., :value_dims]) for x in (some, part)]
            merged = (some, lses[0], part, lses[1], rows, rows)
            for function, kernel, arguments, written, operands in (
                (merge_rows, merge_rows_kernel, merged, one, 2),
                (add_rows, write_rows_kernel, (some, part, rows), one, 2),
                (copy_rows, write_rows_kernel, (some, part, None, rows), one, 1),
                (*of_both, (*both, rows, None, True), one + other, 2),
                (*of_both, (*both, None, rows, False), one + other, 1),
            ):
                kernel.device_caches.clear()
                function(*arguments)
                (found,) = compiled(kernel)
                name = f"{function.__name__} {dtype} d{dims} {part.stride()} {rows is None}"
                yield {
                    "variant": name,
                    "accesses": accesses_of_globals(found.asm["ptx"]),
                    "written": written,
                    "operands": operands,
                }


def accesses_of_globals(ptx: str) -> dict[str, int]:
    """The number of loads ("ld") and stores ("st") of each width in bytes, as "ld16"."""
    found = re.findall(r"\b(ld|st)\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return Counter(f"{what}{int(count or 1) * int(bits) // 8}" for what, count, bits in found)


def report_warmup(architecture: int):
    """How many kernels are compiled by sparseflash.warmup, and by the two passes of a call."""
    triton_backend.why_not = lambda spec, mask: []
    facts = {"heads": 2, "kv_heads": 1, "head_dim": 16, "dtype": torch.float16, "device": "cpu"}
    facts["backend"] = "triton"
    bias = torch.zeros(1, 79, requires_grad=True)
    choices = {
        "plain": {},
        "padded": {"key_lengths": True},
        "biased": {"bias": bias},
        "no gradients": {"backward": False},
        "first call": {},
    }
    for name, options in choices.items():
        for kernel in KERNELS.values():
            kernel.device_caches.clear()
        _compiled.clear()
        mask = causal(40, (16, 16))
        if name != "first call":
            sparseflash.warmup(mask, **facts, **options)
        before = count_kernels()
        query, key = (torch.zeros(1, n, 40, 16, dtype=torch.float16) for n in (2, 1))
        if options.pop("key_lengths", False):
            options["key_lengths"] = torch.tensor([30])
        differentiated = options.pop("backward", True)
        for leaf in (query, key):
            leaf.requires_grad_(differentiated)
        out = sparseflash.attention(query, key, key, mask, backend="triton", **options)
        forward = count_kernels()
        if differentiated:
            out.backward(torch.ones_like(out))
        found = {"before": before, "forward": forward - before, "later": count_kernels() - forward}
        yield {"call": name} | found


FAILING = """
import triton
import triton.language as tl


@triton.jit
def kernel(BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 32, f"BLOCK must be 32, got {BLOCK}")
"""


def report_failing(architecture: int):
    """The error of a call whose kernel has an error, and what is logged."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("sparseflash").addHandler(handler)
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, {workers.VARIABLE: "1"}):
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "cache"))
        package = Path(folder, "failing_kernels")
        package.mkdir()
        Path(package, "__init__.py").touch()
        Path(package, "failing.py").write_text(FAILING)
        sys.path.append(folder)
        failing = import_module("failing_kernels.failing").kernel
        try:
            launcher.compile_only(
                lambda: launcher.launch(failing, (1, 1, 1), (), (), {"BLOCK": 16})
            )
        except ValueError as error:
            yield {"error": str(error), "log": log.getvalue()}
        process = workers.WORKERS._process
        workers.WORKERS.stop()
        process.wait()


def count_kernels() -> int:
    """How many kernels were compiled since the caches of all were cleared."""
    return sum(len(compiled(kernel)) for kernel in KERNELS.values())


def reports(what: str, architecture: int):
    global VARIANTS
    VARIANTS = compile_instead_of_launching(architecture)
    if what in ("calls", "layouts"):
        count_instead_of_compiling()
    configs.limits = lambda device: (architecture, SHARED_MEMORY[architecture])
    launcher.multiprocessors = lambda device: 4
    yield from globals()[f"report_{what}"](architecture)
