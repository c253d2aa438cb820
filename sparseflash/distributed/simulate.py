"""How long attention over many ranks would take, modelled from the plan alone.

    python -m sparseflash.distributed.simulate "local((4095, 0))" --tokens 16M --ranks 8,64,512

No GPU and no other process is needed. The model of one pass of one rank:

    by keys   max(own blocks, exchange) + fetched blocks + merge of rows
    by rows   max(blocks, exchange / groups + waiting blocks, exchange + waiting blocks / groups)
    exchange  latency + max(bytes received, bytes sent) / bandwidth

where waiting blocks are of rows that attend fetched keys, and blocks take their useful FLOPs at
the rate of the machine, forward 4 d bq bk and backward 2.5 times that. The slowest rank counts.
`efficiency` is the time that evenly shared blocks alone would take over that of the model; where
`exposed` is not 0, communication no longer hides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor

from masks import BlockMask
from masks._parse import parse
from sparseflash.distributed.assign import STRATEGIES
from sparseflash.distributed.model import divided
from sparseflash.distributed.plan import ContextPlan, make_plan

BACKWARD = 2.5  # FLOPs of the backward pass over those of the forward pass
_UNITS = {"": 1, "K": 2**10, "M": 2**20}


@dataclass(frozen=True)
class Machine:
    """What a rank can do.

    Attributes:
        tflops: Useful TFLOP/s of attention kernels.
        bandwidth: GB/s in which it receives, and as many in which it sends.
        latency_us: Of an exchange.

    Raises:
        ValueError: A rate is not above 0, or the latency is below it.
    """

    tflops: float = 400.0
    bandwidth: float = 200.0
    latency_us: float = 50.0

    def __post_init__(self) -> None:
        for name in ("tflops", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not self.latency_us >= 0:
            raise ValueError(f"latency_us must be at least 0, got {self.latency_us}")

    def exchange_ms(self, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """float64 (ranks,): of an exchange of so many bytes by each rank."""
        moved = torch.tensor([received, sent]).double().amax(0)
        return moved / (self.bandwidth * 1e6) + (moved > 0) * self.latency_us / 1e3


@dataclass(frozen=True)
class Attention:
    """Sizes of the attention; elements of 2 bytes."""

    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    batch: int = 1


@dataclass(frozen=True)
class Prediction:
    """Modelled milliseconds of the slowest rank.

    Attributes:
        ranks, strategy: Of the plan.
        imbalance: Most blocks of a rank over the mean.
        share: Bytes moved over those of an all-gather or a ring.
        receive_mb: Most megabytes that a rank receives in a forward pass.
        forward_ms, total_ms: Forward; forward and backward.
        exposed_ms: Of total_ms, what it takes longer than blocks alone would.
        efficiency: Of total_ms, what evenly shared blocks alone would take.
    """

    ranks: int
    strategy: str
    imbalance: float
    share: float
    receive_mb: float
    forward_ms: float
    total_ms: float
    exposed_ms: float
    efficiency: float


def predict(plan: ContextPlan, machine: Machine, attention: Attention) -> Prediction:
    """The modelled time of attention by a plan, in one round."""
    mask, blocks = plan.mask, plan.costs.blocks.double()
    heads_of_mask = attention.heads / mask.num_heads
    block_flops = 4 * attention.head_dim * mask.grid.bq * mask.grid.bk
    forward_ms = attention.batch * heads_of_mask * block_flops / (machine.tflops * 1e9)
    backward_ms = BACKWARD * forward_ms
    sizes = (attention.kv_heads, attention.head_dim, torch.bfloat16, attention.batch)
    report = plan.report(*sizes, attention.heads)
    there = machine.exchange_ms(report.receive_bytes, report.send_bytes)
    back = machine.exchange_ms(report.backward_receive_bytes, report.backward_send_bytes)
    division = divided(plan.workload, plan.owner, plan.ranks)
    forward = division.elapsed(plan.split, plan.groups, forward_ms, there)
    total = forward + division.elapsed(plan.split, plan.groups, backward_ms, back)
    slowest = float(total.max())
    alone = float(blocks.max()) * (forward_ms + backward_ms)
    return Prediction(
        ranks=plan.ranks,
        strategy=plan.strategy,
        imbalance=report.imbalance,
        share=report.share,
        receive_mb=max(report.receive_bytes) / 1e6,
        forward_ms=float(forward.max()),
        total_ms=slowest,
        exposed_ms=slowest - alone,
        efficiency=float(blocks.mean()) * (forward_ms + backward_ms) / max(slowest, 1e-12),
    )


def parse_tokens(text: str) -> int:
    """A number of tokens, in units of 1024 with K, of 1024 * 1024 with M."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in _UNITS:
        raise ValueError(f"tokens must be a number, with K or M or without, got {text!r}")
    return int(number) * _UNITS[unit]


def main(
    pattern: Annotated[str, typer.Argument(help="As `python -m masks` reads it.")],
    tokens: Annotated[str, typer.Option(help="Of the sequence, such as 1M.")] = "1M",
    ranks: Annotated[str, typer.Option(help="Numbers, separated by commas.")] = "2,4,8,64",
    strategy: Annotated[str, typer.Option(help="auto, a strategy, or all.")] = "auto",
    block_size: Annotated[int, typer.Option(min=16, max=256, help="Tokens.")] = 128,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    kv_heads: Annotated[int, typer.Option(min=1)] = 16,
    head_dim: Annotated[int, typer.Option(min=8, max=256)] = 128,
    tflops: Annotated[float, typer.Option(help="Useful TFLOP/s of a rank.")] = 400.0,
    bandwidth: Annotated[float, typer.Option(help="GB/s of a rank.")] = 200.0,
    latency_us: Annotated[float, typer.Option(help="Of an exchange.")] = 50.0,
) -> None:
    """Models attention over many ranks, and says where communication stops hiding."""
    try:
        length, each = parse_tokens(tokens), ranks.split(",")
        if not all(number.isdecimal() for number in each):
            raise ValueError(f"ranks must be numbers, separated by commas, got {ranks!r}")
        mask = parse(pattern)(length, block_size)
        machine = Machine(tflops, bandwidth, latency_us)
        attention = Attention(heads, kv_heads, head_dim)
        names = [*STRATEGIES] if strategy == "all" else [strategy]
        found = [
            predict(make_plan(mask, int(number), name), machine, attention)
            for number in each
            for name in names
        ]
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    _show(mask, found)


def _show(mask: BlockMask, found: Sequence[Prediction]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{mask}, modelled", title_justify="left")
    for name in ("ranks", "strategy", "imbalance", "moved", "received MB", "forward ms"):
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


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app(prog_name="python -m sparseflash.distributed.simulate")
