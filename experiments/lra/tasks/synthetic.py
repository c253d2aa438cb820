"""Random ids and labels with the shape of a task, for measurements of speed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.lra.tasks.task import SPLITS, Sample, Samples, Shape, Task


class Synthetic(Task):
    """Random samples with the shape of another task, whose sequences all have its full length.

    Args:
        like: The other task.
        size: Number of samples of each split.
    """

    def __init__(self, like: Task, size: int = 1024):
        self.name, self.shape, self.size = f"synthetic {like.name}", like.shape, size

    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        return {split: Noise(self.shape, self.size, n) for n, split in enumerate(SPLITS)}


@dataclass(frozen=True)
class Noise:
    """Random samples; `stream` determines the random numbers."""

    shape: Shape
    size: int
    stream: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        random = np.random.default_rng([self.stream, index])
        ids = random.integers(1, self.shape.vocabulary, (self.shape.documents, self.shape.seq_len))
        return Sample(list(ids), int(random.integers(self.shape.classes)))
