"""How long attention over many ranks would take, modelled from the plan alone.

    python -m sparseflash simulate "local((4095, 0))" --tokens 16M --ranks 8,64,512

No GPU and no other process is needed. The model of one pass of one rank:

    by keys   call + max(own blocks, exchange) + fetched blocks + merge of rows
    by rows   call + max(blocks, exchange / groups + waiting blocks,
                         exchange + waiting blocks / groups)
    exchange  latency + max(bytes received, bytes sent) / bandwidth

where waiting blocks are of rows that attend fetched keys, and blocks take their useful FLOPs at
the rate of the machine, forward 4 d bq bk and backward 2.5 times that. The slowest rank counts.
`efficiency` is the time that evenly shared blocks alone would take over that of the model; where
`exposed` is not 0, communication no longer hides.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from sparseflash.distributed.model import Division, Split, divided
from sparseflash.distributed.plan import ContextPlan
from sparseflash.distributed.report import Report

BACKWARD = 2.5  # FLOPs of the backward pass over those of the forward pass


@dataclass(frozen=True)
class Machine:
    """What a rank can do.

    Attributes:
        tflops: Useful TFLOP/s of attention kernels, forward.
        bandwidth: GB/s in which it receives, and as many in which it sends.
        latency_us: Microseconds of an exchange beside its bytes.
        backward_tflops: Useful TFLOP/s of the backward pass; as many as forward if None.
        call_us: Microseconds of a pass beside its blocks and its exchange.

    Raises:
        ValueError: A rate is not above 0, or a time is below it.
    """

    tflops: float = 400.0
    bandwidth: float = 200.0
    latency_us: float = 50.0
    backward_tflops: float | None = None
    call_us: float = 0.0

    def __post_init__(self) -> None:
        rates = {"tflops": self.tflops, "bandwidth": self.bandwidth}
        if self.backward_tflops is not None:
            rates["backward_tflops"] = self.backward_tflops
        for name, rate in rates.items():
            if not rate > 0:
                raise ValueError(f"{name} must be above 0, got {rate}")
        for name in ("latency_us", "call_us"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    @staticmethod
    def load(path: str | Path) -> "Machine":
        """The machine of a JSON file that `experiments.long_context.calibrate` wrote.

        Raises:
            ValueError: The file describes no machine.
        """
        try:
            return Machine(**json.loads(Path(path).read_text())["machine"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            names = [each.name for each in fields(Machine)]
            raise ValueError(f'file {path} must hold "machine" with some of {names}') from error

    def exchange_ms(self, moved: Tensor) -> Tensor:
        """float64 (ranks,): of an exchange in which each rank moves so many bytes one way."""
        return moved / (self.bandwidth * 1e6) + (moved > 0) * self.latency_us / 1e3


@dataclass(frozen=True)
class Attention:
    """Sizes of the attention."""

    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def report(self, plan: ContextPlan) -> Report:
        """What a plan moves of it."""
        sizes = (self.kv_heads, self.head_dim, self.dtype, self.batch, self.heads)
        return plan.report(*sizes)


@dataclass(frozen=True)
class Demand:
    """What a plan asks of each rank: all that the model of time reads. As JSON with `asdict`.

    Attributes:
        split, groups: As in the plan.
        block_flops: Useful FLOPs of a block of all heads of its mask and the batch, forward.
        own, fetched, ready, waiting, waiting_rows: For each rank, as in Division.
        moved, returned: Bytes of each rank, the more of received and sent ones, forward and
            backward.
    """

    split: Split
    groups: int
    block_flops: float
    own: list[float]
    fetched: list[float]
    ready: list[float]
    waiting: list[float]
    waiting_rows: list[float]
    moved: list[float]
    returned: list[float]

    @staticmethod
    def of(plan: ContextPlan, attention: Attention, selected: float = 1.0) -> "Demand":
        """The demand of a plan; see `predict`."""
        report = attention.report(plan)
        division = divided(plan.workload, plan.owner, plan.ranks)
        heads = attention.batch * attention.heads / plan.mask.num_heads
        forward = torch.tensor([report.receive_bytes, report.send_bytes])
        backward = torch.tensor([report.backward_receive_bytes, report.backward_send_bytes])
        return Demand(
            split=plan.split,
            groups=plan.groups,
            block_flops=heads * 4 * attention.head_dim * plan.mask.grid.bq * plan.mask.grid.bk,
            own=(division.own * selected).tolist(),
            fetched=(division.fetched * selected).tolist(),
            ready=(division.ready * selected).tolist(),
            waiting=(division.waiting * selected).tolist(),
            waiting_rows=division.waiting_rows.tolist(),
            moved=forward.double().amax(0).tolist(),
            returned=backward.double().amax(0).tolist(),
        )

    @property
    def blocks(self) -> Tensor:
        """float64 (ranks,): blocks that each rank computes."""
        return torch.tensor([self.own, self.fetched]).double().sum(0)

    def block_ms(self, machine: Machine) -> tuple[float, float]:
        """Milliseconds of a block, forward and backward."""
        backward = machine.backward_tflops or machine.tflops
        rates = (machine.tflops, backward / BACKWARD)
        return self.block_flops / (rates[0] * 1e9), self.block_flops / (rates[1] * 1e9)

    def times(self, machine: Machine) -> tuple[Tensor, Tensor]:
        """Modelled milliseconds of each rank, forward and backward; float64 (ranks,)."""
        names = ("own", "fetched", "ready", "waiting", "waiting_rows")
        division = Division(*(torch.tensor(getattr(self, name)).double() for name in names))
        forward, backward = (
            division.elapsed(self.split, self.groups, block, machine.exchange_ms(moved))
            for block, moved in zip(
                self.block_ms(machine),
                torch.tensor([self.moved, self.returned]).double(),
                strict=True,
            )
        )
        return forward + machine.call_us / 1e3, backward + machine.call_us / 1e3


@dataclass(frozen=True)
class Prediction:
    """Modelled milliseconds of the slowest rank.

    Attributes:
        ranks, strategy: As in the plan.
        imbalance: Most blocks of a rank over the mean.
        share: Bytes moved over those of an all-gather or a ring.
        receive_mb: Most megabytes that a rank receives in a forward pass.
        forward_ms, total_ms: Forward; forward and backward.
        exposed_ms: How much longer total_ms is than the blocks alone would take.
        efficiency: The share of total_ms that evenly shared blocks alone would take.
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


def predict(
    plan: ContextPlan, machine: Machine, attention: Attention, selected: float = 1.0
) -> Prediction:
    """The modelled time of attention by a plan, in one round.

    Args:
        plan, machine, attention: Who computes and moves what, at what rates, of what sizes.
        selected: The share of the blocks that a DynamicMask selects; all are fetched.
    """
    demand = Demand.of(plan, attention, selected)
    forward, backward = demand.times(machine)
    slowest = float((forward + backward).max())
    blocks, block_ms = demand.blocks, sum(demand.block_ms(machine))
    report = attention.report(plan)
    return Prediction(
        ranks=plan.ranks,
        strategy=plan.strategy,
        imbalance=report.imbalance,
        share=report.share,
        receive_mb=max(report.receive_bytes) / 1e6,
        forward_ms=float(forward.max()),
        total_ms=slowest,
        exposed_ms=max(slowest - float(blocks.max()) * block_ms - 2 * machine.call_us / 1e3, 0.0),
        efficiency=float(blocks.mean()) * block_ms / max(slowest, 1e-12),
    )
