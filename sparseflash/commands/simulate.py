"""`python -m sparseflash simulate`: predicts context-parallel attention on many ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from masks.commands import PatternText, progress_bar, usage_errors

if TYPE_CHECKING:
    from masks import BlockMask
    from sparseflash.distributed.simulation import Prediction

HIDDEN = 0.01  # communication is hidden if it adds less than this share to both passes
_UNITS = {"": 1, "K": 2**10, "M": 2**20}


def parse_tokens(text: str) -> int:
    """A number of tokens; K means 1024 and M means 1024 * 1024. Raises ValueError."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in _UNITS:
        raise ValueError(f"tokens must be a number, with K or M or without, got {text!r}")
    return int(number) * _UNITS[unit]


def simulate(
    pattern: PatternText,
    tokens: Annotated[
        str, typer.Option(help="Tokens of the sequence, such as 512K or 1M.")
    ] = "1M",
    ranks: Annotated[
        str, typer.Option(help="Numbers of ranks, separated by commas.")
    ] = "2,4,8,64",
    strategy: Annotated[
        str, typer.Option(help="A strategy that assigns tokens to ranks, auto, or all.")
    ] = "auto",
    block_size: Annotated[
        int, typer.Option(min=16, max=512, help="Side of a block in tokens.")
    ] = 128,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    kv_heads: Annotated[int, typer.Option(min=1)] = 16,
    head_dim: Annotated[int, typer.Option(min=8, max=256)] = 128,
    tflops: Annotated[
        float | None, typer.Option(help="Useful TFLOP/s of a rank. Default: 400.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s of a rank. Default: 200.")] = None,
    latency_us: Annotated[
        float | None, typer.Option(help="Latency of an exchange. Default: 50.")
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(exists=True, help="Rates that experiments.long_context.calibrate wrote."),
    ] = None,
) -> None:
    """Predict context-parallel attention, and the number of ranks that hides communication."""
    from masks._parse import parse
    from sparseflash.distributed import make_plan
    from sparseflash.distributed.assign import STRATEGIES
    from sparseflash.distributed.simulation import Attention, Machine, predict

    with usage_errors(), progress_bar("planning") as progress, _one_thread():
        length, each = parse_tokens(tokens), ranks.split(",")
        if not all(number.isdecimal() for number in each):
            raise ValueError(f"ranks must be numbers, separated by commas, got {ranks!r}")
        mask = parse(pattern)(length, block_size)
        given = {"tflops": tflops, "bandwidth": bandwidth, "latency_us": latency_us}
        given = {name: rate for name, rate in given.items() if rate is not None}
        rates = replace(Machine() if machine is None else Machine.load(machine), **given)
        attention = Attention(heads, kv_heads, head_dim)
        names = [*STRATEGIES] if strategy == "all" else [strategy]
        cases = [(int(number), name) for number in each for name in names]
        found = []
        for number, name in cases:
            progress(1 + len(found), 1 + len(cases))  # the mask is a step too
            found.append(predict(make_plan(mask, number, name), rates, attention))
    _show(mask, found)
    groups = {name: [each for each in found if each.strategy == name] for name in STRATEGIES}
    groups = groups if strategy == "all" else {strategy: found}
    for name, group in groups.items():
        print(f"{name}: communication {hiding(group)}")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Operations of torch run on one thread: most take less time than threads wait for others."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def hiding(found: "Sequence[Prediction]") -> str:
    """Text: on how many ranks communication is hidden (see HIDDEN)."""
    ordered = sorted(found, key=lambda each: each.ranks)
    shown = [each.ranks for each in ordered if each.exposed_ms > HIDDEN * each.total_ms]
    if not shown:
        return f"is hidden on up to {ordered[-1].ranks} ranks"
    before = [each.ranks for each in ordered if each.ranks < shown[0]]
    if not before:
        return f"is not hidden on {shown[0]} ranks"
    return f"is hidden on up to {before[-1]} ranks, but not on {shown[0]}"


def _show(mask: "BlockMask", found: "Sequence[Prediction]") -> None:
    table = Table(title=f"{mask}, modelled", title_justify="left")
    for name in ("ranks", "strategy", "imbalance", "traffic", "received MB", "forward ms"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for name in ("both ms", "exposed ms", "efficiency"):
        table.add_column(name, justify="right")
    for each in found:
        table.add_row(
            *(f"{each.ranks}", each.strategy, f"{each.imbalance:.2f}", f"{each.share:.2%}"),
            *(f"{each.receive_mb:.1f}", f"{each.forward_ms:.2f}", f"{each.total_ms:.2f}"),
            *(f"{each.exposed_ms:.2f}", f"{each.efficiency:.3f}"),
        )
    Console(width=140).print(table)
