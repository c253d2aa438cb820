"""Film pairs: are two IMDb reviews about the same film?

It replaces Retrieval, whose data are no longer available. It is not a task of the arena, and its
accuracies cannot be compared with those of AAN.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.progress import track

from experiments.lra.tasks.hashing import below, seed_of, stream_of
from experiments.lra.tasks.retrieval import Pairs, Retrieval
from experiments.lra.tasks.store import check_hashes, write_hashes
from experiments.lra.tasks.task import SPLITS, MissingData, Sample, Samples, bytes_to_ids
from experiments.lra.tasks.text import BUILD as BUILD_REVIEWS
from experiments.lra.tasks.text import FOLDER as REVIEWS
from experiments.lra.tasks.text import LENGTH, SENTIMENTS

FOLDER = "film_pairs"
SIZES: Mapping[str, int] = dict(zip(SPLITS, (40_000, 4_000, 10_000), strict=True))
HELD_OUT = 10  # one of so many films of the training set is in the validation set
SPACES = bytes.maketrans(b"\t\n\r", b"   ")
BUILD = "film-pairs"
TAB = bytes_to_ids(b"\t")
HOW = f"make them with: python -m experiments.lra.data {BUILD}"
Review = Path
# Film -> sentiment -> its reviews.
Films = Mapping[str, Mapping[str, list[Review]]]


class FilmPairs(Retrieval):
    """Reads film_pairs/{train,validation,test}.tsv, in the format of `Retrieval`.

    No film is in two splits. Both reviews of a pair have the same sentiment. The first review, and
    the second review, have the same distribution under both labels, so neither alone
    determines the label.

    Args:
        joined: Whether a sample is one document of both reviews with a tab between them, so that
            attention compares their bytes. By default an encoder reads each review alone, and only
            the classifier compares them.
        length: Bytes of a review that are read, as in Retrieval at most 4,000. In one document the
            tab is one of those of the first review.
        skip_corrupt: As in Retrieval.

    Raises:
        ValueError: `length` is less than 2.
    """

    name = "film-pairs"

    def __init__(self, joined: bool = False, length: int = LENGTH, skip_corrupt: bool = False):
        super().__init__(skip_corrupt)
        if length < 2:
            raise ValueError(f"length must be at least two bytes, got {length}")
        self.joined, self.length, self.floors_of = joined, length, self.name
        self.name += "-joined" * joined + f"-{length}" * (length != LENGTH)
        seq_len, documents = (2 * length, 1) if joined else (length, 2)
        self.shape = replace(self.shape, seq_len=seq_len, documents=documents)

    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        folder = data_root / FOLDER
        check_hashes(folder, BUILD)
        files = {split: folder / f"{split}.tsv" for split in SPLITS}
        pairs = {split: Pairs(path, self.skip_corrupt, HOW) for split, path in files.items()}
        if not self.joined:
            return pairs
        return {split: Joined(of_split, self.length) for split, of_split in pairs.items()}


class Joined:
    """Pairs as one document: the first review, a tab, which no review contains, the second one.

    Args:
        pairs: The pairs.
        length: As in FilmPairs.
    """

    def __init__(self, pairs: Samples, length: int):
        self.pairs, self.length = pairs, length

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        (first, second), label, _ = self.pairs[index]
        return Sample(
            [np.concatenate([first[: self.length - 1], TAB, second[: self.length]])], label
        )


def write_film_pairs(data_root: Path, sizes: Mapping[str, int] = SIZES) -> Path:
    """Writes the pairs of all splits. Equal data give equal pairs.

    Args:
        data_root: The folder that contains aclImdb, with its files urls_*.txt.
        sizes: Number of pairs of each split.

    Returns:
        The folder of the three files.

    Raises:
        MissingData: A file does not exist.
        ValueError: A review has no film.
    """
    reviews = data_root / REVIEWS
    check_hashes(reviews, BUILD_REVIEWS)
    train, test = (read_films(reviews / part) for part in ("train", "test"))
    held_out = {film for film in train if int(stream_of("held out", film)) % HELD_OUT == 0}
    films: dict[str, Films] = {
        "train": {film: train[film] for film in train.keys() - held_out},
        "validation": {film: train[film] for film in held_out},
        "test": {film: test[film] for film in test.keys() - train.keys()},
    }
    folder = data_root / FOLDER
    folder.mkdir(exist_ok=True)
    for split, count in sizes.items():
        draft = folder / f".{split}.part"
        with draft.open("wb") as file:
            pairs = draw_pairs(films[split], split, count)
            for line in track(pairs, split, count, transient=True):
                file.write(line)
        draft.replace(folder / f"{split}.tsv")
    write_hashes(folder, ["*.tsv"])
    return folder


def read_films(folder: Path) -> dict[str, dict[str, list[Review]]]:
    """The reviews of a part of aclImdb, by film and sentiment.

    Line n of urls_<sentiment>.txt is the address of the film of review n.
    """
    films: dict[str, dict[str, list[Review]]] = defaultdict(lambda: defaultdict(list))
    for sentiment in SENTIMENTS:
        path = folder / f"urls_{sentiment}.txt"
        if not path.exists():
            raise MissingData(
                path, f"build it with python -m experiments.lra.data {BUILD_REVIEWS}"
            )
        urls = path.read_text().split()
        for review in sorted((folder / sentiment).glob("*.txt")):
            number = int(review.stem.split("_")[0])
            if number >= len(urls):
                raise ValueError(f"{path} has {len(urls)} lines, no film of {review.name}")
            films[urls[number]][sentiment].append(review)
    return films


def draw_pairs(films: Films, split: str, count: int) -> Iterator[bytes]:
    """Lines of pairs in the format of `Retrieval`; pairs of odd number are of one film.

    Args:
        films: The reviews of the split.
        split: Name of the split, which determines the random numbers.
        count: Number of pairs.
    """
    # The reviews that can be the first of a pair of one film, in an order that does not depend on
    # the file system.
    firsts = sorted(
        (film, sentiment, review)
        for film, by_sentiment in films.items()
        for sentiment, reviews in by_sentiment.items()
        for review in reviews
        if len(reviews) > 1
    )
    stream, state = stream_of("film pairs", split), np.empty(1, np.uint64)
    for number in range(count):
        state[0] = seed_of(stream, np.uint64(number))
        label = number % 2
        film, sentiment, first = firsts[below(state, len(firsts))]
        # The second review of a pair of two films is drawn as that of a pair of its own film. So
        # the second review alone does not determine the label.
        other, other_first = film, first
        while label == 0 and (other == film or other_first.parent.name != sentiment):
            other, _, other_first = firsts[below(state, len(firsts))]
        seconds = [review for review in films[other][sentiment] if review != other_first]
        second = seconds[below(state, len(seconds))]
        names = (review.stem.encode() for review in (first, second))
        texts = (review.read_bytes().translate(SPACES) for review in (first, second))
        yield b"%d.0\t%s\t%s\t%s\t%s\n" % (label, *names, *texts)
