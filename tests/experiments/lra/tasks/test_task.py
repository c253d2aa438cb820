from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from experiments.lra.tasks import (
    ImageTask,
    ListOps,
    MissingData,
    Pathfinder,
    Retrieval,
    Sample,
    Text,
    collate,
)
from experiments.lra.tasks.task import Subset


@pytest.mark.parametrize(
    "task", [Text(), Retrieval(), ImageTask(), ListOps("published"), Pathfinder(source="released")]
)
def test_missing_files_are_named(task, tmp_path):
    with pytest.raises(
        MissingData, match=rf"{tmp_path}.* is missing: (unpack|make it) .*data_root"
    ):
        task.splits(tmp_path)


def test_collate_pads_and_cuts():
    shape = Text().shape
    batch = collate(
        shape, [Sample([np.ones(5000, np.int16)], 1), Sample([np.ones(3, np.int16)], 0)]
    )
    assert batch.ids.shape == (2, 1, 4096)
    assert batch.lengths.tolist() == [[4096], [3]]
    assert batch.ids.sum() == 4096 + 3
    assert batch.labels.tolist() == [1, 0]
    # A graph of training steps takes the same inputs for every batch.
    whole = collate(shape, [Sample([np.ones(5000, np.int16)], 1)])
    assert whole.lengths.tolist() == [[4096]]


@pytest.mark.parametrize("source", ["stored", "fresh"])
def test_images_of_a_batch_are_read_at_once(source, tmp_path):
    task = Pathfinder(source=source, sizes=(1, 6, 1))
    samples = task.splits(tmp_path)["validation"]
    for some in (samples, Subset(samples, np.array([5, 3, 1]))):
        loader = iter(DataLoader(some, 2, collate_fn=partial(collate, task.shape)))
        batch, singly = next(loader), collate(task.shape, [some[0], some[1]])
        assert batch.ids.dtype == torch.uint8
        assert batch.lengths is singly.lengths is None
        assert torch.equal(batch.ids.long(), singly.ids)
        assert torch.equal(batch.labels, singly.labels)


def test_images_have_no_lengths(tmp_path):
    images = Pathfinder(sizes=(2, 2, 2)).splits(tmp_path)["test"]
    batch = collate(Pathfinder().shape, [images[0], images[1]])
    assert batch.lengths is None
    assert batch.ids.dtype == torch.int64
