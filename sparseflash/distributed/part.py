"""The part of one rank in a plan: the masks of its calls, and the exchanges between them.

split="in place"   as by rows, but all results are written, and all keys read, where they lie
split="rows"   ready rows attend own keys during the exchange; after it, waiting rows attend own
               and fetched keys in one call, one group of heads after another
split="keys"   all rows attend own keys during the first exchange, then fetched keys round by
               round, and the results are merged by LSE
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

import masks
from masks import BlockMask, MaskBatch
from masks._core.grid import Grid
from masks._core.intervals import Runs, union
from masks.lookup_table import moved
from sparseflash.dispatch.call import Positions
from sparseflash.distributed.assign import Split, Workload
from sparseflash.distributed.exchange import Splits

# The most chunks of the keys of shared rows, or of the queries of heavy keys, and the least blocks
# of one: with 16 heads there are enough work tiles for a GPU, and most of the time of a tile is
# neither prologue nor epilogue.
MAX_CHUNKS, CHUNK_BLOCKS = 32, 16
# In place, a received key block is heavy if at least HEAVY_BLOCKS own block rows attend it, and if
# it has more than 1 / TILES of all blocks of received keys. It is one work tile of each key head.
HEAVY_BLOCKS, TILES = 64, 8
# By keys, all rows attend the keys of a round if 1 / SCATTERED of them or more do, and are
# not consecutive: empty rows take less time than copies of queries, results and gradients.
SCATTERED = 4
Tokens = Tensor | slice  # indices of tokens: int64, or a slice if they are consecutive


class Heads(NamedTuple):
    """Group `number` of `groups` equal groups of heads."""

    number: int = 0
    groups: int = 1

    def of(self, count: int) -> slice:
        """The indices of these heads among `count` heads; a single head applies to all groups."""
        if count == 1:
            return slice(None)
        return slice(*(count * i // self.groups for i in (self.number, self.number + 1)))

    @staticmethod
    def of_each(tensor: Tensor, groups: int) -> tuple[Tensor, ...]:
        """Views of the heads of each of `groups` groups, in one call of torch."""
        heads = tensor.shape[1]
        return (tensor,) * groups if heads == 1 else tensor.split(heads // groups, 1)


@dataclass(frozen=True, eq=False)
class Round:
    """One all-to-all of keys and values, and the attention of one rank to the received keys.

    Attributes:
        send: For each rank, the own tokens that are sent to it.
        splits: Number of tokens that each rank sends to each other one.
        columns: int64 (blocks,), ascending: key blocks of the sequence that are attended. These
            are the received ones and, with split="rows", the own ones of waiting rows.
        received_at: Index among the tokens of `columns` of each received token, in the order in
            which they arrive.
        own: Own tokens that belong to `columns`.
        own_at: Index of each of them among the tokens of `columns`.
        rows: int64, ascending: the own block rows of `mask`. Those that attend `columns`, or all.
        positions: Positions of these rows and columns in the sequence.
        queries: Own tokens of `rows`.
        attending: Own tokens of the rows that attend `columns`: those whose results are merged.
        attending_at: Index of each of them among `queries`.
        mask: The mask of these queries and keys; None if no query attends any key.
        packed: The tokens of `send`, those of one rank after those of another.
    """

    send: tuple[Tokens, ...]
    splits: Splits
    columns: Tensor
    received_at: Tokens
    own: Tokens
    own_at: Tokens
    rows: Tensor
    positions: Positions
    queries: Tokens
    attending: Tokens
    attending_at: Tokens
    mask: BlockMask | MaskBatch | None
    packed: Tokens

    @property
    def received(self) -> int:
        """Number of tokens that are received."""
        return sum(self.splits.receive)

    @cached_property
    def attended(self) -> int:
        """Number of key tokens that are attended."""
        return self.received + count(self.own)

    @property
    def arrives_in_order(self) -> bool:
        """Whether the received tokens are all that are attended, and in this order."""
        return isinstance(self.received_at, slice) and not count(self.own)

    def to(self, device: torch.device) -> "Round":
        send = tuple(x.to(device) if isinstance(x, Tensor) else x for x in self.send)
        return replace(moved(self, device), send=send)


@dataclass(frozen=True, eq=False)
class HeavyKeys:
    """Received key blocks that nearly all own rows attend, as those of global tokens.

    The kernel of dK and dV has one work tile for such a block and head, which takes so long that
    most multiprocessors would be idle. So the queries are divided into chunks.

    Attributes:
        tokens: Index of their tokens among received ones, as they arrive.
        chunks: Number of equal chunks of the own queries.
        mask: The masks of the queries of each chunk and these keys, or the one that all have.
    """

    tokens: Tokens
    chunks: int
    mask: BlockMask | MaskBatch

    def to(self, device: torch.device) -> "HeavyKeys":
        return moved(self, device)


@dataclass(frozen=True, eq=False)
class InPlace:
    """The masks of a rank that computes each row once and copies neither rows nor own keys.

    Attributes:
        ready: The mask of own rows and own keys where only ready rows attend; None if none does.
        every: The mask of own rows and all keys that they attend, own and received ones; None if
            no pair attends.
        waiting: The same where only waiting rows attend; None if there are none.
        order: int64, where each key block of `every` lies: own ones, then received ones.
        received_order: int64, where each key block of the round lies among received ones.
        heavy: The heavy ones among received key blocks; None if there are none.
        light: The mask of the round without heavy key blocks; None if no other pair attends.
        has_empty_rows: Whether an own row that is not shared attends nothing.
    """

    ready: BlockMask | None
    every: BlockMask | None
    waiting: BlockMask | None
    order: Tensor
    received_order: Tensor
    heavy: HeavyKeys | None
    light: BlockMask | None
    has_empty_rows: bool

    def to(self, device: torch.device) -> "InPlace":
        return moved(self, device)


class Step(NamedTuple):
    """A round, and the heads for which it is run."""

    round: Round
    heads: Heads


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Block rows that all ranks share, for one rank.

    Attributes:
        own: Own tokens of these rows.
        own_tokens: Number of own tokens of these rows.
        tokens: Number of tokens of these rows that each rank owns.
        order: int64: for each token of these rows, in the order of the sequence, its index if the
            tokens are ordered by rank.
        positions: Positions of these rows and of the own columns in the sequence.
        mask: The mask of all these rows and the own keys.
        chunks: Number of equal chunks of the own keys. A row is one work tile of each head, which
            leaves most multiprocessors idle; the attention to each chunk is one of its own.
        mask_of_chunks: The masks of all these rows and each chunk, or the one that all have.
    """

    own: Tokens
    own_tokens: int
    tokens: list[int]
    order: Tensor
    positions: Positions
    mask: BlockMask | MaskBatch
    chunks: int
    mask_of_chunks: BlockMask | MaskBatch

    def to(self, device: torch.device) -> "SharedRows":
        return moved(self, device)


@dataclass(frozen=True, eq=False)
class Part:
    """The masks and exchanges of one rank.

    Attributes:
        rows, columns: int64, block rows and block columns of the sequence that it owns.
        positions: Their positions in the sequence.
        mask: The mask of its queries and its own keys. With split="rows" the waiting rows are
            empty. None if no pair attends.
        rounds: The exchanges.
        order: The order of rounds: index and heads of each, as many on every rank.
        gradients_per_key: Largest number of gradients that are added for one of its keys.
        shared: The rows that all ranks share; None if there are none.
        in_place: Further masks if split="in place", else None.
    """

    rows: Tensor
    columns: Tensor
    positions: Positions
    mask: BlockMask | MaskBatch | None
    rounds: tuple[Round, ...]
    order: tuple[tuple[int, Heads], ...]
    gradients_per_key: int
    shared: SharedRows | None
    in_place: InPlace | None = None

    @cached_property
    def steps(self) -> list[Step]:
        """The rounds in the order in which they run."""
        return [Step(self.rounds[index], heads) for index, heads in self.order]

    def to(self, device: torch.device) -> "Part":
        rounds = tuple(each.to(device) for each in self.rounds)
        return replace(moved(self, device), rounds=rounds)


@dataclass(frozen=True, eq=False)
class Fetches:
    """Which key blocks ranks fetch for the heads of one mask, and in how many rounds.

    Attributes:
        workload: The mask in the form that the strategies read.
        owner: int64 (units,), the rank that owns each unit.
        fetched: bool (ranks, nk), the key blocks that each rank receives.
        num_rounds: Number of all-to-alls, the same on every rank.
        distances: Those of pairwise exchanges: in round n rank r receives from rank
            r ^ distances[n] only. Empty if each round brings keys of several ranks.
    """

    workload: Workload
    owner: Tensor
    fetched: Tensor
    num_rounds: int
    distances: tuple[int, ...] = ()

    def round(self, rank: int, number: int, split: Split) -> Round:
        """Round `number` of a rank."""
        by_rows, in_place = split == "rows", split == "in place"
        tokens, grid = self.workload.column_tokens, self.workload.mask.grid
        of_rank = self.columns_of(rank)
        own_first = torch.zeros(grid.nk, dtype=torch.int64)
        own_first[of_rank] = torch.cumsum(tokens[of_rank], 0) - tokens[of_rank]
        of_ranks = [self._received(receiver, number) for receiver in range(len(self.fetched))]
        sent = []
        for columns in of_ranks:
            columns = columns[self._owner_of(columns) == rank]
            sent.append(_tokens_of(own_first[columns], tokens[columns]))
        received = of_ranks[rank]
        counts = torch.zeros(2 * [len(self.fetched)], dtype=torch.int64)
        for receiver, columns in enumerate(of_ranks):
            counts[:, receiver].index_add_(0, self._owner_of(columns), tokens[columns])
        rows = self._attending(rank, received.sort().values)
        own_columns = received[:0]
        if by_rows and len(rows):
            own_columns = self._own_columns_of(rank, rows)
        attending = self._queries_of(rank, rows)
        attending_at: Tokens = slice(0, count(attending))
        own_rows = torch.arange(len(self.rows_of(rank)))
        many = len(rows) * SCATTERED >= len(own_rows) and not _consecutive(rows)
        if in_place or (not by_rows and many):
            rows, attending_at = own_rows, attending
        columns, order = torch.cat([received, own_columns]).sort()
        first = torch.empty_like(columns)
        first[order] = torch.cumsum(tokens[columns], 0) - tokens[columns]
        positions = [_tokens_of(first[: len(received)], tokens[received])]
        if in_place:  # as they arrive
            positions = [torch.arange(len(positions[0]))]
        positions.append(_tokens_of(first[len(received) :], tokens[own_columns]))
        numbers = self.rows_of(rank)[rows]
        return Round(
            send=tuple(map(_as_slice, sent)),
            splits=Splits(rank, counts.tolist()),
            columns=columns,
            received_at=_as_slice(positions[0]),
            own=_as_slice(_tokens_of(own_first[own_columns], tokens[own_columns])),
            own_at=_as_slice(positions[1]),
            rows=rows,
            positions=_positions(grid, numbers, columns),
            queries=self._queries_of(rank, rows),
            attending=attending,
            attending_at=attending_at,
            mask=self._mask_of(numbers, columns),
            packed=_as_slice(torch.cat(sent)),
        )

    def in_place(self, rank: int) -> InPlace:
        """The masks of a rank that are not among those of its round, if all blocks are whole."""
        numbers, own = self.rows_of(rank), self.columns_of(rank)
        received = self._received(rank, 0) if self.num_rounds else own[:0]
        ready = self.ready_rows(rank)
        columns, order = torch.cat([own, received]).sort()
        every, of_own = self._mask_of(numbers, columns), self._mask_of(numbers, own)
        waits = torch.ones(len(numbers), dtype=torch.bool).index_fill_(0, ready, False)
        attend = torch.isin(numbers, self.workload.shared)  # their results come from all ranks
        if every is not None:
            attend |= every.blocks_per_row().sum(0) > 0
        of_received = self._mask_of(numbers, received.sort().values)
        received_order = received.argsort()
        heavy, light = None, of_received
        if of_received is not None:
            heavy, light = _heavy_keys(of_received, received_order)
        return InPlace(
            ready=_with_rows(of_own, ready),
            every=every,
            waiting=_with_rows(every, waits.nonzero().flatten()),
            order=order,
            received_order=received_order,
            heavy=heavy,
            light=light,
            has_empty_rows=not bool(attend.all()),
        )

    def _mask_of(self, rows: Tensor, columns: Tensor) -> BlockMask | None:
        """The mask of some block rows and block columns; None if no pair attends."""
        if not len(rows) or not len(columns):
            return None
        mask = self.workload.mask.take_blocks(rows, columns)
        return mask if mask.nnz_blocks else None

    def ready_rows(self, rank: int) -> Tensor:
        """int64: the own block rows of a rank that attend no fetched key."""
        ready = torch.ones(len(self.rows_of(rank)), dtype=torch.bool)
        ready[self._attending(rank, self.fetched[rank].nonzero().flatten())] = False
        return ready.nonzero().flatten()

    def rows_of(self, rank: int) -> Tensor:
        """int64: the block rows that a rank owns."""
        return (self.owner[self.workload.rows] == rank).nonzero().flatten()

    def columns_of(self, rank: int) -> Tensor:
        """int64: the block columns that a rank owns."""
        return (self.owner[self.workload.columns] == rank).nonzero().flatten()

    def _owner_of(self, columns: Tensor) -> Tensor:
        return self.owner[self.workload.columns[columns]]

    def _received(self, rank: int, number: int) -> Tensor:
        """The key blocks that a rank receives in one round, in the order of arrival."""
        columns = self.fetched[rank].nonzero().flatten()
        if self.distances:
            return columns[self._owner_of(columns) == rank ^ self.distances[number]]
        # A rank starts with the keys of the next rank, so that not all ranks need the same sender.
        distance = (self._owner_of(columns) - rank - 1) % len(self.fetched)
        columns = columns[torch.argsort(distance, stable=True)]
        bounds = [len(columns) * i // self.num_rounds for i in (number, number + 1)]
        columns = columns[bounds[0] : bounds[1]].sort().values
        return columns[torch.argsort(self._owner_of(columns), stable=True)]

    def _attending(self, rank: int, columns: Tensor) -> Tensor:
        """The own block rows that attend any of the columns."""
        own = self.rows_of(rank)
        if not len(columns):
            return own[:0]
        mask = self.workload.mask.take_blocks(own, columns)
        return mask.blocks_per_row().sum(0).nonzero().flatten()

    def _own_columns_of(self, rank: int, rows: Tensor) -> Tensor:
        """The own block columns that any of the given own block rows attends."""
        own, numbers = self.columns_of(rank), self.rows_of(rank)[rows]
        mask = self.workload.mask.take_blocks(numbers, own)
        _, begin, end = Workload(mask).spans
        return own[union(Runs(begin, end)).to_bool(mask.grid.nk)]

    def _queries_of(self, rank: int, rows: Tensor) -> Tokens:
        grid = self.workload.mask.grid
        queries = (rows.unsqueeze(1) * grid.bq + torch.arange(grid.bq)).flatten()
        own = self.rows_of(rank)
        missing = grid.nq * grid.bq - grid.q_len if own[-1] == grid.nq - 1 else 0
        return _as_slice(queries[queries < len(own) * grid.bq - missing])


def _with_rows(mask: BlockMask | None, rows: Tensor) -> BlockMask | None:
    """The mask of some rows; None if no pair attends."""
    some = None if mask is None or not len(rows) else mask.keep_rows(rows)
    return some if some is not None and some.nnz_blocks else None


def _heavy_keys(mask: BlockMask, order: Tensor) -> tuple[HeavyKeys | None, BlockMask | None]:
    """(heavy key blocks of the mask of a round, the mask without them); see InPlace.

    Args:
        mask: Own rows and received key blocks, all of them whole.
        order: int64, where each key block lies.
    """
    rows, by_key = mask.grid.nq, mask.T
    blocks, chunks = by_key.blocks_per_row().sum(0), _chunks(rows, True)
    is_heavy = (blocks >= HEAVY_BLOCKS) & (blocks * TILES > blocks.sum())
    heavy, light = (each.nonzero().flatten() for each in (is_heavy, ~is_heavy))
    if chunks == 1 or not len(heavy):
        return None, mask
    of_chunks = [mask.take_blocks(each, heavy) for each in torch.arange(rows).chunk(chunks)]
    equal = all(each == of_chunks[0] for each in of_chunks)
    side = mask.grid.bk
    found = HeavyKeys(
        tokens=_as_slice(_tokens_of(order[heavy] * side, torch.full_like(heavy, side))),
        chunks=chunks,
        mask=of_chunks[0] if equal else MaskBatch.from_masks(of_chunks),
    )
    of_others = _with_rows(by_key, light)
    return found, None if of_others is None else of_others.T


def shared_rows_of(mask: BlockMask, fetches: Fetches, rank: int) -> SharedRows:
    """The shared block rows of the mask of the whole sequence, for one rank."""
    grid, workload = mask.grid, fetches.workload
    shared, sizes = workload.shared, workload.shared_tokens
    owner = fetches.owner[workload.rows[shared]]
    by_owner = torch.argsort(owner, stable=True)
    first = torch.empty_like(sizes)
    first[by_owner] = torch.cumsum(sizes[by_owner], 0) - sizes[by_owner]
    rows = torch.searchsorted(fetches.rows_of(rank), shared[owner == rank])
    own, columns = _tokens_of(rows * grid.bq, sizes[owner == rank]), fetches.columns_of(rank)
    ranks = len(fetches.fetched)
    tokens = torch.zeros(ranks, dtype=torch.int64).index_add_(0, owner, sizes)
    chunks = _chunks(len(columns), bool((workload.column_tokens[columns] == grid.bk).all()))
    of_chunks = [mask.take_blocks(shared, each) for each in columns.chunk(chunks)]
    equal = all(each == of_chunks[0] for each in of_chunks)
    return SharedRows(
        own=_as_slice(own),
        own_tokens=len(own),
        tokens=tokens.tolist(),
        order=_tokens_of(first, sizes),
        positions=_positions(grid, shared, columns),
        mask=mask.take_blocks(shared, columns),
        chunks=chunks,
        mask_of_chunks=of_chunks[0] if equal else MaskBatch.from_masks(of_chunks),
    )


def _chunks(blocks: int, whole: bool) -> int:
    """The most equal chunks of so many blocks; 1 if a block is clipped."""
    most = min(MAX_CHUNKS, blocks // CHUNK_BLOCKS) if whole else 1
    return next((n for n in range(most, 1, -1) if blocks % n == 0), 1)


def part_of(
    fetches: Sequence[Fetches], groups: int, rank: int, split: Split, shared: SharedRows | None
) -> Part:
    """The part of a rank; `fetches` has an entry for each group of heads, or one for all."""
    grid, rounds, order = fetches[0].workload.mask.grid, [], []
    for number, each in enumerate(fetches):
        head_groups = range(groups) if len(fetches) == 1 else (number,)
        own_rounds = range(len(rounds), len(rounds) + each.num_rounds)
        order += [(index, Heads(group, groups)) for group in head_groups for index in own_rounds]
        rounds += [each.round(rank, n, split) for n in range(each.num_rounds)]
    rows, columns = fetches[0].rows_of(rank), fetches[0].columns_of(rank)
    mask = _own_mask(fetches, rank, split == "rows")
    tokens = int(fetches[0].workload.column_tokens[columns].sum())
    gradients = torch.full((groups, tokens), int(mask is not None) + int(shared is not None))
    for index, heads in order:
        for keys in (*rounds[index].send, rounds[index].own):
            gradients[heads.number, keys] += 1
    return Part(
        rows=rows,
        columns=columns,
        positions=_positions(grid, rows, columns),
        mask=mask,
        rounds=tuple(rounds),
        order=tuple(order),
        gradients_per_key=int(gradients.max()),
        shared=shared,
        in_place=fetches[0].in_place(rank) if split == "in place" else None,
    )


def part_of_batch(part: Part, batch: MaskBatch, shared: Tensor) -> Part:
    """The part of a rank with a mask for each batch element.

    Args:
        part: The part for the union of their masks: the same rows, keys and exchanges.
        batch: The masks of the whole sequence.
        shared: int64, the block rows that all ranks share.
    """
    whole = [batch[index] for index in range(len(batch))]
    without_shared = [Workload.of(mask, shared).mask for mask in whole]

    def masks_of(each: list[BlockMask], rows: Tensor, columns: Tensor) -> list[BlockMask]:
        return [mask.take_blocks(rows, columns) for mask in each]

    mask, rounds, of_shared = part.mask, [*part.rounds], part.shared
    if isinstance(mask, BlockMask):  # it has no waiting rows with split="rows"
        own = masks_of(without_shared, part.rows, part.columns)
        mask = MaskBatch.from_masks([each & mask for each in own])
    for index, heads in part.order:
        here = rounds[index]
        if isinstance(here.mask, BlockMask):  # else it was replaced for the heads before
            of_heads = [mask_of_heads(each, heads) for each in without_shared]
            own = masks_of(of_heads, part.rows[here.rows], here.columns)
            rounds[index] = replace(here, mask=MaskBatch.from_masks(own))
    if of_shared is not None:
        found = MaskBatch.from_masks(masks_of(whole, shared, part.columns))
        of_shared = replace(of_shared, mask=found, chunks=1, mask_of_chunks=found)
    return replace(part, mask=mask, rounds=tuple(rounds), shared=of_shared)


def mask_of_heads(mask: BlockMask, heads: Heads) -> BlockMask:
    """The mask of some heads; the mask itself if it has one head, which applies to all."""
    if mask.num_heads == 1:
        return mask
    indices = range(mask.num_heads)[heads.of(mask.num_heads)]
    return masks.stack([mask.head(head) for head in indices])


def _own_mask(fetches: Sequence[Fetches], rank: int, by_rows: bool) -> BlockMask | None:
    """The mask of a Part, for the heads of all `fetches`."""
    of_heads: list[BlockMask] = []
    for each in fetches:
        mask = each.workload.mask.take_blocks(each.rows_of(rank), each.columns_of(rank))
        if by_rows:
            ready = each.ready_rows(rank)
            mask = mask.keep_rows(ready) if len(ready) else mask - mask
        if len(fetches) == 1:
            return mask if mask.nnz_blocks else None
        of_heads += map(mask.head, range(mask.num_heads))
    stacked = masks.stack(of_heads)
    return stacked if stacked.nnz_blocks else None


def _positions(grid: Grid, rows: Tensor, columns: Tensor) -> Positions:
    return Positions(rows * grid.bq, columns * grid.bk, grid.q_len)


def _as_slice(tokens: Tensor) -> Tokens:
    """Tokens as a slice if they are consecutive: indexing by a slice makes a view, not a copy."""
    if not len(tokens):
        return slice(0, 0)
    first = int(tokens[0])
    return slice(first, first + len(tokens)) if _consecutive(tokens) else tokens


def _consecutive(numbers: Tensor) -> bool:
    return bool((numbers.diff() == 1).all())


def count(tokens: Tokens) -> int:
    """The number of tokens."""
    return len(tokens) if isinstance(tokens, Tensor) else tokens.stop - tokens.start


def _tokens_of(first: Tensor, count: Tensor) -> Tensor:
    """The concatenation of arange(first, first + count) of each block."""
    start = torch.cumsum(count, 0) - count
    return torch.arange(int(count.sum())) + torch.repeat_interleave(first - start, count)


def in_chunks(tensor: Tensor, chunks: int) -> Tensor:
    """A view of (1, heads, tokens, dims) as (chunks, heads, tokens / chunks, dims)."""
    if chunks == 1:
        return tensor
    return tensor[0].unflatten(1, (chunks, -1)).transpose(0, 1)


def repeated(tensor: Tensor, chunks: int) -> Tensor:
    """A tensor (1, ...) once for each chunk."""
    return tensor if chunks == 1 else tensor.expand(chunks, *tensor.shape[1:]).contiguous()
