"""What the command lines of the experiments share: choices, parsers, and where results go."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from enum import StrEnum
from fractions import Fraction
from pathlib import Path

import torch
import typer

from experiments import memory
from experiments.baselines import Baseline
from experiments.check import CheckError
from experiments.environment import environment
from experiments.measure import DTYPES, Case, Method, run
from experiments.pattern_families import FAMILIES, parse_family
from experiments.plots import draw
from experiments.record import Record
from experiments.report import load, show, wide_console
from experiments.roofline import measure_roofline
from sparseflash import BackendError

RESULTS = Path(__file__).parent / "results"
INTERRUPTED = 130


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"


class BlockSize(StrEnum):
    """Sides of a block, in tokens."""

    B16 = "16"
    B32 = "32"
    B64 = "64"
    B128 = "128"
    B256 = "256"


class Passes(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"

    @property
    def directions(self) -> tuple[str, ...]:
        return ("forward", "backward") if self is Passes.BOTH else (self.value,)


def numbers(text: str, convert: Callable[[str], float]) -> tuple:
    return tuple(convert(part.strip()) for part in text.split(","))


def parse_lengths(text: str) -> tuple[int, ...]:
    try:
        found = numbers(text, int)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of whole numbers such as 4096,8192"
        ) from None
    if min(found) < 1:
        raise typer.BadParameter(f"lengths must be at least 1 token, got {text}")
    return found


def parse_densities(text: str) -> tuple[float, ...]:
    try:
        found = numbers(text, lambda part: float(Fraction(part)))
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(
            f"{text!r} is not a list of densities such as 1/2,1/8,0.05"
        ) from None
    if not all(0 < s <= 1 for s in found):
        raise typer.BadParameter(f"densities must lie in (0, 1], got {text}")
    return found


def parse_patterns(text: str) -> tuple[str, ...]:
    """Pattern names, separated by the commas that stand outside parentheses."""
    names = tuple(part.strip() for part in re.split(r",(?![^(]*\))", text))
    for name in names:
        try:
            parse_family(name)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; families are {', '.join(FAMILIES)}") from None
    return names


def parse_baselines(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in set(Baseline)]:
        raise typer.BadParameter(
            f"unknown baseline {unknown[0]!r}; known: none, {', '.join(Baseline)}"
        )
    return names


def resolve(device: Device) -> str:
    """The device's type. Raises typer.BadParameter where it is asked for and missing."""
    if device is Device.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: this machine has no CUDA device")
    if device is Device.AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.value


def carry_out(
    plan: Callable[[Callable[[str], None]], Iterator[Case]],
    method: Method,
    path: Path,
    resume: bool,
    roofline: bool = False,
) -> None:
    """Measures, and whatever comes of it is kept in `path`; then prints and draws it."""
    console = wide_console()
    _make_folder(path.parent)  # an error comes before all is measured
    record = open_record(method, path, resume)
    if roofline and not record.roofline:
        record.roofline = measure_roofline(DTYPES[method.dtype])
    try:
        run(plan, method, record, path, console)
    except KeyboardInterrupt:
        record.save(path)
        console.print(
            f"Interrupted: {path} holds {len(record.rows)} measurements; --resume goes on."
        )
        raise typer.Exit(INTERRUPTED) from None
    except CheckError as error:
        console.print(f"[red]Wrong result, nothing more is timed:[/] {error}")
        raise typer.Exit(1) from None
    except BackendError as error:
        raise typer.BadParameter(str(error)) from None
    show(record, console)
    for written in (path, *draw(record, path.with_suffix(""))):
        console.print(f"wrote {written}", highlight=False)
    console.print(f"done in {record.seconds:.0f} s on {record.environment['device']}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--output: {error}") from None


def slug(device: str) -> str:
    """The device's name as part of a file name: "cpu", "nvidia-h200"."""
    return (
        "cpu"
        if device == "cpu"
        else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    )


def open_record(method: Method, path: Path, resume: bool) -> Record:
    """A new record, or with `resume` the one in `path`, of the same settings and commit."""
    fresh = Record(
        environment(torch.device(method.device)) | {"memory": memory.METHOD[method.device]},
        json.loads(json.dumps(asdict(method))),
    )
    if not resume:
        return fresh
    if not path.exists():
        raise typer.BadParameter(f"--resume: there is no {path}")
    record = load(path)
    kept, now = _identity(record), _identity(fresh)
    if others := [name for name in kept | now if kept.get(name) != now.get(name)]:
        listed = "; ".join(f"{name} {kept.get(name)}, now {now.get(name)}" for name in others)
        raise typer.BadParameter(f"--resume: {path} is of another run: {listed}")
    return record


def _identity(record: Record) -> dict:
    """What a run must share with the one that it goes on."""
    environment = {name: record.environment[name] for name in ("device", "git")}
    return record.settings | {f"environment {name}": v for name, v in environment.items()}
