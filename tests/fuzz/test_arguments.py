"""One odd argument among good ones: it is served, or a TypeError or ValueError names it."""

import random
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import masks
import sparseflash
from masks import BlockMask, DynamicMask, MaskBatch, analysis, interop, plot
from masks.lint import lint
from sparseflash.advisor import Workload, block_sizes, search
from sparseflash.distributed import context_parallel_attention, gather, make_plan
from sparseflash.nn import KeyValueCache, Rotary, SparseAttention
from sparseflash.testing.algorithms import flash_forward, tile_sizes

MEMORY = 2 * 2**30  # bytes that a case may take beside what the process has

HUGE = (2**31, 2**40, 2**62, 2**63 - 1, 2**63, 10**20)
NUMBERS = (
    *(-(2**63), -5, -1, 0, 1, 2, 3, 7, 16, 63, 1000, *HUGE),
    *(-0.5, 0.0, 0.5, 1.0, 3.0, 1e300, float("nan"), float("inf"), -float("inf")),
    *(True, False, np.int64(3), np.float32(2.5), 1j),
)
OBJECTS = (
    *(None, "", "x", "top-left", "bottom-right", "full", "full()", "~" * 50, b"x", object()),
    *((), [], [3], (1, 2), (2, 1), (0, 0), (1, 2, 3), [-1], [2**63], ["x"], [1.5]),
    *([[1, 2], [3, 4]], {}, {"a": 1}, {3}, range(3), range(0), int, len),
    *(masks.full(), masks.full()(32, 16)),
)
SHAPE = (2, 2, 40, 8)
TENSORS = (
    *(lambda: torch.zeros(()), lambda: torch.tensor(3), lambda: torch.zeros(0)),
    *(lambda: torch.arange(3), lambda: torch.tensor([1, 2], dtype=torch.int8)),
    *(lambda: torch.tensor([-1, 50]), lambda: torch.tensor([2**40, 3])),
    *(lambda: torch.ones(2, 4, 5, dtype=torch.bool), lambda: torch.rand(SHAPE)),
    *(lambda: torch.rand(SHAPE, dtype=torch.float64), lambda: torch.rand(2, 2, 0, 8)),
    *(lambda: torch.rand(2, 3, 40, 8), lambda: torch.rand(2, 2, 8, 40).mT),
    *(lambda: torch.full(SHAPE, torch.nan), lambda: torch.rand(SHAPE).half()),
    *(
        lambda: torch.zeros(SHAPE, dtype=torch.int64),
        lambda: torch.zeros(3, dtype=torch.complex64),
    ),
)


def odd(rng: random.Random, good: Any, strict: bool) -> Any:
    """Any value, or one of the kind of a good one."""
    if strict:
        kind = rng.choice((NUMBERS, OBJECTS, TENSORS))
    elif isinstance(good, torch.Tensor):
        kind = TENSORS
    else:
        kind = NUMBERS if isinstance(good, (int, float)) else OBJECTS
    value = rng.choice(kind)
    return value() if kind is TENSORS else value


@contextmanager
def limited_memory() -> Iterator[None]:
    """What takes far more memory than its result fails, and not the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check_call(
    function: Callable,
    good: dict[str, Any],
    strict: bool,
    allowed: tuple[type[Exception], ...],
    rng: random.Random,
) -> None:
    """A call with one odd argument.

    Args:
        function: What is called.
        good: Arguments that it serves.
        strict: Whether the odd one may be of any type, and has to be named where it is refused.
        allowed: What else may be raised.
    """
    name = rng.choice(list(good))
    value = odd(rng, good[name], strict)
    with limited_memory():
        try:
            function(**good | {name: value})
        except (TypeError, ValueError, sparseflash.BackendError) as error:
            words = (*(known.rstrip("s") for known in good), str(value), "pattern", "nodes")
            if strict and not any(word in str(error) for word in words):
                raise AssertionError(f"{name}={value!r} is not named: {error}") from error
        except allowed:
            pass
        except Exception as error:
            error.add_note(f"{name}={value!r}")
            raise


def compiled(make: Callable) -> Callable:
    """Makes a pattern, and its mask at a length."""
    return lambda **arguments: make(**arguments)((40, 40), 16).to_dense()


PATTERNS = {
    masks.full: {},
    masks.causal: {"align": "top-left"},
    masks.local: {"window": (3, 2), "align": "top-left"},
    masks.dilated: {"window": 3, "dilation": 2, "align": None},
    masks.strided: {"stride": 2, "window": 1, "align": None},
    masks.butterfly: {"max_stride": 2},
    masks.neighborhood2d: {"columns": 2, "radius": 1},
    masks.random: {"density": 0.5, "seed": 3},
    masks.global_tokens: {"tokens": [1, 30]},
    masks.longformer: {"window": 3, "num_global": 2},
    masks.bigbird: {"window": 3, "num_global": 1, "num_random": 1, "seed": 0},
    masks.documents: {"lengths": [10, 30], "k_lengths": [20, 20], "pattern": masks.full()},
    masks.tree: {"parents": [-1] * 40, "prefix_len": 0},
}


@pytest.mark.parametrize("run", [20, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [make for make in PATTERNS if PATTERNS[make]])
def test_patterns(fuzz, make, run):
    fuzz(partial(check_call, compiled(make), PATTERNS[make], True, ()), run)


MASK = masks.causal()(40, 16)
SCORES = torch.rand(3, 3)
MASKS = {
    "call": (masks.causal(), {"seq_len": (40, 40), "block_size": 16}),
    "device": (masks.causal(), {"seq_len": 40, "device": "cpu"}),
    "text": (plot.text, {"mask": MASK, "most": 4}),
    "with_block_size": (masks.causal().with_block_size, {"block_size": 16}),
    "from_dense": (BlockMask.from_dense, {"dense": torch.eye(40).bool(), "block_size": 16}),
    "from_blocks": (
        BlockMask.from_blocks,
        {"blocks": torch.eye(3).bool(), "block_size": 16, "seq_len": (40, 40)},
    ),
    "from_topk": (
        DynamicMask.from_topk,
        {"scores": SCORES, "k": 2, "block_size": 16, "seq_len": (40, 40)},
    ),
    "crop": (MASK.crop, {"q_len": 20, "k_len": 30}),
    "slice_queries": (MASK.slice_queries, {"begin": 3, "end": 30}),
    "reblock": (MASK.reblock, {"block_size": (32, 64)}),
    "select": (MASK.select, {"blocks": SCORES > 0.5, "scores": SCORES}),
    "select_topk": (MASK.select_topk, {"scores": SCORES, "k": 2}),
    "stack": (masks.stack, {"masks": [MASK, MASK]}),
    "from_masks": (MaskBatch.from_masks, {"masks": [MASK, MASK]}),
    "with_keys": (MaskBatch.with_keys, {"mask": MASK, "keys": torch.ones(2, 40).bool()}),
    "to_cudnn_blocks": (interop.to_cudnn_blocks, {"mask": masks.full()(64, 16)}),
    "to_cudnn_intervals": (interop.to_cudnn_intervals, {"mask": MASK}),
    "to_flashinfer": (interop.to_flashinfer, {"mask": masks.full()(64, 16)}),
    "from_cudnn_intervals": (
        interop.from_cudnn_intervals,
        {"intervals": torch.ones(1, 3, 40).int(), "k_len": 40, "block_size": 16},
    ),
    "take_blocks": (
        MASK.take_blocks,
        {"rows": torch.tensor([0, 1]), "columns": torch.tensor([0, 2])},
    ),
    "keep_rows": (MASK.keep_rows, {"rows": torch.tensor([0, 1])}),
    "receptive_field": (
        analysis.receptive_field,
        {"masks": [MASK, MASK], "layers": 2, "samples": 10, "seed": 3},
    ),
    "hops": (analysis.hops, {"masks": MASK, "tokens": [3], "layers": 2}),
    "pixel_reach": (
        analysis.pixel_reach,
        {"masks": masks.full()(64, 16), "image": (8, 8), "layers": 2}
        | {"tile": (4, 4), "pixel": (3, 3)},
    ),
    "spectral_gap": (analysis.spectral_gap, {"mask": MASK}),
    "lint": (lint, {"masks": MASK, "within": masks.causal(), "layers": 2, "ignore": []}),
    "table": (partial(MASK.table, "cpu"), {"block_size": (32, 64)}),
    "coverage": (MASK.coverage, {"block_size": (32, 64)}),
    "DynamicMask": (
        DynamicMask,
        {"support": MASK, "blocks": torch.ones(1, 1, 3, 3).bool(), "scores": SCORES[None, None]},
    ),
    "MaskBatch": (MaskBatch, {"stacked": MASK, "num_batches": 1}),
    "to_flex": (interop.to_flex, {"mask": MASK}),
    "from_flex": (interop.from_flex, {"mask": interop.to_flex(MASK)}),
    "to_block_lists": (interop.to_block_lists, {"mask": MASK}),
    "from_block_lists": (
        interop.from_block_lists,
        {"lists": interop.to_block_lists(MASK), "seq_len": 40, "pattern": masks.causal()},
    ),
    "from_cudnn_blocks": (
        interop.from_cudnn_blocks,
        {"blocks": interop.to_cudnn_blocks(masks.full()(64, 16)), "seq_len": 64},
    ),
    "from_flashinfer": (
        interop.from_flashinfer,
        {"blocks": interop.to_flashinfer(masks.full()(64, 16))},
    ),
    "to_torch": (interop.to_torch, {"mask": MASK, "layout": torch.sparse_bsr}),
    "from_torch": (
        interop.from_torch,
        {"matrix": torch.eye(40).bool().to_sparse(), "block_size": 16},
    ),
    "parse": (masks.parse, {"text": "local(3) & causal()"}),
    "from_json": (masks.from_json, {"text": masks.to_json(masks.local(3))}),
}


@pytest.mark.parametrize("run", [20, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.filterwarnings("ignore:Sparse .* beta state")
def test_masks(fuzz, name, run):
    fuzz(partial(check_call, *MASKS[name], True, ()), run)


PLAN = make_plan(MASK, 1)
SHARD = torch.zeros(2, 40)
PLANS = {
    "make_plan": (
        make_plan,
        {"mask": MASK, "ranks": 2, "strategy": [0, 1, 1], "round_tokens": 16, "split": "auto"}
        | {"shared_rows": [1], "fetch_cost": 2.0},
    ),
    "report": (
        PLAN.report,
        {"kv_heads": 2, "head_dim": 8, "dtype": torch.float32, "batch": 3, "heads": 4},
    ),
    "shard": (PLAN.shard, {"tensor": SHARD, "rank": 0, "dim": 1}),
    "unshard": (PLAN.unshard, {"shards": [SHARD], "dim": 1}),
    "gather": (gather, {"shard": SHARD, "plan": PLAN, "dim": 1, "group": None}),
}


@pytest.mark.parametrize("run", [20, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PLANS)
def test_context_plans(fuzz, name, run):
    fuzz(partial(check_call, *PLANS[name], True, ()), run)


WORKLOAD = Workload(256, 16, heads=2)
MODELS = {
    "Workload": (
        Workload,
        {"seq_len": 256, "head_dim": 16, "batch": 1, "heads": 2, "device": "H200"}
        | {"dtype": torch.bfloat16},
    ),
    "block_sizes": (block_sizes, {"pattern": "local(3)", "workload": WORKLOAD, "sides": [64]}),
    "search": (
        search,
        {"workload": WORKLOAD, "layers": 2, "connected": 0.5, "budget_ms": 1.0}
        | {"patterns": ["local(3)"], "block_size": 64, "most": 2},
    ),
    "flash_forward": (
        flash_forward,
        {"query": torch.rand(40, 8), "key": torch.rand(40, 8), "value": torch.rand(40, 8)}
        | {"tiles": (8, 8)},
    ),
    "tile_sizes": (tile_sizes, {"fast_memory": 512, "head_dim": 8}),
}


@pytest.mark.parametrize("run", [20, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_time_and_memory(fuzz, name, run):
    fuzz(partial(check_call, *MODELS[name], True, ()), run)


# What torch raises for sizes that no memory holds, and for tensors of other shapes.
TORCH = (RuntimeError, MemoryError)


def replaced_attention(query, key, value, mask, **options):
    with sparseflash.replace_sdpa(mask):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)


def calls() -> dict[str, tuple[Callable, dict[str, Any]]]:
    query, key, value = torch.randn(3, 2, 2, 40, 8).unbind()
    packed = torch.randn(40, 2, 8)
    ends = torch.tensor([0, 10, 40], dtype=torch.int32)
    tensors = {"query": query, "key": key, "value": value}
    cache = KeyValueCache(batch=2, kv_heads=2, max_len=64, head_dim=8)
    layer = SparseAttention(16, 2, masks.causal())
    return {
        "attention": (
            sparseflash.attention,
            tensors
            | {"mask": MASK, "scale": 0.3, "dropout_p": 0.1, "key_lengths": torch.tensor([3, 40])}
            | {"softcap": 3.0, "score": None, "bias": torch.zeros(2, 79)}
            | {"sinks": torch.zeros(2), "precision": "ieee", "deterministic": True}
            | {"planned_order": True, "backend": "cpu", "seed": 3},
        ),
        "attention_varlen": (
            sparseflash.attention_varlen,
            dict(zip(("query", "key", "value"), (packed,) * 3, strict=True))
            | {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "mask": masks.causal()},
        ),
        "attention of a plan": (
            context_parallel_attention,
            tensors
            | {"plan": PLAN, "scale": 0.3, "dropout_p": 0.1, "key_lengths": torch.tensor([3, 40])}
            | {"softcap": 3.0, "bias": torch.zeros(2, 79), "sinks": torch.zeros(2), "seed": 3}
            | {"mask": None, "group": None, "check": None, "backend": "cpu"},
        ),
        "attention replaced": (
            replaced_attention,
            tensors
            | {"mask": MASK, "dropout_p": 0.1, "is_causal": True, "scale": 0.5}
            | {"enable_gqa": False},
        ),
        "from_torch": (
            SparseAttention.from_torch,
            {"module": torch.nn.MultiheadAttention(16, 2), "pattern": masks.causal()},
        ),
        "merge_attention": (
            sparseflash.merge_attention,
            {"outs": [query, key], "lses": [query[..., 0], key[..., 0]]},
        ),
        "block_mass": (
            sparseflash.block_mass,
            {"query": query, "key": key, "mask": MASK, "scale": 0.5},
        ),
        "unpad": (sparseflash.unpad, {"x": query[:, 0], "keep": torch.ones(2, 40).bool()}),
        "pad": (sparseflash.pad, {"x": torch.randn(80, 2), "keep": torch.ones(2, 40).bool()}),
        "alibi": (sparseflash.alibi, {"slopes": torch.rand(2), "q_len": 4, "k_len": 5}),
        "relative_bias": (
            sparseflash.relative_bias,
            {"weights": torch.rand(2, 5), "q_len": 4, "k_len": 5},
        ),
        "cache": (
            KeyValueCache,
            {"batch": 2, "kv_heads": 2, "max_len": 64, "head_dim": 8},
        ),
        "append": (
            lambda **new: cache.reset() or cache.append(**new),
            {"key": key, "value": value},
        ),
        "rotary": (Rotary, {"head_dim": 8, "base": 100.0}),
        "module": (SparseAttention, {"embed_dim": 16, "num_heads": 2, "pattern": masks.causal()}),
        "layer": (
            lambda **inputs: layer(**inputs),
            {"x": torch.randn(2, 40, 16), "key_lengths": torch.tensor([3, 40])},
        ),
    }


@pytest.mark.parametrize("run", [20, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", calls())
def test_calls(fuzz, name, run):
    fuzz(partial(check_call, *calls()[name], True, TORCH), run)
