"""The graph of a stack of masks: vertices are classes of tokens, edges are ranges of classes.

Classes are numbered block after block, so that a run of full blocks is a range of classes, and so
is a run of bits in a row of a bit tile:

    causal, blocks of 4, 8 tokens           full() outside, blocks of 4

    class    0 1 2 3 | 4 5 6 7              class   0 | 1
    row 5    full range  [0, 4) of its block row    row 0    full range [0, 2)
             partial range [4, 6) of its class
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np
import torch

from masks._core.bit_tiles import deduplicate, pack, unpack
from masks._core.block_set import BlockSet
from masks.arguments import check_memory
from masks.block_mask import BlockMask
from masks.patterns import causal

WORDS_AT_ONCE = 1 << 22  # words of 64 bits that are gathered at a time
BYTES_OF_RANGE = 96  # in partial blocks, with the temporaries


class Ranges(NamedTuple):
    """Ranges [begin, end) of classes, with the row that each belongs to, ascending; int64."""

    row: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class _Level(NamedTuple):
    """The ranges of 2**k to 2**(k + 1) - 1 classes, each as the union of two ranges of 2**k.

    Args:
        row: Rows that have such ranges, ascending.
        start: For each of these rows the index of its first range.
        first: For each range the begin of the first of its two ranges of 2**k classes.
        second: For each range the begin of the second one.
    """

    row: np.ndarray
    start: np.ndarray
    first: np.ndarray
    second: np.ndarray


@dataclass(frozen=True)
class Layer:
    """The edges of one mask.

    Attributes:
        block_of_class: int64 (classes,), the block of each class.
        full: Ranges that all classes of a block row attend, in full blocks and in partial blocks
            whose rows are equal. Rows are block rows.
        partial: Ranges that a class attends in other partial blocks. Rows are classes.
        attends_itself: bool (classes,), whether a token of the class attends itself.
    """

    block_of_class: np.ndarray
    full: Ranges
    partial: Ranges
    attends_itself: np.ndarray

    @cached_property
    def _full_levels(self) -> list[_Level]:
        return _levels(self.full)

    @cached_property
    def _partial_levels(self) -> list[_Level]:
        return _levels(self.partial)

    def attended_bits(self, bits: np.ndarray) -> np.ndarray:
        """The OR of `bits` over the classes that each class attends: uint64 (classes, words)."""
        blocks = int(self.block_of_class[-1]) + 1
        by_block = _union_of_ranges(bits, self._full_levels, blocks)
        by_class = _union_of_ranges(bits, self._partial_levels, len(bits))
        return np.bitwise_or(by_class, by_block[self.block_of_class], out=by_class)

    def attended_sums(self, values: np.ndarray) -> np.ndarray:
        """The sum of `values` over the classes that each class attends: (classes,)."""
        before = np.concatenate([[0], np.cumsum(values)])
        blocks = int(self.block_of_class[-1]) + 1
        by_block, by_class = (
            np.bincount(r.row, before[r.end] - before[r.begin], rows)
            for r, rows in ((self.full, blocks), (self.partial, len(values)))
        )
        return by_block[self.block_of_class] + by_class

    def attending_sums(self, values: np.ndarray) -> np.ndarray:
        """The sum of `values` over the classes that attend each class: (classes,)."""
        change = np.zeros(len(values) + 1)
        for ranges, value in (
            (self.full, np.bincount(self.block_of_class, values)),
            (self.partial, values),
        ):
            np.add.at(change, ranges.begin, value[ranges.row])
            np.subtract.at(change, ranges.end, value[ranges.row])
        return np.cumsum(change)[:-1]


@dataclass(frozen=True)
class TokenGraph:
    """The classes of tokens, and the edges of every layer.

    Attributes:
        tokens: Length of the sequence.
        class_of_token: int64 (tokens,). Classes of later blocks have higher numbers.
        weight: int64 (classes,), the number of tokens of each class.
        layers: The edges of each layer, from the input on. Equal masks share one object.
    """

    tokens: int
    class_of_token: np.ndarray
    weight: np.ndarray
    layers: list[Layer]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.weight)


def union_heads(mask: BlockMask) -> BlockMask:
    """The mask of the pairs that any head attends, on the CPU."""
    firsts = [mask.head_to_mask.index(m) for m in range(mask.num_masks)]
    return reduce(lambda a, b: a | b, (mask.head(h) for h in firsts)).to("cpu")


def is_causal(masks: Sequence[BlockMask]) -> bool:
    """Whether no query of any mask attends a key after it."""
    return all(
        (mask - causal()(mask.seq_len, mask.block_size, mask.device)).nnz_blocks == 0
        for mask in dict.fromkeys(masks)
    )


def token_graph(masks: Sequence[BlockMask]) -> TokenGraph:
    """The graph of the masks of consecutive layers.

    Args:
        masks: One mask for each layer, at least 1, square and of one length.

    Raises:
        ValueError: A mask is not square, or lengths differ.
    """
    _check(masks)
    side = min(min(mask.block_size) for mask in masks)
    distinct = {mask: union_heads(mask).reblock(side).block_set for mask in dict.fromkeys(masks)}
    sets = list(distinct.values())
    first = _first_tokens_of_classes(sets)
    tokens = masks[0].seq_len[0]
    number = np.cumsum(first.is_first) - 1
    class_of_token = number[first.token][:tokens]
    is_first = first.is_first.reshape(-1, side)
    start = np.concatenate([[0], np.cumsum(is_first.sum(1))])
    built = {mask: _layer(blocks, is_first, start) for mask, blocks in distinct.items()}
    return TokenGraph(
        tokens,
        class_of_token,
        np.bincount(class_of_token, minlength=int(start[-1])),
        [built[mask] for mask in masks],
    )


def as_list(masks: BlockMask | Sequence[BlockMask]) -> list[BlockMask]:
    """One mask or several as a list. Raises TypeError for other types, ValueError for no mask."""
    given = [masks] if isinstance(masks, BlockMask) else masks
    if not isinstance(given, Sequence) or not all(isinstance(m, BlockMask) for m in given):
        raise TypeError(f"masks must be a BlockMask or a list of them, got {masks!r}")
    if not given:
        raise ValueError("masks must have at least 1 entry, got none")
    return list(given)


def _check(masks: Sequence[BlockMask]) -> None:
    lengths = sorted({length for mask in masks for length in mask.seq_len})
    if len(lengths) > 1:
        raise ValueError(
            f"masks must have as many keys as queries, and all the same length, got {lengths}"
        )


class _FirstTokens(NamedTuple):
    """For each token, also past the end: the first token of its class; whether it is the first."""

    token: np.ndarray
    is_first: np.ndarray


def _first_tokens_of_classes(sets: Sequence[BlockSet]) -> _FirstTokens:
    """The classes of tokens: equal rows and equal columns in the bit tiles of all partial blocks.

    Rows and columns are compared by a 64-bit hash, the sum of hash64(partial block, row of its bit
    tile). Two different tokens have equal hashes with a probability of 2**-64.
    """
    g = sets[0].grid
    sums = np.zeros((g.nq, g.bq), dtype=np.uint64)
    next_number = 1
    for blocks in sets:
        _, row, column = (t.numpy() for t in g.locate(blocks.partial))
        tile = blocks.partial_bit_tile.numpy()
        by_key = pack(unpack(blocks.bit_tiles, g.bk).mT)
        for tiles, block in ((blocks.bit_tiles, row), (by_key, column)):
            kinds = deduplicate(tiles.flatten(0, 1))[1].view(tiles.shape[:2])
            kind = kinds.numpy().astype(np.uint64)
            number = np.arange(next_number, next_number + len(tile), dtype=np.uint64)[:, None]
            next_number += len(tile)
            parts = 1 + len(tile) * g.bq // WORDS_AT_ONCE
            for part in np.array_split(np.arange(len(tile)), parts):
                values = _hash64((number[part] << np.uint64(32)) + kind[tile[part]])
                np.add.at(sums, block[part], values)
    inside = (np.arange(g.nq * g.bq) < g.q_len).reshape(sums.shape)
    order = np.lexsort((np.where(inside, sums, 0), ~inside), axis=1)
    ordered, ordered_inside = (np.take_along_axis(a, order, 1) for a in (sums, inside))
    starts_class = np.ones_like(inside)
    starts_class[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]) | (
        ordered_inside[:, 1:] != ordered_inside[:, :-1]
    )
    head = np.maximum.accumulate(np.where(starts_class, np.arange(g.bq), 0), axis=1)
    first = np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, head, 1), 1)
    token = (first + np.arange(g.nq)[:, None] * g.bq).ravel()
    is_first = (token == np.arange(len(token))) & inside.ravel()
    return _FirstTokens(token, is_first)


def _hash64(x: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea, Flood 2014): a hash of 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _layer(blocks: BlockSet, is_first: np.ndarray, start: np.ndarray) -> Layer:
    g = blocks.grid
    _, row, first, last = (t.numpy() for t in g.locate_runs(blocks.full))
    by_row, by_class = _partial_ranges(blocks, is_first, start)
    full = _sorted(
        *map(np.concatenate, zip((row, start[first], start[last]), by_row, strict=True))
    )
    block_of_class = np.repeat(np.arange(g.nq), np.diff(start))
    codes = blocks.tile_codes(g.flat_index(0, *(torch.arange(g.nq),) * 2)).numpy()
    diagonal = unpack(blocks.tiles_by_code(), g.bk).diagonal(dim1=1, dim2=2).numpy()[codes]
    return Layer(block_of_class, full, by_class, diagonal[is_first])


def _partial_ranges(
    blocks: BlockSet, is_first: np.ndarray, start: np.ndarray
) -> tuple[Ranges, Ranges]:
    """The ranges of classes in partial blocks: of whole block rows; of classes.

    A block whose rows are equal, such as one of global keys, has the ranges of one row, and its
    block row attends them. Blocks with the same bit tile and the same classes have the same
    ranges; these are computed once.
    """
    g = blocks.grid
    _, row, column = (t.numpy() for t in g.locate(blocks.partial))
    kinds, kind = deduplicate(pack(torch.from_numpy(is_first)))
    kinds, kind = unpack(kinds, g.bk).numpy(), kind.numpy()
    tile = blocks.partial_bit_tile.numpy()
    codes, code_of_block = np.unique(
        (tile * len(kinds) + kind[row]) * len(kinds) + kind[column], return_inverse=True
    )
    parts = []
    equal = np.zeros(len(codes), dtype=bool)
    for i, code in enumerate(codes):
        bits = unpack(blocks.bit_tiles[code // len(kinds) ** 2], g.bk).numpy()
        bits = bits[kinds[code // len(kinds) % len(kinds)]][:, kinds[code % len(kinds)]]
        equal[i] = (bits == bits[0]).all()
        padded = np.pad(bits[:1] if equal[i] else bits, ((0, 0), (1, 1))).astype(np.int8)
        change = np.diff(padded, axis=1)
        parts.append(
            np.stack(
                [np.argwhere(change > 0)[:, 0], *(np.argwhere(change == s)[:, 1] for s in (1, -1))]
            )
        )
    count = np.array([part.shape[1] for part in parts], dtype=np.int64)
    runs = np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), dtype=np.int64)
    repeated = count[code_of_block]
    check_memory("masks", BYTES_OF_RANGE * int(repeated.sum()))
    equal = equal[code_of_block]

    def expand(chosen: np.ndarray, first: np.ndarray) -> Ranges:
        number, code = repeated[chosen], code_of_block[chosen]
        skipped = (np.cumsum(count) - count)[code] - (np.cumsum(number) - number)
        row_in_block, begin, end = runs[:, np.arange(number.sum()) + np.repeat(skipped, number)]
        shift = np.repeat(start[column[chosen]], number)
        row_of_range = row_in_block + np.repeat(first[chosen], number)
        return _sorted(row_of_range, begin + shift, end + shift)

    return expand(equal, row), expand(~equal, start[row])


def _sorted(row: np.ndarray, begin: np.ndarray, end: np.ndarray) -> Ranges:
    order = np.argsort(row, kind="stable")
    return Ranges(row[order], begin[order], end[order])


def _levels(ranges: Ranges) -> list[_Level]:
    """Groups ranges by the largest power of two that is not above their length."""
    length = ranges.end - ranges.begin
    level = np.frexp(length.astype(np.float64))[1] - 1
    levels = []
    for k in range(int(level.max(initial=-1)) + 1):
        own = level == k
        row, start = np.unique(ranges.row[own], return_index=True)
        levels.append(_Level(row, start, ranges.begin[own], ranges.end[own] - (1 << k)))
    return levels


def _union_of_ranges(bits: np.ndarray, levels: list[_Level], rows: int) -> np.ndarray:
    """The bitwise OR of `bits` over the ranges of each row: uint64 (rows, words).

    A sparse table: entry i at level k is the OR of the 2**k entries from i on. A range is the
    union of two entries, so it takes two look-ups, whatever its length.
    """
    out = np.zeros((rows, bits.shape[1]), dtype=np.uint64)
    table = bits
    for k, level in enumerate(levels):
        if k:
            half = 1 << (k - 1)
            table = table[:-half] | table[half:]
        parts = 1 + len(level.first) * bits.shape[1] // WORDS_AT_ONCE
        for group in np.array_split(np.arange(len(level.row)), min(parts, max(len(level.row), 1))):
            if not len(group):
                continue
            begin = level.start[group[0]]
            end = (
                level.start[group[-1] + 1] if group[-1] + 1 < len(level.row) else len(level.first)
            )
            union = table[level.first[begin:end]]
            if k:
                union |= table[level.second[begin:end]]
            out[level.row[group]] |= np.bitwise_or.reduceat(
                union, level.start[group] - begin, axis=0
            )
    return out
