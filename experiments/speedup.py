"""The main job: how much faster attention gets as the density s falls, measured forward and
backward.

    python -m experiments.speedup

sweeps patterns over densities at one or more lengths, and a few patterns over lengths. Every
result is checked against float64 before it is timed. It prints tables and the densities at which
sparse stops beating dense, and writes a JSON file with the environment, and pictures.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from experiments.baselines import DEVICES, Baseline
from experiments.cli import (
    RESULTS,
    BlockSize,
    Device,
    Dtype,
    Passes,
    carry_out,
    parse_baselines,
    parse_densities,
    parse_lengths,
    parse_patterns,
    resolve,
    slug,
)
from experiments.pattern_families import FAMILIES
from experiments.sweep import COMMON, DEFAULTS, QUICK, Settings, plan
from experiments.timing import Clock
from sparseflash.backends import BACKENDS


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
    backend: Annotated[
        str | None, option(f"Ours: auto, {', '.join(b.name for b in BACKENDS)}.", "backend")
    ] = None,
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
    baselines: Annotated[
        tuple | None,
        option(
            f"Whom to compare with: none, or any of {', '.join(Baseline)}.",
            "baselines",
            parser=parse_baselines,
            metavar="NAME,NAME",
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
    kind = resolve(device)
    chosen = {
        "dtype": dtype,
        "backend": backend,
        "lengths": lengths,
        "growth": growth,
        "batch": batch,
        "heads": heads,
        "growth_heads": heads,
        "head_dim": head_dim,
        "block_size": int(block_size) if block_size else None,
        "patterns": patterns,
        "densities": densities,
        "baselines": baselines,
        "clock": clock,
    }
    settings = Settings(
        **COMMON
        | DEFAULTS[kind]
        | (QUICK if quick else {})
        | {name: value for name, value in chosen.items() if value is not None}
        | {
            "device": kind,
            "directions": passes.directions,
            "seed": seed,
        }
    )
    validate(settings)
    path = output / f"speedup-{slug(kind)}.json"
    carry_out(partial(plan, settings), settings, path, resume)


def validate(settings: Settings) -> None:
    """Raises typer.BadParameter for settings that do not go together."""
    known = ["auto", *(b.name for b in BACKENDS)]
    if settings.backend not in known:
        raise typer.BadParameter(
            f"unknown --backend {settings.backend!r}; known: {', '.join(known)}"
        )
    for baseline in settings.baselines:
        if settings.device not in DEVICES[Baseline(baseline)]:
            raise typer.BadParameter(
                f"--baselines {baseline} runs on {', '.join(DEVICES[Baseline(baseline)])} only"
            )
    if (settings.clock == Clock.CPU) != (settings.device == "cpu"):
        raise typer.BadParameter(
            f"--clock {settings.clock} does not measure a {settings.device} device"
        )


if __name__ == "__main__":
    typer.run(main)
