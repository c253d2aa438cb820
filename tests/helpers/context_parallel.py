"""Attention over a sequence that ranks share, against one process."""

import random
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import masks
import sparseflash
from masks import BlockMask, DynamicMask, MaskBatch
from sparseflash.dispatch.call import Call
from sparseflash.distributed import (
    ContextPlan,
    context_parallel_attention,
    gather,
    in_place,
    make_plan,
    part,
    passes,
)
from sparseflash.score import ScoreFunction
from tests.helpers.context_calls import (
    BATCH,
    BLOCK,
    DIMS,
    HEADS,
    LENGTH,
    STRATEGIES,
    WHOLE,
    difference,
    inputs,
    mask_of,
    masks_of,
    plan_in_groups,
    plan_in_place,
    plan_of,
    round_of_groups,
)
from tests.helpers.in_place import in_place_on_cpus


def errors(
    rank: int, mask_name: str, strategy: str, split: str, extras: dict[str, Any]
) -> dict[str, float]:
    """The largest difference to one process of out, lse and each gradient."""
    plan, extras = _plan_of(mask_name, dist.get_world_size(), strategy, split), dict(extras)
    if extras.pop("reads", False):
        table = torch.linspace(-2, 2, HEADS * 50, dtype=torch.float64).view(HEADS, 50).sin()
        extras |= {"score": _score_of_tensors(), "table": table}
    tensors = inputs(extras.pop("dtype", torch.float64), extras.pop("value_dim", DIMS))
    return errors_of_call(rank, plan, (masks_of(mask_name), None), tensors, extras)


@cache
def _plan_of(mask_name: str, ranks: int, strategy: str, split: str) -> ContextPlan:
    """Made once: calls that differ in their options share a plan, as the layers of a model do."""
    return plan_of(masks_of(mask_name), ranks, strategy, split)


def errors_in_place(
    rank: int, mask_name: str, strategy: str, shared_rows: tuple[int, ...], extras: dict[str, Any]
) -> tuple[dict[str, float], int]:
    """`errors` with split "in place" and filled memory; and the number of calls computed so."""
    extras = dict(extras)
    given = inputs(torch.float64, extras.pop("value_dim", DIMS), WHOLE)
    plan = plan_in_place(mask_name, strategy, shared_rows)
    return _errors_in_place(rank, plan, given, extras)


def errors_in_groups(
    rank: int,
    mask_name: str,
    strategy: str,
    shared_rows: tuple[int, ...],
    groups: int,
    batch: int,
    extras: dict[str, Any],
) -> tuple[dict[str, float], int, int]:
    """`errors_in_place` if no rank receives more bytes at a time than those of so many groups of
    heads; and the number of groups that the plan needs.
    """
    given = tuple(x[:batch] for x in inputs(torch.float64, DIMS, WHOLE))
    plan = plan_in_groups(mask_name, strategy, shared_rows, groups)
    return *_errors_in_place(rank, plan, given, extras), plan.least_head_groups


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
            found = errors_of_call(rank, plan, (plan.mask, None), given, extras)
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
    return errors_of_call(rank, plan, (mask, None), inputs(torch.float64, DIMS, WHOLE), {})


def errors_with_filled_memory(
    rank: int, mask_name: str, split: str, extras: dict[str, Any]
) -> dict[str, float]:
    """`errors` where memory that is not written holds NaN. All rows of a butterfly wait."""
    torch.use_deterministic_algorithms(True)  # then torch.empty fills memory
    try:
        if mask_name == "butterfly" and split in ("rows", "keys"):
            plan = make_plan(mask_of(mask_name), dist.get_world_size(), "contiguous", split=split)
            assert (plan.part(rank).mask is None) == (split == "rows")
        return errors(rank, mask_name, "contiguous", split, extras)
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


def errors_of_chunks(rank: int, pattern: str, extras: dict[str, Any]) -> dict[str, float]:
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
    return errors_of_call(rank, plan, (mask, None), tensors, extras)


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
        options["round_tokens"] = round_of_groups(plan, groups)
        plan = make_plan(mask, ranks, "contiguous", **options)
        assert plan.least_head_groups == groups
        return errors_of_call(rank, plan, (mask, None), given, {}), calls


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
        return errors_of_call(rank, plan, (mask, None), given, {})


@cache
def _score_of_tensors() -> ScoreFunction:
    def near(score, batch, head, query, key, table, document):
        same = document[query] == document[key]
        return torch.where(same, score + table[head, (query - key) % 50], 0.5 * score)

    return ScoreFunction.from_torch("near of tensors", near, (float, int))


def errors_of_call(
    rank: int,
    plan: ContextPlan,
    used: tuple[BlockMask | MaskBatch | DynamicMask, DynamicMask | None],
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

    results, gradients = _of_one_process(used[0], given, shared, extras)
    out, lse, *max_logits = results
    grad_lse = grad_lse * lse.isfinite()

    dtype = torch.float32 if kernels else tensors[0].dtype
    own = [plan.shard(x, rank, 2).to(dtype).requires_grad_() for x in tensors]
    own_shared = {name: x.clone().requires_grad_() for name, x in shared.items()}
    call = {**_reads(own_shared), **extras, "mask": used[1]}
    if kernels:
        call["backend"] = "triton"
    own_results = context_parallel_attention(*own, plan, return_lse=True, **call)
    own_out, own_lse, *own_max_logits = own_results
    own_grads = (plan.shard(grad_out, rank, 2), plan.shard(grad_lse, rank, 2))
    own_grads = [x.to(y.dtype) for x, y in zip(own_grads, (own_out, own_lse), strict=True)]
    torch.autograd.backward([own_out, own_lse], own_grads)

    found = {"out": (gather(own_out.detach(), plan, 2), out)}
    found["lse"] = (gather(own_lse.detach(), plan, 2), lse)
    for mine, one in zip(own_max_logits, max_logits, strict=True):
        found["maximum logits"] = (gather(mine, plan, 2), one)
    for name, mine in zip(("query", "key", "value"), own, strict=True):
        found[name] = (gather(mine.grad, plan, 2), gradients[name])
    for name, mine in own_shared.items():
        dist.all_reduce(mine.grad)
        found[name] = (mine.grad, gradients[name])
    return {name: difference(*pair) for name, pair in found.items()}


_kept: dict[tuple, tuple] = {}


def _of_one_process(
    mask: BlockMask | MaskBatch | DynamicMask,
    given: tuple[Tensor, ...],
    shared: dict[str, Tensor],
    extras: dict[str, Any],
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The results of a call on the whole sequence, and its gradients by name.

    They are kept if no option is a tensor: many cases differ in their plan alone.
    """
    *tensors, grad_out, grad_lse = given
    key = None
    if not shared and all(isinstance(x, bool | float | int) for x in extras.values()):
        # The sums tell tensors of one shape apart.
        numbers = tuple((x.shape, x.dtype, x.double().sum().item()) for x in given)
        key = (id(mask), numbers, *sorted(extras.items()))
        if key in _kept:
            return _kept[key][1:]
    whole = [x.clone().requires_grad_() for x in tensors]
    whole_shared = {name: x.clone().requires_grad_() for name, x in shared.items()}
    results = sparseflash.attention(
        *whole, mask, return_lse=True, **_reads(whole_shared), **extras
    )
    out, lse, *_ = results
    grad_lse = (grad_lse * lse.isfinite()).to(lse.dtype)
    torch.autograd.backward([out, lse], [grad_out, grad_lse])
    leaves = dict(zip(("query", "key", "value"), whole, strict=True)) | whole_shared
    results = tuple(x.detach() for x in results)
    gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    if key is not None:
        _kept[key] = (mask, results, gradients)  # with the mask, whose id is no other's then
    return results, gradients


def _reads(shared: dict[str, Tensor]) -> dict[str, Any]:
    """Arguments of a call: a table is a score tensor, beside one that has documents."""
    if "table" not in shared:
        return shared
    rest = {name: x for name, x in shared.items() if name != "table"}
    return rest | {"score_tensors": [shared["table"], torch.arange(LENGTH) // 60]}


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

    def random_mask() -> BlockMask:
        dense = chosen(rng.choice((0.1, 0.5, 0.9)), num_masks, *grid)
        for dim, side in enumerate(block):
            dense = dense.repeat_interleave(side, dim + 1)
        dense = dense[:, :length, :length] & chosen(rng.choice((0.3, 1.0)), 1, length, length)
        return BlockMask.from_dense(dense if num_masks > 1 else dense[0], block)

    mask: BlockMask | MaskBatch = random_mask()
    if rng.random() < 0.3:
        mask = MaskBatch.from_masks([mask, *(random_mask() for _ in range(batch - 1))])

    units = -(-length // max(block))
    own = [*range(ranks), *(rng.randrange(ranks) for _ in range(units - ranks))]
    strategy = rng.choice((*STRATEGIES[:2], "auto", own))
    selects = isinstance(mask, BlockMask) and rng.random() < 0.4
    rows = () if selects else tuple(row for row in range(grid[0]) if rng.random() < 0.15)
    options: dict[str, Any] = {"shared_rows": rows}
    options |= rng.choice(({"split": "rows"}, {"split": "keys"}, {"round_tokens": 3 * block[1]}))
    plan = make_plan(mask, ranks, strategy, **options)

    used: tuple[BlockMask | MaskBatch | DynamicMask, DynamicMask | None] = (mask, None)
    if selects and isinstance(mask, BlockMask):
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
    if rng.random() < 0.3:
        extras["return_max_logits"] = True
    shapes = [(batch, n, length, dims) for n in (heads, kv_heads)]
    value_dim = rng.choice((dims, 16))
    shapes += [(batch, n, length, value_dim) for n in (kv_heads, heads)]
    given = tuple(normal(*shape) for shape in (*shapes, (batch, heads, length)))
    return errors_of_call(rank, plan, used, given, extras)


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


@cache
def _two_by_two() -> DeviceMesh:
    """Its groups are made once: each time takes longer than a call."""
    return init_device_mesh("cpu", (2, 2))


def errors_with_shared_heads(
    rank: int, mask_name: str, split: str, extras: dict[str, Any]
) -> dict[str, float]:
    """The differences to one process on 2 x 2 ranks, of which two share the heads of a shard.

    With "selects" each batch element and head has the blocks with the highest scores.
    """
    mesh, mask, extras = _two_by_two(), masks_of(mask_name), dict(extras)
    plan = _plan_of(mask_name, mesh.get_group(0).size(), "zigzag", split)
    if extras.pop("reads", False):
        table = torch.linspace(-2, 2, HEADS * 50, dtype=torch.float64).view(HEADS, 50).sin()
        extras |= {"score": _score_of_tensors(), "table": table}
    scores, selects = None, extras.pop("selects", False)
    if selects:
        shape = (BATCH, HEADS, mask.grid.nq, mask.grid.nk)
        generator = torch.Generator().manual_seed(1)
        scores = torch.randn(shape, generator=generator, dtype=torch.float64)
    names = ("bias", "sinks", "table")
    shared = {name: extras.pop(name) for name in names if name in extras}
    *tensors, grad_out, grad_lse = inputs(torch.float64)
    whole = [x.clone().requires_grad_() for x in tensors]
    whole_shared = {name: x.clone().requires_grad_() for name, x in shared.items()}
    used = mask
    if scores is not None:
        whole_shared["scores"] = scores.clone().requires_grad_()
        assert isinstance(mask, BlockMask)
        used = mask.select_topk(whole_shared["scores"], 3)
    read = _reads({name: x for name, x in whole_shared.items() if name != "scores"})
    out, lse, *max_logits = sparseflash.attention(*whole, used, return_lse=True, **read, **extras)
    grad_lse = grad_lse * lse.isfinite()
    torch.autograd.backward([out, lse], [grad_out, grad_lse])

    def mine(x: Tensor) -> Tensor:
        return plan.shard(x, rank // 2, 2).tensor_split(2, 2)[rank % 2].contiguous()

    own = [mine(x).requires_grad_() for x in tensors]
    own_shared = {name: x.clone().requires_grad_() for name, x in shared.items()}
    call = {**_reads(own_shared), **extras, "group": mesh, "return_lse": True}
    if scores is not None:
        own_shared["scores"] = scores.clone().requires_grad_()
        rows = own_shared["scores"][:, :, plan.part(rank // 2).rows]
        call["mask"] = plan.mask_of(rank // 2).select_topk(rows, 3)
    own_out, own_lse, *own_max_logits = context_parallel_attention(*own, plan, **call)
    torch.autograd.backward([own_out, own_lse], [mine(grad_out), mine(grad_lse)])
    found = {"out": (own_out, mine(out)), "lse": (own_lse, mine(lse))}
    for own_max, one in zip(own_max_logits, max_logits, strict=True):
        assert not own_max.requires_grad
        found["maximum logits"] = (own_max, mine(one))
    for name, shard, one in zip(("query", "key", "value"), own, whole, strict=True):
        found[name] = (shard.grad, mine(one.grad))
    for name, x in own_shared.items():
        dist.all_reduce(x.grad)
        found[name] = (x.grad, whole_shared[name].grad)
    return {name: difference(*pair) for name, pair in found.items()}
