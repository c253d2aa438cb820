"""Sweeps: which patterns are measured at which sizes, by whom, and the loop that measures them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import memory
from experiments.check import Attend, check
from experiments.families import CAUSAL, FULL, Member, Size, parse_family
from experiments.peers import Peer, Problem, attend_peer, attend_sparseflash
from experiments.record import Record, Row
from experiments.timing import Clock, time_call

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
GROWING = ("butterfly()", "local(256)")


@dataclass(frozen=True)
class Settings:
    """What is measured.

    lengths:   at which patterns are swept over densities, with `batch` sequences of `heads` heads
    growth:    over which a few patterns are swept, with one sequence of `growth_heads` heads
    dense_limit, standard_limit: the longest of `growth` for full masks, and for materialised
    attention
    budget_ms: time spent on each median
    """

    device: str
    dtype: str
    lengths: tuple[int, ...]
    growth: tuple[int, ...]
    batch: int
    heads: int
    growth_heads: int
    head_dim: int
    block_size: int
    patterns: tuple[str, ...]
    densities: tuple[float, ...]
    directions: tuple[str, ...]
    peers: tuple[str, ...]
    clock: str
    dense_limit: int
    standard_limit: int
    budget_ms: float
    seed: int


DEFAULTS = {
    "cpu": {
        "dtype": "fp32",
        "lengths": (4096,),
        "growth": (1024, 4096, 16384, 65536),
        "batch": 1,
        "heads": 4,
        "growth_heads": 1,
        "head_dim": 64,
        "block_size": 64,
        "peers": (Peer.SDPA,),
        "clock": Clock.CPU,
        "dense_limit": 8192,
        "standard_limit": 4096,
        "budget_ms": 400.0,
    },
    "cuda": {
        "dtype": "bf16",
        "lengths": (8192, 16384),
        "growth": (1024, 4096, 16384, 65536),
        "batch": 2,
        "heads": 16,
        "growth_heads": 16,
        "head_dim": 128,
        "block_size": 128,
        "peers": (Peer.FLASH, Peer.CUDNN, Peer.FLEX),
        "clock": Clock.GRAPH,
        "dense_limit": 65536,
        "standard_limit": 16384,
        "budget_ms": 60.0,
    },
}
COMMON = {
    "patterns": ("butterfly", "local", "strided", "random", "fading_memory"),
    "densities": (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32),
}
QUICK = {
    "lengths": (1024,),
    "growth": (1024, 2048),
    "densities": (1 / 2, 1 / 8),
    "budget_ms": 20.0,
}


@dataclass(frozen=True)
class Case:
    """One mask on one problem size, and who is measured on it."""

    sweep: str
    family: str
    member: Member
    batch: int
    heads: int
    seq_len: int
    contenders: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.member.label} at N = {self.seq_len}"


def plan(settings: Settings, say: Callable[[str], None]) -> Iterator[Case]:
    """Every case of the settings, its mask compiled; says what it has to leave out."""
    for seq_len in settings.lengths:
        yield from density_cases(settings, seq_len, say)
    for seq_len in settings.growth:
        yield from length_cases(settings, seq_len)


def density_cases(settings: Settings, seq_len: int, say: Callable[[str], None]) -> Iterator[Case]:
    """Every pattern at every density; the full mask, to which others are compared, first."""
    size = Size(seq_len, settings.block_size, torch.device(settings.device))
    sparse_peers = [peer for peer in settings.peers if peer == Peer.FLEX]
    for family in (FULL, CAUSAL, *map(parse_family, settings.patterns)):
        members, missed = family.choose(size, settings.densities)
        for density in missed:
            say(f"left out: no {family.name} of density {density:.3g} at N = {seq_len}")
        for member in members:
            peers = settings.peers if member.problem.dense else sparse_peers
            contenders = ("sparseflash", *peers)
            yield Case(
                "density", family.name, member, settings.batch, settings.heads, seq_len, contenders
            )


def length_cases(settings: Settings, seq_len: int) -> Iterator[Case]:
    """The growing patterns at one length, and full masks while they are short enough."""
    size = Size(seq_len, settings.block_size, torch.device(settings.device))
    contenders = dict.fromkeys(GROWING, ("sparseflash",))
    if seq_len <= settings.dense_limit:
        # FlexAttention would be compiled anew for every length, longer than all the rest takes.
        dense_peers = [peer for peer in settings.peers if peer != Peer.FLEX]
        standard = [Peer.STANDARD] if seq_len <= settings.standard_limit else []
        contenders = {"full": ("sparseflash", *dense_peers, *standard)} | contenders
    for name, who in contenders.items():
        family = FULL if name == "full" else parse_family(name)
        for member in family.choose(size, ())[0]:
            yield Case("length", name, member, 1, settings.growth_heads, seq_len, who)


def measure(case: Case, contender: str, settings: Settings) -> Iterator[Row]:
    """Checks a contender on a case, then times each pass and takes its peak memory."""
    device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
    inputs, grad_out = random_problem(case, settings.head_dim, dtype, device, settings.seed)
    attend = contestant(contender, case.member.problem, device)
    mask = case.member.problem.mask
    check(
        attend, inputs, mask, f"{contender} on {case}", backward="backward" in settings.directions
    )
    for direction in settings.directions:
        prepare = (
            forward_pass(attend, inputs)
            if direction == "forward"
            else backward_pass(attend, inputs, grad_out)
        )
        timing = time_call(prepare, Clock(settings.clock), settings.budget_ms)
        yield Row(
            sweep=case.sweep,
            contender=contender,
            family=case.family,
            pattern=case.member.label,
            batch=case.batch,
            heads=case.heads,
            seq_len=case.seq_len,
            head_dim=settings.head_dim,
            block_size=settings.block_size,
            density=mask.density,
            blocks_per_row=mask.density * -(-case.seq_len // settings.block_size),
            direction=direction,
            **asdict(timing),
            peak_bytes=memory.peak_bytes(lambda prepare=prepare: prepare()(), device),
        )


def contestant(contender: str, problem: Problem, device: torch.device) -> Attend:
    return (
        attend_sparseflash(problem)
        if contender == "sparseflash"
        else attend_peer(Peer(contender), problem, device)
    )


def random_problem(case: Case, head_dim: int, dtype: torch.dtype, device: torch.device, seed: int):
    """(query, key, value), requiring gradients, and a gradient of the output.

    Standard normal: a GPU computes faster on zeros than on data.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.heads, case.seq_len, head_dim)
    *inputs, grad_out = (
        torch.randn(shape, generator=generator, dtype=dtype, device=device) for _ in range(4)
    )
    return [t.requires_grad_() for t in inputs], grad_out


def forward_pass(attend: Attend, inputs):
    return lambda: lambda: attend(*inputs)


def backward_pass(attend: Attend, inputs, grad_out):
    def prepare():
        out = attend(*inputs)
        return lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

    return prepare


def run(settings: Settings, record: Record, path: Path, console: Console) -> None:
    """Measures what the record does not hold yet, and saves it after every case."""
    torch.manual_seed(settings.seed)
    begin = time.perf_counter() - record.seconds
    record.skipped.clear()
    known = {(r.sweep, r.contender, r.family, r.pattern, r.seq_len) for r in record.rows}
    with progress_bar(console) as progress:
        task = progress.add_task("compiling masks", total=None)
        cases = list(plan(settings, lambda text: progress.console.print(f"[yellow]{text}[/]")))
        progress.update(task, total=sum(len(case.contenders) for case in cases))
        for case in cases:
            for contender in case.contenders:
                progress.update(task, description=f"{contender} on {case}")
                key = (case.sweep, contender, case.family, case.member.label, case.seq_len)
                if key not in known:
                    _measure_into(record, case, contender, settings)
                    record.seconds = time.perf_counter() - begin
                    record.save(path)
                progress.advance(task)
        progress.update(task, description="the first case again")
        record.drift = measure_drift(record, cases[0], settings)
    record.complete = True
    record.save(path)


def measure_drift(record: Record, first: Case, settings: Settings) -> float:
    """The factor by which the time of our full mask has changed since it was first measured.

    All speed-ups are ratios to that first time: where it does not hold, they do not either.
    """
    again = {row.direction: row.median_ms for row in measure(first, "sparseflash", settings)}
    before = {row.direction: row.median_ms for row in record.rows[: len(again)]}
    ratios = [again[direction] / before[direction] for direction in again]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


def _measure_into(record: Record, case: Case, contender: str, settings: Settings) -> None:
    """A peer that cannot run is written down with its reason; sparseflash has to run."""
    try:
        record.rows += list(measure(case, contender, settings))
    except RuntimeError as error:
        if contender == "sparseflash":
            raise
        record.skipped.append([contender, str(case), str(error).strip().splitlines()[0]])


def progress_bar(console: Console) -> Progress:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console)
