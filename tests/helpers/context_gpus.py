"""What each rank does in tests of attention over a sequence that GPUs share."""

from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import masks
import sparseflash
from masks import BlockMask
from sparseflash.distributed import (
    context_parallel_attention,
    copies,
    free_buffers,
    gather,
    make_plan,
    part,
)

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


def errors(
    rank: int,
    name: str,
    options: dict[str, Any],
    extras: dict[str, Any],
    k: int | None = None,
    length: int = LENGTH,
    batch: int = 2,
    transport: Literal["auto", "collectives", "copies"] = "copies",
) -> dict[str, float]:
    """The largest difference to one GPU of out and gradients, relative to the largest value.

    Args:
        rank: Number of this rank.
        name: Name of the mask.
        options: Arguments of make_plan.
        extras: Arguments of attention.
        k: Number of blocks that a DynamicMask selects for each block row; None for all.
        length: Number of tokens.
        batch: Number of batch elements.
        transport: How the two GPUs exchange.
    """
    device = torch.device("cuda", rank)
    mask = mask_of(name, length)
    plan = make_plan(mask, dist.get_world_size(), **options)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    shapes = [(batch, heads, length, DIMS) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *whole, grad_out = (normal(*shape).bfloat16() for shape in shapes)
    scores = normal(mask.grid.nq, mask.grid.nk)
    own = [plan.shard(x, rank, 2).requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]
    used, selected = mask.to(device), None
    if k is not None:
        used = used.select_topk(scores, k)
        rows = plan.part(rank, device).rows
        selected = plan.mask_of(rank).to(device).select_topk(scores[rows], k)
    extras = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in extras.items()}
    out = sparseflash.attention(*whole, used, **extras)
    expected = (out.detach(), *torch.autograd.grad(out, whole, grad_out))
    found = context_parallel_attention(*own, plan, mask=selected, transport=transport, **extras)
    grads = torch.autograd.grad(found, own, plan.shard(grad_out, rank, 2))
    names = ("out", "query", "key", "value")
    results = zip(names, (found.detach(), *grads), expected, strict=True)
    return {name: _difference(gather(x, plan, 2), y) for name, x, y in results}


def errors_of_heavy_keys(rank: int) -> dict[str, float]:
    """`errors` where gradients of the keys of global tokens are computed in chunks of queries."""
    options = {"split": "in place", "strategy": "contiguous", "shared_rows": ()}
    with mock.patch.multiple(part, HEAVY_BLOCKS=3, CHUNK_BLOCKS=2):
        return errors(rank, "global tokens", options, {}, None, WHOLE, 1)


def _difference(found: Tensor, expected: Tensor) -> float:
    gap = (found.float() - expected.float()).abs().max()
    return float(gap / expected.float().abs().max().clamp(min=1e-9))


def same_bits(rank: int, name: str, length: int) -> bool:
    """Whether two runs of both passes give the same bits."""
    device = torch.device("cuda", rank)
    plan = make_plan(mask_of(name, length), dist.get_world_size())
    generator = torch.Generator(device).manual_seed(0)
    whole = torch.randn(3, 1, KV_HEADS, length, DIMS, generator=generator, device=device)
    results = []
    for _ in range(2):
        own = plan.shard(whole.bfloat16(), rank, 3).requires_grad_()
        out = context_parallel_attention(*own.unbind(), plan)
        out.float().square().sum().backward()
        results.append((out, own.grad))
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def layers(rank: int) -> tuple[bool, bool]:
    """(whether results by copies and by collectives are equal, whether buffers can be freed)

    Each layer reads the result of the one before. Lengths change, so that buffers do.
    """
    device, results = torch.device("cuda", rank), []
    for transport in ("copies", "collectives"):
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
    group = dist.group.WORLD
    held = copies.buffer_bytes(group)
    free_buffers()
    equal = all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    return equal, held > 0 and copies.buffer_bytes(group) == 0


def refused_in_a_graph(rank: int) -> str:
    """The error of copies while a CUDA graph is captured."""
    plan = make_plan(mask_of("butterfly", WHOLE), dist.get_world_size())
    device, stream = torch.device("cuda", rank), torch.cuda.Stream()
    own = torch.zeros(3, 1, 2, len(plan.positions(rank)), DIMS, device=device).bfloat16()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        context_parallel_attention(*own.unbind(), plan)  # the first call makes tables
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            context_parallel_attention(*own.unbind(), plan, transport="copies", check=False)
        except ValueError as error:
            return str(error)
        finally:
            graph.capture_end()
    return "nothing was refused"
