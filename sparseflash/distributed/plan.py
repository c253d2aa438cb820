"""ContextPlan: how a sequence is sharded over ranks, and which key blocks the ranks exchange.

A plan follows from the mask and from the assignment of units to ranks, which `planning` chooses.
So every rank makes the same plan without communication.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import masks
from masks import BlockMask, MaskBatch
from masks._parse import UNREADABLE
from masks.arguments import check_floating_dtype, check_integer, check_integers
from masks.mask_batch import check_block_mask
from masks.registry import Caching
from masks.serialize import read_json
from sparseflash.distributed.assign import NO_ROWS, Split, Workload
from sparseflash.distributed.capture import check_not_captured
from sparseflash.distributed.model import (
    CHOICES,
    can_be_in_place,
    copied_tokens,
    pairwise_distances,
)
from sparseflash.distributed.part import (
    Fetches,
    Heads,
    Part,
    mask_of_heads,
    part_of,
    part_of_batch,
    shared_rows_of,
)
from sparseflash.distributed.plan_arguments import (
    check_owner,
    check_plan_mask,
    checked_rounds,
    checked_rows,
    ranks_of,
    union_of,
)
from sparseflash.distributed.report import Report, report_of
from sparseflash.distributed.traffic import Assignment, Costs

HEADER = "context_plan"  # the key of the safetensors metadata


@dataclass(frozen=True, eq=False, repr=False)
class ContextPlan(Caching):
    """How a sequence is sharded over ranks, and which key blocks the ranks exchange.

    `make_plan` makes it. It refers to no process group: a rank is a number in range(ranks).

    Attributes:
        mask: The mask of the whole sequence, on the CPU.
        ranks: Number of ranks.
        strategy: Name of the strategy that assigned units to ranks; "own" for an assignment by
            the caller.
        owner: int64 (units,), the rank that owns each unit of max(block_size) tokens.
        round_tokens: Largest number of key tokens that a rank receives in a round; None for no
            limit. With split "in place" a round brings all tokens for a group of heads, and at
            most as many bytes as round_tokens tokens have for all heads.
        split: "rows" if rows that attend fetched keys wait for them. "in place" if they do, and
            results are written and keys read where they lie. "keys" if every row attends own keys
            first and fetched keys later, and the results are merged.
        groups: Largest number of groups in which the heads of one mask are fetched if
            round_tokens is None; `head_groups` counts those of a call.
        shared: int64, the block rows that all ranks share: each rank computes their attention to
            its own keys, and the owner of a row merges the results.
        otherwise: With split "in place", (split, groups) of calls that are not computed so.
        batch: The mask of each batch element, on the CPU; `mask` is the union of these masks, by
            which tokens are assigned and keys exchanged. None if all batch elements have `mask`.
    """

    mask: BlockMask
    ranks: int
    strategy: str
    owner: Tensor
    round_tokens: int | None = None
    split: Split = "keys"
    groups: int = 1
    shared: Tensor = NO_ROWS
    otherwise: tuple[Split, int] = ("rows", 1)
    batch: MaskBatch | None = None

    @property
    def seq_len(self) -> int:
        """Number of tokens of the whole sequence."""
        return self.mask.grid.q_len

    def positions(self, rank: int) -> Tensor:
        """Positions in the sequence of the tokens that a rank owns.

        Args:
            rank: Number of the rank, from 0.

        Returns:
            int64 (tokens of the rank,), ascending.
        """
        rank = self._rank(rank)
        if ("positions", rank) not in self.cache:
            unit = self.workload.unit
            with torch.inference_mode(False):  # autograd may save them in a later call
                first = (self.owner == rank).nonzero() * unit
                tokens = (first + torch.arange(unit)).flatten()
                self.cache["positions", rank] = tokens[tokens < self.seq_len]
        return self.cache["positions", rank]

    def shard(self, tensor: Tensor, rank: int, dim: int) -> Tensor:
        """The part of a tensor that belongs to one rank.

        Args:
            tensor: A tensor with all tokens of the sequence along `dim`.
            rank: Number of the rank, from 0.
            dim: The dimension of tokens.

        Returns:
            A copy of the tensor at self.positions(rank) of `dim`.

        Raises:
            TypeError, ValueError: `tensor` does not have seq_len tokens in `dim`, or there is no
                such rank.
        """
        _check_tokens("tensor", tensor, dim, self.seq_len, f"{self.seq_len} tokens")
        return tensor.index_select(dim, self.positions(rank).to(tensor.device))

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The inverse of `shard`, for one process that has the shards of all ranks.

        If each rank has its own shard, use `gather`.

        Args:
            shards: shards[rank] has the tokens of that rank along `dim`.
            dim: The dimension of tokens.

        Returns:
            A tensor with all tokens of the sequence along `dim`.

        Raises:
            TypeError, ValueError: `shards` is not a list of one tensor for each rank, or a tensor
                has another number of tokens than its rank.
        """
        if not isinstance(shards, Sequence):
            raise TypeError(f"shards must be a list of tensors, got {type(shards).__name__}")
        if len(shards) != self.ranks:
            raise ValueError(
                f"shards must have {self.ranks} tensors, one a rank, got {len(shards)}"
            )
        for rank, shard in enumerate(shards):
            self.check_length(f"shards[{rank}]", shard, rank, dim)
        position = torch.cat([self.positions(rank) for rank in range(self.ranks)])
        joined = torch.cat(list(shards), dim)
        return joined.index_select(dim, position.argsort().to(joined.device))

    def check_length(self, name: str, tensor: Tensor, rank: int, dim: int) -> None:
        """Raises ValueError if a tensor does not have as many tokens as a rank owns.

        Args:
            name: Name of the tensor in the message.
            tensor: The tensor that is checked.
            rank: Number of the rank, from 0.
            dim: The dimension of tokens.
        """
        expected = len(self.positions(rank))
        _check_tokens(name, tensor, dim, expected, f"the {expected} tokens of rank {rank}")

    def mask_of(self, rank: int) -> BlockMask:
        """The mask of the queries of one rank and all keys, from which a DynamicMask can select.

        Args:
            rank: Number of the rank, from 0.

        Returns:
            A BlockMask whose block rows are those that the rank owns.
        """
        rank = self._rank(rank)
        if ("mask", rank) not in self.cache:
            every = torch.arange(self.mask.grid.nk)
            self.cache["mask", rank] = self.mask.take_blocks(self._rows(rank), every)
        return self.cache["mask", rank]

    def is_support(self, support: BlockMask, rank: int) -> bool:
        """Whether a mask, on any device, equals mask_of(rank)."""
        key = ("support", rank, support.handle)
        if key not in self.cache:
            self.cache[key] = support.to("cpu") == self.mask_of(rank)
        return self.cache[key]

    @cached_property
    def agreed(self) -> dict[tuple[Any, ...], int]:
        """The numbers of calls of which ranks have compared all arguments; see agreement.py.

        It is not in the cache, which one rank might empty before the others: that rank would wait
        for them to compare.
        """
        return {}

    def part(
        self,
        rank: int,
        device: torch.device | str = "cpu",
        groups: int = 1,
    ) -> Part:
        """The masks and exchanges of one rank, cached for each device.

        Args:
            rank: Number of the rank, from 0.
            device: Device of the tensors of the part.
            groups: Number of groups of heads that are fetched one after another.

        Raises:
            RuntimeError: A CUDA graph is being captured, and the part is not on the device yet.
        """
        rank, device = self._rank(rank), torch.device(device)
        key = ("part", rank, groups)
        if key not in self.cache:
            fetches, shared = self._fetches(groups), None
            if len(self.shared):
                shared = shared_rows_of(self.mask, fetches[0], rank)
            part = part_of(fetches, groups, rank, self.split, shared)
            if self.batch is not None:
                part = part_of_batch(part, self.batch, self.shared)
            self.cache[key] = part
        if (*key, device) not in self.cache:
            check_not_captured(device)  # the part is copied to the device
            self.cache[*key, device] = self.cache[key].to(device)
        return self.cache[*key, device]

    @cached_property
    def not_in_place(self) -> "ContextPlan":
        """The plan for calls that cannot be computed in place, with the same exchange of keys."""
        split, groups = self.otherwise
        return replace(self, split=split, groups=groups).with_assignment(self.assignment)

    def with_assignment(self, assignment: Assignment) -> "ContextPlan":
        """This plan, which keeps an equal assignment, so that nothing is counted again."""
        vars(self)["assignment"] = assignment
        return self

    def of_heads(self, heads: Heads) -> "ContextPlan":
        """The plan of some heads, with the same assignment of tokens.

        Args:
            heads: The heads.

        Returns:
            A plan for the masks of these heads; this object if all heads have one mask.
        """
        if self.mask.num_heads == 1:
            return self
        if ("of heads", heads) not in self.tables:  # as long as the plan: ranks agree on it once
            mask, batch = mask_of_heads(self.mask, heads), self.batch
            if batch is not None:
                elements = [mask_of_heads(batch[index], heads) for index in range(len(batch))]
                batch = MaskBatch.from_masks(elements)
            self.tables["of heads", heads] = replace(self, mask=mask, batch=batch)
        return self.tables["of heads", heads]

    def head_groups(self, kv_heads: int) -> int:
        """The number of groups of key heads that are exchanged one after another.

        If heads have different masks, each key head is a group, so that each one fetches only
        the keys that it needs.

        Args:
            kv_heads: Number of key heads of the call.

        Returns:
            A divisor of kv_heads.

        Raises:
            ValueError: kv_heads does not divide the number of heads of the mask.
        """
        if self.split == "keys":
            return 1
        if self.split == "in place":
            least = min(self.least_head_groups, kv_heads)
            return next(n for n in range(least, kv_heads + 1) if kv_heads % n == 0)
        if self.mask.num_heads == 1:
            return max(n for n in range(1, self.groups + 1) if kv_heads % n == 0)
        if self.mask.num_heads % kv_heads:
            raise ValueError(
                f"kv_heads must divide the {self.mask.num_heads} heads of the mask, got {kv_heads}"
            )
        return kv_heads

    def traffic(self, groups: int = 1) -> Tensor:
        """The number of key tokens that each rank receives from each other in a forward pass.

        Args:
            groups: Number of groups of heads, from head_groups.

        Returns:
            int64 (ranks, ranks). Entry [receiver, sender] is summed over groups of heads; the
            diagonal is 0.
        """
        if groups == 1 or self.mask.num_heads == 1:
            return self.costs.traffic * groups
        return torch.stack([each.costs.traffic for each in self._of_groups(groups)]).sum(0)

    def copied(self, groups: int = 1) -> Tensor:
        """The number of key tokens that each rank copies in a forward pass.

        These are the ones that it packs before it sends them. With split "keys" there are also
        received ones that do not arrive in the order of the sequence, and with split "rows" all
        that waiting rows attend. With round_tokens there may be fewer.

        Args:
            groups: Number of groups of heads, from head_groups.

        Returns:
            int64 (ranks,), summed over groups of heads.
        """
        if groups == 1 or self.mask.num_heads == 1:
            return copied_tokens(self.assignment, self.split) * groups
        found = [copied_tokens(each, self.split) for each in self._of_groups(groups)]
        return torch.stack(found).sum(0)

    @cached_property
    def num_rounds(self) -> int:
        """All-to-alls of one pass for each group of heads, the same on every rank; 0 if no rank
        fetches keys.
        """
        if self._distances:
            return len(self._distances)
        if self.split == "in place":  # round_tokens makes groups of heads
            return int(self.costs.traffic.any())
        return self._least_rounds

    @property
    def least_head_groups(self) -> int:
        """In place: the number of groups of heads in which no rank receives too much at a time.

        A call with fewer key heads is not computed in place.
        """
        return max(self._least_rounds, 1)

    @cached_property
    def _least_rounds(self) -> int:
        """The number of rounds, of tokens or of heads, in which each rank receives its keys."""
        if self.round_tokens is None:
            return int(self.costs.traffic.any())
        most = int(self._fetched.sum(1).max())
        blocks = self.round_tokens // self.mask.grid.bk
        return -(-most // blocks)

    @property
    def fetches_again(self) -> bool:
        """Whether the backward pass fetches keys again, so that two rounds at most are stored."""
        return self.round_tokens is not None and self._least_rounds > 1

    @cached_property
    def _distances(self) -> tuple[int, ...]:
        """Those of pairwise exchanges; empty if there are none."""
        if self.split != "keys" or self.round_tokens is not None:
            return ()
        return pairwise_distances(self.assignment)

    @property
    def workload(self) -> Workload:
        """The mask without shared rows, in the form that the strategies read."""
        return self.assignment.workload

    @property
    def costs(self) -> Costs:
        """What every rank computes, sends and receives."""
        return self.assignment.costs

    @cached_property
    def assignment(self) -> Assignment:
        """The workload and the rank of each unit, from which costs and traffic follow."""
        return Assignment(Workload.of(self.mask, self.shared), self.owner, self.ranks)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan, by which ranks check that their plans are equal."""
        mask, batches = self._stored
        blocks, digest = mask.block_set, hashlib.sha256()
        shape = (mask.seq_len, mask.block_size, mask.head_to_mask, batches)
        digest.update(
            repr((*shape, self.ranks, self.round_tokens, self.split, self.groups)).encode()
        )
        digest.update(repr(self.otherwise).encode())
        tensors = (*blocks.full, blocks.partial, blocks.partial_bit_tile, blocks.bit_tiles)
        for tensor in (*tensors, self.owner, self.shared):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def _stored(self) -> tuple[BlockMask, int]:
        """(the masks from which all others follow, the number of batch elements that have them)"""
        return (self.mask, 1) if self.batch is None else (self.batch.stacked, len(self.batch))

    def report(
        self,
        kv_heads: int = 1,
        head_dim: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        batch: int = 1,
        heads: int | None = None,
        value_dim: int | None = None,
    ) -> Report:
        """Bytes and blocks of every rank, compared with an all-gather and a lower bound.

        Args:
            kv_heads, head_dim, dtype, batch: Sizes and dtype of keys and values.
            heads: Number of query heads, by default kv_heads. It counts if there are shared rows,
                whose queries are sent.
            value_dim: Dims of a value; by default head_dim.

        Returns:
            A Report.

        Raises:
            TypeError, ValueError: An argument is invalid; the message names it.
        """
        heads = kv_heads if heads is None else heads
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "batch": batch, "heads": heads}
        sizes["value_dim"] = value_dim
        for name, size in sizes.items():
            check_integer(name, size, least=1, most=2**31 - 1)
        check_floating_dtype("dtype", dtype)
        queries = batch * heads
        return report_of(self, batch, kv_heads, queries, (head_dim, value_dim), dtype)

    def save(self, path: str | Path) -> None:
        """Writes the plan to a safetensors file. `masks.load` can read the mask from this file, or
        MaskBatch.stacked if each batch element has a mask.

        Args:
            path: The file, which is overwritten if it exists.
        """
        mask, batches = self._stored
        masks.save(mask, path)
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata())
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        header = {"ranks": self.ranks, "strategy": self.strategy, "rounds": self.round_tokens}
        header |= {"split": self.split, "groups": self.groups, "otherwise": self.otherwise}
        header |= {"batches": batches}
        tensors |= {"owner": self.owner, "shared": self.shared}
        save_file(tensors, path, metadata | {HEADER: json.dumps(header)})

    @staticmethod
    def load(path: str | Path) -> "ContextPlan":
        """Reads a plan that `save` wrote.

        Args:
            path: The file.

        Returns:
            The plan.

        Raises:
            ValueError: The file contains no valid plan.
            OSError: The file does not exist or cannot be read.
        """
        mask = masks.load(path)
        try:
            with safe_open(path, framework="pt") as file:
                owner, shared = file.get_tensor("owner"), file.get_tensor("shared")
                header = read_json((file.metadata() or {})[HEADER])
            return _saved_plan(mask, header, owner, shared)
        except (SafetensorError, *UNREADABLE) as error:
            raise ValueError(f"file {path} contains no valid context plan: {error!r}") from error

    def __getstate__(self) -> dict:
        # Pickles and copies have neither the counted traffic nor the calls in the cache.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __repr__(self) -> str:
        report = self.report()
        groups = self.least_head_groups if self.split == "in place" else self.groups
        return (
            f"ContextPlan(ranks={self.ranks}, strategy={self.strategy!r}, "
            f"split={self.split!r}, groups={groups}, rounds={self.num_rounds}, "
            f"round_tokens={self.round_tokens}, "
            f"shared_rows={len(self.shared)}, imbalance={report.imbalance:.2f}, "
            f"moves={report.share:.2%} of an all-gather, at least {report.least_share:.2%}, "
            f"mask={self.mask if self.batch is None else self.batch})"
        )

    @cached_property
    def _fetched(self) -> Tensor:
        """bool (ranks, nk): the key blocks that each rank receives."""
        return self.assignment.fetched()

    def _fetches(self, groups: int) -> list[Fetches]:
        """What ranks fetch for all heads, or for each group if heads have different masks."""
        if groups == 1 or self.mask.num_heads == 1:
            rounds = (self.num_rounds, self._distances)
            return [Fetches(self.workload, self.owner, self._fetched, *rounds)]
        if ("fetches", groups) not in self.cache:
            each = [(assigned, assigned.fetched()) for assigned in self._of_groups(groups)]
            self.cache["fetches", groups] = [
                Fetches(assigned.workload, self.owner, fetched, int(fetched.any()))
                for assigned, fetched in each
            ]
        return self.cache["fetches", groups]

    def _of_groups(self, groups: int) -> list[Assignment]:
        """The assignment of each group of heads."""
        if ("assignments", groups) not in self.cache:
            of_heads = (mask_of_heads(self.mask, Heads(n, groups)) for n in range(groups))
            self.cache["assignments", groups] = [
                Assignment(Workload(mask, self.shared), self.owner, self.ranks)
                for mask in of_heads
            ]
        return self.cache["assignments", groups]

    def _rank(self, rank: int) -> int:
        return check_integer("rank", rank, least=0, most=self.ranks - 1)

    def _rows(self, rank: int) -> Tensor:
        return (self.owner[self.workload.rows] == rank).nonzero().flatten()


def _saved_plan(mask: Any, saved: Mapping[str, Any], owner: Tensor, shared: Tensor) -> ContextPlan:
    """The plan in the contents of a file. Raises if a part is missing or invalid."""
    check_block_mask(mask)
    batch = None
    if (batches := check_integer("batches", saved.get("batches", 1), least=1)) > 1:
        batch = MaskBatch(mask, batches)
        mask = union_of(batch)
    check_plan_mask(mask)
    chosen = saved["split"], check_integer("groups", saved["groups"])
    otherwise = tuple(saved.get("otherwise", ("rows", 1)))
    not_in_place = tuple(choice for choice in CHOICES if choice[0] != "in place")
    workload = Workload(mask)
    allowed = CHOICES if can_be_in_place(workload) and batch is None else not_in_place
    for name, each, choices in (
        ("split and groups", chosen, allowed),
        ("otherwise", otherwise, not_in_place),
    ):
        if each not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {each}")
    rounds = checked_rounds(saved["rounds"], chosen[0], mask)
    if chosen[0] == "in place":  # calls that are not computed so have the same limit
        checked_rounds(rounds, otherwise[0], mask)
    units, numbers = workload.units, check_integers("owner", owner)
    ranks = ranks_of(saved["ranks"], units)
    check_owner(numbers, units, ranks)
    rows = torch.tensor(checked_rows(shared, mask.grid.nq), dtype=torch.int64)
    name = str(saved["strategy"])
    assigned = (mask, ranks, name, torch.tensor(numbers), rounds)
    return ContextPlan(*assigned, *chosen, rows, otherwise, batch)


def _check_tokens(name: str, tensor: Any, dim: Any, count: int, tokens: str) -> None:
    """Raises if a tensor does not have `count` tokens, described by `tokens`, along `dim`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    dim = check_integer("dim", dim, least=-tensor.dim(), most=tensor.dim() - 1)
    if tensor.shape[dim] != count:
        raise ValueError(f"{name} must have {tokens} in dim {dim}, got {tuple(tensor.shape)}")
