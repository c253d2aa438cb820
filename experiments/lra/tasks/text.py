"""Text: the sentiment of an IMDb review, read byte by byte."""

from collections.abc import Mapping
from pathlib import Path

from experiments.lra.tasks.store import check_hashes
from experiments.lra.tasks.task import (
    BYTES,
    MissingData,
    Sample,
    Samples,
    Shape,
    Task,
    bytes_to_ids,
    split_off_tenth,
)

FOLDER = "aclImdb"
BUILD = "imdb ARCHIVE (for film pairs ARCHIVE, or that of --films, must have urls_*.txt)"
SENTIMENTS = ("neg", "pos")
LENGTH = 4096  # bytes of a review that are read in the task of the arena


class Text(Task):
    """Reads aclImdb/{train,test}/{pos,neg}/*.txt.

    Args:
        validate_on_test: Whether the test set is also the validation set, and all of the training
            set is used for training, as in papers on the arena. By default a tenth of the training
            set is the validation set.
        length: Bytes of a review that are read. With another length than LENGTH, which is for
            pre-training, the task has another name.

    Raises:
        ValueError: `length` is less than 1.
    """

    def __init__(self, validate_on_test: bool = False, length: int = LENGTH):
        if length < 1:
            raise ValueError(f"length must be at least one byte, got {length}")
        self.validate_on_test = validate_on_test
        self.name = "text" if length == LENGTH else f"text-{length}"
        self.shape = Shape(seq_len=length, vocabulary=BYTES, classes=2)

    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        folder = data_root / FOLDER
        check_hashes(folder, BUILD)
        train, test = (Reviews(folder / part) for part in ("train", "test"))
        if self.validate_on_test:
            return {"train": train, "validation": test, "test": test}
        training, validation = split_off_tenth(train, "text")
        return {"train": training, "validation": validation, "test": test}


class Reviews:
    """The reviews of a folder, in the order of their names.

    Raises:
        MissingData: The folder has no reviews.
    """

    def __init__(self, folder: Path):
        self.files = [
            (path, label)
            for label, sentiment in enumerate(SENTIMENTS)
            for path in sorted((folder / sentiment).glob("*.txt"))
        ]
        if not self.files:
            raise MissingData(
                folder / "{pos,neg}",
                "unpack https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.files[index]
        return Sample([bytes_to_ids(path.read_bytes())], label)
