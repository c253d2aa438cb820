"""Measures cases: implementations are checked, timed interleaved, and their memory is taken."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import memory
from experiments.baselines import Baseline, attend_baseline, attend_sparseflash
from experiments.check import Attend, check
from experiments.pattern_families import Problem
from experiments.record import Measurement, Record, is_ours
from experiments.timing import Clock, Prepare, Timing, prepared, time_interleaved

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Method:
    """How cases are measured. backend: what "sparseflash" stands for; budget_ms: time spent on
    each median."""

    device: str
    dtype: str
    backend: str
    directions: tuple[str, ...]
    clock: str
    budget_ms: float
    seed: int


@dataclass(frozen=True)
class Case:
    """One mask on one problem size, and what is measured on it: baselines, and our backends as
    "sparseflash" or "sparseflash:name".

    q_len, kv_heads: of a case that is decoded, which has no backward pass
    """

    suite: str
    family: str
    problem: Problem
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    block_size: int
    implementations: tuple[str, ...]
    q_len: int | None = None
    kv_heads: int | None = None

    @property
    def group(self) -> tuple:
        """That of its rows, less the direction."""
        size = (self.batch, self.heads, self.seq_len, self.head_dim, self.block_size)
        return self.suite, *size, self.q_len, self.kv_heads

    def directions(self, method: Method) -> list[str]:
        """The passes to measure."""
        return [d for d in method.directions if d == "forward" or self.q_len is None]

    def key_value_bytes(self, itemsize: int) -> int | None:
        """Of the keys and values in non-zero blocks; None where it is not decoded."""
        if self.kv_heads is None:
            return None
        numbers = 2 * self.batch * self.kv_heads * self.seq_len * self.head_dim
        return round(self.problem.density * numbers * itemsize)

    def __str__(self) -> str:
        return f"{self.problem.label} at N = {self.seq_len}"


def measure(
    case: Case,
    implementations: Sequence[str],
    method: Method,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[Measurement], dict[str, str]]:
    """Checks implementations on a case, then times each pass, interleaved, and takes the peak
    memory of each. Tells `say` what it is at.

    Returns the measurements of one implementation after the other, and the reasons of baselines
    that cannot run; ours have to.
    """
    device, dtype = torch.device(method.device), DTYPES[method.dtype]
    problem = random_problem(case, dtype, device, method.seed)
    skips = SkipReasons()
    passes: dict[str, dict[str, Prepare]] = {}
    for implementation in implementations:
        say(f"checking {implementation} on {case}")
        with skips.catch(implementation):
            passes[implementation] = checked(implementation, case, method, *problem)
    timings: dict[str, dict[str, Timing]] = {}
    for direction in case.directions(method):
        say(f"timing {case}, {direction}")
        running = {c: p[direction] for c, p in passes.items() if c not in skips.reasons}
        timings[direction] = _timed(running, method, skips)
    rows = [
        _row(case, implementation, direction, timings[direction][implementation], prepare, method)
        for implementation, of_implementation in passes.items()
        for direction, prepare in of_implementation.items()
        if implementation not in skips.reasons
    ]
    return rows, skips.reasons


class SkipReasons:
    """Why baselines cannot run. Ours have to: their errors pass."""

    def __init__(self):
        self.reasons: dict[str, str] = {}

    @contextmanager
    def catch(self, implementation: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_ours(implementation):
                raise
            self.reasons[implementation] = str(error).strip().splitlines()[0]


def checked(
    implementation: str, case: Case, method: Method, inputs, grad_out
) -> dict[str, Prepare]:
    """Each pass of an implementation whose results were right."""
    attend = make_attend(implementation, case.problem, method.backend)
    mask, directions = case.problem.mask, case.directions(method)
    check(attend, inputs, mask, f"{implementation} on {case}", backward="backward" in directions)
    passes = {
        "forward": forward_pass(attend, inputs),
        "backward": backward_pass(attend, inputs, grad_out),
    }
    return {direction: passes[direction] for direction in directions}


def _timed(passes: dict[str, Prepare], method: Method, skips: SkipReasons) -> dict[str, Timing]:
    """The time of the same pass of each implementation that can run."""
    samples = {}
    with ExitStack() as stack:
        for implementation, prepare in passes.items():
            with skips.catch(implementation):
                run = prepared(prepare, Clock(method.clock))
                samples[implementation] = stack.enter_context(run)
        timings = time_interleaved(list(samples.values()), method.budget_ms)
    return dict(zip(samples, timings, strict=True))


def _row(
    case: Case,
    implementation: str,
    direction: str,
    timing: Timing,
    prepare: Prepare,
    method: Method,
) -> Measurement:
    """What is kept of a pass; its peak memory is taken here."""
    density = case.problem.density
    return Measurement(
        suite=case.suite,
        implementation=implementation,
        family=case.family,
        pattern=case.problem.label,
        batch=case.batch,
        heads=case.heads,
        seq_len=case.seq_len,
        head_dim=case.head_dim,
        block_size=case.block_size,
        density=density,
        blocks_per_row=density * -(-case.seq_len // case.block_size),
        direction=direction,
        **asdict(timing),
        peak_bytes=memory.peak_bytes(lambda: prepare()(), torch.device(method.device)),
        q_len=case.q_len,
        kv_heads=case.kv_heads,
        key_value_bytes=case.key_value_bytes(DTYPES[method.dtype].itemsize),
    )


def make_attend(implementation: str, problem: Problem, backend: str) -> Attend:
    if is_ours(implementation):
        _, _, named = implementation.partition(":")
        return attend_sparseflash(problem, named or backend)
    return attend_baseline(Baseline(implementation), problem)


def random_problem(case: Case, dtype: torch.dtype, device: torch.device, seed: int):
    """(query, key, value), requiring gradients, and a gradient of the output.

    Standard normal: a GPU computes faster on zeros than on data.
    """
    generator = torch.Generator(device).manual_seed(seed)
    of_queries = (case.heads, case.q_len or case.seq_len)
    of_keys = (case.kv_heads or case.heads, case.seq_len)
    *inputs, grad_out = (
        torch.randn(
            (case.batch, *shape, case.head_dim), generator=generator, dtype=dtype, device=device
        )
        for shape in (of_queries, of_keys, of_keys, of_queries)
    )
    return [t.requires_grad_() for t in inputs], grad_out


def forward_pass(attend: Attend, inputs):
    return lambda: lambda: attend(*inputs)


def backward_pass(attend: Attend, inputs, grad_out):
    def prepare():
        out = attend(*inputs)
        return lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True)

    return prepare


def run(
    plan: Callable[[Callable[[str], None]], Iterator[Case]],
    method: Method,
    record: Record,
    path: Path,
    console: Console,
) -> None:
    """Measures what the record does not hold yet of the cases of `plan(say)`, and saves it after
    every case."""
    torch.manual_seed(method.seed)
    begin = time.perf_counter() - record.seconds
    record.skipped.clear()
    known = {(r.implementation, r.family, r.pattern, r.group[:-1]) for r in record.rows}
    with progress_bar(console) as progress:
        task = progress.add_task("compiling masks", total=None)

        def say(text: str) -> None:
            progress.update(task, description=text)

        cases = list(plan(lambda text: progress.console.print(f"[yellow]{text}[/]")))
        progress.update(task, total=sum(len(case.implementations) for case in cases))
        say("warming up")
        _warm_up(cases[0], method)
        for case in cases:
            known_of_case = case.family, case.problem.label, case.group
            lacking = [c for c in case.implementations if (c, *known_of_case) not in known]
            if lacking:
                rows, reasons = measure(case, lacking, method, say)
                record.rows += rows
                record.skipped += [[c, str(case), reason] for c, reason in reasons.items()]
                record.seconds = time.perf_counter() - begin
                record.save(path)
            progress.advance(task, len(case.implementations))
        say("the first case again")
        record.drift = measure_drift(record, cases[0], method)
    record.complete = True
    record.save(path)


def _warm_up(first: Case, method: Method) -> None:
    """Measures the first case for nothing: all others are compared with it, and what it finds cold
    would count for it alone."""
    measure(first, first.implementations[:1], method)


def measure_drift(record: Record, first: Case, method: Method) -> float:
    """The factor by which the time of the first implementation on the first case, our full mask,
    has changed since it was first measured.

    All speed-ups are ratios to that first time: where it does not hold, they do not either.
    """
    rows, _ = measure(first, first.implementations[:1], method)
    again = {row.direction: row.median_ms for row in rows}
    before = {row.direction: row.median_ms for row in record.rows[: len(again)]}
    ratios = [again[direction] / before[direction] for direction in again]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


def progress_bar(console: Console) -> Progress:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console)
