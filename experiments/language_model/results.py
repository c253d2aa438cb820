"""Collects trained runs in one record, with its picture and its table."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.ticker import FuncFormatter
from rich.table import Table

from experiments.files import read_results, record_path, shared, write_json
from experiments.pictures import look, panels, save

RESULT_OF = "a result of `experiments.language_model train`"
KEYS = ("model", "data", "bits_per_byte", "bytes_per_second", "positions", "curve", "environment")


def gather(name: str, folders: list[Path], output: Path) -> tuple[Path, Path]:
    """Writes language-model-NAME-DEVICE.json and a picture of it.

    Args:
        name: Name of the record.
        folders: Folders of the runs, whose names are the labels.
        output: Folder of both files.

    Returns:
        The paths of both files.

    Raises:
        ValueError: A folder has no result, two folders have the same name, or the runs differ in
            data or device.
    """
    record = record_of(name, folders)
    path = record_path(output, f"language-model-{name}", record["device"])
    write_json(path, record)
    return path, draw(path)


def record_of(name: str, folders: list[Path]) -> dict:
    """The contents of the record; see `gather`."""
    names, runs = [folder.name for folder in folders], read_results(folders, RESULT_OF, KEYS)
    if len(set(names)) < len(names):
        raise ValueError(f"runs of a record must have distinct names, got {names}")
    shared("data", (str(run["data"]) for run in runs))
    device = shared("device", (run["environment"]["device"] for run in runs))
    named = dict(zip(names, runs, strict=True))
    return {"name": name, "device": device, "data": runs[0]["data"], "runs": named}


def draw(record: Path) -> Path:
    """Draws bits per byte over bytes read, over seconds of training, and over positions.

    The last panel shows the end of each run by the position of a byte in its sequence. Returns the
    path of the picture.
    """
    facts = json.loads(record.read_text())
    figure, (curve, times, position) = panels(1, 3, size=(14, 4.6))
    for number, (label, run) in enumerate(facts["runs"].items()):
        style = look(number) | {"markersize": 3}
        read = [point["step"] * run["step_bytes"] for point in run["curve"]]
        bits = [point["bits_per_byte"] for point in run["curve"]]
        legend = f"{label}: {run['bits_per_byte']:.4f}, {run['bytes_per_second']:,.0f} bytes/s"
        curve.plot(read, bits, label=legend, **style)
        if run["bytes_per_second"]:
            times.plot([seconds_of(run, point["step"]) for point in run["curve"]], bits, **style)
        position.plot(run["positions"][1:], run["curve"][-1]["by_position"], **style)
    curve.set(xlabel="bytes read in training", ylabel="validation bits per byte")
    curve.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1e6:g}M"))
    times.set(xlabel="seconds of training", ylabel="validation bits per byte")
    position.set_xscale("log", base=2)
    position.set(xlabel="position in the sequence, up to", ylabel="validation bits per byte")
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

    None if a run has no throughput, because it ended before steps were timed.
    """
    runs = list(runs)
    if not all(run["bytes_per_second"] for run in runs):
        return None
    return min(seconds_of(run, run["curve"][-1]["step"]) for run in runs)


def contexts_of(run: dict) -> str:
    """The context of a run, and that of its first steps if it is shorter."""
    context = f"{run['model']['context']:,}"
    if not run.get("short_steps"):
        return context
    return f"{context} (first {run['short_steps']:,} steps: {run['short_context']:,})"


def table_of(record: dict) -> Table:
    """The runs, and their loss and speed against the first run."""
    columns = ("run", "parameters", "context", "steps", "bits per byte", "against the first")
    table = Table(*columns, "bytes/s", "speed-up", title=record["name"])
    first = next(iter(record["runs"].values()))
    for label, run in record["runs"].items():
        loss, speed = (run[name] for name in ("bits_per_byte", "bytes_per_second"))
        table.add_row(
            label,
            f"{run['parameters']:,}",
            contexts_of(run),
            f"{run['trained']:,} of {run['steps']:,}",
            f"{loss:.4f}",
            f"{100 * (loss / first['bits_per_byte'] - 1):+.2f} %",
            f"{speed:,.0f}",
            f"{speed / first['bytes_per_second']:.2f}" if first["bytes_per_second"] else "",
        )
    return table
