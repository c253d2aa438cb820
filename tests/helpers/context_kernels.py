"""Kernels of GPUs, interpreted or simulated, over a sequence that ranks share."""

import math
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import masks
import sparseflash
from sparseflash.distributed import context_parallel_attention, gather, make_plan, part
from sparseflash.score import ScoreFunction
from tests.helpers.context_calls import difference
from tests.helpers.context_parallel import errors_of_call


@cache
def _score_in_interpreter() -> ScoreFunction:
    from tests.helpers import interpreter  # imports Triton, which other cases do not need

    interpreter.call_builtins_directly()
    interpreter.patch_once_a_launch()
    interpreter.keep_types()

    def far(score, batch, head, query, key):
        return torch.where((query - 3 * key + head) % 4 == 0, 0.5 * score, score)

    return ScoreFunction.from_torch("far by positions", far)


def errors_of_kernels(rank: int, extras: dict[str, Any]) -> dict[str, float]:
    """The largest difference of interpreted Triton kernels in float32 to the backend of CPUs in
    float64 in one process. Ranks share a row, and exchange keys in rounds.
    """
    score = _score_in_interpreter()
    length, heads, kv_heads, dims, block = 120, 2, 1, 8, 32
    mask = masks.local((40, 0))(length, block)
    plan = make_plan(mask, dist.get_world_size(), [0, 1, 1, 0], round_tokens=64, shared_rows=(3,))
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, n, length, dims) for n in (heads, kv_heads, kv_heads, heads)]
    shapes.append((1, heads, length))
    given = tuple(torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)
    return errors_of_call(
        rank, plan, (mask, None), given, {**extras, "score": score}, kernels=True
    )


def errors_of_simulated_kernels(
    rank: int, name: str, strategy: str, split: str, kv_heads: int
) -> dict[str, float]:
    """The largest differences of simulated Hopper kernels in bfloat16 to float64 in one process,
    relative to the largest value.

    With split "in place, strided" there are two groups of heads, and the dims of a head are not
    contiguous.
    """
    from sparseflash.backends import hopper
    from tests.helpers.simulated_hopper import simulation  # imports Triton

    ranks, block = dist.get_world_size(), 128
    length, rows = 4 * block * ranks, (0,) if name == "global tokens" else ()
    patterns = {
        "butterfly": masks.butterfly(),
        "causal": masks.causal(),
        "global tokens": masks.local(130) | masks.global_tokens([5, 100]),
        "empty rows": masks.pattern(lambda q, k: (q // block % 3 != 1) & ((q ^ k) < 300)),
    }
    mask = patterns[name](length, block)
    split, _, strided = split.partition(", ")
    options: dict[str, Any] = {"split": split, "shared_rows": rows}
    plan = make_plan(mask, ranks, strategy, **options)
    if strided:
        options["round_tokens"] = block * math.ceil(int(plan.costs.receive.max()) / block / 2)
        plan = make_plan(mask, ranks, strategy, **options)
        assert plan.head_groups(kv_heads) == plan.least_head_groups == 2
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, 64) for heads in (2, kv_heads, kv_heads, 2)]
    *tensors, grad_out = (torch.randn(x, generator=generator).bfloat16() for x in shapes)
    whole = [x.double().requires_grad_() for x in tensors]
    out, most = sparseflash.attention(*whole, mask, return_max_logits=True)
    expected = (out.detach(), most, *torch.autograd.grad(out, whole, grad_out.double()))
    own = [plan.shard(x, rank, 2) for x in tensors]
    own = [(x.mT.contiguous().mT if strided else x).requires_grad_() for x in own]
    with (
        simulation(),
        mock.patch.object(hopper, "why_not", return_value=[]),
        # Keys of global tokens are heavy, and rows and keys are divided into chunks.
        mock.patch.multiple(part, HEAVY_BLOCKS=3, CHUNK_BLOCKS=2),
    ):
        options = {"backend": "hopper", "return_max_logits": True}
        own_out, own_most = context_parallel_attention(*own, plan, **options)
        grads = torch.autograd.grad(own_out, own, plan.shard(grad_out, rank, 2))
    found = [gather(x, plan, 2).double() for x in (own_out.detach(), own_most, *grads)]
    names = ("out", "maximum logits", "query", "key", "value")
    pairs = zip(found, expected, strict=True)
    sizes = [x.masked_fill(x.isinf(), 0).abs().max() for x in expected]
    gaps = [difference(*pair) / float(size) for pair, size in zip(pairs, sizes, strict=True)]
    return dict(zip(names, gaps, strict=True))
