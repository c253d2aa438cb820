"""The backend "triton": kernels in Triton, for compute capability 8.0 or more.

The module implements sparseflash.backends.base.Backend. The first call that needs Triton imports
it, so this package can be imported if Triton is not installed.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from masks._core.grid import BLOCK_SIDES
from masks.lookup_table import LookupTable
from masks.mask_batch import CompiledMask
from sparseflash.dispatch.call import Call, Gradients, Needs, Saved
from sparseflash.dispatch.spec import EVERY_EXTRA, AttentionSpec
from sparseflash.score import find_score_function

name = "triton"
extras = EVERY_EXTRA
compiles = True
TILE = (128, 128)  # tokens
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = range(8, 257)
ARCHITECTURE = 80  # compute capability times ten
# Blocks whose shorter side is a key of MIN_COVERAGE are re-blocked to MIN_MERGED_SIDE tokens or
# more if their coverage of TILEs is at least the value. On an H200 at 128 dims re-blocking makes a
# band (coverage 0.9) 1.9 to 2.8 times as fast, but random blocks of s = 1/4 (0.25) and butterflies
# (0.17 and 0.31) only 0.55 to 1.08 times.
MIN_MERGED_SIDE = 64
MIN_COVERAGE = {16: 0.5, 32: 0.7}


def why_not(spec: AttentionSpec, mask: CompiledMask) -> list[str]:
    """The reasons for which the kernels cannot compute a call; empty if they can."""
    if find_spec("triton") is None:
        return ["triton is not installed"]
    return _why_not_call(spec) or _why_not_device(spec)


def _why_not_call(spec: AttentionSpec) -> list[str]:
    from sparseflash.backends.triton import configs, launch

    interpreted = configs.interpreted()
    reasons = []
    if spec.device.type != "cuda" and not (spec.device.type == "cpu" and interpreted):
        reasons.append(f"device is {spec.device}, needs cuda (or cpu with TRITON_INTERPRET=1)")
    if spec.dtype not in DTYPES:
        reasons.append(f"dtype is {spec.dtype}, needs one of {DTYPES}")
    elif spec.dtype == torch.bfloat16 and interpreted:
        reasons.append(
            "dtype is torch.bfloat16, in which the Triton interpreter computes wrong products"
        )
    for name in ("head_dim", "value_dim"):
        if (dim := getattr(spec, name)) not in HEAD_DIMS:
            reasons.append(f"{name} is {dim}, needs {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}")
    if not set(spec.block_size) <= set(BLOCK_SIDES):
        reasons.append(f"block_size is {spec.block_size}, needs sides in {BLOCK_SIDES}")
    if spec.score is not None and find_score_function(spec.score).triton is None:
        reasons.append(f"score is {spec.score!r}, which has no function for Triton")
    for name in ("batch", "heads"):
        if getattr(spec, name) > launch.MAX_GRID_YZ:
            reasons.append(f"{name} is {getattr(spec, name)}, needs at most {launch.MAX_GRID_YZ}")
    return reasons


def _why_not_device(spec: AttentionSpec) -> list[str]:
    from sparseflash.backends.triton import configs

    architecture, memory = configs.limits(spec.device)
    if architecture < ARCHITECTURE:
        return [f"compute capability is {architecture / 10}, needs {ARCHITECTURE / 10} or more"]
    reasons = []
    for pass_name in configs.PASSES:
        needed = configs.min_shared_memory(
            pass_name, architecture, spec.dtype, spec.widest_dim, spec.block_size
        )
        if needed > memory:
            reasons.append(
                f"{pass_name} needs {needed} bytes of shared memory, {spec.device} allows {memory}"
            )
    return reasons


def auto_skip(spec: AttentionSpec, mask: CompiledMask) -> list[str]:
    """Always empty: this backend is the last one that "auto" considers."""
    return []


def compiled_for(spec: AttentionSpec, table: LookupTable) -> tuple[bool, ...]:
    """Whether there are partial blocks, in both directions."""
    return table.by_query.has_partial, table.by_key.has_partial


def block_size_for(spec: AttentionSpec, mask: CompiledMask) -> tuple[int, int]:
    """Larger blocks than those of the mask if their coverage is high enough."""
    least = MIN_COVERAGE.get(min(spec.block_size))
    own = spec.few_queries or spec.positions  # there is a position for each block of the mask
    if least is None or own or spec.device.type != "cuda":
        return spec.block_size
    coverage = mask.coverage(TILE)
    if coverage is None or coverage < least:
        return spec.block_size
    block_q, block_k = spec.block_size
    return max(block_q, MIN_MERGED_SIDE), max(block_k, MIN_MERGED_SIDE)


forward_block_size_for = block_size_for


def describe(
    call: Call, mask: CompiledMask, query: Tensor, key: Tensor, value: Tensor
) -> dict[str, str]:
    """The configuration of each pass, and the block size of a re-blocked mask.

    See sparseflash.backends.base.
    """
    from sparseflash.backends.triton import decode, launch

    plan, described = call.plan, {}
    if plan.table.block_size != plan.spec.block_size:
        merged = f"{plan.table.block_size}, merged from blocks of {plan.spec.block_size}"
        described["tiles"] = merged
    streamed = {
        "forward": {"key": key, "value": value},
        "dq": {"key": key, "value": value},
        "dkdv": {"query": query, "grad_out": query},
    }
    for pass_name, tensors in streamed.items():
        described[pass_name] = str(launch.prepare_pass(plan, pass_name, tensors).config)
    if plan.spec.few_queries:
        described["forward"] = decode.describe(plan, key, value)
    return described


def computes_in_place(spec: AttentionSpec) -> bool:
    """Never: kernels read the keys of one tensor, and write all rows."""
    return False


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse); see sparseflash.backends.base."""
    decode, passes = _modules()
    run = decode.forward if call.spec.few_queries else passes.forward
    return run(call, query, key, value)


def backward(
    call: Call, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, needs: Needs
) -> Gradients:
    """The gradients; see sparseflash.backends.base."""
    _, passes = _modules()
    return passes.backward(call, grad_out, grad_lse, saved, needs)


@lru_cache(maxsize=1)
def _modules():
    """The modules that import Triton. Cached, because an import statement takes time."""
    from sparseflash.backends.triton import decode, passes

    return decode, passes
