"""Which samples each step reads."""

import pytest

from experiments.lra.batches import StepBatches


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
