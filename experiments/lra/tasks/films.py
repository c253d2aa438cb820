"""Film pairs: are two IMDb reviews about the same film?

It is a substitute for Retrieval, whose data are no longer available. It is not a task of the
arena, and its accuracies cannot be compared with those of AAN.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from rich.progress import track

from experiments.lra.tasks.hashing import below, seed_of, stream_of
from experiments.lra.tasks.retrieval import Pairs, Retrieval
from experiments.lra.tasks.store import check_hashes, write_hashes
from experiments.lra.tasks.task import SPLITS, MissingData, Samples
from experiments.lra.tasks.text import FOLDER as REVIEWS
from experiments.lra.tasks.text import SENTIMENTS

FOLDER = "film_pairs"
SIZES: Mapping[str, int] = dict(zip(SPLITS, (40_000, 4_000, 10_000), strict=True))
HELD_OUT = 10  # one film in so many of the training set is for validation
HOW = "make them with: python -m experiments.lra.data film-pairs"
Review = Path
# Film -> sentiment -> its reviews.
Films = Mapping[str, Mapping[str, list[Review]]]


class FilmPairs(Retrieval):
    """film_pairs/{train,validation,test}.tsv, in the format of `Retrieval`.

    The films of the three splits are different ones. Both reviews of a pair have one sentiment,
    and each place of a pair has the same distribution of reviews under both labels.
    """

    name = "film-pairs"

    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        folder = data_root / FOLDER
        check_hashes(folder)
        return {split: Pairs(folder / f"{split}.tsv", self.skip_corrupt, HOW) for split in SPLITS}


def write_film_pairs(data_root: Path, sizes: Mapping[str, int] = SIZES) -> Path:
    """Writes the pairs of all splits from aclImdb and its urls_*.txt; the same for the same data.

    Args:
        data_root: The folder that holds aclImdb.
        sizes: Pairs of each split.

    Returns:
        The folder of the three files.

    Raises:
        MissingData: For files that are not there.
        ValueError: For a review without a film.
    """
    reviews = data_root / REVIEWS
    check_hashes(reviews)
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
            for line in track(lines(films[split], split, count), split, count, transient=True):
                file.write(line)
        draft.replace(folder / f"{split}.tsv")
    write_hashes(folder, ["*.tsv"])
    return folder


def read_films(folder: Path) -> dict[str, dict[str, list[Review]]]:
    """The reviews of a part of aclImdb by film and sentiment.

    Line n of urls_<sentiment>.txt is the page of the film of review n.
    """
    films: dict[str, dict[str, list[Review]]] = defaultdict(lambda: defaultdict(list))
    for sentiment in SENTIMENTS:
        path = folder / f"urls_{sentiment}.txt"
        if not path.exists():
            raise MissingData(path, "it is part of aclImdb_v1.tar.gz")
        urls = path.read_text().split()
        for review in sorted((folder / sentiment).glob("*.txt")):
            number = int(review.stem.split("_")[0])
            if number >= len(urls):
                raise ValueError(f"{path} has {len(urls)} lines, no film of {review.name}")
            films[urls[number]][sentiment].append(review)
    return films


def lines(films: Films, split: str, count: int) -> Iterator[bytes]:
    """Pairs in the format of `Retrieval`, of one film where their number is odd."""
    # All that a pair of one film can begin with, in an order that no file system decides.
    first = sorted(
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
        film, sentiment, a = first[below(state, len(first))]
        # Drawn like the second review of a pair of that other film: so the second review alone
        # does not tell the label.
        other, begins = film, a
        while label == 0 and (other == film or begins.parent.name != sentiment):
            other, _, begins = first[below(state, len(first))]
        rest = [review for review in films[other][sentiment] if review != begins]
        b = rest[below(state, len(rest))]
        texts = (review.read_bytes().translate(SPACES) for review in (a, b))
        yield b"%d.0\t%s\t%s\t%s\t%s\n" % (label, a.stem.encode(), b.stem.encode(), *texts)


SPACES = bytes.maketrans(b"\t\n\r", b"   ")
