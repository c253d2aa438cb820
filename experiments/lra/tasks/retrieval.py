"""Retrieval: does one paper of the ACL Anthology Network cite the other? Two texts, in bytes."""

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
    zip(
        SPLITS,
        (f"new_aan_pairs.{part}.tsv" for part in ("train", "eval", "test")),
        strict=True,
    )
)
KEPT_BYTES = 4000
COLUMNS = 5  # label, two identifiers, two texts; no header, no quoting


class Retrieval(Task):
    """tsv_data/new_aan_pairs.{train,eval,test}.tsv, read in place: only where each line begins is
    kept in memory."""

    name = "retrieval"
    shape = Shape(seq_len=4096, vocabulary=BYTES, classes=2, documents=2)

    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        return {split: Pairs(data_root / "tsv_data" / FILES[split]) for split in SPLITS}


class Pairs:
    """The lines of one file, in any order; where they begin is kept beside the file."""

    def __init__(self, path: Path):
        if not path.exists():
            raise MissingData(path, "unpack lra_release.gz of google-research/long-range-arena")
        self.path = path
        index = path.with_name(f"{path.name}.index")
        self.starts = stored(index, {"bytes": path.stat().st_size}, self._index)["starts"]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Sample:
        begin, end = self.starts[index : index + 2].tolist()
        with self.path.open("rb") as file:
            file.seek(begin)
            line = file.read(end - begin)
        columns = line.rstrip(b"\n").split(b"\t")
        try:
            label, _, _, first, second = columns
            ids = [bytes_to_ids(text[:KEPT_BYTES]) for text in (first, second)]
            return Sample(ids, int(float(label)))
        except ValueError as error:
            raise ValueError(
                f"{self.path}, line {index + 1}: must be {COLUMNS} columns, the first a number; "
                f"got {len(columns)}, {columns[0][:20]!r}"
            ) from error

    def _index(self, allocate: Allocate) -> None:
        with self.path.open("rb") as file:
            lengths = [len(line) for line in track(file, f"indexing {self.path}", transient=True)]
        allocate("starts", (len(lengths) + 1,), np.int64)[:] = np.cumsum([0, *lengths])
