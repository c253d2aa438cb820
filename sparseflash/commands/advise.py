"""`python -m sparseflash advise` and `search`: block sizes of a pattern, and patterns."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from masks.commands import Json, PatternText, progress_bar, usage_errors

if TYPE_CHECKING:
    from sparseflash.advisor.choices import Choice, Workload
    from sparseflash.io_model import Device


@dataclass
class Shared:
    """The options of both commands."""

    seq_len: Annotated[int, typer.Option(min=1, help="Length in tokens.")] = 16384
    head_dim: Annotated[int, typer.Option(min=1, help="Dims of a head.")] = 128
    batch: Annotated[int, typer.Option(min=1, help="Batch elements.")] = 1
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 16
    backward: Annotated[bool, typer.Option(help="Include the backward pass.")] = True
    device: Annotated[
        str | None,
        typer.Option(
            help="Device of predicted times: A100, H100 or H200. Default: the GPU of this "
            "machine if it is one of them, else H200."
        ),
    ] = None
    measure: Annotated[bool, typer.Option(help="Also measure on the GPU of this machine.")] = False
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Picture to write (PNG, SVG or PDF).")
    ] = None
    as_json: Json = False

    def workload(self, causal: bool = False) -> "Workload":
        """The workload. Raises ValueError for an option that this machine does not support."""
        from masks.plot import check_picture
        from sparseflash.advisor.choices import Workload

        check_picture("--plot", self.plot)
        _check_measure(self.measure)
        sizes = (self.seq_len, self.head_dim, self.batch, self.heads)
        return Workload(*sizes, causal, self.backward, self.device or _of_this_machine())


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a signature in which the fields of Shared replace `**shared`."""
    *own, _ = signature(command).parameters.values()
    shared = signature(Shared).parameters.values()
    command.__signature__ = Signature([*own, *shared])  # type: ignore
    command.__annotations__ |= {parameter.name: parameter.annotation for parameter in shared}
    return command


@with_shared_options
def advise(pattern: PatternText, **shared: Any) -> None:
    """Compare the block sizes of a pattern: density, useful pairs, predicted time."""
    from sparseflash.advisor.choices import block_sizes

    options = Shared(**shared)
    with usage_errors():
        workload = options.workload()
        with progress_bar("building masks"):
            choices = block_sizes(pattern, workload)
        _finish(choices, workload, options)
    pairs = {choice.pairs for choice in choices}
    if len(pairs) > 1 and not options.as_json:
        between = f"{min(pairs):,} to {max(pairs):,}"
        print(f"Defined on blocks: {between} pairs attend, depending on the block size.")


@with_shared_options
def search(
    layers: Annotated[int, typer.Option(min=1, help="Number of layers with the pattern.")],
    connected: Annotated[
        float, typer.Option(help="Share of pairs that must be connected after all layers.")
    ] = 1.0,
    budget_ms: Annotated[
        float | None, typer.Option(help="Largest predicted time of a layer.")
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(help="A candidate; repeatable. Default: families of built-in patterns."),
    ] = None,
    block_size: Annotated[
        int, typer.Option(help="Side of a block in tokens: 16, 32, ... 512.")
    ] = 128,
    most: Annotated[int, typer.Option(min=1, help="Number of patterns to find.")] = 8,
    causal: Annotated[bool, typer.Option(help="Make patterns causal.")] = False,
    **shared: Any,
) -> None:
    """Find the fastest patterns that connect enough pairs; exit with status 1 if none does."""
    from sparseflash.advisor import choices as advisor

    options = Shared(**shared)
    with usage_errors():
        workload = options.workload(causal)
        with progress_bar("following tokens") as progress:
            evaluated = advisor.search(
                workload,
                layers=layers,
                connected=connected,
                budget_ms=budget_ms,
                patterns=pattern,
                block_size=block_size,
                most=most,
                failing=options.plot is not None,
                progress=progress,
            )
        sufficient = [c for c in evaluated if (c.connected or 0) >= connected - advisor.ROUNDING]
        _finish(sufficient, workload, options, evaluated, connected)
    raise typer.Exit(not sufficient)


def _of_this_machine() -> "str | Device":
    import torch

    from sparseflash.io_model import device_like

    device = device_like(torch.device("cuda")) if torch.cuda.is_available() else None
    return device or "H200"


def _check_measure(measure: bool) -> None:
    """Raises ValueError without a GPU, because a CPU would take minutes for each choice."""
    import torch

    if measure and not torch.cuda.is_available():
        raise ValueError(
            "--measure needs a CUDA device, and there is none; sparseflash.advisor.measure of "
            'device "cpu" takes a CPU'
        )


def _finish(
    choices: "Sequence[Choice]",
    workload: "Workload",
    options: Shared,
    evaluated: "Sequence[Choice]" = (),
    connected: float | None = None,
) -> None:
    from sparseflash.advisor import choices as advisor
    from sparseflash.io_model import device_named

    device = device_named(workload.device).name
    if options.measure:
        with progress_bar("measuring") as progress:
            choices = advisor.measure(choices, workload, progress=progress)
    if options.plot is not None and (choices or evaluated):
        shown = {(choice.pattern, choice.block_size): choice for choice in (*evaluated, *choices)}
        advisor.plot([*shown.values()], options.plot, title=str(workload), connected=connected)
        if not options.as_json:
            print(f"wrote {options.plot}")
    if options.as_json:
        dtype = str(workload.dtype).removeprefix("torch.")
        fields = asdict(workload) | {"device": device, "dtype": dtype}
        print(json.dumps({"workload": fields, "choices": [asdict(choice) for choice in choices]}))
        return
    if not choices:
        print("no pattern connects enough pairs within the budget")
        return
    print(workload)
    table = _table(choices, options.measure)
    console = Console()
    unbounded = console.options.update(width=1 << 16)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)
    order = "measured time" if options.measure else f"predicted time on {device}"
    print(f"sorted by {order}")
    if not options.measure:
        low, middle, high = advisor.OVER_LEAST
        print(
            f"The predicted time is a lower bound. On an H200, measured calls took {low:.1f} to "
            f"{high:.1f} times as long; the median is {middle:.1f}."
        )


def _table(choices: "Sequence[Choice]", measured: bool) -> Table:
    """A row for each choice, with the columns that they have."""
    table = Table(box=None)
    names = ["block", "density", "useful", "predicted ms"]
    names += ["measured ms"] * measured
    names += ["connected"] * any(choice.connected is not None for choice in choices)
    for name in (*names, "pattern"):  # the pattern is last, and a long one exceeds the terminal
        table.add_column(name, no_wrap=True)
    for choice in choices:
        row = [str(choice.block_size), f"{choice.density:.4g}"]
        row += [f"{choice.useful:.1%}", f"{choice.predicted_ms:.3f}"]
        row += [] if choice.measured_ms is None else [f"{choice.measured_ms:.3f}"]
        if choice.connected is not None:
            low, high = choice.connected_interval or (choice.connected,) * 2
            interval = f" ({low:.0%} to {high:.0%})" if low < high else ""
            row.append(f"{choice.connected:.1%}{interval}")
        table.add_row(*row, escape(choice.pattern))
    return table
