"""Authorship of passages: some books of an author for training, other books for testing.

Passages of all lengths begin at the same positions, so lengths differ only in how much is read.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from experiments.files import RESULT, read_json, read_object
from experiments.language_model.books import FACTS, Book, Books
from experiments.long_documents.words import BUCKETS, FIRST_WORD, TOKEN_BYTES, word_ids
from experiments.lra.tasks import MissingData, Sample, Samples, Shape, Task
from experiments.lra.tasks.task import BYTES, bytes_to_ids

LONGEST = 65_536  # bytes of a passage
LEAST = 2 * LONGEST  # bytes of a book
BOOKS = 3  # least number of books of an author; one of three is for testing
TESTED = 8  # largest number of test passages of an author
AUTHORS = 50
NOBODY = ("", "Anonymous", "Various")
EPOCH = 2**20  # training passages in an epoch
DATA = "data.json"  # in the folder of a length: `identity` of the books
Tokens = Literal["bytes", "words"]


@dataclass(frozen=True)
class Passage:
    """A position in a book: its first byte, and the author."""

    book: Book
    begin: int
    label: int


class Authors(Task):
    """The task of finding the author of a passage of `length` bytes, among `authors` authors.

    A token is a byte. With `tokens="words"` a token is a word, hashed as in the floor of word
    counts, or a byte that is neither letter nor space; then a passage is cut to one token for each
    TOKEN_BYTES bytes.

    A third of the books of an author are for testing. The last LONGEST bytes of the others are for
    validation, and the rest is for training: passages at random positions, equally many for each
    author.
    """

    def __init__(self, length: int = LONGEST, authors: int = AUTHORS, tokens: Tokens = "bytes"):
        if not 1 <= length <= LONGEST:
            raise ValueError(f"length must be 1 to {LONGEST} bytes, got {length}")
        if authors < 2:
            raise ValueError(f"authors must be 2 or more, got {authors}")
        if tokens not in get_args(Tokens):
            raise ValueError(f"tokens must be bytes or words, got {tokens!r}")
        self.length, self.authors = length, authors
        self.tokens: Tokens = tokens
        self.name = f"authors-{length}" + "-words" * (tokens == "words")
        if tokens == "bytes":
            self.shape = Shape(seq_len=length, vocabulary=BYTES, classes=authors)
        else:
            seq_len = -(-length // TOKEN_BYTES)
            self.shape = Shape(seq_len, vocabulary=FIRST_WORD + BUCKETS, classes=authors)

    def splits(self, data_root: Path) -> Mapping[str, Samples]:
        folder = data_root / "books"
        if not (folder / FACTS).exists():
            raise MissingData(folder, "python -m experiments.language_model data builds it")
        books = Books.read(folder)
        chosen = by_author(books, self.authors)
        return {
            "train": Drawn(books, books_for_training(chosen), self.length, self.tokens),
            "validation": Passages(
                books, passages_for_validation(chosen), self.length, self.tokens
            ),
            "test": Passages(books, passages_for_testing(chosen), self.length, self.tokens),
        }


def by_author(books: Books, authors: int) -> list[tuple[str, list[Book]]]:
    """The authors with the most books of sufficient length, and these books in random order.

    Raises:
        ValueError: There are too few such authors.
    """
    found = defaultdict(list)
    for book in books.books:
        if book.bytes >= LEAST and book.author not in NOBODY:
            found[book.author].append(book)
    enough = [author for author, own in found.items() if len(own) >= BOOKS]
    if len(enough) < authors:
        raise ValueError(
            f"authors must be at most {len(enough)}, the number of authors with {BOOKS} books of "
            f"{LEAST} bytes or more, got {authors}"
        )
    enough.sort(key=lambda author: (-len(found[author]), author))
    return [(author, sorted(found[author], key=_drawn)) for author in sorted(enough[:authors])]


def identity(books: Books, chosen: list[tuple[str, list[Book]]]) -> dict[str, str]:
    """SHA-256 of the chosen authors, with the paths and texts of their books.

    Passages depend on nothing else, so a corpus may have more books, or fewer.
    """
    digest = hashlib.sha256()
    for author, own in chosen:
        for book in own:
            digest.update(f"{author}\n{book.path}\n{book.bytes}\n".encode())
            digest.update(books.text(book).data)
    return {"authors": digest.hexdigest()}


def check_same_books(folder: Path, data: Mapping[str, object]) -> None:
    """Raises ValueError if a folder has runs on other books, or with another number of authors.

    Args:
        folder: The folder of a length, which need not exist.
        data: `identity` of the books that are to be read.
    """
    if read_json(folder / DATA, data) != data and any(folder.glob("seed*")):
        raise ValueError(
            f"output must have runs on the same books and authors, but {folder} has runs on others"
        )


def starting_from(folder: Path, data: dict[str, str], seeds: int, output: Path) -> list[str]:
    """Options of `python -m experiments.lra.seeds` with which every seed starts from its own best
    weights in the folder of another length.

    Args:
        folder: A folder with the runs of a length.
        data: `identity` of the books of the runs that start.
        seeds: Number of seeds.
        output: The folder of the runs that start. It may have results of them.

    Raises:
        ValueError: The folder has no such weights, they are of other authors or books, or a run
            was stuck at chance: the weights of its restart are of another seed. Or `output` has
            results of runs that started from other weights.
    """
    from experiments.lra.learner import read_checkpoint, trained_by  # imports torch

    if read_object(folder / DATA, "written by `experiments.long_documents train`", ()) != data:
        raise ValueError(f"init_from must have runs on the same books, got {folder} of others")
    for seed in range(seeds):
        if not (path := best_of(folder, seed)).exists():
            raise ValueError(f"init_from must have weights of every seed, but {path} is missing")
        if read_json(folder / f"seed{seed}" / RESULT, {}).get("stuck"):
            raise ValueError(f"init_from must have runs above chance, but seed{seed} was stuck")
        own = output / f"seed{seed}"
        if (result := read_json(own / RESULT, None)) is None:
            continue
        started, expected = result.get("init_from"), trained_by(read_checkpoint(path))
        if started != expected:
            raise ValueError(
                f"output must have no runs that started from other weights than {expected}, but "
                f"{own} started from {started}"
            )
    return [f"--model.init_from={best_of(folder, '{seed}')}", "--model.positions_from=repeated"]


def best_of(folder: Path, seed: int | str) -> Path:
    """The checkpoint that a run has tested."""
    return folder / f"seed{seed}" / "checkpoints" / "best.ckpt"


def _drawn(book: Book) -> str:
    """A pseudo-random order that is equal in every corpus with the book."""
    return hashlib.sha256(book.path.encode()).hexdigest()


def books_for_testing(own: list[Book]) -> list[Book]:
    """The test books of an author."""
    return own[: len(own) // BOOKS]


def books_for_training(chosen: list[tuple[str, list[Book]]]) -> list[list[Book]]:
    """The training books of each author."""
    return [own[len(own) // BOOKS :] for _, own in chosen]


def passages_for_validation(chosen: list[tuple[str, list[Book]]]) -> list[Passage]:
    """The end of every training book."""
    return [
        Passage(book, book.bytes - LONGEST, label)
        for label, own in enumerate(books_for_training(chosen))
        for book in own
    ]


def passages_for_testing(chosen: list[tuple[str, list[Book]]]) -> list[Passage]:
    """Up to TESTED disjoint passages of an author, spread over the books."""
    passages = []
    for label, (_, own) in enumerate(chosen):
        parts = [
            (book, n) for book in books_for_testing(own) for n in range(book.bytes // LONGEST)
        ]
        spread = np.linspace(0, len(parts) - 1, min(TESTED, len(parts))).round().astype(int)
        passages += [Passage(parts[i][0], LONGEST * parts[i][1], label) for i in spread]
    return passages


class Passages:
    """Samples at given positions."""

    in_memory = True

    def __init__(
        self, books: Books, passages: list[Passage], length: int, tokens: Tokens = "bytes"
    ):
        self.books, self.passages, self.length, self.tokens = books, passages, length, tokens

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, index: int) -> Sample:
        return self._read(self.passages[index])

    def _read(self, passage: Passage) -> Sample:
        text = self.books.text(passage.book)[passage.begin : passage.begin + self.length]
        ids = word_ids(text) if self.tokens == "words" else bytes_to_ids(text.tobytes())
        return Sample([ids], passage.label)


class Drawn(Passages):
    """Samples at random positions of the training books, with authors in turn."""

    in_memory = False  # drawing them takes long enough that processes should do it

    def __init__(
        self, books: Books, training: list[list[Book]], length: int, tokens: Tokens = "bytes"
    ):
        super().__init__(books, [], length, tokens)
        self.training = training

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> Sample:
        return self._read(self.place(index))

    def place(self, index: int) -> Passage:
        """A random position in the training books of the author, except the ends of books."""
        label = index % len(self.training)
        own = self.training[label]
        ends = np.cumsum([book.bytes - LEAST + 1 for book in own])
        at = int(np.random.default_rng(index).integers(ends[-1]))
        number = int(np.searchsorted(ends, at, side="right"))
        return Passage(own[number], at - (int(ends[number - 1]) if number else 0), label)
