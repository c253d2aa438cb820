"""Batches for training: the samples of a step are a function of seed and step."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import cast

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from experiments.lra.tasks import Batch, Samples, Task, collate
from experiments.lra.tasks.hashing import shuffled, stream_of
from experiments.lra.tasks.task import Subset, in_memory
from masks.arguments import check_integer


class StepBatches(Sampler[list[int]]):
    """Yields the indices of batches `start`, `start` + 1, ... without end, for one process.

    Batches are consecutive parts of the training set, which has a new order in each epoch. With
    several processes, each one reads a part of every batch.
    """

    def __init__(
        self, samples: int, batch_size: int, seed: int, start: int, rank: int, world_size: int
    ):
        if batch_size % world_size:
            raise ValueError(
                f"batch_size must be a multiple of the {world_size} processes, got {batch_size}"
            )
        self.samples, self.batch_size, self.seed, self.start = samples, batch_size, seed, start
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in count(self.start):
            first = batch * self.batch_size
            places = np.arange(first + self.rank, first + self.batch_size, self.world_size)
            epochs, positions = np.divmod(places, self.samples)
            yield [
                sample
                for epoch in np.unique(epochs)
                for sample in self._samples(int(epoch), positions[epochs == epoch])
            ]

    def _samples(self, epoch: int, positions: np.ndarray) -> list[int]:
        stream = stream_of("order", self.seed, epoch)
        return shuffled(positions, self.samples, stream).tolist()


class ArenaData(L.LightningDataModule):
    """The samples of a task in batches.

    Args:
        data_root: Folder of published files, to which generated files are written.
        batch_size: Number of samples of a step, over all processes.
        workers: Number of processes that read or draw samples; with 0 this is done between steps,
            as always with samples in memory.
        seed: Seed of the order of the training samples.

    Raises:
        ValueError: `batch_size` is below 1, or `workers` is below 0.
    """

    def __init__(
        self,
        task: Task,
        data_root: Path = Path("data"),
        batch_size: int = 32,
        workers: int = 0,
        seed: int = 0,
    ):
        super().__init__()
        check_integer("data.batch_size", batch_size, least=1)
        check_integer("data.workers", workers, least=0)
        self.task, self.data_root, self.batch_size = task, data_root, batch_size
        self.workers, self.seed = workers, seed

    def prepare_data(self) -> None:
        self.task.splits(self.data_root)

    def setup(self, stage: str) -> None:
        self.samples = self.task.splits(self.data_root)

    def train_dataloader(self) -> DataLoader:
        trainer = self._trainer()
        batches = StepBatches(
            len(self.samples["train"]),
            self.batch_size,
            self.seed,
            start=trainer.global_step * trainer.accumulate_grad_batches,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        return self._loader(self.samples["train"], batch_sampler=batches)

    def val_dataloader(self) -> DataLoader:
        return self._evaluation("validation")

    def test_dataloader(self) -> DataLoader:
        return self._evaluation("test")

    def _evaluation(self, split: str) -> DataLoader:
        trainer, samples = self._trainer(), self.samples[split]
        mine = Subset(samples, np.arange(trainer.global_rank, len(samples), trainer.world_size))
        size = -(-self.batch_size // trainer.world_size)
        return self._loader(mine, batch_size=size)

    def _loader(self, samples: Samples, **options) -> DataLoader:
        return DataLoader(
            cast(Dataset, samples),  # which asks for no more than Samples has
            num_workers=0 if in_memory(samples) else self.workers,
            collate_fn=partial(collate, self.task.shape),
            pin_memory=self._trainer().strategy.root_device.type == "cuda",
            **options,
        )

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        # Lengths remain on the CPU, where attention checks them without waiting for the device.
        moved = super().transfer_batch_to_device(
            batch._replace(lengths=None), device, dataloader_idx
        )
        return moved._replace(lengths=batch.lengths)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch._replace(ids=batch.ids.long())

    def _trainer(self) -> L.Trainer:
        assert self.trainer is not None, "a LightningDataModule gives loaders to its Trainer only"
        return self.trainer
