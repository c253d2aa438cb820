"""Measures attention with plans and baselines on the ranks of a case: see `scaling`."""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from experiments.instruments import Log
from experiments.long_context.baselines import all_gather_attention
from experiments.long_context.cases import Case, Kind, Predicted, Way
from experiments.long_context.exchange import counted, nothing_exchanged
from experiments.memory import peak_bytes
from experiments.record import useful_flops
from masks import BlockMask, DynamicMask
from sparseflash.distributed import ContextPlan, Copies, context_parallel_attention, gather
from sparseflash.distributed.simulation import Attention

TOLERANCE = (
    0.05  # relative to the largest value; parts are rounded to bfloat16 before they are merged
)
SETTLE_S = 0.3  # time for runs before an implementation is timed: rested GPUs have higher clocks
BUDGET_S = 1.0  # time for the runs of one pass, or of both, of one implementation
MAX_RUNS = 10
# The side of a product before each run, 1.5 ms on an H200: as in a training step the GPU is busy
# when the first kernel of attention is launched, so that the host is ahead of it.
BEFORE = 8192
EXCHANGED = {"cuda": (2**20, 2**24, 2**28, 2**30), "cpu": (2**16, 2**20)}  # bytes of a rank
OWN = (Way.PLAN, 1)  # the reference of efficiency
PLANNED = (Way.PLAN, Way.LIMITED, Way.CAPTURED, Way.COLLECTIVES)
WITHOUT_GPUS = {  # why an implementation is skipped on CPUs
    Way.COLLECTIVES: "without GPUs every plan exchanges by all-to-alls",
    Way.CAPTURED: "without GPUs there are no CUDA graphs",
}
TIMEOUT = timedelta(minutes=5)
Run = Callable[[], tuple[Tensor, ...]]
USABLE = 0.95  # the part of the memory of a device that a run may need


@dataclass(frozen=True)
class Row:
    """One implementation on one mask and number of ranks.

    Attributes:
        kind: "weak" or "strong".
        pattern, implementation, strategy: Names of these; the strategy is that of the plan.
        ranks, seq_len: Number of ranks, and of tokens of the sequence.
        heads, kv_heads, head_dim: Sizes of attention; batch is 1.
        density: Density of the mask.
        forward_ms, total_ms: Milliseconds of the forward pass, and of both passes.
        exposed_forward_ms, exposed_total_ms: The part of these that the exchange adds.
        tflops: Useful TFLOP/s of a rank in total_ms.
        receive_mb: Most megabytes that a rank receives in a forward pass, by the plan.
        counted_mb: The same, counted in a run.
        gathered_mb: Megabytes that a rank receives in an all-gather or a ring, by the plan.
        shared_rows: Number of shared block rows.
        imbalance: Largest number of blocks of a rank over the mean.
        peak_bytes: Largest memory of a rank during both passes, without inputs.
        difference: Largest difference of out and gradients to those of the first implementation
            of the case, which is the all-gather if it fits, relative to the largest value; None
            for the first one.
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
    counted_mb: float
    gathered_mb: float
    shared_rows: int
    imbalance: float
    peak_bytes: int
    difference: float | None


@dataclass(frozen=True)
class Setting:
    """Sizes of attention, the ranks of a case, the device of this rank, and how it copies."""

    kind: Kind
    sizes: Attention
    group: ProcessGroup | None
    rank: int
    device: torch.device
    copies: Copies | None = None


def start() -> torch.device:
    """Joins the process group; returns the device of this process."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        # A kernel of attention fills the device: an exchange that starts later would wait for it.
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
        return device
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return torch.device("cpu")


@dataclass(frozen=True)
class Exchange:
    """An all-to-all in which every rank receives `received` bytes, and its milliseconds."""

    ranks: int
    received: int
    milliseconds: float


def exchanges(setting: Setting) -> list[Exchange]:
    """The times of all-to-alls of EXCHANGED bytes, from which `calibrate` has the bandwidth."""
    ranks, found = dist.get_world_size(setting.group), []
    for size in EXCHANGED[setting.device.type]:
        share = size // (ranks - 1)
        splits = [0 if rank == setting.rank else share for rank in range(ranks)]
        sent, received = torch.zeros(2, sum(splits), dtype=torch.uint8, device=setting.device)
        run = partial(dist.all_to_all_single, received, sent, splits, splits, group=setting.group)
        found.append(Exchange(ranks, len(received), _times(setting, (run,))[0]))
    return found


def agreed(mine: bool, device: torch.device) -> bool:
    """Whether the condition is true in all processes."""
    said = torch.tensor(int(mine), device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MIN)
    return bool(said)


def measure(
    setting: Setting, case: Case, ways: Sequence[Way] = tuple(Way)
) -> tuple[list[Row], dict[str, str]]:
    """(rows of a case, why an implementation was skipped), equal on all of its ranks."""
    expected, rows, skipped = None, [], {}
    if setting.group is not None and setting.device.type == "cuda":
        copies = Copies.where_possible(setting.group, setting.device)
        setting = replace(setting, copies=copies)
    for way in (way for way in case.plans if way in ways):  # the all-gather first
        if way in WITHOUT_GPUS and setting.device.type != "cuda":
            skipped[way] = WITHOUT_GPUS[way]
            continue
        needed, most = _needed_bytes(setting, case, way), _memory(setting.device)
        if needed > USABLE * most:
            skipped[way] = f"needs about {needed / 1e9:.0f} of {most / 1e9:.0f} GB of a device"
            continue
        try:
            row, found = _measured(setting, case, way, expected)
        except torch.OutOfMemoryError:
            if setting.group is not None:  # the other ranks wait in an exchange
                raise
            skipped[way] = "out of memory"
        else:
            expected = found if expected is None else expected
            rows.append(row)
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
        if setting.copies is not None:  # the buffers of the next one are smaller or larger
            setting.copies.free()
    return rows, skipped


def _measured(
    setting: Setting, case: Case, way: Way, expected: tuple[Tensor, ...] | None
) -> tuple[Row, tuple[Tensor, ...]]:
    """(row, results) of an implementation, whose results are compared with the expected ones."""
    plan = case.plans[way]
    forward, both = _passes(*_prepared(setting, way, plan, case.k))
    prepare = _as_called
    if way is Way.CAPTURED:
        prepare = partial(_captured, device=setting.device)
    else:
        both()  # the first call makes tables
    run_both = both

    def first() -> tuple[Tensor, ...]:  # a graph has memory from its capture on
        nonlocal run_both
        run_both = prepare(both)
        return run_both()

    peak = peak_bytes(first, setting.device)
    # The buffers of copies are no memory of the caching allocator.
    peak += 0 if setting.copies is None else setting.copies.nbytes
    found, difference = _gathered(setting, plan, run_both()), None
    if expected is not None:
        difference = _largest_difference(found, expected)
    if difference is not None and not difference < TOLERANCE:
        raise RuntimeError(
            f"{way} on {case.pattern} differs from the first implementation by {difference}"
        )
    with counted() as received:
        forward()
    runs = prepare(forward), run_both
    _settle(setting, run_both)
    if setting.group is None:
        times = 2 * _times(setting, runs)
    else:
        with nothing_exchanged() as without:
            silent = (prepare(without(run)) for run in (forward, both))
            times = _times(setting, (*runs, *silent))
    return _row(setting, case, way, times, difference, sum(received), peak), found


def _memory(device: torch.device) -> float:
    """Bytes of memory of a GPU; unlimited on CPUs."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory


def _needed_bytes(setting: Setting, case: Case, way: Way) -> float:
    """An estimate, from above, of the memory of both passes on the rank that needs most.

    A rank has query, out, both gradients and dQ in float32, key, value and their gradients. For
    what it fetches it has keys and values, their gradients, and copies that are sent and received.
    """
    plan, sizes = case.plans[way], setting.sizes
    own = len(plan.positions(setting.rank))
    keys = 4 * own
    if case.ranks > 1 and way is Way.GATHER:
        keys += 6 * case.seq_len + 4 * own
    elif case.ranks > 1:
        part = plan.part(setting.rank, setting.device, plan.head_groups(sizes.kv_heads))
        steps = part.steps[:2] if plan.fetches_again else part.steps
        fetched = ((4 * each.attended + 6 * each.received, heads.groups) for each, heads in steps)
        keys += sum(math.ceil(tokens / groups) for tokens, groups in fetched)
    tokens = 7 * own * sizes.heads + keys * sizes.kv_heads
    return _over_ranks(setting, tokens * sizes.head_dim * sizes.dtype.itemsize)


def _inputs(setting: Setting, plan: ContextPlan) -> Iterator[Tensor]:
    """Own query, key, value and gradient of out, one at a time: each is made of all tokens."""
    sizes = setting.sizes
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    generator = torch.Generator(setting.device).manual_seed(0)
    for n in heads:
        whole = torch.randn(
            *(1, n, plan.seq_len, sizes.head_dim),
            generator=generator,
            device=setting.device,
            dtype=sizes.dtype,
        )
        yield plan.shard(whole, setting.rank, 2)
        del whole


def _prepared(
    setting: Setting, way: Way, plan: ContextPlan, k: int | None
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A function of own query, key and value, and these with the gradient of out."""
    query, key, value, grad_out = _inputs(setting, plan)
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
    transport = None if way is Way.COLLECTIVES else setting.copies
    options = {"plan": plan, "group": setting.group, "mask": selected, "transport": transport}
    return partial(context_parallel_attention, **options), own


def _scores(setting: Setting, blocks: int) -> Tensor:
    """The scores of all blocks of the sequence, from which top-k selects."""
    generator = torch.Generator(setting.device).manual_seed(1)
    return torch.rand(blocks, blocks, generator=generator, device=setting.device)


def _passes(attend: Callable[..., Tensor], own: tuple[Tensor, ...]) -> tuple[Run, Run]:
    """The forward pass, which returns out, and both, which also return the gradients of inputs."""
    *tensors, grad_out = own

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (attend(*tensors),)

    def both() -> tuple[Tensor, ...]:
        out = attend(*tensors)
        return out.detach(), *torch.autograd.grad(out, tensors, grad_out)

    return forward, both


def _as_called(run: Run) -> Run:
    """A run as Python calls it. Its results are freed at the next run, as in a training step."""
    return run


def _captured(run: Run, device: torch.device) -> Run:
    """The same run as a CUDA graph, which has the memory of its results."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()  # makes tables, compares arguments, and allocates buffers that the graph takes over
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = run()

    def replay() -> tuple[Tensor, ...]:
        graph.replay()
        return results

    return replay


def _gathered(
    setting: Setting, plan: ContextPlan, shards: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Sums over dims for each token of the sequence: small, but they depend on every element."""
    weights = torch.linspace(-1, 1, setting.sizes.head_dim, device=setting.device)
    sums = [torch.stack([h.float() @ weights for h in x.unbind(1)], 1) for x in shards]
    return tuple(gather(x, plan, 2, setting.group) for x in sums)


def _largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Relative to the largest expected value of each result; NaN if one has NaN."""
    pairs = zip(found, expected, strict=True)
    # By torch, whose maximum is NaN if any value is: Python compares, and NaN is not larger.
    each = [(one - other).abs().max() / other.abs().max() for one, other in pairs]
    return float(torch.stack(each).max())


def _row(
    setting: Setting,
    case: Case,
    way: Way,
    times: Sequence[float],
    difference: float | None,
    received: int,
    peak: float,
) -> Row:
    """times: milliseconds of the forward pass, of both, and of the same without exchanges"""
    forward_ms, total_ms, *silent = times
    plan, sizes = case.plans[way], setting.sizes
    report = sizes.report(plan)
    gathered = max(report.gathered_bytes) / 1e6
    lengths = (case.seq_len, case.seq_len)
    flops = useful_flops(sizes.heads, lengths, sizes.head_dim, case.density, "forward")
    return Row(
        kind=setting.kind,
        pattern=case.pattern,
        implementation=way,
        strategy=plan.strategy,
        ranks=case.ranks,
        seq_len=case.seq_len,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        density=case.density,
        forward_ms=forward_ms,
        total_ms=total_ms,
        exposed_forward_ms=forward_ms - silent[0],
        exposed_total_ms=total_ms - silent[1],
        tflops=3.5 * flops / case.ranks / (total_ms * 1e9),
        receive_mb=max(report.receive_bytes) / 1e6 if way in PLANNED else gathered,
        counted_mb=_over_ranks(setting, received) / 1e6,
        gathered_mb=gathered,
        shared_rows=report.shared_rows if way in PLANNED else 0,
        imbalance=report.imbalance,
        peak_bytes=int(_over_ranks(setting, peak)),
        difference=difference,
    )


def _times(setting: Setting, runs: Sequence[Callable[[], object]]) -> list[float]:
    """Milliseconds of the slowest rank for each of `runs`, which all ranks start at once.

    Medians over rounds in which each of them runs once. So the clock of the device, which changes
    with time, is the same for all of them, and differences of them do not depend on it.
    """
    first = sum(max(_once(setting, run) for _ in range(2)) for run in runs)
    rounds = int(max(3, min(MAX_RUNS, BUDGET_S * 1e3 * len(runs) / first)))
    found = [[_once(setting, run) for run in runs] for _ in range(rounds)]
    return [statistics.median(each) for each in zip(*found, strict=True)]


def _settle(setting: Setting, run: Callable[[], object]) -> None:
    """Runs for SETTLE_S, so that no implementation is timed on a GPU that has rested."""
    spent = 0.0
    while setting.device.type == "cuda" and spent < SETTLE_S * 1e3:
        spent += _once(setting, run)


def _once(setting: Setting, run: Callable[[], object]) -> float:
    if setting.group is not None:
        dist.barrier(group=setting.group)
    if setting.device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        _keep_busy(setting.device)
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


def _keep_busy(device: torch.device) -> None:
    """Launches a product on a GPU; `begin` of a run follows it."""
    factor, product = _product(device)
    torch.mm(factor, factor, out=product)


@lru_cache
def _product(device: torch.device) -> tuple[Tensor, Tensor]:
    """A matrix and the memory of its square."""
    factor = torch.randn(BEFORE, BEFORE, device=device, dtype=torch.bfloat16)
    return factor, torch.empty_like(factor)


def _over_ranks(setting: Setting, number: float) -> float:
    """The maximum over ranks."""
    if setting.group is None:
        return number
    most = torch.tensor(number, dtype=torch.float64, device=setting.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=setting.group)
    return float(most)


def show_predicted(said: list[Predicted]) -> None:
    from experiments.report import plain_table, wide_console

    figures = ("ranks", "tokens", "forward ms", "both ms", "exposed ms")
    table = plain_table("Predicted of the plans", ("pattern", "strategy"), figures)
    for each in said:
        p = each.prediction
        times = (f"{t:.2f}" for t in (p.forward_ms, p.total_ms, p.exposed_ms))
        table.add_row(each.pattern, p.strategy, f"{p.ranks}", f"{each.seq_len}", *times)
    wide_console().print(table)


def show(log: Log, said: list[Predicted]) -> None:
    rows: list[Row] = log.rows
    alone = {row.pattern: row.tflops for row in rows if (row.implementation, row.ranks) == OWN}
    modelled = {(p.pattern, p.prediction.ranks): p.prediction.total_ms for p in said}

    def share(row: Row) -> str:
        return f"{row.tflops / alone[row.pattern]:.3f}" if row.pattern in alone else ""

    def model(row: Row) -> str:
        planned = row.implementation == Way.PLAN
        return f"{modelled[row.pattern, row.ranks]:.2f}" if planned else ""

    figures: dict[str, Callable[[Row], str]] = {
        "ranks": lambda row: f"{row.ranks}",
        "tokens": lambda row: f"{row.seq_len}",
        "forward ms": lambda row: f"{row.forward_ms:.2f}",
        "both ms": lambda row: f"{row.total_ms:.2f}",
        "predicted": model,
        "exposed ms": lambda row: f"{row.exposed_forward_ms:.2f}, {row.exposed_total_ms:.2f}",
        "TFLOP/s a rank": lambda row: f"{row.tflops:.3g}",
        "efficiency": share,
        "received MB": lambda row: f"{row.counted_mb:.1f}",
        "by plan": lambda row: f"{row.receive_mb:.1f}",
        "of all": lambda row: f"{row.gathered_mb:.1f}",
        "peak MB": lambda row: f"{row.peak_bytes / 1e6:.0f}",
        "difference": lambda row: "" if row.difference is None else f"{row.difference:.1e}",
    }
    log.show("Scaling", ("pattern", "implementation", "strategy"), figures)
