"""Predicts the time of context-parallel attention on many ranks from the plan.

    python -m sparseflash simulate "local((4095, 0))" --tokens 16M --ranks 8,64,512

It needs no GPU and no other process. The model of one pass of one rank:

    forward   call + time of the blocks, beside which exchanges run + copies
    backward  the same
    exchange  latency + max(bytes received, bytes sent) / bandwidth
    copies    (bytes read + bytes written) / memory

`model.Division.elapsed` has the order of kernels and exchanges for each split. The time of a block
is its useful FLOPs, 4 d bq bk forward and 2.5 times as many backward, over the rate of the
machine. Copies are those of keys and values that are packed or put in order, and the addition of
received gradients. The time of a pass is that of the slowest rank. `efficiency` is the time of
evenly divided blocks alone over the predicted time. If `exposed` is not 0, communication is not
hidden by computation.
"""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import Tensor

from sparseflash.distributed.assign import Split
from sparseflash.distributed.model import (
    BACKWARD,
    Division,
    divide_blocks,
    receiving_rounds,
)
from sparseflash.distributed.plan import ContextPlan
from sparseflash.distributed.report import Report


@dataclass(frozen=True)
class Machine:
    """The rates of a rank.

    Attributes:
        tflops: Useful TFLOP/s of attention kernels in the forward pass.
        bandwidth: GB/s of each direction of an exchange.
        latency_us: Fixed time of an exchange, in microseconds.
        backward_tflops: Useful TFLOP/s in the backward pass; by default `tflops`.
        call_us: Fixed time of a pass, in microseconds.
        memory: GB/s at which copies read and write the memory of a rank, both together.

    Raises:
        ValueError: A rate is not positive, or a time is negative.
    """

    tflops: float = 400.0
    bandwidth: float = 200.0
    latency_us: float = 50.0
    backward_tflops: float | None = None
    call_us: float = 0.0
    memory: float = 2000.0

    def __post_init__(self) -> None:
        rates = {"tflops": self.tflops, "bandwidth": self.bandwidth, "memory": self.memory}
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
        """Reads a machine from a JSON file that `experiments.long_context.calibrate` wrote.

        Args:
            path: The file.

        Returns:
            The machine.

        Raises:
            ValueError: The file does not describe a machine.
        """
        try:
            return Machine(**json.loads(Path(path).read_text())["machine"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            names = [each.name for each in fields(Machine)]
            raise ValueError(f'file {path} must have "machine" with some of {names}') from error

    def exchange_ms(self, moved: Tensor) -> Tensor:
        """The time of an exchange, in milliseconds.

        Args:
            moved: (ranks,), the larger of the bytes that each rank receives and sends.

        Returns:
            float64 (ranks,).
        """
        return moved / (self.bandwidth * 1e6) + (moved > 0) * self.latency_us / 1e3


@dataclass(frozen=True)
class Attention:
    """The sizes of a call of attention."""

    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and the value of a token."""
        return 2 * self.batch * self.kv_heads * self.head_dim * self.dtype.itemsize

    def report(self, plan: ContextPlan) -> Report:
        """The report of a plan for these sizes."""
        sizes = (self.kv_heads, self.head_dim, self.dtype, self.batch, self.heads)
        return plan.report(*sizes)


@dataclass(frozen=True)
class Demand:
    """The work and traffic of each rank: the input of the time model.

    Attributes:
        split, groups: As in the plan.
        block_flops: Useful FLOPs of the forward pass for one block, all heads that share its mask,
            and the whole batch.
        own, fetched, ready, waiting, waiting_rows: For each rank, as in Division.
        moved, returned: The larger of the bytes that each rank receives and sends, in the forward
            and in the backward pass.
        copied, added: For each rank, bytes of memory that copies read and write, in the forward
            and in the backward pass. Empty for none, as in records made before they were counted.
        rounds: Number of rounds in which each rank receives keys; empty for one.
        gathered_rows: For each rank, as in Division. Empty for none, as in earlier records.
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
    copied: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    gathered_rows: list[float] = field(default_factory=list)

    @staticmethod
    def of(plan: ContextPlan, attention: Attention, selected: float = 1.0) -> "Demand":
        """The demand of a plan; arguments as in `predict`."""
        if selected < 1 and plan.split == "in place":
            plan = plan.not_in_place  # as calls with a DynamicMask are computed
        report = attention.report(plan)
        division = divide_blocks(plan.assignment).selected(selected)
        heads = attention.batch * attention.heads / plan.mask.num_heads
        forward = torch.tensor([report.receive_bytes, report.send_bytes])
        backward = torch.tensor([report.backward_receive_bytes, report.backward_send_bytes])
        copied = 2 * torch.tensor(report.copied_bytes).double()
        # A rank gets gradients of what it sent, each of which is read, added and written. Those of
        # received keys are packed if the keys were put in order before they were attended.
        groups = plan.head_groups(attention.kv_heads)
        gradients = plan.traffic(groups).sum(0) * attention.token_bytes // groups
        added = 3 * gradients + (copied if plan.split == "rows" else copied - 2 * gradients)
        return Demand(
            split=plan.split,
            groups=plan.groups,
            block_flops=heads * 4 * attention.head_dim * plan.mask.grid.bq * plan.mask.grid.bk,
            own=division.own.tolist(),
            fetched=division.fetched.tolist(),
            ready=division.ready.tolist(),
            waiting=division.waiting.tolist(),
            waiting_rows=division.waiting_rows.tolist(),
            moved=forward.double().amax(0).tolist(),
            returned=backward.double().amax(0).tolist(),
            copied=copied.tolist(),
            added=added.tolist(),
            rounds=receiving_rounds(plan.assignment).double().tolist(),
            gathered_rows=division.gathered_rows.tolist(),
        )

    @property
    def blocks(self) -> Tensor:
        """float64 (ranks,): blocks that each rank computes."""
        return torch.tensor([self.own, self.fetched]).double().sum(0)

    def block_ms(self, machine: Machine) -> tuple[float, float]:
        """Milliseconds of a block in the forward and in the backward pass."""
        backward = machine.backward_tflops or machine.tflops
        rates = (machine.tflops, backward / BACKWARD)
        return self.block_flops / (rates[0] * 1e9), self.block_flops / (rates[1] * 1e9)

    def times(self, machine: Machine) -> tuple[Tensor, Tensor]:
        """Predicted milliseconds of each rank, forward and backward, float64 (ranks,) each."""
        names = ("own", "fetched", "ready", "waiting", "waiting_rows")
        of_ranks = [getattr(self, name) for name in names]
        of_ranks.append(self.gathered_rows or [0.0] * len(self.own))
        division = Division(*(torch.tensor(each).double() for each in of_ranks))
        rounds = torch.tensor(self.rounds or [1.0]).double()
        moved = torch.tensor([self.moved, self.returned]).double()
        exchanges = [machine.exchange_ms(each) for each in moved]
        forward, backward = (
            division.elapsed(self.split, self.groups, block, exchange, rounds, is_backward)
            for block, exchange, is_backward in zip(
                self.block_ms(machine), exchanges, (False, True), strict=True
            )
        )
        copied, added = (
            torch.tensor(each or [0.0]).double() / (machine.memory * 1e6) + machine.call_us / 1e3
            for each in (self.copied, self.added)
        )
        return forward + copied, backward + added


@dataclass(frozen=True)
class Prediction:
    """The predicted time of the slowest rank.

    Attributes:
        ranks, strategy: As in the plan.
        imbalance: Largest number of blocks of a rank over the mean.
        share: Bytes received over those of an all-gather or ring attention.
        receive_mb: Largest number of megabytes that a rank receives in a forward pass.
        forward_ms, total_ms: Milliseconds of the forward pass, and of both passes.
        exposed_ms: total_ms less the time of the blocks alone.
        efficiency: Time of evenly divided blocks alone over total_ms.
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
    """Predicts the time of attention with a plan, in one round.

    Args:
        plan: The plan.
        machine: The rates of a rank.
        attention: The sizes of the call.
        selected: The share of the blocks that a DynamicMask selects; the keys of all are fetched.

    Returns:
        The prediction.
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
