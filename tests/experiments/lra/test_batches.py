"""Which samples each step reads."""

import sys

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from experiments.lra.batches import ArenaData, StepBatches
from experiments.lra.tasks import Batch, Pathfinder
from tests.helpers import threads


class TestStepBatches:
    def test_every_sample_once_each_time_through(self):
        batches = iter(StepBatches(10, 5, seed=0, start=0, rank=0, world_size=1))
        first, second = (sorted(next(batches) + next(batches)) for _ in range(2))
        assert first == second == list(range(10))

    def test_starts_anywhere(self):
        whole = iter(StepBatches(10, 4, seed=0, start=0, rank=0, world_size=1))
        skipped = [next(whole) for _ in range(6)]
        assert next(iter(StepBatches(10, 4, 0, start=5, rank=0, world_size=1))) == skipped[5]

    def test_processes_share_a_batch(self):
        whole = next(iter(StepBatches(10, 4, 0, 3, 0, 1)))
        parts = [next(iter(StepBatches(10, 4, 0, 3, rank, 2))) for rank in range(2)]
        assert sorted(parts[0] + parts[1]) == sorted(whole)
        with pytest.raises(ValueError, match="batch_size must be a multiple of the 3 processes"):
            StepBatches(10, 4, 0, 0, 0, 3)


@pytest.mark.parametrize(("source", "workers"), [("stored", 0), ("fresh", 1)])
def test_processes_read_only_what_is_not_in_memory(tmp_path, source, workers):
    data = ArenaData(Pathfinder(source=source, sizes=(4, 4, 4)), tmp_path, 2, workers=1)
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data.setup("fit")
    assert data.train_dataloader().num_workers == workers
    assert data.val_dataloader().num_workers == 0


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux does")
@pytest.mark.parametrize(
    "task",
    [
        Pathfinder(source="stored", sizes=(64, 1, 1)),
        Pathfinder(source="fresh", sizes=(64, 1, 1), traced=True),
    ],
    ids=["images in memory", "traced images"],
)
def test_batches_take_one_thread(task, tmp_path, is_pinned):
    data = ArenaData(task, tmp_path, batch_size=64)
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data.setup("fit")
    batches = iter(data.train_dataloader())
    assert is_pinned(next(batches).pin_memory().ids)
    # A batch has 65,536 ids; torch splits operations on 32,768 elements or more.
    assert threads.started_by(lambda: torch.ones(65_536).clone()) == 1
    assert threads.started_by(lambda: next(batches).pin_memory()) == 0


def test_a_pinned_batch_is_a_copy(is_pinned):
    ids, lengths = torch.arange(16, dtype=torch.uint8).view(2, 1, 8), torch.tensor([[3], [8]])
    batch = Batch(ids, lengths, torch.tensor([0, 1]), ids[:, 0].long())
    copy = batch.pin_memory()
    assert all(torch.equal(own, its) for own, its in zip(copy, batch, strict=True))
    assert all(is_pinned(part) for part in copy)
    unpadded = Batch(ids, None, batch.labels)
    assert unpadded.pin_memory()[1::2] == (None, None)


def test_a_loader_pins_batches_as_batches_say(monkeypatch):
    batch = Batch(torch.zeros(2, 1, 8), None, torch.tensor([0, 1]))
    pinned = batch._replace(ids=torch.ones(2, 1, 8))
    monkeypatch.setattr(Batch, "pin_memory", lambda self: pinned)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    loader = DataLoader([batch], batch_size=None, pin_memory=True)
    assert next(iter(loader)) is pinned


def test_a_batch_of_no_sample_is_refused():
    with pytest.raises(ValueError, match=r"data\.batch_size must be at least 1, got 0"):
        ArenaData(Pathfinder(), batch_size=0)
    with pytest.raises(ValueError, match=r"data\.workers must be at least 0, got -1"):
        ArenaData(Pathfinder(), workers=-1)


def test_lengths_remain_on_the_cpu():
    ids, lengths = torch.zeros(2, 1, 8), torch.tensor([[3], [8]])
    batch = Batch(ids, lengths, torch.tensor([0, 1]))
    data = ArenaData(Pathfinder(32))
    moved = data.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert [x.device.type for x in (moved.ids, moved.labels)] == ["meta", "meta"]
    assert moved.lengths is lengths
