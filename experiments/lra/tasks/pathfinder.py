"""Pathfinder: are the two discs on one contour? 32 is the arena's Pathfinder, 128 is Path-X."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from os import cpu_count
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike
from PIL import Image
from rich.progress import track

from experiments.lra.tasks.hashing import seed_of, split_by_hash, stream_of
from experiments.lra.tasks.snakes import DIFFICULTIES, RELEASE, Drawing, Rules, draw
from experiments.lra.tasks.store import Allocate, Arrays, stored
from experiments.lra.tasks.task import (
    SPLITS,
    Batch,
    Images,
    MissingData,
    Sample,
    Samples,
    Shape,
    Subset,
    Task,
    check_sizes,
)

ENDLESS = 10**9  # fresh images of the training split: more than any run reads
FOLDERS = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
SHORTEST = 3  # segments of a contour; its distractors have a third of them, at least one
GENERATOR = 2  # version of stored images; version 1 had other defaults of Rules
NPY_MAGIC = b"\x93NUMPY"


class Pathfinder(Task):
    """Images that are drawn by the published algorithm, or the released images.

    Args:
        side: 32, 64, 128 or 256 pixels.
        difficulty: Length of the marked contours; "hard" is that of the arena.
        source: "fresh" draws each image when it is read, and has ENDLESS training images;
            "stored" draws `sizes` images once; "released" reads the published pathfinder<side>/.
        sizes: Number of images for training, validation and test.
        seed: Seed of the generator.
        skip_corrupt: Whether released images that cannot be read are left out and counted. By
            default they raise an error.
        shorter: Share of the fresh training images with shorter contours, whose numbers of
            segments are uniform from 3 on: a curriculum. Validation and test are unchanged.
        traced: Whether fresh training images have a trace: the number of discs on the contour of
            each pixel. The labels of the arena do not contain it.
        distractors: Number of distractors: "release" as in the images of the arena, "described"
            as in the code of the arena, or "none"; see `snakes.Rules`.
        directions: Directions of first segments: "release" as in the images of the arena, or
            "any"; see `snakes.Rules`.
        resampling: How stamps of segments and discs are reduced: "release" as in the images of the
            arena, or "clipped", as in the runs of our records; see `snakes.Rules`.

    The name of the task says which images it has: it ends in "-released" for those of the arena,
    and in the suffix of their rules for others. Floors are found by this name.

    Raises:
        ValueError: An option is out of range, or is not for this source.
    """

    def __init__(
        self,
        side: Literal[32, 64, 128, 256] = 32,
        difficulty: Literal["easy", "intermediate", "hard"] = "hard",
        source: Literal["fresh", "stored", "released"] = "fresh",
        sizes: tuple[int, int, int] = (160_000, 20_000, 20_000),
        seed: int = 0,
        skip_corrupt: bool = False,
        shorter: float = 0.0,
        traced: bool = False,
        distractors: Literal["release", "described", "none"] = "release",
        directions: Literal["release", "any"] = "release",
        resampling: Literal["release", "clipped"] = "release",
    ):
        if (shorter or traced) and source != "fresh":
            raise ValueError(
                f"shorter and traced are for source 'fresh', got {shorter} and {traced} with "
                f"{source!r}"
            )
        check_sizes(sizes)
        if not 0 <= shorter <= 1:
            raise ValueError(f"shorter must be from 0 to 1, got {shorter}")
        self.shorter, self.traced = shorter, traced
        self.rules = Rules(distractors, directions, resampling)
        if source == "released" and self.rules != RELEASE:
            raise ValueError(
                "distractors, directions and resampling are for sources 'fresh' and 'stored', "
                f"got {distractors!r}, {directions!r} and {resampling!r} with 'released'"
            )
        self.name = f"pathfinder{side}-{difficulty}"
        if source == "released":
            self.name += "-released"
        else:
            self.name += self.rules.suffix
        self.shape = Shape(seq_len=side * side, vocabulary=256, classes=2, side=side)
        self.side, self.difficulty, self.source = side, difficulty, source
        self.sizes, self.seed, self.skip_corrupt = sizes, seed, skip_corrupt

    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        if self.source == "released":
            return self._released(data_root)
        fresh = {
            split: self.images(split, size) for split, size in zip(SPLITS, self.sizes, strict=True)
        }
        if self.source == "stored":
            return {split: self._stored(data_root, split, fresh[split]) for split in SPLITS}
        evaluated = {split: DrawnImages(fresh[split]) for split in SPLITS[1:]}
        return evaluated | {"train": self.images("train", ENDLESS, self.shorter, self.traced)}

    def images(
        self, split: str, count: int, shorter: float = 0.0, traced: bool = False
    ) -> "FreshImages":
        """Images 0 to count - 1 of a split, which are drawn when they are read."""
        segments = DIFFICULTIES[self.difficulty]
        return FreshImages(
            self.side, segments, split, self.seed, count, shorter, traced, self.rules
        )

    def _stored(self, data_root: Path, split: str, fresh: "FreshImages") -> Images:
        name = f"{self.name}-seed{self.seed}-{split}-{len(fresh)}"
        facts = {"generator": GENERATOR, "images": name}
        arrays = stored(data_root / name, facts, fresh.pack)
        return Images(arrays["images"], arrays["labels"])

    def _released(self, data_root: Path) -> Mapping[str, Samples]:
        source = data_root / f"pathfinder{self.side}" / FOLDERS[self.difficulty]
        if not source.exists():
            raise MissingData(source, "unpack lra_release.gz of google-research/long-range-arena")
        arrays = stored(
            data_root / self.name,
            {"source": str(source.relative_to(data_root)), "skip_corrupt": self.skip_corrupt},
            lambda allocate: pack_released(source, self.side, self.skip_corrupt, allocate),
        )
        packed = Images(arrays["images"], arrays["labels"])
        held_out = len(packed) // 10
        sizes = (len(packed) - 2 * held_out, held_out, held_out)
        parts = split_by_hash(len(packed), sizes, "pathfinder")
        return {split: Subset(packed, part) for split, part in zip(SPLITS, parts, strict=True)}


class FreshImages:
    """Images that depend only on split, seed and index; they are drawn when they are read.

    Args:
        side: Side of an image in pixels.
        segments: Segments of the marked contours.
        split: Name of the split.
        seed: Seed of the generator.
        count: Number of images.
        shorter, traced: As in Pathfinder.
        rules: Rules of the generator.
    """

    def __init__(
        self,
        side: int,
        segments: int,
        split: str,
        seed: int,
        count: int,
        shorter: float = 0.0,
        traced: bool = False,
        rules: Rules = RELEASE,
    ):
        self.side, self.segments, self.count = side, segments, count
        self.shorter, self.traced, self.rules = shorter, traced, rules
        self.stream = stream_of("pathfinder", side, segments, seed, split)
        self.lengths = stream_of("pathfinder", "segments", seed, split)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        drawing = self.draw(index)
        trace = drawing.trace.reshape(-1) if self.traced else None
        return Sample([drawing.image.reshape(-1)], drawing.label, trace)

    def draw(self, index: int, moved: bool = False) -> Drawing:
        """Draws an image; moved: as in snakes.draw."""
        segments = self.segments_of(index)
        return draw(self.side, segments, self.stream, index, moved, self.rules)

    def segments_of(self, index: int) -> int:
        """The number of segments of the marked contours of an image."""
        uniform = int(seed_of(self.lengths, np.uint64(index))) / 2**64
        if uniform >= self.shorter:
            return self.segments
        return SHORTEST + int(uniform / self.shorter * (self.segments - SHORTEST))

    def pack(self, allocate: Allocate) -> None:
        """Draws all images into arrays, with a thread for each core."""
        images = allocate("images", (self.count, self.side, self.side), np.uint8)
        labels = allocate("labels", (self.count,), np.uint8)
        discs = allocate("discs", (self.count, 2, 2), np.int16)

        def fill(index: int) -> None:
            images[index], labels[index], discs[index], _ = self.draw(index)

        with ThreadPoolExecutor(cpu_count()) as pool:
            done = pool.map(fill, range(self.count))
            for _ in track(done, "drawing Pathfinder", self.count, transient=True):
                pass


class DrawnImages:
    """Fresh images in memory. All of them are drawn when the first is read."""

    in_memory = True

    def __init__(self, fresh: FreshImages):
        self.fresh = fresh

    @cached_property
    def drawn(self) -> Images:
        arrays: Arrays = {}

        def allocate(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
            arrays[name] = np.empty(shape, dtype)
            return arrays[name]

        self.fresh.pack(allocate)
        return Images(arrays["images"], arrays["labels"])

    def __len__(self) -> int:
        return len(self.fresh)

    def __getitem__(self, index: int) -> Sample:
        return self.drawn[index]

    def __getitems__(self, indices: Sequence[int] | np.ndarray) -> Batch:
        return self.drawn.__getitems__(indices)


def pack_released(source: Path, side: int, skip_corrupt: bool, allocate: Allocate) -> None:
    """Packs imgs/<batch>/*.png with the labels of metadata/<batch>.npy; empty files are left out.

    Args:
        source: Folder of a difficulty.
        side: Side of an image in pixels.
        skip_corrupt: Whether images that cannot be read are left out and counted.
        allocate: Allocates the arrays; see stored.

    Raises:
        ValueError: An image cannot be read, and skip_corrupt is False; the message names it.
    """
    entries = [
        (source / folder / name, label)
        for batch in sorted((source / "metadata").glob("*.npy"), key=lambda path: int(path.stem))
        for folder, name, label in read_metadata(batch)
    ]
    images = allocate("images", (len(entries), side, side), np.uint8)
    labels = []
    for path, label in track(entries, f"packing {source}", transient=True):
        try:
            images[len(labels)] = _read_image(path, side)
        except (OSError, ValueError) as error:
            # A file of the release is empty: imgs/0/sample_172.png of pathfinder32, easy.
            if not skip_corrupt and path.stat().st_size > 0:
                raise ValueError(f"{path} cannot be read: {error}") from error
        else:
            labels.append(label)
    print(f"{source}: {len(labels)} images packed, {len(entries) - len(labels)} left out")
    allocate("labels", (len(labels),), np.uint8)[:] = labels


def _read_image(path: Path, side: int) -> np.ndarray:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
    if pixels.shape != (side, side):
        raise ValueError(f"must be {side} x {side} pixels, got {pixels.shape}")
    return pixels


def read_metadata(path: Path) -> list[tuple[str, str, int]]:
    """The (folder, file, label) of each image of a batch: columns 0, 1 and 3 of its metadata.

    The files of the release are text in spite of their name. The generator writes npy files.

    Raises:
        ValueError: A row cannot be read; the message names file and row.
    """
    content = path.read_bytes()
    if content.startswith(NPY_MAGIC):
        rows = np.load(path, allow_pickle=False).tolist()
    else:
        rows = [line.split() for line in content.decode().splitlines()]
    entries = []
    for number, row in enumerate(rows, 1):
        try:
            entries.append((row[0], row[1], int(row[3])))
        except (IndexError, ValueError) as error:
            raise ValueError(f"{path}, row {number}: cannot be read: {row}") from error
    return entries
