"""Runs the cases of a suite and stores them in a record; an interrupted run can be resumed."""

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import memory
from experiments.check import CheckError
from experiments.cli import INTERRUPTED
from experiments.environment import environment
from experiments.measure import DTYPES, Case, measure, random_problem
from experiments.packaged import refusal
from experiments.plots import draw
from experiments.record import Measurement, Record
from experiments.report import load, show, wide_console
from experiments.roofline import measure_roofline
from experiments.settings import Method
from sparseflash import BackendError, explain
from sparseflash.gap import CHANGES, Gap

GAP_DENSITY = 1 / 16
Cases = Callable[[Callable[[str], None]], Iterator[Case]]


def carry_out(cases: Cases, method: Method, path: Path, resume: bool, roofline: bool) -> None:
    """Measures cases, saves each in `path`, then prints and draws the record.

    Args:
        cases: Returns the cases. Its argument is called with descriptions of omitted cases.
        method: The method of measurement.
        path: Path of the record.
        resume: Whether to resume the record in `path`.
        roofline: Whether to measure the roofline of the device too.

    Raises:
        typer.Exit: The run was interrupted, a result was wrong, or a file cannot be written.
        typer.BadParameter: The record cannot be resumed, or no backend can compute a call.
    """
    console = wide_console()
    record = open_record(method, path, resume)
    if roofline and not record.roofline:
        record.roofline = measure_roofline(DTYPES[method.dtype])
    try:
        run(cases, method, record, path, console)
    except KeyboardInterrupt:
        record.save(path)
        count = len(record.rows)
        print(f"Interrupted: {path} has {count} measurements; --resume continues.")
        raise typer.Exit(INTERRUPTED) from None
    except CheckError as error:
        console.print(f"[red]Wrong result; the run ends:[/] {escape(str(error))}")
        raise typer.Exit(1) from None
    except OSError as error:
        console.print(f"[red]{escape(str(path))} cannot be written:[/] {escape(str(error))}")
        raise typer.Exit(1) from None
    except BackendError as error:
        raise typer.BadParameter(str(error)) from None
    show(record, console)
    for written in (path, *draw(record, path.with_suffix(""))):
        print(f"wrote {written}")
    console.print(f"done in {record.seconds:.0f} s on {record.environment['device']}")


def open_record(method: Method, path: Path, resume: bool) -> Record:
    """A new record, or with `resume` the one in `path`; see `identity`."""
    fresh = Record(
        environment(torch.device(method.device)) | {"memory": memory.METHOD[method.device]},
        json.loads(json.dumps(asdict(method))),
    )
    if not resume:
        return fresh
    if not path.exists():
        raise typer.BadParameter(f"--resume needs the record {path}, which does not exist")
    record = load(path)
    old, now = identity(record), identity(fresh)
    if others := [name for name in old | now if old.get(name) != now.get(name)]:
        listed = "; ".join(f"{name} {old.get(name)}, now {now.get(name)}" for name in others)
        raise typer.BadParameter(
            f"--resume needs the settings, device, commit and versions of {path}: {listed}"
        )
    return record


def identity(record: Record) -> dict:
    """The properties that a resumed run must share with the record."""
    environment = {name: record.environment[name] for name in ("device", "git", "versions")}
    return record.settings | {f"environment {name}": v for name, v in environment.items()}


def run(cases: Cases, method: Method, record: Record, path: Path, console: Console) -> None:
    """Measures the cases that the record does not have, and saves it after every case."""
    torch.manual_seed(method.seed)
    begin = time.perf_counter() - record.seconds
    record.skipped.clear()
    ended, on_gpu = set(), method.device == "cuda"
    known = {(r.implementation, r.family, r.pattern, r.group[:-1]) for r in record.rows}
    with progress_bar(console) as progress, ExitStack() as at_end:
        task = progress.add_task("compiling masks", total=None)

        def log(text: str) -> None:
            progress.update(task, description=text)

        planned = list(cases(lambda text: progress.console.print(f"[yellow]{escape(text)}[/]")))
        progress.update(task, total=sum(len(case.implementations) for case in planned))
        log("warming up")
        first = planned[0]
        # All others are compared with the first one, so a cold start must not affect it.
        measure(first, first.implementations[:1], method)
        # Modules are not garbage. To look through them took longer than to time a call.
        gc.collect()
        gc.freeze()
        at_end.callback(gc.unfreeze)  # else Triton reports them as leaked when the process ends
        for case in planned:
            known_of_case = case.family, case.problem.label, case.group
            lacking = [c for c in case.implementations if (c, *known_of_case) not in known]
            alone = method.limit_ms is not None
            if method.limit_ms is not None:
                slow = too_slow(case, record, method.limit_ms)
                new = {n: slow[n] for n in lacking if n in slow and (case.line, n) not in ended}
                record.skipped += [[name, str(case), reason] for name, reason in new.items()]
                ended |= {(case.line, name) for name in slow}
                lacking = [name for name in lacking if (case.line, name) not in ended]
            refused = {n: reason for n in lacking if (reason := refusal(n, case.seq_len))}
            record.skipped += [[name, str(case), reason] for name, reason in refused.items()]
            lacking = [name for name in lacking if name not in refused]
            for names in ([name] for name in lacking) if alone else [lacking] * bool(lacking):
                rows, reasons = measure_within_memory(case, names, method, log)
                ended |= {(case.line, name) for name in reasons}
                record.rows += rows
                record.skipped += [[c, str(case), reason] for c, reason in reasons.items()]
                record.seconds = time.perf_counter() - begin
                record.save(path)
            progress.advance(task, len(case.implementations))
        for gaps in measure_gaps(planned, method, record.gaps, log) if on_gpu else ():
            record.gaps += gaps
            record.seconds = time.perf_counter() - begin
            record.save(path)
        log("the first case again")
        record.drift = measure_drift(record, first, method)
    record.complete = True
    record.save(path)


def measure_within_memory(
    case: Case, names: Sequence[str], method: Method, log: Callable[[str], None]
) -> tuple[list[Measurement], dict[str, str]]:
    """Calls `measure`. In the suite landscape, ours may run out of memory too."""
    try:
        return measure(case, names, method, log)
    except torch.OutOfMemoryError as error:
        if method.limit_ms is None:
            raise
        return [], dict.fromkeys(names, str(error).splitlines()[0])


def too_slow(case: Case, record: Record, limit_ms: float) -> dict[str, str]:
    """Implementations that exceeded the time limit on a shorter case, with the reason."""
    return {
        row.implementation: f"{row.direction} took {row.median_ms / 1e3:.3g} s at N = "
        f"{row.seq_len}, over the limit of {limit_ms / 1e3:g} s"
        for row in record.rows
        if (row.suite, row.family) == case.line
        and row.implementation in case.implementations
        and row.seq_len < case.seq_len
        and row.median_ms > limit_ms
    }


def measure_gaps(
    cases: Sequence[Case], method: Method, known: Sequence[dict], log: Callable[[str], None]
) -> Iterator[list[dict]]:
    """The causes of gaps at the longest sequences, of one mask after another.

    For each family of the suite speedup, it is measured at the density closest to GAP_DENSITY,
    unless `known` has the gaps of this mask.
    """
    density = [case for case in cases if case.suite == "density" and case.family != "full"]
    chosen: dict[str, Case] = {}
    for case in sorted(density, key=lambda case: case.seq_len):
        best = chosen.get(case.family)
        if best is None or case.seq_len > best.seq_len or _distance(case) < _distance(best):
            chosen[case.family] = case
    for case in chosen.values():
        facts = {"pattern": case.problem.label, "seq_len": case.seq_len}
        if any(gap | facts == gap for gap in known):
            continue
        log(f"why {case} is not faster")
        (query, key, value), _ = random_problem(
            case, DTYPES[method.dtype], torch.device(method.device), method.seed
        )
        explained = explain(query, key, value, case.problem.mask, measure=True)
        gaps = {"forward": explained.forward_gap, "backward": explained.backward_gap}
        yield [
            facts | {"direction": direction} | asdict(gap) | to_change(gap)
            for direction, gap in gaps.items()
            if gap is not None
        ]


def to_change(gap: Gap) -> dict[str, str | None]:
    """The largest part of a gap with a known change, and this change; None if there is none."""
    largest = gap.largest
    return {"largest": largest, "change": None if largest is None else CHANGES[largest]}


def _distance(case: Case) -> float:
    return abs(math.log(case.problem.density / GAP_DENSITY))


def measure_drift(record: Record, first: Case, method: Method) -> float:
    """The factor by which the time of the first case has changed during the run.

    It is our full mask, and all speed-ups are relative to its time.
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
