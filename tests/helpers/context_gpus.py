"""What each rank does in tests of attention over a sequence that GPUs share."""

from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import masks
import sparseflash
from masks import BlockMask, MaskBatch
from sparseflash.distributed import Copies, context_parallel_attention, gather, make_plan, part
from sparseflash.score import ScoreFunction

HEADS, KV_HEADS, LENGTH, DIMS, BLOCK = 4, 2, 2000, 128, 128


WHOLE = 2048  # tokens of whole blocks


def mask_of(name: str, length: int = LENGTH) -> BlockMask:
    """The mask of a case."""
    causal = masks.causal()
    patterns = {
        "causal": causal,
        "window": masks.local((300, 0)),
        "butterfly": masks.butterfly(),
        "global tokens": masks.local(200) | masks.global_tokens(list(range(BLOCK))),
        "documents": masks.documents([700, 900, length - 1600]),  # the second rank fetches nothing
        "head masks": masks.stack([causal, masks.local((200, 0)), masks.butterfly(), causal]),
        "nothing": masks.full() - masks.full(),
    }
    return patterns[name](length, BLOCK)


def masks_of(name: str, length: int, batch: int) -> BlockMask | MaskBatch:
    """The mask of a case; "batch" has one for each batch element."""
    if name != "batch":
        return mask_of(name, length)
    names = ("butterfly", "documents", "window")
    return MaskBatch.from_masks([mask_of(names[i % 3], length) for i in range(batch)])


@cache
def nearer_is_higher() -> ScoreFunction:
    """A score function that depends on positions in the whole sequence and on the head."""

    def near(score, batch, head, query, key):
        return score - (query - key).abs() * 0.01 * (head + 1)

    return ScoreFunction.from_torch("nearer is higher", near)


def errors(
    rank: int,
    name: str,
    options: dict[str, Any],
    extras: dict[str, Any],
    k: int | None = None,
    length: int = LENGTH,
    batch: int = 2,
    copies: bool = True,
) -> dict[str, float]:
    """The largest difference to one GPU of out and gradients, relative to the largest value.

    Args:
        rank: Number of this rank.
        name: Name of the mask.
        options: Arguments of make_plan.
        extras: Arguments of attention; "near" for the score function nearer_is_higher.
        k: Number of blocks that a DynamicMask selects for each block row; None for all.
        length: Number of tokens.
        batch: Number of batch elements.
        copies: Whether the two GPUs exchange by copies.
    """
    device = torch.device("cuda", rank)
    mask = masks_of(name, length, batch)
    plan = make_plan(mask, dist.get_world_size(), **options)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    shapes = [(batch, heads, length, DIMS) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *whole, grad_out = (normal(*shape).bfloat16() for shape in shapes)
    own = [plan.shard(x, rank, 2).requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]
    used, selected = mask.to(device), None
    if k is not None:
        assert isinstance(mask, BlockMask)
        scores = normal(mask.grid.nq, mask.grid.nk)
        used = mask.to(device).select_topk(scores, k)
        rows = plan.part(rank, device).rows
        selected = plan.mask_of(rank).to(device).select_topk(scores[rows], k)
    extras = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in extras.items()}
    if extras.pop("near", False):
        extras["score"] = nearer_is_higher()
    results = sparseflash.attention(*whole, used, return_lse=True, **extras)
    grads = torch.autograd.grad(results[0], whole, grad_out)
    expected = (*(x.detach() for x in results), *grads)
    transport = Copies(device=device) if copies else None
    call = {"mask": selected, "transport": transport, "return_lse": True, **extras}
    results = context_parallel_attention(*own, plan, **call)
    grads = torch.autograd.grad(results[0], own, plan.shard(grad_out, rank, 2))
    of_rows = ("out", "lse", "maximum logits")[: len(results)]
    names = (*of_rows, "query", "key", "value")
    found = zip(names, (*(x.detach() for x in results), *grads), expected, strict=True)
    return {name: _difference(gather(x, plan, 2), y) for name, x, y in found}


def errors_of_heavy_keys(rank: int) -> dict[str, float]:
    """`errors` where gradients of the keys of global tokens are computed in chunks of queries."""
    options = {"split": "in place", "strategy": "contiguous", "shared_rows": ()}
    with mock.patch.multiple(part, HEAVY_BLOCKS=3, CHUNK_BLOCKS=2):
        return errors(rank, "global tokens", options, {}, None, WHOLE, 1)


def _difference(found: Tensor, expected: Tensor) -> float:
    """The LSE and the maximum logit of an empty row are -inf on both sides."""
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    found, expected = (torch.where(finite, x, 0).float() for x in (found, expected))
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))


def errors_with_shared_heads(
    rank: int, shape: tuple[int, int], extras: dict[str, Any]
) -> dict[str, float]:
    """`errors` on a mesh (sequence, heads): ranks of its second dimension divide the heads."""
    device, mesh = torch.device("cuda", rank), init_device_mesh("cuda", shape)
    row, column = divmod(rank, shape[1])
    plan = make_plan(mask_of("butterfly"), shape[0])
    generator = torch.Generator(device).manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    sizes = [(2, n, LENGTH, DIMS) for n in heads]
    given = [torch.randn(x, generator=generator, device=device).bfloat16() for x in sizes]

    def mine(x: Tensor) -> Tensor:
        return plan.shard(x, row, 2).tensor_split(shape[1], 2)[column].contiguous()

    *whole, grad_out = given
    own = [mine(x).requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]
    extras = {**extras, "return_lse": True, "return_max_logits": True}
    results = sparseflash.attention(*whole, mask_of("butterfly").to(device), **extras)
    grads = torch.autograd.grad(results[0], whole, grad_out)
    transport = Copies(mesh.get_group(0), device)
    own_results = context_parallel_attention(*own, plan, group=mesh, transport=transport, **extras)
    own_grads = torch.autograd.grad(own_results[0], own, mine(grad_out))
    names = ("out", "lse", "maximum logits", "query", "key", "value")
    pairs = zip((*own_results, *own_grads), (*results, *grads), strict=True)
    found = [_difference(x.detach(), mine(y.detach())) for x, y in pairs]
    return dict(zip(names, found, strict=True))


def errors_of_a_replay(rank: int, warm: bool) -> dict[str, float]:
    """The largest difference of a captured forward pass, replayed with new inputs.

    warm: whether a call outside the graph made the positions that dropout needs
    """
    ranks, options = dist.get_world_size(), {"strategy": "zigzag", "split": "rows"}
    plan = make_plan(mask_of("butterfly", WHOLE), ranks, **options)
    device, stream = torch.device("cuda", rank), torch.cuda.Stream()
    shape = (3, 1, KV_HEADS, len(plan.positions(rank)), DIMS)
    own, new = torch.randn(2, *shape, device=device).bfloat16()
    extras: dict[str, Any] = {"dropout_p": 0.2, "seed": 7, "backend": "triton"}
    expected = context_parallel_attention(*new.unbind(), plan, **extras)
    if not warm:  # another plan, whose tables are made by a call without dropout
        plan = make_plan(mask_of("butterfly", WHOLE), ranks, **options)
        context_parallel_attention(*new.unbind(), plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = context_parallel_attention(*own.unbind(), plan, check=False, **extras)
    own.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    again = context_parallel_attention(*new.unbind(), plan, **extras)
    return {"replay": _difference(out, expected), "afterwards": _difference(again, expected)}


def same_bits(rank: int, name: str, length: int) -> bool:
    """Whether two runs of both passes give the same bits."""
    device = torch.device("cuda", rank)
    plan = make_plan(mask_of(name, length), dist.get_world_size())
    generator = torch.Generator(device).manual_seed(0)
    whole = torch.randn(3, 1, KV_HEADS, length, DIMS, generator=generator, device=device)
    results, copies = [], Copies(device=device)
    for _ in range(2):
        own = plan.shard(whole.bfloat16(), rank, 3).requires_grad_()
        out = context_parallel_attention(*own.unbind(), plan, transport=copies)
        out.float().square().sum().backward()
        results.append((out, own.grad))
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def layers(rank: int) -> tuple[bool, bool]:
    """(whether results by copies and by all-to-alls are equal, whether buffers can be freed)

    Each layer reads the result of the one before. Lengths change, so that buffers do.
    """
    device, results = torch.device("cuda", rank), []
    copies = Copies()
    for transport in (copies, None):
        found = []
        for length in (WHOLE, 2 * WHOLE, WHOLE):
            plan = make_plan(mask_of("butterfly", length), dist.get_world_size())
            generator = torch.Generator(device).manual_seed(0)
            whole = torch.randn(3, 1, KV_HEADS, length, DIMS, generator=generator, device=device)
            own = plan.shard(whole.bfloat16(), rank, 3).requires_grad_()
            query, key, value = own.unbind()
            for _ in range(4):
                query = context_parallel_attention(query, key, value, plan, transport=transport)
            query.float().square().sum().backward()
            found += [query.detach(), own.grad]
        results.append(found)
    held = copies.nbytes
    copies.free()
    equal = all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    return equal, held > 0 and copies.nbytes == 0


def errors_of_captured_copies(rank: int, groups: int) -> dict[str, float]:
    """The largest difference of both passes as a graph to those that Python calls.

    The graph is replayed several times with new inputs, one after another, between other calls.
    """
    limit = None if groups == 1 else WHOLE // 2 // groups
    options = {"split": "in place", "strategy": "contiguous", "shared_rows": ()}
    plan = make_plan(
        mask_of("butterfly", WHOLE), dist.get_world_size(), round_tokens=limit, **options
    )
    device, stream = torch.device("cuda", rank), torch.cuda.Stream()
    shape = (3, 1, KV_HEADS, len(plan.positions(rank)), DIMS)
    own = torch.randn(*shape, device=device).bfloat16().requires_grad_()
    transport = Copies(device=device)

    def both() -> tuple[Tensor, ...]:
        out = context_parallel_attention(*own.unbind(), plan, transport=transport)
        return out.detach(), *torch.autograd.grad(out.float().square().sum(), own)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = both()
    found: dict[str, float] = {}
    for number in range(4):
        with torch.no_grad():
            own.copy_(torch.randn(*shape, device=device))
        for _ in range(3):
            graph.replay()
        replayed = [x.clone() for x in captured]
        for x, y in zip(replayed, both(), strict=True):
            found[f"{number}, {tuple(x.shape)}"] = _difference(x, y)
    return found


def refused_first_call_in_a_graph(rank: int, check: bool | None) -> str:
    """The error of the first call with a plan while a CUDA graph is captured."""
    plan = make_plan(mask_of("butterfly", WHOLE), dist.get_world_size())
    own = torch.zeros(3, 1, 2, len(plan.positions(rank)), DIMS, device="cuda").bfloat16()
    if check:  # the tables of the plan are on the GPU
        context_parallel_attention(*own.unbind(), plan)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        try:
            context_parallel_attention(*own.unbind(), plan, check=check)
        except RuntimeError as error:
            return str(error)
    return "nothing was refused"


def in_a_later_call(rank: int, second: str, copied: bool) -> str:
    """The error of a call in which one rank takes the second of two plans that all have used."""
    copies = Copies() if copied else None
    patterns = {
        "equal traffic": masks.local((300, 0)) - masks.local((100, 0)),
        "other traffic": masks.causal(),
    }
    plans = [
        make_plan(pattern(LENGTH, BLOCK), dist.get_world_size(), "contiguous")
        for pattern in (masks.local((300, 0)), patterns[second])
    ]
    tokens = len(plans[0].positions(rank))
    own = torch.zeros(3, 1, KV_HEADS, tokens, DIMS, device="cuda").bfloat16()
    for plan in (*plans, *plans, plans[rank == 1]):
        try:
            context_parallel_attention(*own.unbind(), plan, transport=copies)
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error)
    return "nothing"
