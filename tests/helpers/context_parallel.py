"""What each rank does in tests of attention over a sequence that ranks share."""

import math
import os
import random
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import masks
import sparseflash
from masks import BlockMask, DynamicMask
from sparseflash.dispatch.call import Call
from sparseflash.distributed import (
    ContextPlan,
    context_parallel_attention,
    fetch,
    gather,
    in_place,
    make_plan,
    part,
    passes,
)
from sparseflash.score import ScoreFunction
from tests.helpers.in_place import in_place_on_cpus

BATCH, HEADS, KV_HEADS, LENGTH, DIMS, BLOCK = 2, 4, 2, 210, 8, 16
STRATEGIES = ("contiguous", "zigzag", "shuffled")


def mask_of(name: str, length: int = LENGTH) -> BlockMask:
    """The mask of a case."""
    causal, near = masks.causal(), masks.local((20, 0))
    patterns = {
        "causal": causal,
        "window and sink": (masks.local((40, 0)) | masks.global_tokens([0, 1])) & causal,
        "random": masks.random(0.2, seed=1),
        "global tokens": masks.local(10) | masks.global_tokens([3, 100]),
        "butterfly": masks.butterfly(),
        "dense": masks.full(),
        "documents": masks.documents([16] * 13 + [2] * (length > 208)),
        "head masks": masks.stack([causal, near, near, masks.random(0.3, seed=2)]),
        "key head masks": masks.stack([causal, masks.random(0.3, seed=2)]),
        "nothing": masks.full() - masks.full(),
    }
    if name == "empty rows":
        dense = masks.random(0.2, seed=3)(length, BLOCK).to_dense()
        dense[10:70] = False
        dense[150] = False
        return BlockMask.from_dense(dense, BLOCK)
    return patterns[name](length, BLOCK)


def inputs(dtype: torch.dtype, value_dim: int = DIMS, length: int = LENGTH) -> tuple[Tensor, ...]:
    """query, key, value and the gradients of out and lse."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, heads, length, DIMS) for heads in (HEADS, KV_HEADS)]
    shapes += [(BATCH, heads, length, value_dim) for heads in (KV_HEADS, HEADS)]
    shapes.append((BATCH, HEADS, length))
    return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)


def plan_of(mask: BlockMask, ranks: int, strategy: str, split: str) -> ContextPlan:
    """A plan; split "rounds" is by keys, in several rounds, "shared" has rows that ranks share."""
    options: dict[str, Any] = {"split": split}
    if split in ("rounds", "shared rounds"):
        options = {"round_tokens": 48}
    if split in ("shared rows", "shared rounds"):
        options |= {"split": "auto", "shared_rows": (0, 6, 13)}
    return make_plan(mask, ranks, _strategy(strategy, ranks), **options)


def errors(
    rank: int, mask_name: str, strategy: str, split: str, extras: dict[str, Any]
) -> dict[str, float]:
    """The largest difference to one process of out, lse and each gradient."""
    mask = mask_of(mask_name)
    plan = plan_of(mask, dist.get_world_size(), strategy, split)
    extras = dict(extras)
    if extras.pop("reads", False):
        table = torch.linspace(-2, 2, HEADS * 50, dtype=torch.float64).view(HEADS, 50).sin()
        extras |= {"score": _score_of_tensors(), "table": table}
    tensors = inputs(extras.pop("dtype", torch.float64), extras.pop("value_dim", DIMS))
    return _errors(rank, plan, (mask, None), tensors, extras)


WHOLE = 13 * BLOCK  # tokens of whole blocks


def errors_in_place(
    rank: int, mask_name: str, strategy: str, shared_rows: tuple[int, ...], extras: dict[str, Any]
) -> tuple[dict[str, float], int]:
    """`errors` with split "in place" and filled memory; and the number of calls computed so."""
    extras = dict(extras)
    given = inputs(torch.float64, extras.pop("value_dim", DIMS), WHOLE)
    plan = _plan_in_place(mask_name, strategy, shared_rows)
    return _errors_in_place(rank, plan, given, extras)


def errors_in_groups(
    rank: int, mask_name: str, strategy: str, shared_rows: tuple[int, ...], groups: int, batch: int
) -> tuple[dict[str, float], int, int]:
    """`errors_in_place` if no rank receives more bytes at a time than those of so many groups of
    heads; and the number of groups that the plan needs.
    """
    given = tuple(x[:batch] for x in inputs(torch.float64, DIMS, WHOLE))
    plan = _plan_in_groups(mask_name, strategy, shared_rows, groups)
    return *_errors_in_place(rank, plan, given, {}), plan.least_head_groups


def _plan_in_groups(
    mask_name: str, strategy: str, shared_rows: tuple[int, ...], groups: int
) -> ContextPlan:
    whole = _plan_in_place(mask_name, strategy, shared_rows)
    return _plan_in_place(mask_name, strategy, shared_rows, _round_of_groups(whole, groups))


def _round_of_groups(whole: ContextPlan, groups: int) -> int:
    """round_tokens with which heads are in about so many groups, of a plan without it."""
    most = int(whole.costs.receive.max()) // BLOCK
    return BLOCK * max(1, -(-most // groups))


def _plan_in_place(
    mask_name: str,
    strategy: str,
    shared_rows: tuple[int, ...],
    round_tokens: int | None = None,
) -> ContextPlan:
    mask, ranks = mask_of(mask_name, WHOLE), dist.get_world_size()
    chosen = _strategy(strategy, ranks, WHOLE)
    options: dict[str, Any] = {"split": "in place", "shared_rows": shared_rows}
    return make_plan(mask, ranks, chosen, round_tokens=round_tokens, **options)


def _errors_in_place(
    rank: int, plan: ContextPlan, given: tuple[Tensor, ...], extras: dict[str, Any]
) -> tuple[dict[str, float], int]:
    torch.use_deterministic_algorithms(True)  # then torch.empty fills memory
    try:
        wrapped = {"wraps": passes.forward_in_place}
        with (
            in_place_on_cpus(),
            mock.patch.object(passes, "forward_in_place", **wrapped) as computed,
        ):
            found = _errors(rank, plan, (plan.mask, None), given, extras)
    finally:
        torch.use_deterministic_algorithms(False)
    return found, computed.call_count


def errors_of_a_rank_that_attends_nothing(
    rank: int, split: str, otherwise: tuple[str, int]
) -> dict[str, float]:
    """`errors` where only rows of the first rank attend any key, on the backend of CPUs."""
    blocks = torch.zeros(WHOLE // BLOCK, WHOLE // BLOCK, dtype=torch.bool)
    blocks[:3, 1::2] = True  # own keys of the first rank and others
    mask = BlockMask.from_blocks(blocks, block_size=BLOCK, seq_len=WHOLE)
    plan = make_plan(mask, dist.get_world_size(), "contiguous", split=split, shared_rows=())
    plan = replace(plan, otherwise=otherwise)
    return _errors(rank, plan, (mask, None), inputs(torch.float64, DIMS, WHOLE), {})


def errors_with_filled_memory(rank: int, mask_name: str, split: str) -> dict[str, float]:
    """`errors` where memory that is not written holds NaN. All rows of a butterfly wait."""
    torch.use_deterministic_algorithms(True)  # then torch.empty fills memory
    try:
        if mask_name == "butterfly" and split in ("rows", "keys"):
            plan = make_plan(mask_of(mask_name), dist.get_world_size(), "contiguous", split=split)
            assert (plan.part(rank).mask is None) == (split == "rows")
        return errors(rank, mask_name, "contiguous", split, {})
    finally:
        torch.use_deterministic_algorithms(False)


def errors_with_unwritten_rows(
    rank: int, mask_name: str, split: str
) -> tuple[dict[str, float], int]:
    """`errors` where results of rows that kernels may skip are NaN, and the number of these."""
    unwritten, forward, backward = 0, Call.forward, Call.backward

    def skipped(call: Call) -> list[int]:
        rows, side = call.table.by_query, call.table.block_size[0]
        written = rows
        if call.spec.skips_empty_rows:
            written = rows.without_empty_rows
        absent = {*range(rows.num_rows)} - {*written.schedule.flatten().tolist()}
        tokens = [row * side + i for row in absent for i in range(side)]
        return [token for token in tokens if token < call.spec.q_len]

    def spoil(call: Call, *results: Tensor | None) -> None:
        nonlocal unwritten
        tokens = skipped(call)
        for result in results:
            if result is not None:
                result[:, :, tokens] = torch.nan
                unwritten += len(tokens)

    def spoiled_forward(call: Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = forward(call, *tensors)
        spoil(call, out, lse)
        return out, lse

    def spoiled_backward(call: Call, *arguments: Any) -> tuple[Tensor | None, ...]:
        gradients = backward(call, *arguments)
        spoil(call, gradients[0])
        return gradients

    with (
        mock.patch.object(Call, "forward", spoiled_forward),
        mock.patch.object(Call, "backward", spoiled_backward),
    ):
        return errors(rank, mask_name, "shuffled", split, {}), unwritten


def errors_of_chunks(rank: int, pattern: str) -> dict[str, float]:
    """`errors` where the attention of shared rows to own keys is divided into chunks.

    Chunks have one mask if all keys are global, else a mask each.
    """
    ranks, length = dist.get_world_size(), 256
    keys = masks.global_tokens([3, 100])
    mask = masks.local(10) | (keys if pattern == "equal" else keys & masks.causal())
    mask = mask(length, BLOCK)
    with mock.patch.object(part, "CHUNK_BLOCKS", 2):
        plan = make_plan(mask, ranks, "contiguous", shared_rows=(0, 6))
        shared = plan.part(rank).shared
    assert shared is not None
    assert shared.chunks == length // BLOCK // ranks // 2
    tensors = tuple(x[:1] for x in inputs(torch.float64, 16, length))
    return _errors(rank, plan, (mask, None), tensors, {})


def errors_of_heavy_keys(
    rank: int, name: str, batch: int, dtype: torch.dtype, groups: int = 1
) -> tuple[dict[str, float], int]:
    """`errors` in place where gradients of heavy keys are computed in chunks of queries; and the
    number of calls for them. Heads are in so many groups.
    """
    first = masks.pattern(lambda q, k: (k < BLOCK) & (q >= 0))
    if name == "different in each chunk":
        first &= masks.pattern(lambda q, k: (q // BLOCK % 3 > 0) | (k % 3 == 0))
    ranks = dist.get_world_size()
    length = 8 * BLOCK * ranks
    mask = (first if name == "alone" else first | masks.local(10))(length, BLOCK)
    calls, with_heavy = 0, in_place.BackwardInPlace._write_of_heavy_keys

    def counted(*arguments):
        nonlocal calls
        calls += 1
        return with_heavy(*arguments)

    given = tuple(x[:batch].to(dtype) for x in inputs(torch.float64, 16, length))
    with (
        in_place_on_cpus(),
        mock.patch.multiple(part, HEAVY_BLOCKS=3, CHUNK_BLOCKS=2),
        mock.patch.object(in_place.BackwardInPlace, "_write_of_heavy_keys", counted),
    ):
        options: dict[str, Any] = {"split": "in place", "shared_rows": ()}
        plan = make_plan(mask, ranks, "contiguous", **options)
        options["round_tokens"] = _round_of_groups(plan, groups)
        plan = make_plan(mask, ranks, "contiguous", **options)
        assert plan.least_head_groups == groups
        return _errors(rank, plan, (mask, None), given, {}), calls


def errors_of_sums_in_single_precision(rank: int, split: str) -> dict[str, float]:
    """`errors` in 16 bits, where gradients are summed in float32 and own keys are not consecutive.

    Every row attends a key of the other rank, so no row is computed before the exchange. In place
    there are two groups of heads.
    """
    length = 8 * BLOCK
    blocks = torch.zeros(8, 8, dtype=torch.bool)
    blocks[:, ::2] = True
    mask = BlockMask.from_blocks(blocks, block_size=BLOCK, seq_len=length)
    options = {"round_tokens": BLOCK} if split == "in place" else {}
    plan = make_plan(mask, dist.get_world_size(), "contiguous", split=split, **options)
    assert (plan.part(rank).mask is None) == (split == "rows")
    given = tuple(x[:1] for x in inputs(torch.bfloat16, DIMS, length))
    with in_place_on_cpus(), mock.patch.object(passes, "MAX_ROUNDED", 1):
        return _errors(rank, plan, (mask, None), given, {})


@cache
def _score_of_tensors() -> ScoreFunction:
    def near(score, batch, head, query, key, table, document):
        same = document[query] == document[key]
        return torch.where(same, score + table[head, (query - key) % 50], 0.5 * score)

    return ScoreFunction.from_torch("near of tensors", near, (float, int))


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
    return _errors(rank, plan, (mask, None), given, {**extras, "score": score}, kernels=True)


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
    out = sparseflash.attention(*whole, mask)
    expected = (out.detach(), *torch.autograd.grad(out, whole, grad_out.double()))
    own = [plan.shard(x, rank, 2) for x in tensors]
    own = [(x.mT.contiguous().mT if strided else x).requires_grad_() for x in own]
    with (
        simulation(),
        mock.patch.object(hopper, "why_not", return_value=[]),
        # Keys of global tokens are heavy, and rows and keys are divided into chunks.
        mock.patch.multiple(part, HEAVY_BLOCKS=3, CHUNK_BLOCKS=2),
    ):
        own_out = context_parallel_attention(*own, plan, backend="hopper")
        grads = torch.autograd.grad(own_out, own, plan.shard(grad_out, rank, 2))
    found = [gather(x, plan, 2).double() for x in (own_out.detach(), *grads)]
    names = ("out", "query", "key", "value")
    pairs = zip(found, expected, strict=True)
    gaps = [difference(*pair) / float(pair[1].abs().max()) for pair in pairs]
    return dict(zip(names, gaps, strict=True))


def _errors(
    rank: int,
    plan: ContextPlan,
    used: tuple[BlockMask | DynamicMask, DynamicMask | None],
    given: tuple[Tensor, ...],
    extras: dict[str, Any],
    kernels: bool = False,
) -> dict[str, float]:
    """See `errors`; `used` are the mask of the whole sequence and what this rank selects of it.

    kernels: whether ranks use the Triton kernels, in float32
    """
    *tensors, grad_out, grad_lse = given
    extras = dict(extras)
    shared = {name: extras.pop(name) for name in ("bias", "sinks", "table") if name in extras}

    whole = [x.clone().requires_grad_() for x in tensors]
    whole_shared = {name: x.clone().requires_grad_() for name, x in shared.items()}
    read = _reads(whole_shared)
    out, lse = sparseflash.attention(*whole, used[0], return_lse=True, **read, **extras)
    grad_lse = grad_lse * lse.isfinite()
    torch.autograd.backward([out, lse], [grad_out, grad_lse.to(lse.dtype)])

    dtype = torch.float32 if kernels else tensors[0].dtype
    own = [plan.shard(x, rank, 2).to(dtype).requires_grad_() for x in tensors]
    own_shared = {name: x.clone().requires_grad_() for name, x in shared.items()}
    call = {**_reads(own_shared), **extras, "mask": used[1]}
    if kernels:
        call["backend"] = "triton"
    own_out, own_lse = context_parallel_attention(*own, plan, return_lse=True, **call)
    own_grads = (plan.shard(grad_out, rank, 2), plan.shard(grad_lse, rank, 2))
    own_grads = [x.to(y.dtype) for x, y in zip(own_grads, (own_out, own_lse), strict=True)]
    torch.autograd.backward([own_out, own_lse], own_grads)

    found = {"out": (gather(own_out.detach(), plan, 2), out)}
    found["lse"] = (gather(own_lse.detach(), plan, 2), lse)
    for name, mine, one in zip(("query", "key", "value"), own, whole, strict=True):
        found[name] = (gather(mine.grad, plan, 2), one.grad)
    for name, mine in own_shared.items():
        dist.all_reduce(mine.grad)
        found[name] = (mine.grad, whole_shared[name].grad)
    return {name: difference(*pair) for name, pair in found.items()}


def _reads(shared: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments of a call: a table is a score tensor, beside one that has documents."""
    if "table" not in shared:
        return shared
    rest = {name: x for name, x in shared.items() if name != "table"}
    return rest | {"score_tensors": [shared["table"], torch.arange(LENGTH) // 60]}


class Layer(nn.Module):
    """Projections around attention over a shared sequence."""

    def __init__(self, plan: ContextPlan):
        super().__init__()
        self.plan, width = plan, HEADS * DIMS
        self.qkv = nn.Linear(width, width + 2 * KV_HEADS * DIMS, dtype=torch.float64)
        self.out = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (-1, DIMS)).transpose(1, 2)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        found = context_parallel_attention(query, key, value, self.plan, dropout_p=0.2, seed=3)
        return torch.tanh(x + self.out(found.transpose(1, 2).flatten(2)))


def compiled_errors(rank: int) -> dict[str, float]:
    """The differences of two compiled layers to the same ones as they are; and, as "graphs", how
    many graphs were compiled.
    """
    torch.manual_seed(0)
    plan = make_plan(mask_of("window and sink"), dist.get_world_size(), "zigzag")
    layers = nn.Sequential(Layer(plan), Layer(plan))
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(BATCH, LENGTH, HEADS * DIMS, generator=generator, dtype=torch.float64)
    graphs = []

    def counting(graph, operands):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, operands)

    found = []
    for run in (layers, torch.compile(layers, backend=counting)):
        for _ in range(2):  # a second call compiles nothing
            layers.zero_grad()
            x = plan.shard(whole, rank, 1).requires_grad_()
            out = run(x)
            out.square().sum().backward()
            compiled = len(graphs)
        found.append({"out": out.detach(), "x": x.grad})
        found[-1] |= {name: p.grad for name, p in layers.named_parameters()}
        assert len(graphs) == compiled, "compiled again"
    eager, made = found
    return {name: difference(made[name], eager[name]) for name in eager} | {"graphs": len(graphs)}


def fuzzed(rank: int, seed: int) -> dict[str, float]:
    """The differences to one process of a call with random arguments, equal on all ranks."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ranks, block = dist.get_world_size(), rng.choice(((16, 16), (32, 16), (16, 32)))
    batch, kv_heads, dims = rng.randint(1, 2), rng.randint(1, 2), rng.choice((8, 24))
    heads = kv_heads * rng.randint(1, 3)
    length = rng.randint(max(block) * (ranks - 1) + 1, 300)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    def chosen(share: float, *size: int) -> Tensor:
        return torch.rand(size, generator=generator) < share

    grid = [-(-length // side) for side in block]
    num_masks = rng.choice((1, kv_heads, heads))
    dense = chosen(rng.choice((0.1, 0.5, 0.9)), num_masks, *grid)
    for dim, side in enumerate(block):
        dense = dense.repeat_interleave(side, dim + 1)
    dense = dense[:, :length, :length] & chosen(rng.choice((0.3, 1.0)), 1, length, length)
    mask = BlockMask.from_dense(dense if num_masks > 1 else dense[0], block)

    units = -(-length // max(block))
    own = [*range(ranks), *(rng.randrange(ranks) for _ in range(units - ranks))]
    strategy = rng.choice((*STRATEGIES[:2], "auto", own))
    selects = rng.random() < 0.4
    rows = () if selects else tuple(row for row in range(grid[0]) if rng.random() < 0.15)
    options: dict[str, Any] = {"shared_rows": rows}
    options |= rng.choice(({"split": "rows"}, {"split": "keys"}, {"round_tokens": 3 * block[1]}))
    plan = make_plan(mask, ranks, strategy, **options)

    used: tuple[BlockMask | DynamicMask, DynamicMask | None] = (mask, None)
    if selects:
        most = num_masks if num_masks > 1 else heads
        blocks = chosen(0.6, rng.choice((1, batch)), rng.choice((1, most)), *grid)
        mine = blocks[:, :, plan.part(rank).rows]
        used = (mask.select(blocks), plan.mask_of(rank).select(mine))
    every = {
        "key_lengths": torch.tensor([rng.randint(0, length) for _ in range(batch)]),
        "bias": normal(heads, 2 * length - 1),
        "sinks": normal(heads),
        "softcap": rng.uniform(0.5, 20),
        "scale": rng.uniform(0.2, 2) * dims**-0.5,
    }
    extras = {name: value for name, value in every.items() if rng.random() < 0.4}
    if rng.random() < 0.5:
        extras |= {"dropout_p": 0.3, "seed": rng.randrange(2**40)}
    shapes = [(batch, n, length, dims) for n in (heads, kv_heads)]
    value_dim = rng.choice((dims, 16))
    shapes += [(batch, n, length, value_dim) for n in (kv_heads, heads)]
    given = tuple(normal(*shape) for shape in (*shapes, (batch, heads, length)))
    return _errors(rank, plan, used, given, extras)


def _strategy(name: str, ranks: int, length: int = LENGTH) -> str | list[int]:
    if name != "shuffled":
        return name
    units = -(-length // BLOCK)
    return [*range(ranks), *(unit * unit % 7 % ranks for unit in range(units - ranks))]


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference. LSE of empty rows is -inf in both; nothing may be NaN."""
    assert not found.isnan().any(), "a result was not written, or was added to unwritten memory"
    assert torch.equal(found.isinf(), expected.isinf())
    return float((found - expected).detach().masked_fill(expected.isinf(), 0).abs().max())


def bytes_moved(rank: int, mask_name: str, strategy: str, split: str) -> list[list[int]]:
    """Bytes that came and went in the forward pass and in the backward pass, and those of the
    plan.
    """
    moved = torch.zeros(2, dtype=torch.int64)
    exchange = dist.all_to_all_single

    def counted(output, source, receive_splits, send_splits, *arguments, **keywords):
        for i, (tensor, splits) in enumerate(((output, receive_splits), (source, send_splits))):
            row_bytes = tensor[:1].nbytes
            moved[i] += row_bytes * (sum(splits) - splits[rank])  # its own stay where they are
        return exchange(output, source, receive_splits, send_splits, *arguments, **keywords)

    plan = plan_of(mask_of(mask_name), dist.get_world_size(), strategy, split)
    value_dim = 2 * DIMS
    given = inputs(torch.float64, value_dim)[:3]
    own = [plan.shard(x, rank, 2).requires_grad_() for x in given]
    with mock.patch.object(dist, "all_to_all_single", counted):
        out = context_parallel_attention(*own, plan)
        forward = moved.tolist()
        out.sum().backward()
    backward = [both - first for both, first in zip(moved.tolist(), forward, strict=True)]
    report = plan.report(KV_HEADS, DIMS, torch.float64, BATCH, HEADS, value_dim)
    planned = [report.receive_bytes[rank], report.send_bytes[rank]]
    returned = [report.backward_receive_bytes[rank], report.backward_send_bytes[rank]]
    return [forward, backward, planned, returned]


def order_of_a_call(rank: int, split: str) -> list[list[str]]:
    """The exchanges and calls of attention of the forward and of the backward pass, in order."""
    events, forward, backward = [], Call.forward, Call.backward
    exchange = dist.all_to_all_single

    def noted(function, what):
        def noting(*arguments, **keywords):
            events.append(what)
            return function(*arguments, **keywords)

        return noting

    mask, ranks = masks.local(20)(WHOLE, BLOCK), dist.get_world_size()
    plan = make_plan(mask, ranks, "contiguous", split=split)
    own = [plan.shard(x, rank, 2).requires_grad_() for x in inputs(torch.float64, 16, WHOLE)[:3]]
    with (
        in_place_on_cpus(),
        mock.patch.object(dist, "all_to_all_single", noted(exchange, "exchange")),
        mock.patch.object(Call, "forward", noted(forward, "attention")),
        mock.patch.object(Call, "backward", noted(backward, "attention")),
    ):
        out = context_parallel_attention(*own, plan)
        in_forward = len(events)
        out.sum().backward()
    return [events[:in_forward], events[in_forward:]]


def bytes_copied(rank: int, mask_name: str, strategy: str, split: str) -> tuple[int, int, int]:
    """Bytes of keys and values that are copied in the forward pass, and those of the plan; and
    bytes of gradients that are packed in the backward pass.
    """
    copied, copy = [0], fetch.copy_both_in_place

    def counted(totals, parts, rows, part_rows=slice(None)):
        copied[0] += sum(total[:, :, rows].nbytes for total in totals)
        copy(totals, parts, rows, part_rows)

    length = 256 if mask_name == "whole butterfly" else LENGTH
    mask = masks.butterfly()(length, BLOCK) if length == 256 else mask_of(mask_name)
    plan = plan_of(mask, dist.get_world_size(), strategy, split)
    value_dim = 2 * DIMS
    given = inputs(torch.float64, value_dim, length)[:3]
    own = [plan.shard(x, rank, 2).requires_grad_() for x in given]
    with mock.patch.object(fetch, "copy_both_in_place", counted):
        out = context_parallel_attention(*own, plan)
        forward = copied[0]
        out.sum().backward()
    report = plan.report(KV_HEADS, DIMS, torch.float64, BATCH, HEADS, value_dim)
    return forward, report.copied_bytes[rank], copied[0] - forward


def same_bits(rank: int, split: str) -> bool:
    """Whether two calls with dropout give the same bits."""
    plan = plan_of(mask_of("random"), dist.get_world_size(), "zigzag", split)
    found = []
    for _ in range(2):
        own = [plan.shard(x, rank, 2).requires_grad_() for x in inputs(torch.float32)[:3]]
        out = context_parallel_attention(*own, plan, dropout_p=0.2, seed=1)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in own)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def second_backward_pass(rank: int, mask_name: str, split: str) -> bool:
    """Whether two backward passes over one graph give the same bits."""
    with _computed(split):
        plan, own = _sharded(rank, mask_name, split)
        out = context_parallel_attention(*own, plan).square().sum()
        first = torch.autograd.grad(out, own, retain_graph=True)
        second = torch.autograd.grad(out, own)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _sharded(rank: int, mask_name: str, split: str) -> tuple[ContextPlan, list[Tensor]]:
    """A plan, and own query, key and value.

    In place there is one batch element. If the split also says "groups" there are two groups of
    heads, and if it says "shared rows" there are rows that ranks share.
    """
    if split.startswith("in place"):
        rows = (0, 6, 12) if "shared rows" in split else ()
        groups = 2 if "groups" in split else 1
        plan = _plan_in_groups(mask_name, "contiguous", rows, groups)
        assert plan.head_groups(KV_HEADS) == plan.least_head_groups == groups
        tensors = [x[:1] for x in inputs(torch.float32, DIMS, WHOLE)[:3]]
    else:
        plan = plan_of(mask_of(mask_name), dist.get_world_size(), "contiguous", split)
        tensors = inputs(torch.float32)[:3]
    return plan, [plan.shard(x, rank, 2).requires_grad_() for x in tensors]


def _computed(split: str) -> AbstractContextManager[None]:
    """A context in which the backend of CPUs computes plans with this split as they are."""
    return in_place_on_cpus() if split.startswith("in place") else nullcontext()


def gradients_with_hooks(rank: int, hooks: str, split: str) -> list[bool]:
    """Whether gradients, and those of a second pass, have the bits that they have without hooks.

    The hooks are those of a user: what is saved is in arrays of numpy, in one buffer, or not
    at all (checkpointing).
    """
    with _computed(split):
        return _gradients_with_hooks(rank, hooks, split)


def _gradients_with_hooks(rank: int, hooks: str, split: str) -> list[bool]:
    plan, own = _sharded(rank, "causal", split)
    expected = torch.autograd.grad(context_parallel_attention(*own, plan).square().sum(), own)
    buffer, used = torch.zeros(1 << 20), [0]

    def packed(tensor: Tensor) -> Tensor:
        begin = used[0]
        used[0] += tensor.numel()
        buffer[begin : used[0]] = tensor.detach().flatten()
        return buffer[begin : used[0]].view(tensor.shape)

    if hooks == "checkpoint":
        out = checkpoint(context_parallel_attention, *own, plan, use_reentrant=False)
    elif hooks == "numpy":
        with saved_tensors_hooks(lambda x: x.detach().numpy(), torch.from_numpy):
            out = context_parallel_attention(*own, plan)
    else:
        with saved_tensors_hooks(packed, lambda x: x):
            out = context_parallel_attention(*own, plan)
    fetched = out.grad_fn.fetched  # pyright: ignore
    out = out.square().sum()
    passes_ = [torch.autograd.grad(out, own, retain_graph=True) for _ in range(2)]
    equal = [all(map(torch.equal, grads, expected)) for grads in passes_]
    return [*equal, fetched == []]


def freed_inputs(rank: int, split: str) -> list[bool]:
    """Whether query, key and value are freed before the backward pass if a checkpoint or a hook
    computes or copies them; and whether gradients are those of calls without it.
    """
    with _computed(split):
        plan, own = _sharded(rank, "causal", split)
        memory: list[Any] = []

        def call(*tensors: Tensor) -> Tensor:
            tensors = tuple(2 * x for x in tensors)
            memory[:] = [weakref.ref(x.untyped_storage()) for x in tensors]
            return context_parallel_attention(*tensors, plan)

        expected = torch.autograd.grad(call(*own).square().sum(), own)
        found = []
        for hooks in ("checkpoint", "copies"):
            if hooks == "checkpoint":
                out = checkpoint(call, *own, use_reentrant=False)
            else:
                with saved_tensors_hooks(lambda x: x.detach().clone().numpy(), torch.from_numpy):
                    out = call(*own)
            found.append(not any(each() for each in memory))
            grads = torch.autograd.grad(out.square().sum(), own)
            found.append(all(map(torch.equal, grads, expected)))
    return found


def shared_rows_of_one_rank(rank: int) -> tuple[str, float]:
    """The error of a call without a group, and the difference to attention with one."""
    mask = mask_of("global tokens")
    plan = make_plan(mask, 1, shared_rows=(0, 6, 13))
    tensors = inputs(torch.float64)[:3]
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    refused = ""
    try:
        context_parallel_attention(*tensors, plan)
    except ValueError as error:
        refused = str(error)
    out = context_parallel_attention(*tensors, plan, group=groups[rank])
    return refused, difference(out, sparseflash.attention(*tensors, mask))


def memory_of_gradients(rank: int) -> list[float]:
    """For gradients of key and value: the memory that they keep over their own."""
    plan = make_plan(mask_of("butterfly"), dist.get_world_size(), "contiguous", split="rows")
    plan = replace(plan, groups=1)
    own = [plan.shard(x, rank, 2).requires_grad_() for x in inputs(torch.float32)[:3]]
    out = context_parallel_attention(*own, plan)
    grads = torch.autograd.grad(out.sum(), own[1:])
    return [x.untyped_storage().nbytes() / x.nbytes for x in grads]


def selected(rank: int) -> dict[str, float]:
    """The differences to one process where each rank selects the blocks of its queries."""
    ranks, support = dist.get_world_size(), mask_of("causal")
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, HEADS, support.grid.nq, support.grid.nk)
    scores = torch.randn(shape, generator=generator, dtype=torch.float64)
    *tensors, grad_out, _ = inputs(torch.float64)
    whole_scores, whole = scores.clone().requires_grad_(), [x.clone() for x in tensors]
    whole = [x.requires_grad_() for x in whole]
    out = sparseflash.attention(*whole, support.select_topk(whole_scores, 3))
    out.backward(grad_out)
    found = {}
    for strategy, split in (("zigzag", "rows"), ("contiguous", "rounds"), ("zigzag", "keys")):
        plan = plan_of(support, ranks, strategy, split)
        rows = plan.part(rank).rows
        own_scores = scores[:, :, rows].clone().requires_grad_()
        mask = plan.mask_of(rank).select_topk(own_scores, 3)
        own = [plan.shard(x, rank, 2).requires_grad_() for x in tensors]
        own_out = context_parallel_attention(*own, plan, mask=mask)
        own_out.backward(plan.shard(grad_out, rank, 2))
        pairs = {f"out {split}": (gather(own_out.detach(), plan, 2), out)}
        for name, mine, one in zip(("query", "key", "value"), own, whole, strict=True):
            pairs[f"{name} {split}"] = (gather(mine.grad, plan, 2), one.grad)
        pairs[f"scores {split}"] = (own_scores.grad, whole_scores.grad[:, :, rows])
        found |= {name: difference(*pair) for name, pair in pairs.items()}
    return found


def tables_made(rank: int, split: str) -> list[int]:
    """Tables of selected blocks that are made in three calls, the last with a new selection."""
    support = mask_of("causal")
    plan = plan_of(support, dist.get_world_size(), "zigzag", split)
    scores = torch.randn(support.grid.nq, support.grid.nk)[plan.part(rank).rows]
    own = [plan.shard(x, rank, 2) for x in inputs(torch.float64)[:3]]
    one, other = (plan.mask_of(rank).select_topk(scores, 3) for _ in range(2))
    select, made = BlockMask.select, [0]

    def counted(*arguments):
        made[-1] += 1
        return select(*arguments)

    with mock.patch.object(BlockMask, "select", counted):
        for mask in (one, one, other):
            context_parallel_attention(*own, plan, mask=mask)
            made.append(0)
    return made[:3]


def errors_with_shared_heads(rank: int, split: str, extras: dict[str, Any]) -> dict[str, float]:
    """The differences to one process on 2 x 2 ranks, of which two share the heads of a shard."""
    mesh, mask = init_device_mesh("cpu", (2, 2)), mask_of("window and sink")
    plan = plan_of(mask, mesh.get_group(0).size(), "zigzag", split)
    *tensors, grad_out, grad_lse = inputs(torch.float64)
    whole = [x.clone().requires_grad_() for x in tensors]
    out, lse = sparseflash.attention(*whole, mask, return_lse=True, **extras)
    torch.autograd.backward([out, lse], [grad_out, grad_lse])

    def mine(x: Tensor) -> Tensor:
        return plan.shard(x, rank // 2, 2).tensor_split(2, 2)[rank % 2].contiguous()

    own = [mine(x).requires_grad_() for x in tensors]
    own_out, own_lse = context_parallel_attention(
        *own, plan, group=mesh, return_lse=True, **extras
    )
    torch.autograd.backward([own_out, own_lse], [mine(grad_out), mine(grad_lse)])
    found = {"out": (own_out, mine(out)), "lse": (own_lse, mine(lse))}
    for name, shard, one in zip(("query", "key", "value"), own, whole, strict=True):
        found[name] = (shard.grad, mine(one.grad))
    return {name: difference(*pair) for name, pair in found.items()}


@cache
def _score_of_heads() -> ScoreFunction:
    return ScoreFunction.from_torch("of heads", lambda s, b, head, q, k: s * (head + 1))


def refused_with_shared_heads(rank: int) -> list[str]:
    """The errors of calls that heads x sequence does not take."""
    mesh = init_device_mesh("cpu", (2, 2))
    plan = make_plan(mask_of("causal"), 2, "contiguous")
    of_heads = make_plan(mask_of("head masks"), 2, "contiguous")
    own = [
        plan.shard(x, rank // 2, 2).tensor_split(2, 2)[rank % 2] for x in inputs(torch.float64)[:3]
    ]
    calls = [(own, plan, {"dropout_p": 0.1}), (own, of_heads, {})]
    calls += [([x[:, :, 1:] for x in own] if rank == 1 else own, plan, {})]
    calls += [([own[0], own[1][:, :1], own[2][:, :1]], plan, {})]
    calls += [(own, plan, {"score": _score_of_heads()})]
    errors = []
    for tensors, used, options in calls:
        try:
            context_parallel_attention(*tensors, used, group=mesh, check=True, **options)
        except ValueError as error:
            errors.append(str(error))
    return errors


def refused(rank: int, what: str) -> str:
    """The error of a call of which something is wrong on rank 1."""
    wrong = rank == 1
    name = "window and sink" if what == "mask" and wrong else "causal"
    rows = (0,) if what == "gradient of query" else None
    plan = make_plan(mask_of(name), dist.get_world_size(), "contiguous", shared_rows=rows)
    dtype = torch.float32 if what == "dtype" and wrong else torch.float64
    own = [plan.shard(x, rank, 2) for x in inputs(dtype)[:3]]
    if what == "length" and wrong:
        own = [x[:, :, 1:] for x in own]
    own[0].requires_grad_(what == "gradient of query" and not wrong)
    if what == "gradient of key":  # and rank 1 needs that of value
        own[1 + wrong].requires_grad_()
    softcap = 5.0 if "options" in what and wrong else None
    dropout = {"dropout_p": 0.5, "seed": rank} if what == "seed" else {}
    check = None if what == "options of a later call" else what != "unchecked"
    try:
        if check is None:
            context_parallel_attention(*own, plan)
        context_parallel_attention(*own, plan, softcap=softcap, check=check, **dropout)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused_in_place(rank: int, what: str) -> str:
    """The error of a call that only rank 1 cannot compute in place."""
    mask = mask_of("butterfly", WHOLE)
    plan = make_plan(mask, dist.get_world_size(), "contiguous", split="in place", shared_rows=())
    own = [plan.shard(x, rank, 2) for x in inputs(torch.float64, DIMS, WHOLE)[:3]]
    arguments: dict[str, Any] = {"key_lengths": torch.tensor([WHOLE, 77])}
    if what == "options":
        arguments = {"dropout_p": 0.5, "seed": 1}
    with in_place_on_cpus():
        try:
            context_parallel_attention(*own, plan, **(arguments if rank == 1 else {}))
        except ValueError as error:
            return str(error)
    return "nothing"


def after_another_died(rank: int, which: int) -> str:
    """The error of a call that one rank does not live to see, between two passes if it is 2."""
    plan = make_plan(mask_of("causal"), dist.get_world_size(), "zigzag")
    own = [plan.shard(x, rank, 2).requires_grad_() for x in inputs(torch.float64)[:3]]
    if rank == which == 1:
        os._exit(1)
    try:
        out = context_parallel_attention(*own, plan)
        if rank == which == 2:
            os._exit(1)
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"
