"""Retrieval: does one paper of the ACL Anthology Network cite the other? Two texts in bytes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.progress import track

from experiments.lra.tasks.store import Allocate, stored
from experiments.lra.tasks.task import (
    BYTES,
    SPLITS,
    MissingData,
    Sample,
    Samples,
    Shape,
    Task,
    bytes_to_ids,
)

FILES = dict(
    zip(SPLITS, (f"new_aan_pairs.{part}.tsv" for part in ("train", "eval", "test")), strict=True)
)
MAX_BYTES = 4000  # of a text; the rest is cut off
HOW = "unpack lra_release.gz of google-research/long-range-arena"
COLUMNS = 5  # label, two identifiers, two texts; without header and quotation marks


class Retrieval(Task):
    """Reads tsv_data/new_aan_pairs.{train,eval,test}.tsv; only offsets of lines are in memory.

    Args:
        skip_corrupt: Whether lines that cannot be read are left out and counted. By default they
            raise an error.
    """

    name = "retrieval"
    shape = Shape(seq_len=4096, vocabulary=BYTES, classes=2, documents=2)

    def __init__(self, skip_corrupt: bool = False):
        self.skip_corrupt = skip_corrupt

    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        folder = data_root / "tsv_data"
        return {split: Pairs(folder / FILES[split], self.skip_corrupt) for split in SPLITS}


class Pairs:
    """The pairs of a file. The offsets of its lines are stored beside the file.

    Args:
        path: The file.
        skip_corrupt: As in Retrieval.
        how: How to get the file, for the error if it does not exist.

    Raises:
        MissingData: The file does not exist.
    """

    def __init__(self, path: Path, skip_corrupt: bool = False, how: str = HOW):
        if not path.exists():
            raise MissingData(path, how)
        self.path, self.skip_corrupt = path, skip_corrupt
        facts = {"bytes": path.stat().st_size, "skip_corrupt": skip_corrupt}
        # (number of the line, offset of its begin, offset of its end) of each pair.
        self.lines = stored(path.with_name(f"{path.name}.index"), facts, self._index)["lines"]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Sample:
        number, begin, end = self.lines[index].tolist()
        with self.path.open("rb") as file:
            file.seek(begin)
            line = file.read(end - begin)
        try:
            return read_pair(line)
        except ValueError as error:
            raise ValueError(f"{self.path}, line {number}: {error}") from error

    def _index(self, allocate: Allocate) -> None:
        found, number, begin = [], 0, 0
        with self.path.open("rb") as file:
            for line in track(file, f"indexing {self.path}", transient=True):
                number, end = number + 1, begin + len(line)
                if not self.skip_corrupt or _is_pair(line):
                    found.append((number, begin, end))
                begin = end
        if number > len(found):
            print(f"{self.path}: {len(found)} lines read, {number - len(found)} left out")
        allocate("lines", (len(found), 3), np.int64)[:] = found


def read_pair(line: bytes) -> Sample:
    """The two texts of a line, and its label.

    Raises:
        ValueError: The line is not a pair; the message says what a line must be.
    """
    columns = line.rstrip(b"\n").split(b"\t")
    try:
        label, _, _, first, second = columns
        ids = [bytes_to_ids(text[:MAX_BYTES]) for text in (first, second)]
        return Sample(ids, int(float(label)))
    except ValueError as error:
        raise ValueError(
            f"must be {COLUMNS} columns, the first a number; got {len(columns)}, "
            f"{columns[0][:20]!r}"
        ) from error


def _is_pair(line: bytes) -> bool:
    try:
        read_pair(line)
    except ValueError:
        return False
    return True
