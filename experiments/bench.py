"""The benchmark of attention, in named suites.

    python -m experiments.bench speedup
    python -m experiments.bench dense sparse

`speedup` measures patterns over densities, and a few patterns over lengths, on any device.
`landscape` measures all implementations over lengths, including approximations, each up to its
limit of memory or time, and the parts of standard attention. The other suites measure fixed
problems on a GPU, and its roofline: a matrix product and a copy in the same run. Every result,
except those of approximations, is checked against float64 before it is timed. A suite prints
tables, and writes a JSON file with the environment of the run, and pictures.
`docs/benchmark-columns.md` explains the columns.
"""

from functools import partial
from typing import Annotated, Any

import typer

from experiments.cli import (
    FAMILY_NAMES,
    RESULTS,
    Baselines,
    BlockSize,
    Clock,
    Device,
    Dtype,
    Load,
    Output,
    Overwrite,
    Passes,
    Suite,
    check_backend,
    needs_cuda,
    output_file,
    parse_densities,
    parse_lengths,
    parse_name,
    parse_patterns,
    resolve,
)
from experiments.settings import (
    DENSITY_DEFAULTS,
    METHOD_DEFAULTS,
    DensityMethod,
    Method,
    defaults,
    density_method,
    landscape_method,
)

app = typer.Typer(add_completion=False)
PANEL = "Options of the suite speedup; landscape has some of them, with other defaults"
ANYWHERE = (Suite.SPEEDUP, Suite.LANDSCAPE)  # suites that run on a CPU too
OF_LANDSCAPE = ("patterns", "growth", "batch", "heads", "head_dim", "block_size")


def option(text: str, setting: str, **keywords):
    """An option whose help ends with the defaults of its setting."""
    cpu, gpu = (listed(defaults(device)[setting]) for device in ("cpu", "cuda"))
    text += f" Default: {cpu}." if cpu == gpu else f" Default: {cpu} on a CPU, {gpu} on a GPU."
    panel = PANEL if setting in DENSITY_DEFAULTS else None
    return typer.Option(help=text, show_default=False, rich_help_panel=panel, **keywords)


def listed(value: object) -> str:
    """A value, or values separated by commas."""
    return ",".join(map(listed, value)) if isinstance(value, tuple) else f"{value}"


@app.command()
def main(
    suites: Annotated[
        list[Suite] | None,
        typer.Argument(
            help="Default: all except speedup and landscape. Only these two run on a CPU.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="auto is a GPU if there is one.")] = Device.AUTO,
    backends: Annotated[
        str,
        typer.Option(
            "--backends",
            "--backend",
            metavar="NAME,NAME",
            help="Backends of sparseflash: auto, or names such as triton. NAME/any-order measures"
            " deterministic=False, NAME/planned planned_order=True.",
        ),
    ] = "auto",
    baselines: Baselines = None,
    passes: Annotated[Passes, typer.Option(help="Passes to measure.")] = Passes.BOTH,
    dtype: Annotated[Dtype | None, option("Dtype of the inputs.", "dtype")] = None,
    clock: Annotated[
        Clock | None,
        option("On a GPU: graph (device time only) or events (as called from Python).", "clock"),
    ] = None,
    timing: Annotated[
        Load | None,
        option("rested (short turns with pauses), sustained (continuous load) or both.", "timing"),
    ] = None,
    budget_ms: Annotated[
        float | None, option("Milliseconds for each rested median.", "budget_ms", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    dropout: Annotated[
        float,
        typer.Option(
            help="Probability of dropout. Baselines without dropout are left out.", min=0, max=0.99
        ),
    ] = 0.0,
    padding: Annotated[
        float,
        typer.Option(
            help="Share of the keys that are masked in the shortest sequence of a batch.",
            min=0,
            max=0.99,
        ),
    ] = 0.0,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",  # typer 0.27 would take the metavar for it
            help="Part of the name of the record, after that of the suite, for a record of some"
            " implementations or sizes: small letters, digits and hyphens.",
            show_default=False,
            parser=parse_name,
            metavar="NAME",
        ),
    ] = None,
    output: Output = RESULTS,
    overwrite: Overwrite = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted run with the same settings.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A run of about a minute, to see that everything works.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    patterns: Annotated[
        tuple | None,
        option(
            f"Any of {', '.join(FAMILY_NAMES)}; an expression such as 'local(256) & causal()'; or"
            " file.py:name. The name is a Pattern, or a function that returns a Pattern for a"
            " number of tokens, such as the width of a window; then the patterns nearest to the"
            " requested densities are measured.",
            "patterns",
            parser=parse_patterns,
            metavar="NAME,NAME",
        ),
    ] = None,
    densities: Annotated[
        tuple | None,
        option(
            "Requested densities of masks.",
            "densities",
            parser=parse_densities,
            metavar="1/2,0.05",
        ),
    ] = None,
    lengths: Annotated[
        tuple | None,
        option(
            "Lengths in tokens at which densities are measured.",
            "lengths",
            parser=parse_lengths,
            metavar="N,N",
        ),
    ] = None,
    growth: Annotated[
        tuple | None,
        option(
            "Lengths in tokens, to measure time against length.",
            "growth",
            parser=parse_lengths,
            metavar="N,N",
        ),
    ] = None,
    batch: Annotated[int | None, option("Sequences of a batch.", "batch", min=1)] = None,
    heads: Annotated[int | None, option("Heads of each sequence.", "heads", min=1)] = None,
    head_dim: Annotated[int | None, option("Dims of a head.", "head_dim", min=8, max=256)] = None,
    block_size: Annotated[
        BlockSize | None, option("Side of a block in tokens.", "block_size")
    ] = None,
) -> None:
    """Measure one or more suites, print their tables and write their records."""
    from experiments.runner import carry_out
    from experiments.suites import planned

    kind = resolve(device)
    fixed = {"device": kind, "directions": passes.directions, "seed": seed}
    fixed |= {"dropout_p": dropout, "padding": padding}
    method = given(dtype=dtype, clock=clock, timing=timing, budget_ms=budget_ms)
    density = given(
        patterns=patterns,
        densities=densities,
        lengths=lengths,
        growth=growth,
        batch=batch,
        heads=heads,
        head_dim=head_dim,
        block_size=block_size and int(block_size),
    )
    chosen = suites or [suite for suite in Suite if suite not in ANYWHERE]
    refuse(["quick"] * quick + [*density], chosen)
    ours = parse_backends(backends)
    density |= given(ours=ours, baselines=baselines, growth_heads=heads)
    runs = []  # all are checked before the first one takes its hours
    for suite in chosen:
        if suite is Suite.SPEEDUP:
            settings = density_method(kind, quick, method | density | fixed)
        elif suite is Suite.LANDSCAPE:
            own = {name: density[name] for name in OF_LANDSCAPE if name in density}
            settings = landscape_method(kind, method | own | fixed)
        else:
            needs_cuda()
            if kind != "cuda":
                raise typer.BadParameter(f"the suite {suite} measures a GPU, got --device {kind}")
            settings = Method(**METHOD_DEFAULTS[kind] | method | fixed)
        validate(settings)
        parts = [suite if suite is Suite.SPEEDUP else f"bench-{suite}", *[name] * bool(name)]
        parts += ["dropout"] * (dropout > 0) + ["padding"] * (padding > 0)
        path = output_file(output, "-".join(parts), kind, overwrite)
        cases = partial(planned, suite, settings, ours, baselines)
        runs.append((cases, settings, path, suite not in ANYWHERE))
    for cases, settings, path, roofline in runs:
        carry_out(cases, settings, path, resume, roofline=roofline)


def refuse(options: list[str], suites: list[Suite]) -> None:
    """Raises typer.BadParameter for options that a chosen suite does not have."""
    for suite in suites:
        known = OF_LANDSCAPE if suite is Suite.LANDSCAPE else ()
        alien = [f"--{name}".replace("_", "-") for name in options if name not in known]
        if suite is not Suite.SPEEDUP and alien:
            names = ", ".join(alien)
            raise typer.BadParameter(
                f"the suite {suite} has no option {names}, only speedup has it"
            )


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def parse_backends(text: str) -> tuple[str, ...]:
    """Implementations, "sparseflash" or "sparseflash:backend"."""
    from experiments.record import OPTIONS_OF_SUFFIX, OURS

    names = [name.strip() for name in text.split(",")]
    for name in names:
        backend, slash, suffix = name.partition("/")
        check_backend(backend if slash + suffix in {"", *OPTIONS_OF_SUFFIX} else name)
    return tuple(OURS if name == "auto" else f"{OURS}:{name}" for name in names)


def validate(method: Method) -> None:
    """Raises typer.BadParameter for settings that do not go together."""
    from experiments.cli import Baseline
    from sparseflash.dropout import threshold

    try:
        threshold(method.dropout_p)
    except ValueError as error:
        raise typer.BadParameter(f"--dropout: {error}") from error
    for name in method.baselines if isinstance(method, DensityMethod) else ():
        devices = Baseline(name).devices
        if Baseline(name).approximate:
            raise typer.BadParameter(f"--baselines {name} is for the suite landscape only")
        if method.device not in devices:
            raise typer.BadParameter(f"--baselines {name} runs on {', '.join(devices)} only")
    if (method.clock == Clock.CPU) != (method.device == "cpu"):
        raise typer.BadParameter(
            f"--clock {method.clock} does not measure a {method.device} device"
        )


if __name__ == "__main__":
    app(prog_name="python -m experiments.bench")
