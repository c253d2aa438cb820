"""The main job: how much faster attention gets as the density s falls, measured forward and
backward.

    python -m experiments.speedup

sweeps patterns over densities at one or more lengths, and a few patterns over lengths. Every
result is checked against float64 before it is timed. It prints tables and the densities at which
sparse stops beating dense, and writes a JSON file with the environment, and pictures.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from experiments import memory
from experiments.check import CheckError
from experiments.environment import environment
from experiments.families import FAMILIES, parse_family
from experiments.measure import run
from experiments.peers import DEVICES, Peer
from experiments.plots import draw
from experiments.record import Record
from experiments.report import TABLE_WIDTH, show
from experiments.sweep import COMMON, DEFAULTS, QUICK, Settings, plan
from experiments.timing import Clock

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


def parse_peers(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in set(Peer)]:
        raise typer.BadParameter(f"unknown peer {unknown[0]!r}; known: none, {', '.join(Peer)}")
    return names


def option(text: str, setting: str | None = None, **keywords):
    """An option, its help ending in the defaults of the setting that it changes."""
    if setting:
        cpu, gpu = (listed((COMMON | DEFAULTS[device])[setting]) for device in ("cpu", "cuda"))
        text += f" Default: {cpu}." if cpu == gpu else f" Default: {cpu} on a CPU, {gpu} on a GPU."
    return typer.Option(help=text, show_default=False, **keywords)


def listed(value) -> str:
    return ",".join(map(listed, value)) if isinstance(value, tuple) else f"{value}"


def main(
    device: Annotated[Device, option("auto takes the GPU where there is one.")] = Device.AUTO,
    dtype: Annotated[Dtype | None, option("Type of the inputs.", "dtype")] = None,
    lengths: Annotated[
        tuple | None,
        option(
            "Sequence lengths at which densities are swept.",
            "lengths",
            parser=parse_lengths,
            metavar="N,N",
        ),
    ] = None,
    growth: Annotated[
        tuple | None,
        option(
            "Sequence lengths for time and memory against length.",
            "growth",
            parser=parse_lengths,
            metavar="N,N",
        ),
    ] = None,
    batch: Annotated[int | None, option("Sequences in a batch.", "batch", min=1)] = None,
    heads: Annotated[int | None, option("Heads of each sequence.", "heads", min=1)] = None,
    head_dim: Annotated[
        int | None, option("Dimension of each head.", "head_dim", min=8, max=256)
    ] = None,
    block_size: Annotated[
        BlockSize | None, option("Side of a mask's blocks, in tokens.", "block_size")
    ] = None,
    patterns: Annotated[
        tuple | None,
        option(
            f"Any of {', '.join(FAMILIES)}; an expression such as 'local(256) & causal()'; or"
            " file.py:name, a Pattern of yours or a function that makes one from a length in"
            " tokens. All families by default.",
            parser=parse_patterns,
            metavar="NAME,NAME",
        ),
    ] = None,
    densities: Annotated[
        tuple | None,
        option("Densities.", "densities", parser=parse_densities, metavar="1/2,0.05"),
    ] = None,
    passes: Annotated[Passes, option("Which passes are measured.")] = Passes.BOTH,
    peers: Annotated[
        tuple | None,
        option(
            f"Whom to compare with: none, or any of {', '.join(Peer)}.",
            "peers",
            parser=parse_peers,
            metavar="PEER,PEER",
        ),
    ] = None,
    clock: Annotated[
        Clock | None,
        option("On a GPU: graph (device time alone) or events (as called from Python).", "clock"),
    ] = None,
    output: Annotated[
        Path, option("Folder for the JSON file and the pictures.", file_okay=False)
    ] = RESULTS,
    seed: Annotated[int, option("Seed of the random inputs.")] = 0,
    quick: Annotated[bool, option("A smaller run, to see that all works.")] = False,
    resume: Annotated[bool, option("Go on with an interrupted run of the same settings.")] = False,
) -> None:
    """Measures how much faster attention gets as the density of its mask falls."""
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    kind = resolve(device)
    chosen = {
        "dtype": dtype,
        "lengths": lengths,
        "growth": growth,
        "batch": batch,
        "heads": heads,
        "growth_heads": heads,
        "head_dim": head_dim,
        "block_size": int(block_size) if block_size else None,
        "patterns": patterns,
        "densities": densities,
        "peers": peers,
        "clock": clock,
    }
    settings = Settings(
        **COMMON
        | DEFAULTS[kind]
        | (QUICK if quick else {})
        | {name: value for name, value in chosen.items() if value is not None}
        | {
            "device": kind,
            "directions": ("forward", "backward") if passes is Passes.BOTH else (passes.value,),
            "seed": seed,
        }
    )
    validate(settings)
    stem = output / f"speedup-{slug(kind)}"
    path = stem.with_suffix(".json")
    record = open_record(settings, path, resume)
    try:
        run(partial(plan, settings), settings, record, path, console)
    except KeyboardInterrupt:
        record.save(path)
        console.print(
            f"Interrupted: {path} holds {len(record.rows)} measurements; --resume goes on."
        )
        raise typer.Exit(INTERRUPTED) from None
    except CheckError as error:
        console.print(f"[red]Wrong result, nothing more is timed:[/] {error}")
        raise typer.Exit(1) from None
    show(record, console)
    for written in (path, *draw(record, stem)):
        console.print(f"wrote {written}", highlight=False)
    console.print(f"done in {record.seconds:.0f} s on {record.environment['device']}")


def resolve(device: Device) -> str:
    """The device's type. Raises typer.BadParameter where it is asked for and missing."""
    if device is Device.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: this machine has no CUDA device")
    if device is Device.AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.value


def validate(settings: Settings) -> None:
    """Raises typer.BadParameter for settings that do not go together."""
    for peer in settings.peers:
        if settings.device not in DEVICES[Peer(peer)]:
            raise typer.BadParameter(
                f"--peers {peer} runs on {', '.join(DEVICES[Peer(peer)])} only"
            )
    if (settings.clock == Clock.CPU) != (settings.device == "cpu"):
        raise typer.BadParameter(
            f"--clock {settings.clock} does not measure a {settings.device} device"
        )


def slug(device: str) -> str:
    """The device's name as part of a file name: "cpu", "nvidia-h200"."""
    return (
        "cpu"
        if device == "cpu"
        else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower())
    )


def open_record(settings: Settings, path: Path, resume: bool) -> Record:
    """A new record, or with `resume` the one in `path`, of the same settings and commit."""
    fresh = Record(
        environment(torch.device(settings.device)) | {"memory": memory.METHOD[settings.device]},
        json.loads(json.dumps(asdict(settings))),
    )
    if not resume:
        return fresh
    if not path.exists():
        raise typer.BadParameter(f"--resume: there is no {path}")
    record = Record.load(path)
    kept = {
        "settings": record.settings,
        "device": record.environment["device"],
        "git": record.environment["git"],
    }
    now = {
        "settings": fresh.settings,
        "device": fresh.environment["device"],
        "git": fresh.environment["git"],
    }
    for name in kept:
        if kept[name] != now[name]:
            raise typer.BadParameter(
                f"--resume: the {name} of {path} are others: {kept[name]}, now {now[name]}"
            )
    return record


if __name__ == "__main__":
    typer.run(main)
