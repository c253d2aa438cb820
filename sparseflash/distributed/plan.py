"""ContextPlan: how a sequence is sharded over ranks, and which key blocks they exchange.

Everything follows from the mask and the assignment of its units to ranks. So every rank makes the
same plan without asking another.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import masks
from masks import BlockMask
from masks.arguments import check_integer, check_integers
from masks.registry import Cache
from sparseflash.distributed.assign import STRATEGIES, Costs, Workload, costs
from sparseflash.distributed.report import Report, report_of

ABOUT = 1.05  # within this factor modelled times are alike
HEADER = "context_plan"  # the key of the safetensors metadata


@dataclass(frozen=True, eq=False)
class Round:
    """One all-to-all of keys and values, and the attention to what it brings to one rank.

    Attributes:
        send: the own tokens that go to each rank: int64 (tokens,), or a slice where they follow
            one another.
        send_splits, receive_splits: how many tokens go to and come from each rank.
        order: int64 (received,), of the received tokens in the order of the sequence where each
            stands among those received, or None where they come in that order.
        columns: int64 (blocks,), numbers of the received key blocks in the sequence, ascending.
        rows: int64, which of the own block rows attend them, ascending.
        queries: the own tokens of these rows.
        mask: these queries against the received keys; None where no query attends any.
    """

    send: tuple[Tensor | slice, ...]
    send_splits: list[int]
    receive_splits: list[int]
    order: Tensor | None
    columns: Tensor
    rows: Tensor
    queries: Tensor | slice
    mask: BlockMask | None

    @property
    def received(self) -> int:
        """Tokens that come in."""
        return sum(self.receive_splits)

    def to(self, device: torch.device) -> "Round":
        send = tuple(x.to(device) if isinstance(x, Tensor) else x for x in self.send)
        return replace(_moved(self, device), send=send)


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank does.

    Attributes:
        rows, columns: int64, numbers of its block rows and block columns in the sequence.
        mask: its queries against its own keys.
        rounds: the exchanges, as many on every rank.
    """

    rows: Tensor
    columns: Tensor
    mask: BlockMask
    rounds: tuple[Round, ...]

    def to(self, device: torch.device) -> "Part":
        rounds = tuple(each.to(device) for each in self.rounds)
        return replace(_moved(self, device), rounds=rounds)


@dataclass(frozen=True, eq=False, repr=False)
class ContextPlan:
    """How a sequence is sharded over ranks, and which key blocks they exchange.

    Made by make_plan. It knows no process group: a rank is a number from 0 to before `ranks`.

    Attributes:
        mask: Of the whole sequence, on the CPU.
        ranks: How many share the sequence.
        strategy: The one that assigned the units to ranks; "own" where the caller did.
        owner: int64 (units,), the rank of each run of max(block_size) tokens.
        round_tokens: Most tokens of keys that a rank receives in one round; None for one round.
    """

    mask: BlockMask
    ranks: int
    strategy: str
    owner: Tensor
    round_tokens: int | None = None

    @property
    def seq_len(self) -> int:
        """Tokens of the whole sequence."""
        return self.mask.grid.q_len

    def positions(self, rank: int) -> Tensor:
        """int64 (tokens of the rank,): where each of its tokens stands in the sequence."""
        rank = self._rank(rank)
        if ("positions", rank) not in self.cache:
            unit = self.workload.unit
            first = (self.owner == rank).nonzero() * unit
            tokens = (first + torch.arange(unit)).flatten()
            self.cache["positions", rank] = tokens[tokens < self.seq_len]
        return self.cache["positions", rank]

    def shard(self, tensor: Tensor, rank: int, dim: int) -> Tensor:
        """The part of one rank of a tensor that holds the whole sequence along `dim`."""
        if tensor.shape[dim] != self.seq_len:
            raise ValueError(
                f"tensor must have {self.seq_len} tokens in dim {dim}, got {tuple(tensor.shape)}"
            )
        return tensor.index_select(dim, self.positions(rank).to(tensor.device))

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The whole of the shards of all ranks, rank after rank; see `gather` for those that each
        rank has one of.
        """
        if len(shards) != self.ranks:
            raise ValueError(f"shards must be of {self.ranks} ranks, got {len(shards)}")
        for rank, shard in enumerate(shards):
            self.check_length(f"shards[{rank}]", shard, rank, dim)
        position = torch.cat([self.positions(rank) for rank in range(self.ranks)])
        joined = torch.cat(list(shards), dim)
        return joined.index_select(dim, position.argsort().to(joined.device))

    def check_length(self, name: str, tensor: Tensor, rank: int, dim: int) -> None:
        """Raises ValueError where a tensor has not as many tokens as the rank."""
        expected = len(self.positions(rank))
        if tensor.shape[dim] != expected:
            raise ValueError(
                f"{name} must have the {expected} tokens of rank {rank} in dim {dim}, got "
                f"{tuple(tensor.shape)}"
            )

    def mask_of(self, rank: int) -> BlockMask:
        """The queries of one rank against all keys: what a DynamicMask of a call selects from."""
        rank = self._rank(rank)
        if ("mask", rank) not in self.cache:
            every = torch.arange(self.mask.grid.nk)
            self.cache["mask", rank] = self.mask.take_blocks(self._rows(rank), every)
        return self.cache["mask", rank]

    def is_support(self, support: BlockMask, rank: int) -> bool:
        """Whether a mask, on any device, is mask_of(rank)."""
        key = ("support", rank, support.handle)
        if key not in self.cache:
            self.cache[key] = support.to("cpu") == self.mask_of(rank)
        return self.cache[key]

    def part(self, rank: int, device: torch.device | str = "cpu") -> Part:
        """What one rank does; its tensors on a device. Made once."""
        rank, device = self._rank(rank), torch.device(device)
        if ("part", rank) not in self.cache:
            rows, columns = self._rows(rank), self._columns(rank)
            mask = self.mask.take_blocks(rows, columns)
            rounds = tuple(self._round(rank, number) for number in range(self.num_rounds))
            self.cache["part", rank] = Part(rows, columns, mask, rounds)
        if ("part", rank, device) not in self.cache:
            self.cache["part", rank, device] = self.cache["part", rank].to(device)
        return self.cache["part", rank, device]

    @cached_property
    def num_rounds(self) -> int:
        """All-to-alls of one pass: the same on every rank, 0 where no rank needs another."""
        most = max(int(needed.sum()) for needed in self._fetched)
        if self.round_tokens is None:
            return min(most, 1)
        blocks = self.round_tokens // self.mask.grid.bk
        return -(-most // blocks)

    @cached_property
    def workload(self) -> Workload:
        """The mask as the strategies see it."""
        return Workload(self.mask)

    @cached_property
    def costs(self) -> Costs:
        """What every rank computes, sends and receives."""
        return costs(self.workload, self.owner, self.ranks)

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that two plans share only if they are equal."""
        blocks, facts = self.mask.block_set, hashlib.sha256()
        shape = (self.mask.seq_len, self.mask.block_size, self.mask.head_to_mask)
        facts.update(repr((*shape, self.ranks, self.round_tokens)).encode())
        tensors = (*blocks.full, blocks.partial, blocks.partial_bit_tile, blocks.bit_tiles)
        for tensor in (*tensors, self.owner):
            facts.update(repr(tuple(tensor.shape)).encode())
            facts.update(tensor.contiguous().numpy().tobytes())
        return facts.hexdigest()

    def report(
        self,
        kv_heads: int = 1,
        head_dim: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        batch: int = 1,
    ) -> Report:
        """Bytes and blocks of every rank, beside a ring, an all-gather and lower bounds."""
        token_bytes = 2 * batch * kv_heads * head_dim * dtype.itemsize
        return report_of(self, token_bytes)

    def save(self, path: str | Path) -> None:
        """Writes the plan to a safetensors file, of which masks.load reads the mask."""
        masks.save(self.mask, path)
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata())
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        facts = {"ranks": self.ranks, "strategy": self.strategy, "rounds": self.round_tokens}
        save_file(tensors | {"owner": self.owner}, path, metadata | {HEADER: json.dumps(facts)})

    @staticmethod
    def load(path: str | Path) -> "ContextPlan":
        """What `save` wrote.

        Raises:
            ValueError: The file holds no plan.
        """
        mask = masks.load(path)
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
            if header is None or not isinstance(mask, BlockMask):
                raise ValueError(f"file {path} holds no context plan")
            owner, facts = file.get_tensor("owner"), json.loads(header)
        _check_owner(owner.tolist(), Workload(mask).units, facts["ranks"])
        return ContextPlan(mask, facts["ranks"], facts["strategy"], owner, facts["rounds"])

    def __repr__(self) -> str:
        return (
            f"ContextPlan(ranks={self.ranks}, strategy={self.strategy!r}, "
            f"rounds={self.num_rounds}, mask={self.mask})"
        )

    @cached_property
    def cache(self) -> Cache:
        """What users of the plan store with it, under keys of their own."""
        return Cache()

    @cached_property
    def _fetched(self) -> Tensor:
        """bool (ranks, nk): the key blocks that each rank receives."""
        own = self.owner[self.workload.columns] == torch.arange(self.ranks).unsqueeze(1)
        return self.workload.needed(self.owner, self.ranks) & ~own

    def _rank(self, rank: int) -> int:
        return check_integer("rank", rank, least=0, most=self.ranks - 1)

    def _rows(self, rank: int) -> Tensor:
        return (self.owner[self.workload.rows] == rank).nonzero().flatten()

    def _columns(self, rank: int) -> Tensor:
        return (self.owner[self.workload.columns] == rank).nonzero().flatten()

    def _received_columns(self, rank: int, number: int) -> Tensor:
        """The key blocks that a rank receives in one round, in the order in which they come."""
        columns = self._fetched[rank].nonzero().flatten()
        sender = self.owner[self.workload.columns[columns]]
        # A rank starts with those of the next one, so that no rank is asked by all at once.
        columns = columns[torch.argsort((sender - rank - 1) % self.ranks, stable=True)]
        bounds = [len(columns) * i // self.num_rounds for i in (number, number + 1)]
        columns = columns[bounds[0] : bounds[1]].sort().values
        return columns[torch.argsort(self.owner[self.workload.columns[columns]], stable=True)]

    def _round(self, rank: int, number: int) -> Round:
        own_first = torch.zeros(self.mask.grid.nk, dtype=torch.int64)
        own, tokens = self._columns(rank), self.workload.column_tokens
        own_first[own] = torch.cumsum(tokens[own], 0) - tokens[own]
        sent, send_splits = [], []
        for receiver in range(self.ranks):
            columns = self._received_columns(receiver, number)
            columns = columns[self.owner[self.workload.columns[columns]] == rank]
            sent.append(_tokens_of(own_first[columns], tokens[columns]))
            send_splits.append(len(sent[-1]))
        columns = self._received_columns(rank, number)
        splits = torch.zeros(self.ranks, dtype=torch.int64)
        splits.index_add_(0, self.owner[self.workload.columns[columns]], tokens[columns])
        ascending, order = columns.sort()
        arrived = torch.cumsum(tokens[columns], 0) - tokens[columns]
        in_order = bool((columns.diff() > 0).all())
        return Round(
            send=tuple(map(_as_slice, sent)),
            send_splits=send_splits,
            receive_splits=splits.tolist(),
            order=None if in_order else _tokens_of(arrived[order], tokens[ascending]),
            columns=ascending,
            **self._attended(rank, ascending),
        )

    def _attended(self, rank: int, columns: Tensor) -> dict[str, Any]:
        """The rows of a rank that attend some of the columns, as fields of a Round."""
        own = self._rows(rank)
        rows = own[:0]
        if len(columns):
            mask = self.mask.take_blocks(own, columns)
            rows = mask.blocks_per_row().sum(0).nonzero().flatten()
        if not len(rows):
            return {"rows": rows, "queries": slice(0, 0), "mask": None}
        side, every = mask.grid.bq, torch.arange(mask.grid.nk)
        queries = (rows.unsqueeze(1) * side + torch.arange(side)).flatten()
        queries = _as_slice(queries[queries < mask.grid.q_len])
        return {"rows": rows, "queries": queries, "mask": mask.take_blocks(rows, every)}


def make_plan(
    mask: BlockMask,
    ranks: int | ProcessGroup | DeviceMesh,
    strategy: str | Sequence[int] | Tensor = "auto",
    *,
    round_tokens: int | None = None,
    fetch_cost: float = 4.0,
) -> ContextPlan:
    """The plan by which ranks share a sequence: which tokens each has, and what they exchange.

    A pure function: every rank that calls it with equal arguments gets an equal plan, without
    communication. Stored with the mask.

    Args:
        mask: Of as many queries as keys.
        ranks: How many share the sequence, at most one for each unit of max(block_size) tokens; or
            the group or the one-dimensional mesh of these ranks.
        strategy: "contiguous", "zigzag", "zigzag by document", "balanced chunks", "contiguous with
            repair", or "auto": of those with about the least modelled time, that which moves
            least. Or the rank of each unit.
        round_tokens: Most tokens of keys and values that a rank receives at a time, at least one
            block; what it needs beyond that comes in later rounds. By default all come at once.
        fetch_cost: For "auto": how long it takes to fetch one block of keys and values of all
            heads, in times to compute one non-zero block of all heads, forward and backward.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names it.
    """
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"mask must be a BlockMask, got {type(mask).__name__}; a pattern makes one of a length"
        )
    if mask.grid.q_len != mask.grid.k_len:
        raise ValueError(f"mask must have as many queries as keys, got {mask.seq_len}")
    units = -(-mask.grid.q_len // max(mask.block_size))
    ranks = _ranks(ranks, units)
    if round_tokens is not None:
        round_tokens = check_integer("round_tokens", round_tokens, least=mask.grid.bk)
    if not fetch_cost > 0:
        raise ValueError(f"fetch_cost must be positive, got {fetch_cost}")
    if not isinstance(strategy, str):
        owner = check_integers("strategy", strategy)
        _check_owner(owner, units, ranks)
        return ContextPlan(mask.to("cpu"), ranks, "own", torch.tensor(owner), round_tokens)
    if strategy not in (*STRATEGIES, "auto"):
        raise ValueError(f"strategy must be auto or one of {[*STRATEGIES]}, got {strategy!r}")
    key = ("context plan", ranks, strategy, round_tokens, float(fetch_cost))
    if key not in mask.cache:
        workload = Workload(mask.to("cpu"))
        owner = None
        if strategy == "auto":
            strategy, owner = _fastest(workload, ranks, fetch_cost)
        else:
            owner = STRATEGIES[strategy](workload, ranks)
        mask.cache[key] = ContextPlan(workload.mask, ranks, strategy, owner, round_tokens)
    return mask.cache[key]


def _fastest(workload: Workload, ranks: int, fetch_cost: float) -> tuple[str, Tensor]:
    """The strategy that moves least of those whose modelled time is about the least."""
    heads, block = workload.mask.num_heads, workload.mask.grid.bk
    assigned = {name: assign(workload, ranks) for name, assign in STRATEGIES.items()}
    found = {name: costs(workload, owner, ranks) for name, owner in assigned.items()}
    times = {name: cost.time(heads, block, fetch_cost) for name, cost in found.items()}
    within = [name for name in times if times[name] <= ABOUT * min(times.values())]
    best = min(within, key=lambda name: int(found[name].traffic.sum()))
    return best, assigned[best]


def _ranks(ranks: int | ProcessGroup | DeviceMesh, units: int) -> int:
    if isinstance(ranks, (ProcessGroup, DeviceMesh)):
        if isinstance(ranks, DeviceMesh) and ranks.ndim != 1:
            raise ValueError(f"ranks must be a mesh of one dimension, got {ranks}")
        ranks = ranks.size()
    ranks = check_integer("ranks", ranks, least=1)
    if ranks > units:
        raise ValueError(f"ranks must be at most the {units} units of the mask, got {ranks}")
    return ranks


def _check_owner(owner: list[int], units: int, ranks: int) -> None:
    if len(owner) != units or set(owner) != set(range(ranks)):
        raise ValueError(
            f"strategy must give each of {units} units one of {ranks} ranks, and each rank a "
            f"unit, got {len(owner)} of {sorted(set(owner))}"
        )


def _moved(record, device: torch.device):
    """A copy of a Round or a Part with its tensors and its mask on the device."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return replace(
        record,
        **{k: v.to(device) for k, v in values.items() if isinstance(v, (Tensor, BlockMask))},
    )


def _as_slice(tokens: Tensor) -> Tensor | slice:
    """Ascending tokens, as a slice where they follow one another: views cost no copy."""
    if not len(tokens):
        return slice(0, 0)
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last + 1 - first == len(tokens) else tokens


def _tokens_of(first: Tensor, count: Tensor) -> Tensor:
    """The `count` numbers from `first` on, block after block."""
    start = torch.cumsum(count, 0) - count
    return torch.arange(int(count.sum())) + torch.repeat_interleave(first - start, count)
