import pickle

import numpy as np
import pytest

from experiments.lra.tasks import SPLITS, ImageTask
from experiments.lra.tasks.task import Subset


class TestImage:
    def batches(self, root, data):
        folder = root / "cifar-10-batches-py"
        folder.mkdir()
        for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
            (folder / name).write_bytes(pickle.dumps(data, protocol=2))

    def test_published_batches_are_read_in_grey(self, tmp_path):
        colours = np.zeros((4, 3072), np.uint8)
        colours[:, :1024], colours[:, 1024:2048], colours[:, 2048:] = 200, 100, 50
        self.batches(tmp_path, {b"data": colours, b"labels": [0, 1, 2, 3]})
        splits = ImageTask().splits(tmp_path)
        assert [len(splits[split]) for split in SPLITS] == [18, 2, 4]
        train, held_out = splits["train"], splits["validation"]
        assert isinstance(train, Subset)
        assert isinstance(held_out, Subset)
        assert {*train.indices, *held_out.indices} == set(range(20))
        (pixels,), label, _ = splits["test"][2]
        assert set(pixels) == {round(0.2989 * 200 + 0.587 * 100 + 0.114 * 50)}
        assert label == 2

    def test_a_file_that_would_run_something_is_refused(self, tmp_path):
        self.batches(tmp_path, pytest.fail)
        with pytest.raises(
            ValueError, match="data_batch_1 is not a batch of CIFAR-10: it asks for"
        ):
            ImageTask().splits(tmp_path)
