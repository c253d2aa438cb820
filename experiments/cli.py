"""Shared parts of the command lines: choices, parsers, and the folder of results.

This module imports torch only where it is needed, so that `--help` is quick.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import StrEnum
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from experiments.files import record_path
from masks import commands

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "experiments/results"  # records that documents cite
INTERRUPTED = 130
FAMILY_NAMES = ("butterfly", "local", "strided", "random", "fading_memory")


class Suite(StrEnum):
    """The suites of the benchmark."""

    SPEEDUP = "speedup"
    DENSE = "dense"
    SPARSE = "sparse"
    SMALL_BLOCKS = "small-blocks"
    DECODE = "decode"
    LRA = "lra"
    MEMORY = "memory"
    LANDSCAPE = "landscape"


class Baseline(StrEnum):
    """Implementations to compare with."""

    SDPA = "sdpa"  # scaled_dot_product_attention, its backend chosen by torch
    FLASH = "flash"  # that of torch's FlashAttention-2
    CUDNN = "cudnn"  # that of cuDNN
    FLASH4 = "flash4"  # FlashAttention-4, where it is installed
    FLEX = "flex"  # FlexAttention, compiled
    CUDNN_BSA = "cudnn-bsa"  # cuDNN's block-sparse attention, where cudnn-frontend is installed
    CUDNN_FLEX = "cudnn-flex"  # cuDNN's attention of masks as intervals, too
    FLASHINFER = "flashinfer"  # FlashInfer's block-sparse attention (forward), if installed
    STANDARD = "standard"  # materialised scores
    LINEAR = "linear"  # from here on approximate: see `experiments.attention` and `packaged`
    LINFORMER = "linformer"
    PERFORMER = "performer"
    NYSTROMFORMER = "nystromformer"
    REFORMER = "reformer"
    SMYRF = "smyrf"
    LOCAL = "local-attention"  # of a package
    LONGFORMER = "longformer"  # of transformers
    BIGBIRD = "bigbird"  # of transformers
    ROUTING = "routing"  # of the package routing_transformer
    SINKHORN = "sinkhorn"  # of the package sinkhorn_transformer

    @property
    def approximate(self) -> bool:
        """Whether it approximates attention."""
        return list(Baseline).index(self) >= list(Baseline).index(Baseline.LINEAR)

    @property
    def devices(self) -> tuple[str, ...]:
        """The types of device on which it runs."""
        anywhere = self.approximate or self in (Baseline.SDPA, Baseline.STANDARD)
        return ("cpu", "cuda") if anywhere else ("cuda",)


class Device(StrEnum):
    """Types of device."""

    AUTO, CPU, CUDA = "auto", "cpu", "cuda"


class Dtype(StrEnum):
    """Types of the inputs."""

    FP16, BF16, FP32 = "fp16", "bf16", "fp32"


class BlockSize(StrEnum):
    """Sides of a block, in tokens."""

    B16, B32, B64, B128, B256 = "16", "32", "64", "128", "256"


class Passes(StrEnum):
    """Passes of attention."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"

    @property
    def directions(self) -> tuple[str, ...]:
        """The single passes."""
        return ("forward", "backward") if self is Passes.BOTH else (self.value,)


class Clock(StrEnum):
    """How the time of a call is measured.

    cpu: `perf_counter`. events: two CUDA events around the call, after the cache was flushed; this
    includes host time if it is longer than device time. graph: two CUDA events around the replay
    of a CUDA graph of the call, after the cache was flushed; this is device time only.
    """

    CPU = "cpu"
    EVENTS = "events"
    GRAPH = "graph"


class Load(StrEnum):
    """The load of the device while a call is timed; see `timing`."""

    RESTED = "rested"
    SUSTAINED = "sustained"
    BOTH = "both"

    @property
    def single(self) -> tuple[str, ...]:
        """The single loads."""
        return ("rested", "sustained") if self is Load.BOTH else (self.value,)


def parse_numbers(text: str, convert: Callable, what: str, example: str) -> tuple:
    """Parses numbers separated by commas. Raises typer.BadParameter for other text."""
    try:
        return tuple(convert(part.strip()) for part in text.split(","))
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(f"must be {what} such as {example}, got {text!r}") from None


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths in tokens."""
    found = parse_numbers(text, int, "whole numbers", "4096,8192")
    if min(found) < 1:
        raise typer.BadParameter(f"lengths must be at least 1 token, got {text}")
    return found


def parse_densities(text: str) -> tuple[float, ...]:
    """Densities in (0, 1]."""
    found = parse_numbers(text, lambda s: float(Fraction(s)), "densities", "1/2,1/8,0.05")
    if not all(0 < s <= 1 for s in found):
        raise typer.BadParameter(f"densities must be above 0 and at most 1, got {text}")
    return found


def parse_name(text: str) -> str:
    """Part of the name of a record. Raises typer.BadParameter for other text."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", text):
        raise typer.BadParameter(
            f"must be small letters, digits and hyphens such as packages, got {text!r}"
        )
    return text


def parse_patterns(text: str) -> tuple[str, ...]:
    """Pattern names, separated by commas outside of parentheses."""
    from experiments.pattern_families import parse_family

    names = tuple(part.strip() for part in re.split(r",(?![^(]*\))", text))
    for name in names:
        try:
            parse_family(name)
        except ValueError as error:
            known = ", ".join(FAMILY_NAMES)
            raise typer.BadParameter(f"{error}; known families: {known}") from None
    return names


def check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises typer.BadParameter with all known names for the first name that is not known."""
    known = list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")


def check_backend(name: str) -> None:
    """Raises typer.BadParameter for a name that is neither auto nor a backend."""
    from sparseflash.backends import BACKENDS

    check_known("backend", [name], ["auto", *(backend.name for backend in BACKENDS)])


def parse_baselines(text: str) -> tuple[str, ...]:
    """Names of baselines. Raises typer.BadParameter for an unknown one."""
    if text == "none":
        return ()
    names = tuple(part.strip() for part in text.split(","))
    check_known("baseline", names, ["none", *Baseline])
    return names


# The options that every command has.
Baselines = Annotated[
    tuple | None,
    typer.Option(
        "--baselines",
        "--peers",
        parser=parse_baselines,
        metavar="NAME,NAME",
        help=f"Implementations to compare with: none, or any of {', '.join(Baseline)}.",
        show_default=False,
    ),
]
Output = Annotated[
    Path, typer.Option(file_okay=False, help="Folder for the record (JSON) and its pictures.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Allow to replace the records of the package.")
]
Seconds = Annotated[
    float | None, typer.Option(help="End the run after this time, which includes its test.", min=1)
]
ExportTo = Annotated[
    Path | None,
    typer.Option(
        "--export", file_okay=False, help="Folder to which the run is exported in small files."
    ),
]
ImportFrom = Annotated[
    Path | None,
    typer.Option("--import", file_okay=False, help="Folder of an exported run to resume."),
]
RecordName = Annotated[
    str,
    typer.Argument(
        parser=parse_name,
        metavar="NAME",
        help="Name of the record: small letters, digits and hyphens.",
    ),
]
RESULTS = Path("results")  # in the current folder


def usage_errors(*kinds: type[Exception]) -> AbstractContextManager[None, bool | None]:
    """Errors of these kinds, by default ValueError, as errors of the command line."""
    return commands.usage_errors(kinds=kinds or (ValueError,))


def help_of(doc: str | None) -> str:
    """The docstring of a module as help text, in which typer keeps the line breaks."""
    return str(doc).replace("\n\n", "\n\n\b\n")


def needs(found: object, what: str) -> None:
    """Raises typer.BadParameter with what a command needs, unless `found` is true."""
    if not found:
        raise typer.BadParameter(f"this command needs {what}")


def needs_extra(extra: str, module: str) -> None:
    """Raises typer.BadParameter with the install command of an extra, if its module is missing."""
    needs(find_spec(module), f"{module}: pip install -e '.[{extra}]'")


def needs_cuda() -> None:
    """Raises typer.BadParameter if there is no CUDA device."""
    import torch

    needs(torch.cuda.is_available(), "a CUDA device, and this machine has none")


def resolve(device: Device) -> str:
    """The type of the device. Raises typer.BadParameter if the chosen one is missing."""
    import torch

    if device is Device.CUDA:
        needs_cuda()
    if device is Device.AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.value


def output_folder(output: Path, overwrite: bool) -> Path:
    """The folder of results, which is created if it is missing.

    Args:
        output: The folder.
        overwrite: Whether it may be the folder of the records in the package.

    Raises:
        typer.BadParameter: The folder is inside the package, or cannot be created.
    """
    if not overwrite and output.resolve().is_relative_to(SHIPPED.parent):
        raise typer.BadParameter(
            f"--output {output} is a folder of the package, which has records: give another"
            " folder, or --overwrite to replace them"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--output: {error}") from None
    return output


def output_file(output: Path, name: str, device: str, overwrite: bool) -> Path:
    """The path of a record in `output_folder`, for this machine's device of the type "cpu" or
    "cuda"; see `record_path`."""
    import torch

    machine = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return record_path(output_folder(output, overwrite), name, machine)


@contextmanager
def building(root: Path, name: str) -> Iterator[Path]:
    """A folder that gets its name when it is complete. An existing folder is not changed.

    If writing fails, it is removed, with parent folders that were created for it.
    """
    target = root / name
    if target.exists():
        raise typer.BadParameter(f"{target} exists already; move it away first")
    created = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix=".unfinished-", dir=root) as draft:
            yield Path(draft) / name
            shutil.move(Path(draft) / name, target)
        created = []
    finally:
        for folder in created:
            with suppress(OSError):  # other processes may have written there
                folder.rmdir()
