"""Collects trained runs in one record, with its picture and its table."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.ticker import FuncFormatter
from rich.table import Table

from experiments.files import read_object, read_results, record_path, shared, write_json
from experiments.language_model.settings import Settings
from experiments.pictures import look, panels, save

RESULT_OF = "a result of `experiments.language_model train`"
RECORD_OF = "a record of `experiments.language_model record`"
KEYS = ("model", "data", "bits_per_byte", "bytes_per_second", "positions", "curve", "environment")
KEYS += ("ended", "trained", "steps")
Runs = dict[str, dict]  # by name


def gather(name: str, sources: list[Path], output: Path) -> tuple[Path, Path]:
    """Writes language-model-NAME-DEVICE.json and a picture of it.

    Args:
        name: Name of the record.
        sources: Folders of runs, whose names are the labels, and records, whose runs are added.
        output: Folder of both files.

    Returns:
        The paths of both files.

    Raises:
        ValueError: A folder has no result, a file is no record, two runs have the same name, or
            the runs differ in data or device.
    """
    record = record_of(name, sources)
    path = record_path(output, f"language-model-{name}", record["device"])
    write_json(path, record)
    return path, draw(path)


def record_of(name: str, sources: list[Path]) -> dict:
    """The contents of the record; see `gather`."""
    found: list[tuple[str, dict]] = []
    for path in sources:
        if path.is_file():
            found += read_object(path, RECORD_OF, ("device", "runs"))["runs"].items()
        else:
            found += [(path.name, read_results([path], RESULT_OF, KEYS)[0])]
    names, runs = [label for label, _ in found], [run for _, run in found]
    if len(set(names)) < len(names):
        raise ValueError(f"runs of a record must have distinct names, got {names}")
    shared("data", (str(run["data"]) for run in runs))
    device = shared("device", (run["environment"]["device"] for run in runs))
    return {"name": name, "device": device, "data": runs[0]["data"], "runs": dict(found)}


def repeated(runs: Runs) -> dict[str, list[dict]]:
    """Runs by the name of the first one that differs from them in the seed or the device alone.

    A run that has not ended is by its own name.
    """
    compared = [field.name for field in fields(Settings) if field.name != "seed"]
    first: dict[str, str] = {}
    found: dict[str, list[dict]] = {}
    for name, run in runs.items():
        settings = json.dumps([run.get(each) for each in compared], sort_keys=True)
        own = first.setdefault(settings, name) if run["ended"] else name
        found.setdefault(own, []).append(run)
    return found


def mean_bits(runs: Iterable[dict]) -> float:
    """The mean of the bits per byte at the end of some runs."""
    return fmean(run["bits_per_byte"] for run in runs)


def mean_speed(runs: Iterable[dict], device: str | None = None) -> float:
    """Mean bytes per second of the runs of a GPU, or of all; 0 if there are none."""
    own = [run for run in runs if device in (None, run["environment"]["device"])]
    return fmean(run["bytes_per_second"] for run in own) if own else 0.0


def bits_of(runs: Sequence[dict], digits: int = 4) -> str:
    """The bits per byte of a run; the mean of several, with the least and the greatest."""
    found = sorted(run["bits_per_byte"] for run in runs)
    text = f"{fmean(found):.{digits}f}"
    if len(found) == 1:
        return text
    return f"{text} ({found[0]:.{digits}f} to {found[-1]:.{digits}f})"


def draw(record: Path) -> Path:
    """Draws bits per byte over bytes read, over seconds of training, and over positions.

    The last panel shows the end of each run by the position of a byte or token in its sequence.
    Runs of several seeds have the same colour. Returns the path of the picture.
    """
    facts = json.loads(record.read_text())
    figure, (curve, times, position) = panels(1, 3, size=(14, 4.6))
    for number, (label, group) in enumerate(repeated(facts["runs"]).items()):
        style = look(number) | {"markersize": 3}
        speed = mean_speed(group)
        legend = f"{label}{unended(group[0])}: {bits_of(group)}, {speed:,.0f} bytes/s"
        for run in group:
            read = [point["step"] * run["step_bytes"] for point in run["curve"]]
            bits = [point["bits_per_byte"] for point in run["curve"]]
            curve.plot(read, bits, label=legend if run is group[0] else None, **style)
            if is_timed(run):
                passed = [seconds_of(run, point["step"]) for point in run["curve"]]
                times.plot(passed, bits, **style)
            position.plot(run["positions"][1:], run["curve"][-1]["by_position"], **style)
    unit = unit_of(next(iter(facts["runs"].values())))
    curve.set(xlabel="bytes read in training", ylabel="validation bits per byte")
    curve.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1e6:g}M"))
    times.set(xlabel="seconds of training", ylabel="validation bits per byte")
    position.set_xscale("log", base=2)
    position.set(
        xlabel=f"position in the sequence, up to ({unit})", ylabel="validation bits per byte"
    )
    # The first bytes of a sequence are hard for every model; a long context helps later ones.
    late = [
        bits
        for run in facts["runs"].values()
        for end, bits in zip(run["positions"][1:], run["curve"][-1]["by_position"], strict=True)
        if end >= 16
    ]
    if late:
        position.set_ylim(0.98 * min(late), 1.02 * max(late))
    figure.suptitle(f"{facts['name']}, {facts['device']}", fontsize=10)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    return save(figure, record)[0]


def is_timed(run: dict) -> bool:
    """Whether a run has the throughput at each of its contexts."""
    short = run["short_bytes_per_second"] if run.get("short_steps") else True
    return bool(run["bytes_per_second"] and short)


def seconds_of(run: dict, step: int) -> float:
    """The time of the first steps of a run, from the throughput at each context."""
    short = min(step, run.get("short_steps", 0))
    seconds = (step - short) / run["bytes_per_second"]
    if short:
        seconds += short / run["short_bytes_per_second"]
    return seconds * run["step_bytes"]


def bits_at(run: dict, seconds: float) -> float | None:
    """Bits per byte of a run after a time of training, or None outside of its validations.

    Between two validations they are interpolated linearly over time.
    """
    times = [seconds_of(run, point["step"]) for point in run["curve"]]
    if not times[0] <= seconds <= times[-1]:
        return None
    bits = [point["bits_per_byte"] for point in run["curve"]]
    return float(np.interp(seconds, times, bits))


def common_seconds(runs: Iterable[dict]) -> float | None:
    """The time of training after which the first of some runs ended.

    None if a run has no throughput at a context, because it ended before steps were timed, or
    because steps at that context were on another device.
    """
    runs = list(runs)
    if not all(map(is_timed, runs)):
        return None
    return min(seconds_of(run, run["curve"][-1]["step"]) for run in runs)


def bytes_of_token(run: dict) -> float:
    """Mean number of bytes of a token."""
    return run["step_bytes"] / run["step_tokens"]


def unit_of(run: dict) -> str:
    """What a token is: "bytes" or "tokens"."""
    return "bytes" if bytes_of_token(run) == 1 else "tokens"


def context_of(run: dict) -> str:
    """The context of a run in tokens, and in bytes."""
    tokens = run["model"]["context"]
    if unit_of(run) == "bytes":
        return f"{tokens:,} bytes"
    return f"{tokens:,} tokens, some {tokens * bytes_of_token(run) / 1e3:,.0f} KB"


def contexts_of(run: dict) -> str:
    """The context of a run, and that of its first steps if it is shorter."""
    if not run.get("short_steps"):
        return context_of(run)
    return f"{context_of(run)} (first {run['short_steps']:,} steps: {run['short_context']:,})"


def unended(run: dict) -> str:
    """The step of a run that has not ended, after a space in parentheses; or nothing."""
    return "" if run["ended"] else f" (step {run['trained']:,} of {run['steps']:,})"


def table_of(record: dict) -> Table:
    """The runs, and their loss and speed against the first run.

    Runs of several seeds are one row. Those that have not ended are not compared by their loss.
    """
    columns = ("run", "runs", "parameters", "context", "steps", "bits per byte")
    table = Table(*columns, "against the first", "bytes/s", "speed-up", title=record["name"])
    groups = repeated(record["runs"])
    first = next(iter(groups.values()))
    for label, group in groups.items():
        run, speed = group[0], mean_speed(group)
        compared = run["ended"] and first[0]["ended"]
        change = 100 * (mean_bits(group) / mean_bits(first) - 1)
        table.add_row(
            label,
            f"{len(group)}",
            f"{run['parameters']:,}",
            contexts_of(run),
            f"{run['trained']:,} of {run['steps']:,}",
            bits_of(group),
            f"{change:+.2f} %" if compared else "",
            f"{speed:,.0f}" if speed else "",
            f"{speed / mean_speed(first):.2f}" if speed and mean_speed(first) else "",
        )
    return table
