"""The base class of all tasks, their samples, and batches of samples."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from experiments.lra.tasks.hashing import split_by_hash
from experiments.pinning import pinned

SPLITS = ("train", "validation", "test")
BYTES = 257  # size of the vocabulary of text: padding, and all bytes


@dataclass(frozen=True)
class Shape:
    """The sizes of a task that determine a model.

    Attributes:
        seq_len: Length in tokens to which every sequence is padded.
        vocabulary: Number of ids, which are 0 to vocabulary - 1.
        classes: Number of labels, which are 0 to classes - 1.
        documents: Sequences of a sample.
        side: Side in pixels of the square image whose pixels are the tokens, or None for text.
            The id of a pixel is its value. In text the id 0 is padding.
    """

    seq_len: int
    vocabulary: int
    classes: int
    documents: int = 1
    side: int | None = None


class Sample(NamedTuple):
    """One sample of a task.

    Attributes:
        documents: The ids of each document, integers (n,).
        label: The class of the sample.
        trace: The class of each token, integers (n,), or None.
    """

    documents: list[np.ndarray]
    label: int
    trace: np.ndarray | None = None


class Samples(Protocol):
    """Samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class Task(ABC):
    """One task of the arena: its name, its shape, and its samples under a folder of data.

    Attributes:
        name: Its name. Tasks whose samples are read in another way have other names.
        shape: Its sizes.
        floors_of: The task whose floors it has, because it asks the same question about the same
            samples; None for its own.
    """

    name: str
    shape: Shape
    floors_of: str | None = None

    @abstractmethod
    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        """The samples of train, validation and test, which are generated if the task does so.

        Args:
            data_root: Folder of the data of all tasks.

        Raises:
            MissingData: A file that must be downloaded does not exist.
        """


class Batch(NamedTuple):
    """Samples as tensors.

    Attributes:
        ids: Integers (batch, documents, seq_len), padded with 0.
        lengths: int64 (batch, documents), in tokens, or None if no sequence is padded.
        labels: int64 (batch,).
        traces: The class of each token, int64 (batch, seq_len), or None.
    """

    ids: Tensor
    lengths: Tensor | None
    labels: Tensor
    traces: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The arguments of a model."""
        return (self.ids,) if self.lengths is None else (self.ids, self.lengths)

    def pin_memory(self) -> "Batch":
        """A copy in pinned memory, which a DataLoader with `pin_memory` asks for."""
        lengths = None if self.lengths is None else pinned(self.lengths)
        traces = None if self.traces is None else pinned(self.traces)
        return Batch(pinned(self.ids), lengths, pinned(self.labels), traces)


class MissingData(FileNotFoundError):
    """A published file does not exist.

    Args:
        path: Path of the file.
        how: How to get it.
    """

    def __init__(self, path: Path, how: str):
        super().__init__(f"{path} is missing: {how}, or set --data.data_root to where it is")


def collate(shape: Shape, samples: Sequence[Sample] | Batch) -> Batch:
    """The batch of samples, which are padded or cut to the length of the task."""
    if isinstance(samples, Batch):
        return samples
    ids = np.zeros((len(samples), shape.documents, shape.seq_len), np.int64)
    lengths = np.zeros((len(samples), shape.documents), np.int64)
    for n, sample in enumerate(samples):
        for d, document in enumerate(sample.documents):
            cut = document[: shape.seq_len]
            ids[n, d, : len(cut)] = cut
            lengths[n, d] = len(cut)
    labels = torch.tensor([sample.label for sample in samples])
    traces = [sample.trace for sample in samples if sample.trace is not None]
    unpadded = bool((lengths == shape.seq_len).all()) and shape.side is not None
    return Batch(
        torch.from_numpy(ids),
        None if unpadded else torch.from_numpy(lengths),
        labels,
        torch.from_numpy(np.stack(traces).astype(np.int64)) if traces else None,
    )


def in_memory(samples: Samples) -> bool:
    """Whether samples are in memory, so that no process is needed to read them."""
    return getattr(samples, "in_memory", False)


class Images:
    """Images in arrays, of which a DataLoader reads a whole batch at once.

    Args:
        images: uint8 (n or more, ...).
        labels: Integers (n,).
    """

    in_memory = True

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        # A plain array: each access of a memory map makes another memory map, which takes longer.
        self.images = np.asarray(images[: len(labels)]).reshape(len(labels), -1)
        self.labels = np.asarray(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        return Sample([self.images[index]], int(self.labels[index]))

    def __getitems__(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """The batch of some images, with ids in 8 bits, which are copied to a device sooner."""
        ids, labels = self.images[indices][:, None], self.labels[indices]
        return Batch(torch.from_numpy(ids), None, torch.from_numpy(labels.astype(np.int64)))


class Subset:
    """The samples with some indices."""

    def __init__(self, samples: Samples, indices: np.ndarray):
        self.samples, self.indices = samples, indices
        self.in_memory = in_memory(samples)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[int(self.indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> Batch | list[Sample]:
        """The samples of a batch, which are read at once if that is possible."""
        at_once = getattr(self.samples, "__getitems__", None)
        if at_once is None:
            return [self[index] for index in indices]
        return at_once(self.indices[indices])


def check_sizes(sizes: Sequence[int]) -> None:
    """Raises ValueError unless there is at least one sample of each split."""
    if len(sizes) != len(SPLITS) or min(sizes) < 1:
        raise ValueError(
            f"sizes must be at least 1 for each of {', '.join(SPLITS)}, got {tuple(sizes)}"
        )


def split_off_tenth(samples: Samples, name: str) -> tuple[Subset, Subset]:
    """(nine tenths of some samples, for training; the others, for validation), by their hashes.

    Args:
        samples: The samples that a data set has for training.
        name: Name of the stream of hashes.
    """
    held_out = len(samples) // 10
    sizes = (len(samples) - held_out, held_out)
    training, validation = split_by_hash(len(samples), sizes, name)
    return Subset(samples, training), Subset(samples, validation)


def bytes_to_ids(text: bytes) -> np.ndarray:
    """The ids of a text: byte b has the id b + 1."""
    return np.frombuffer(text, np.uint8).astype(np.int16) + 1
