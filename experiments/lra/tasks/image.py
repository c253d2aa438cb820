"""Image: CIFAR-10 in greyscale, pixel by pixel."""

import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.lra.tasks.store import check_hashes
from experiments.lra.tasks.task import (
    SPLITS,
    Images,
    MissingData,
    Samples,
    Shape,
    Task,
    split_off_tenth,
)

FOLDER = "cifar-10-batches-py"
BUILD = "cifar ARCHIVE"
SIDE = 32
LUMA = np.array([0.2989, 0.5870, 0.1140])
TRAIN_FILES = tuple(f"data_batch_{n}" for n in range(1, 6))
# The only objects of a pickle that are loaded: those of the published files.
TRUSTED = {
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class ImageTask(Task):
    """Reads cifar-10-batches-py/. A tenth of the training set is the validation set."""

    name = "image"
    shape = Shape(seq_len=SIDE * SIDE, vocabulary=256, classes=10, side=SIDE)

    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        folder = data_root / FOLDER
        check_hashes(folder, BUILD)
        train, test = grey_images(folder, TRAIN_FILES), grey_images(folder, ("test_batch",))
        return dict(zip(SPLITS, (*split_off_tenth(train, "image"), test), strict=True))


def grey_images(folder: Path, names: tuple[str, ...]) -> Images:
    """The images of some files of a folder."""
    batches = [read_batch(folder / name) for name in names]
    return Images(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))


def read_batch(path: Path) -> tuple[np.ndarray, list[int]]:
    """The greyscale images, uint8 (n, 1024), and the labels of a published file.

    Raises:
        MissingData: The file does not exist.
        ValueError: The file is not a batch of CIFAR-10.
    """
    if not path.exists():
        raise MissingData(path, f"make it with: python -m experiments.lra.data {BUILD}")
    colours, labels = load_batch(path)
    grey = np.einsum("ncp,c->np", colours.reshape(-1, 3, SIDE * SIDE), LUMA)
    return np.round(grey).astype(np.uint8), labels


def load_batch(path: Path) -> tuple[np.ndarray, list[int]]:
    """The images in colour, uint8 (n, 3072), and the labels of a published file.

    Raises:
        ValueError: The file is not a batch of CIFAR-10.
    """
    try:
        with path.open("rb") as file:
            batch = _BatchReader(file, encoding="bytes").load()
        colours = batch[b"data"].reshape(-1, 3 * SIDE * SIDE)
        labels = [int(label) for label in batch[b"labels"]]
        if len(colours) != len(labels) or colours.dtype != np.uint8:
            raise ValueError(f"{len(labels)} labels of {len(colours)} images, {colours.dtype}")
    # A damaged pickle raises one of many errors. No code of it was executed.
    except (
        pickle.UnpicklingError,
        EOFError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
    ) as error:
        raise ValueError(f"{path} is not a batch of CIFAR-10: {error}") from error
    return colours, labels


class _BatchReader(pickle.Unpickler):
    """Loads arrays, lists and strings. It executes no code of the pickle."""

    def find_class(self, module: str, name: str):
        module = module.replace("numpy.core", "numpy._core")
        if (module, name) not in TRUSTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)
