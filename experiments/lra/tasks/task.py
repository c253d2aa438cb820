"""The base of all tasks: their shape, their splits, and how samples form a batch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Shape:
    """What a model must know of a task.

    seq_len:    tokens that every sequence is padded to
    vocabulary: ids are 0 to vocabulary - 1
    classes:    labels are 0 to classes - 1
    documents:  sequences in a sample
    side:       rows and columns of the square image whose pixels are the tokens, or None for text;
        the ids of pixels are their values, those of text leave 0 to padding
    """

    seq_len: int
    vocabulary: int
    classes: int
    documents: int = 1
    side: int | None = None


class Sample(NamedTuple):
    """documents: ids of each, integers (n,); label; trace: a class of each token, (n,), where the
    task has them for training."""

    documents: list[np.ndarray]
    label: int
    trace: np.ndarray | None = None


class Samples(Protocol):
    """Samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class Task(ABC):
    """One task of the arena: its name, its shape, and its samples under a folder of data."""

    name: str
    shape: Shape

    @abstractmethod
    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        """train, validation and test; generated or indexed first where that is needed.

        Raises MissingData for a file that must be downloaded and is not there.
        """


class Batch(NamedTuple):
    """ids: int64 (batch, documents, seq_len), padded with 0; lengths: int64 (batch, documents), or
    None where every sequence fills seq_len; labels: int64 (batch,); traces: int64
    (batch, seq_len), the class of each token, or None."""

    ids: Tensor
    lengths: Tensor | None
    labels: Tensor
    traces: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.ids,) if self.lengths is None else (self.ids, self.lengths)


class MissingData(FileNotFoundError):
    """A published file is not where it should be."""

    def __init__(self, path: Path, how: str):
        super().__init__(f"{path} is missing: {how}, or set --data.data_root to where it is")


def collate(shape: Shape, samples: Sequence[Sample]) -> Batch:
    """Pads samples to the length of the task, and cuts off what goes beyond it."""
    ids = np.zeros((len(samples), shape.documents, shape.seq_len), np.int64)
    lengths = np.zeros((len(samples), shape.documents), np.int64)
    for n, sample in enumerate(samples):
        for d, document in enumerate(sample.documents):
            cut = document[: shape.seq_len]
            ids[n, d, : len(cut)] = cut
            lengths[n, d] = len(cut)
    labels = torch.tensor([sample.label for sample in samples])
    traces = [sample.trace for sample in samples if sample.trace is not None]
    filled = bool((lengths == shape.seq_len).all()) and shape.side is not None
    return Batch(
        torch.from_numpy(ids),
        None if filled else torch.from_numpy(lengths),
        labels,
        torch.from_numpy(np.stack(traces)).long() if traces else None,
    )


def in_memory(samples: Samples) -> bool:
    """Whether samples are at hand, so that no process need be started to read them."""
    return getattr(samples, "in_memory", False)


class Subset:
    """The samples at chosen indices of others."""

    def __init__(self, samples: Samples, indices: np.ndarray):
        self.samples, self.indices = samples, indices
        self.in_memory = in_memory(samples)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[int(self.indices[index])]


def bytes_to_ids(text: bytes) -> np.ndarray:
    """Byte b becomes id b + 1."""
    return np.frombuffer(text, np.uint8).astype(np.int16) + 1


BYTES = 257
