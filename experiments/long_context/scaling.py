"""Weak and strong scaling of attention over a sequence that ranks share.

    torchrun --nproc-per-node 2 -m experiments.long_context.scaling weak
    torchrun --nproc-per-node 2 -m experiments.long_context.scaling strong

Measured on 1, 2, 4, ... of the processes, forward and forward with backward, planned from the mask
and beside it an all-gather and a ring with the same kernels. Before a case is timed, its output
and gradients are compared with those of the all-gather. On CPUs it runs over gloo, at small sizes.

- A time is the median over runs of the slowest rank; ranks start each run together.
- Exposed communication is the time less that of the same run in which nothing is exchanged.
- Weak efficiency compares the useful FLOP/s of a rank with those of one rank alone: of most
  patterns the work of a token grows with the sequence.

The rows go to long-context-KIND-RANKS-<device>.json.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Annotated, cast
from unittest import mock

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed import ProcessGroup

import masks
from experiments.cli import RESULTS, Output, Overwrite
from experiments.instruments import Log, command
from experiments.long_context import baselines
from experiments.long_context.baselines import RingPlan, all_gather_attention, ring_plan
from experiments.memory import peak_bytes
from experiments.record import useful_flops
from masks import BlockMask, DynamicMask, Pattern
from sparseflash.distributed import (
    ContextPlan,
    context_parallel_attention,
    make_plan,
    passes,
    shared_rows,
)

TOKENS_A_RANK, TOKENS = 2**17, 2**20
BLOCK = 128
TOLERANCE = 0.05  # of the largest value: parts are rounded to bfloat16 before they are merged
BUDGET_S = 1.0  # of runs of one pass of one implementation
MAX_RUNS = 10
TIMEOUT = timedelta(minutes=5)


class Kind(StrEnum):
    """Weak: the tokens of a rank stay. Strong: those of the sequence stay."""

    WEAK, STRONG = "weak", "strong"


class Way(StrEnum):
    """Implementations."""

    PLAN, GATHER, RING = "plan", "all-gather", "ring"


@dataclass(frozen=True)
class Row:
    """One implementation on one mask and number of ranks.

    Attributes:
        kind: "weak" or "strong".
        pattern, implementation, strategy: What ran; the strategy is that of the plan.
        ranks, seq_len: How many ranks share how many tokens.
        heads, kv_heads, head_dim: Of the attention; batch is 1.
        density: Of the mask.
        forward_ms, total_ms: Forward; forward and backward.
        exposed_forward_ms, exposed_total_ms: Of these, what the exchange adds.
        tflops: Useful TFLOP/s of a rank in total_ms.
        receive_mb: Most megabytes that a rank receives in a forward pass.
        shared_rows: Block rows that all ranks share.
        gathered_mb: What a rank receives in an all-gather or a ring.
        imbalance: Most blocks of a rank over the mean.
        peak_bytes: Most memory of a rank during both passes, beyond inputs.
        difference: Largest difference of out and gradients to the all-gather, over the largest
            value.
    """

    kind: str
    pattern: str
    implementation: str
    strategy: str
    ranks: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    density: float
    forward_ms: float
    total_ms: float
    exposed_forward_ms: float
    exposed_total_ms: float
    tflops: float
    receive_mb: float
    shared_rows: int
    gathered_mb: float
    imbalance: float
    peak_bytes: int
    difference: float


@dataclass(frozen=True)
class Setting:
    """Sizes of a case, the ranks of it, and the device of this one."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    ranks: int
    seq_len: int
    group: ProcessGroup | None
    rank: int
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def patterns(window: int) -> dict[str, Pattern]:
    """The masks of the comparison; `window` tokens."""
    local_global = masks.local(window // 2) | masks.global_tokens(list(range(BLOCK)))
    return {
        "window": masks.local((window - 1, 0)),
        "butterfly": masks.butterfly(),
        "local+global": local_global,
        "random 1/16": masks.random(1 / 16, seed=0),
        "top-k": masks.full(),
    }


def main(
    kind: Kind,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a rank (weak) or of the sequence (strong).")
    ] = None,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    kv_heads: Annotated[int, typer.Option(min=1)] = 16,
    head_dim: Annotated[int, typer.Option(min=8, max=256)] = 128,
    window: Annotated[int, typer.Option(min=1, help="Tokens; of top-k too.")] = 4096,
    only: Annotated[str, typer.Option(help="Patterns, separated by commas; all if empty.")] = "",
    seconds: Annotated[float, typer.Option(help="No new case after so long.")] = 480.0,
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Measures weak or strong scaling on the processes that torchrun started."""
    begin = time.monotonic()
    device = _start()
    count, rank = dist.get_world_size(), dist.get_rank()
    sizes = [n for n in (2**i for i in range(12)) if n <= count]
    # All ranks make all groups.
    groups = {n: cast(ProcessGroup, dist.new_group(list(range(n)))) for n in sizes}
    chosen = {n: p for n, p in patterns(window).items() if not only or n in only.split(",")}
    log = None
    if rank == 0:
        name = f"long-context-{kind}-{count}"
        log = Log(name, device.type, output, overwrite, window=window, torchrun=count)
    for pattern_name, pattern in chosen.items():
        for n in sizes:
            left = seconds - (time.monotonic() - begin)
            if not _agreed(left > 0, device):
                continue
            total = tokens or (TOKENS_A_RANK if kind is Kind.WEAK else TOKENS)
            length = total * n if kind is Kind.WEAK else total
            rows = []
            if rank < n:
                group = groups[n] if n > 1 else None
                sizes_of = (heads, kv_heads, head_dim, n, length, group, rank, device)
                rows = measure(Setting(kind, *sizes_of), pattern_name, pattern, window)
            if log is not None:
                log.add(f"{pattern_name}, {n} ranks", rows, {}, complete=False)
            dist.barrier()
    if log is not None:
        log.add("end", [], {}, complete=True)
        _show(log)
    dist.barrier()
    dist.destroy_process_group()


def _start() -> torch.device:
    """Joins the other processes; the device of this one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
        return device
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return torch.device("cpu")


def _agreed(mine: bool, device: torch.device) -> bool:
    """Whether all processes say so."""
    said = torch.tensor(int(mine), device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MIN)
    return bool(said)


def measure(setting: Setting, name: str, pattern: Pattern, window: int) -> list[Row]:
    """The rows of one mask on one number of ranks, equal on all of them."""
    mask = pattern(setting.seq_len, BLOCK)
    plan = make_plan(mask, setting.ranks)
    contiguous = make_plan(mask, setting.ranks, "contiguous")
    ways: dict[Way, ContextPlan] = {Way.PLAN: plan, Way.GATHER: contiguous}
    if setting.ranks > 1:
        ways[Way.RING] = ring_plan(mask, setting.ranks)
    k = window // BLOCK if name == "top-k" else None
    density = mask.density if k is None else min(k * BLOCK / setting.seq_len, 1.0)
    whole = _inputs(setting)
    expected, rows = None, []
    for way in (Way.GATHER, Way.PLAN, Way.RING):
        if way in ways:
            attend, own = _prepared(setting, way, ways[way], whole, k)
            found = _gathered(setting, ways[way], _passes(attend, own))
            expected = found if expected is None else expected
            difference = max(_difference(*pair) for pair in zip(found, expected, strict=True))
            if not difference < TOLERANCE:
                raise RuntimeError(f"{way} on {name} differs from the all-gather by {difference}")
            del found
            facts = (setting, name, way, ways[way], density, difference)
            rows.append(_row(*facts, attend, own))
            del attend, own
    return rows


def _inputs(setting: Setting) -> tuple[Tensor, ...]:
    """query, key, value and the gradient of out of the whole sequence, the same on every rank."""
    heads = (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)
    generator = torch.Generator(setting.device).manual_seed(0)
    return tuple(
        torch.randn(
            *(1, n, setting.seq_len, setting.head_dim),
            generator=generator,
            device=setting.device,
            dtype=setting.dtype,
        )
        for n in heads
    )


def _prepared(
    setting: Setting, way: Way, plan: ContextPlan, whole: tuple[Tensor, ...], k: int | None
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A function of own query, key and value, and these with the gradient of out."""
    query, key, value, grad_out = (plan.shard(x, setting.rank, 2) for x in whole)
    own = (*(x.requires_grad_() for x in (query, key, value)), grad_out)
    support = plan.mask_of(setting.rank).to(setting.device)
    mask: BlockMask | DynamicMask = support
    if k is not None:
        rows = plan.part(setting.rank, setting.device).rows
        scores = _scores(setting, plan.mask.grid.nq)[rows]
        mask = support.select_topk(scores, k)
    if way is Way.GATHER:
        return partial(all_gather_attention, mask=mask, group=setting.group), own
    selected = mask if isinstance(mask, DynamicMask) else None
    return partial(context_parallel_attention, plan=plan, group=setting.group, mask=selected), own


def _scores(setting: Setting, blocks: int) -> Tensor:
    """The score of each block of the whole sequence, by which top-k selects."""
    generator = torch.Generator(setting.device).manual_seed(1)
    return torch.rand(blocks, blocks, generator=generator, device=setting.device)


def _passes(attend: Callable[..., Tensor], own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """out and the gradients of query, key and value."""
    *tensors, grad_out = own
    out = attend(*tensors)
    return out.detach(), *torch.autograd.grad(out, tensors, grad_out)


def _gathered(
    setting: Setting, plan: ContextPlan, shards: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Sums over the dims of each token, of the whole sequence: little, and of every element."""
    from sparseflash.distributed import gather

    weights = torch.linspace(-1, 1, setting.head_dim, device=setting.device)
    sums = [(x.float() * weights).sum(-1) for x in shards]
    return tuple(gather(x, plan, 2, setting.group) for x in sums)


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _row(
    setting: Setting,
    name: str,
    way: Way,
    plan: ContextPlan,
    density: float,
    difference: float,
    attend: Callable[..., Tensor],
    own: tuple[Tensor, ...],
) -> Row:
    def forward() -> object:
        with torch.no_grad():
            return attend(*own[:3])

    def both() -> object:
        return _passes(attend, own)

    forward_ms, total_ms = _time(setting, forward), _time(setting, both)
    with _nothing_exchanged():
        silent = (_time(setting, forward), _time(setting, both))
    # Both passes keep what they return until the next run: the memory of one step of training.
    peak = _over_ranks(setting, peak_bytes(both, setting.device))
    sizes = (setting.kv_heads, setting.head_dim, setting.dtype)
    report = plan.report(*sizes, heads=setting.heads)
    gathered = max(report.gathered_bytes) / 1e6
    everything = way is Way.GATHER or isinstance(plan, RingPlan)
    flops = useful_flops(
        setting.heads, (setting.seq_len, setting.seq_len), setting.head_dim, density, "forward"
    )
    return Row(
        kind=setting.kind,
        pattern=name,
        implementation=way,
        strategy=plan.strategy,
        ranks=setting.ranks,
        seq_len=setting.seq_len,
        heads=setting.heads,
        kv_heads=setting.kv_heads,
        head_dim=setting.head_dim,
        density=density,
        forward_ms=forward_ms,
        total_ms=total_ms,
        exposed_forward_ms=forward_ms - silent[0],
        exposed_total_ms=total_ms - silent[1],
        tflops=3.5 * flops / setting.ranks / (total_ms * 1e9),
        receive_mb=gathered if everything else max(report.receive_bytes) / 1e6,
        shared_rows=0 if everything else report.shared_rows,
        gathered_mb=gathered,
        imbalance=report.imbalance,
        peak_bytes=int(peak),
        difference=difference,
    )


@contextmanager
def _nothing_exchanged() -> Iterator[None]:
    """Exchanges bring zeros at once. Of what an all-gather brings, own keys stand for all."""

    class Silent(passes.Exchange):
        def __init__(self, group, source, send_splits, receive_splits, what, received=None):
            if received is None:
                received = source.new_empty(sum(receive_splits), *source.shape[1:])
            self._received = received.zero_()

        def wait(self) -> Tensor:
            return self._received

    def repeated(shard: Tensor, group: ProcessGroup) -> Tensor:
        return shard.repeat(group.size(), *[1] * (shard.dim() - 1))

    def own(tensor: Tensor, group: ProcessGroup) -> Tensor:
        return tensor[: len(tensor) // group.size()]

    with (
        mock.patch.object(passes, "Exchange", Silent),
        mock.patch.object(shared_rows, "Exchange", Silent),
        mock.patch.object(baselines, "all_gather", repeated),
        mock.patch.object(baselines, "reduce_scatter", own),
    ):
        yield


def _time(setting: Setting, run: Callable[[], object]) -> float:
    """Milliseconds of the slowest rank: the median of runs that all ranks start together."""
    first = max(_once(setting, run) for _ in range(2))
    runs = int(max(3, min(MAX_RUNS, BUDGET_S * 1e3 / _over_ranks(setting, first))))
    return statistics.median(_once(setting, run) for _ in range(runs))


def _once(setting: Setting, run: Callable[[], object]) -> float:
    if setting.group is not None:
        dist.barrier(group=setting.group)
    if setting.device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found = begin.elapsed_time(end)
    else:
        start = time.perf_counter()
        run()
        found = (time.perf_counter() - start) * 1e3
    return _over_ranks(setting, found)


def _over_ranks(setting: Setting, number: float) -> float:
    """The most of any rank."""
    if setting.group is None:
        return number
    most = torch.tensor(number, dtype=torch.float64, device=setting.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=setting.group)
    return float(most)


def efficiency(row: Row, rows: list[Row]) -> float | None:
    """The useful FLOP/s of a rank over those of one rank alone with the plan; None without it."""
    alone = [r for r in rows if (r.pattern, r.implementation, r.ranks) == (row.pattern, "plan", 1)]
    return row.tflops / alone[0].tflops if alone else None


def _show(log: Log) -> None:
    def share(row: Row) -> str:
        found = efficiency(row, log.rows)
        return "" if found is None else f"{found:.3f}"

    figures: dict[str, Callable[[Row], str]] = {
        "ranks": lambda row: f"{row.ranks}",
        "tokens": lambda row: f"{row.seq_len}",
        "forward ms": lambda row: f"{row.forward_ms:.2f}",
        "both ms": lambda row: f"{row.total_ms:.2f}",
        "exposed ms": lambda row: f"{row.exposed_forward_ms:.2f}, {row.exposed_total_ms:.2f}",
        "TFLOP/s a rank": lambda row: f"{row.tflops:.1f}",
        "efficiency": share,
        "received MB": lambda row: f"{row.receive_mb:.1f}",
        "of all": lambda row: f"{row.gathered_mb:.1f}",
        "peak MB": lambda row: f"{row.peak_bytes / 1e6:.0f}",
        "difference": lambda row: f"{row.difference:.1e}",
    }
    log.show("Scaling", ("pattern", "implementation", "strategy"), figures)


if __name__ == "__main__":
    command(main)
