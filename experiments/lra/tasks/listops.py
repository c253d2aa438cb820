"""ListOps: the value of a nested list of MIN, MAX, MED and SM (sum modulo 10), 500 to 2000 tokens.

Reference:
    Nangia, Bowman 2018, ListOps; Tay et al. 2021, Long Range Arena, section 2.2.1.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from os import cpu_count
from pathlib import Path
from typing import Literal

import numba
import numpy as np
from rich.progress import track

from experiments.lra.tasks.hashing import below, seed_of, split_by_hash, stream_of, uniform
from experiments.lra.tasks.store import Allocate, Arrays, content_hash, stored
from experiments.lra.tasks.task import (
    SPLITS,
    MissingData,
    Sample,
    Samples,
    Shape,
    Subset,
    Task,
    check_sizes,
)

# Token ids: 0 padding, 1 unknown, 2 end of sequence, then the symbols.
SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "X")
FIRST = 3
DIGIT, OPERATOR, CLOSE = FIRST, FIRST + 10, FIRST + 14
IDS = {symbol: FIRST + n for n, symbol in enumerate(SYMBOLS)} | {"]": CLOSE}

MAX_DEPTH = 10  # lists that are open at a time
SHORTEST = 20  # tokens; there are too few shorter expressions for all samples to differ
MAX_ARGUMENTS = 10  # of a list
OPERATOR_PROBABILITY = 0.25
LENGTHS = (500, 2000)  # tokens, both exclusive
PUBLISHED = dict(zip(SPLITS, ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv"), strict=True))
CHUNK = 1000  # expressions that a thread generates at a time


class ListOps(Task):
    """Nested lists, generated or published. Sequences are padded to a power of two.

    Args:
        source: "generated", or "published" for the files listops-1000/basic_*.tsv.
        sizes: Number of generated samples for training, validation and test.
        seed: Seed of the generator.
        lengths: Shortest and longest length of generated expressions in tokens, both exclusive.
            The default is that of the arena; the task has its name only with that.
        shortest: Shortest length for training, exclusive, if it is less than that of `lengths`:
            for a curriculum.
        skip_corrupt: Whether published rows that cannot be read are left out and counted. By
            default they raise an error.

    Raises:
        ValueError: An argument has a value that is not allowed.
    """

    def __init__(
        self,
        source: Literal["generated", "published"] = "generated",
        sizes: tuple[int, int, int] = (96_000, 2_000, 2_000),
        seed: int = 0,
        lengths: tuple[int, int] = LENGTHS,
        shortest: int | None = None,
        skip_corrupt: bool = False,
    ):
        if source == "published" and (lengths != LENGTHS or shortest is not None):
            raise ValueError(f"lengths of published expressions are {LENGTHS}, all of them")
        check_sizes(sizes)
        low, high = lengths
        if not SHORTEST <= low < high - 1:
            raise ValueError(f"lengths must be {SHORTEST} <= low < high - 1, got {lengths}")
        if shortest is not None and not SHORTEST <= shortest < low:
            raise ValueError(f"shortest must be {SHORTEST} <= shortest < {low}, got {shortest}")
        self.source, self.sizes, self.seed = source, sizes, seed
        self.lengths, self.shortest, self.skip_corrupt = lengths, shortest, skip_corrupt
        self.name = "listops" if lengths == LENGTHS else f"listops-{low}-{high}"
        padded = 1 << (high - 1).bit_length()
        self.shape = Shape(seq_len=padded, vocabulary=FIRST + len(SYMBOLS), classes=10)

    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        if self.source == "published":
            return {split: self._published(data_root, PUBLISHED[split]) for split in SPLITS}
        sizes = self.sizes if self.shortest is None else (0, *self.sizes[1:])
        everything = self._stored(data_root, self.lengths, sum(sizes))
        parts = split_by_hash(sum(sizes), sizes, "listops")
        splits: dict[str, Samples] = {
            split: Subset(everything, part) for split, part in zip(SPLITS, parts, strict=True)
        }
        if self.shortest is not None:
            splits["train"] = self._stored(
                data_root, (self.shortest, self.lengths[1]), self.sizes[0]
            )
        return splits

    def _published(self, data_root: Path, name: str) -> "Expressions":
        path = data_root / "listops-1000" / name
        if not path.exists():
            raise MissingData(path, "unpack lra_release.gz of google-research/long-range-arena")
        return read_tsv(path, self.skip_corrupt)

    def _stored(self, data_root: Path, lengths: tuple[int, int], count: int) -> "Expressions":
        facts = {"generator": 1, "count": count, "seed": self.seed, "lengths": lengths}
        name = "listops-{}-{}-of-{}-seed{}".format(*lengths, count, self.seed)

        def fill(allocate: Allocate) -> None:
            for part, array in generate(count, self.seed, lengths).items():
                allocate(part, array.shape, array.dtype)[:] = array

        return Expressions(stored(data_root / name, facts, fill))


class Expressions:
    """Expressions in one array; the ids of sample i are tokens[offsets[i] : offsets[i + 1]]."""

    def __init__(self, arrays: Arrays):
        self.tokens, self.offsets, self.labels = (
            arrays[name] for name in ("tokens", "offsets", "labels")
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        begin, end = self.offsets[index : index + 2]
        return Sample([np.asarray(self.tokens[begin:end])], int(self.labels[index]))


def generate(count: int, seed: int, lengths: tuple[int, int] = LENGTHS) -> Arrays:
    """Generates different expressions. Sample i depends only on the seed, the lengths and i.

    Args:
        count: Number of expressions.
        seed: Seed of the generator.
        lengths: Shortest and longest length in tokens, both exclusive.

    Returns:
        tokens, offsets and labels; see Expressions.

    Raises:
        ValueError: Two expressions are equal.
    """
    # Each pair of lengths has a stream of its own. Otherwise an expression whose length is within
    # both would be in both sets.
    stream = stream_of("listops", seed, *(() if lengths == LENGTHS else lengths))
    starts = range(0, count, CHUNK)
    with ThreadPoolExecutor(cpu_count()) as pool:
        jobs = [
            pool.submit(_expressions, stream, start, min(CHUNK, count - start), *lengths)
            for start in starts
        ]
        chunks = [job.result() for job in track(jobs, "generating ListOps", transient=True)]
    tokens, counts, labels = (np.concatenate(part) for part in zip(*chunks, strict=True))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    _check_different(tokens, offsets)
    return {"tokens": tokens, "offsets": offsets, "labels": labels}


def _check_different(tokens: np.ndarray, offsets: np.ndarray) -> None:
    hashes = {content_hash(tokens[a:b]) for a, b in pairwise(offsets)}
    if len(hashes) != len(offsets) - 1:
        raise ValueError("two samples are equal: take another seed")


@numba.njit(nogil=True, cache=True)
def _expressions(stream, start, count, low, high):
    tokens = np.empty(count * high, np.uint8)
    lengths = np.empty(count, np.int64)
    labels = np.empty(count, np.uint8)
    state = np.empty(1, np.uint64)
    end = 0
    for n in range(count):
        state[0] = seed_of(stream, np.uint64(start + n))
        length = 0
        while length <= low or length >= high:
            length, label = _expression(state, tokens[end : end + high])
        lengths[n], labels[n] = length, label
        end += length
    return tokens[:end].copy(), lengths, labels


@numba.njit(nogil=True)
def _expression(state, tokens):
    """Writes a random expression of at most len(tokens) tokens; returns its length and value."""
    missing = np.zeros(MAX_DEPTH, np.int64)  # arguments that each open list still lacks
    operators = np.zeros(MAX_DEPTH, np.int64)
    values = np.zeros((MAX_DEPTH, MAX_ARGUMENTS), np.int64)
    counts = np.zeros(MAX_DEPTH, np.int64)
    depth, length = 0, 0  # lists that are open
    while True:
        if depth > 0 and missing[depth - 1] == 0:
            depth -= 1
            tokens[length] = CLOSE
            value = apply(operators[depth], values[depth, : counts[depth]])
        elif depth + 1 < MAX_DEPTH and uniform(state) < OPERATOR_PROBABILITY:
            operators[depth] = below(state, 4)
            missing[depth] = 2 + below(state, MAX_ARGUMENTS - 1)
            counts[depth] = 0
            tokens[length] = OPERATOR + operators[depth]
            depth += 1
            value = -1
        else:
            value = below(state, 10)
            tokens[length] = DIGIT + value
        length += 1
        if value >= 0:
            if depth == 0:
                return length, value
            values[depth - 1, counts[depth - 1]] = value
            counts[depth - 1] += 1
            missing[depth - 1] -= 1
        if length == len(tokens):
            return length, 0


@numba.njit(nogil=True)
def apply(operator, values):
    """The value of a list.

    Args:
        operator: 0 MIN, 1 MAX, 2 MED, 3 SM. MED of an even number of arguments is the mean of the
            middle two, rounded down.
        values: Values of its arguments.
    """
    if operator == 0:
        return values.min()
    if operator == 1:
        return values.max()
    if operator == 2:
        return int(np.median(values))
    return values.sum() % 10


def read_tsv(path: Path, skip_corrupt: bool = False) -> Expressions:
    """The expressions of a published file, whose header is `Source\\tTarget`.

    Args:
        path: The file.
        skip_corrupt: Whether rows that cannot be read are left out and counted.

    Raises:
        ValueError: A row cannot be read, and skip_corrupt is False; the message names the line.
    """
    samples, left_out = [], 0
    with path.open() as lines:
        if next(lines, "").rstrip("\n") != "Source\tTarget":
            raise ValueError(f"{path}, line 1: must be Source, a tab, Target")
        for number, line in enumerate(lines, 2):
            try:
                source, target = line.rstrip("\n").split("\t")
                samples.append((tokenize(source), int(target)))
            except (ValueError, KeyError) as error:
                if not skip_corrupt:
                    raise ValueError(f"{path}, line {number}: cannot be read: {error}") from error
                left_out += 1
    if left_out:
        print(f"{path}: {len(samples)} rows read, {left_out} left out")
    return Expressions(
        {
            "tokens": np.concatenate([ids for ids, _ in samples]),
            "offsets": np.cumsum([0, *(len(ids) for ids, _ in samples)]),
            "labels": np.array([label for _, label in samples], np.uint8),
        }
    )


def tokenize(source: str) -> np.ndarray:
    """The ids of an expression such as "( ( ( [MAX 4 ) 3 ) ] )", without its parentheses.

    The brackets determine the value. Parentheses only bind arguments in pairs.

    Raises:
        KeyError: A symbol is not in the vocabulary.
    """
    symbols = source.replace("(", " ").replace(")", " ").split()
    return np.array([IDS[symbol] for symbol in symbols], np.uint8)
