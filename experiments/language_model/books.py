"""Datasets of books as bytes, built from a folder of text files and split by book."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from experiments.files import write_json
from experiments.language_model.settings import BYTES

SUFFIXES = (".md", ".txt")
SPLITS = ("train", "validation", "test")
BOUNDARY = 0  # the token before each book, and before each sequence that a model reads
EVALUATED = 20  # of so many books, one is for validation and one for testing
FACTS = "books.json"
HEADER = b"\n-------\n"  # ends the title, author and year of the known collection
HEADER_BYTES = 600  # at most
WINDOW = 64  # letters, a power of two
SAMPLED_BITS = 8  # one of 2^8 runs of letters is compared
FACTOR = 0x9E3779B97F4A7C15  # odd
COPIED = 0.1  # a book is left out if more than this share of it is in other books


@dataclass(frozen=True)
class Book:
    """The position of a book in the data.

    Attributes:
        path: Path of its file, relative to the source folder.
        author: Name of the folder of the file; empty for a file at the top.
        split: One of SPLITS.
        begin: Index of its first byte in the split, after BOUNDARY.
        bytes: Number of bytes of its text.
    """

    path: str
    author: str
    split: str
    begin: int
    bytes: int


@dataclass(frozen=True)
class Books:
    """A built data set.

    Attributes:
        splits: The tokens of each split, uint8 bytes or uint16. A book begins with BOUNDARY.
        sha256: SHA-256 of each split.
        token_bytes: Number of bytes of each token of the vocabulary.
        bytes_per_token: Mean number of bytes of a token in the train split.
        books: The books of all splits, if tokens are bytes.
    """

    splits: Mapping[str, np.ndarray]
    sha256: Mapping[str, str]
    token_bytes: tuple[int, ...] = (1,) * BYTES
    bytes_per_token: float = 1.0
    books: tuple[Book, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> "Books":
        """Reads and checks a data set that `build` or `tokens.encode` wrote.

        Raises:
            ValueError: The folder has no data set, or a file has changed. The message names it.
        """
        try:
            facts = json.loads((folder / FACTS).read_text())
            hashes, sizes = facts["sha256"], facts.get("token_bytes", [1] * BYTES)
            dtype = np.uint8 if len(sizes) == BYTES else np.uint16
            splits = {s: np.memmap(folder / f"{s}.bin", dtype, "r") for s in SPLITS}
        except (OSError, ValueError, KeyError) as error:
            command = "python -m experiments.language_model data"
            raise ValueError(f"{folder} has no books that `{command}` wrote: {error}") from error
        for split, content in splits.items():
            if hashlib.sha256(content.data).hexdigest() != hashes[split]:
                raise ValueError(f"{folder / split}.bin is damaged: its SHA-256 has changed")
        books = tuple(Book(**book) for book in facts.get("books", {}).values())
        mean = facts["bytes"]["train"] / len(splits["train"])
        return cls(splits, hashes, tuple(sizes), mean, books)

    def text(self, book: Book) -> np.ndarray:
        """The bytes of a book."""
        return self.splits[book.split][book.begin : book.begin + book.bytes]


def build(source: Path, folder: Path, most_bytes: int | None = None) -> dict:
    """Builds a data set from the books of a folder.

    A file is a book; a header with its author is removed. A book with more than COPIED of its text
    in longer books is left out, so that splits do not overlap. The split of a book depends only on
    its content, so it does not change if books are added.

    Args:
        source: Folder with files of SUFFIXES at any depth. The folder of a file is its author.
        folder: Folder to which a .bin file of each split and books.json are written.
        most_bytes: Largest size. Whole authors are taken, those with the most books first. None
            for all books.

    Returns:
        The contents of books.json: bytes and SHA-256 of each split, the books by SHA-256, and the
        paths of books that were left out, each with the share that is in other books.

    Raises:
        ValueError: A split would have no book.
    """
    texts = {path: text for path in files_of(source) if (text := text_of(path.read_bytes()))}
    copies = copies_among(texts)
    selected = chosen([path for path in texts if path not in copies], texts, most_bytes)
    books: dict[str, dict] = {}
    parts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for path in selected:
        digest = hashlib.sha256(texts[path]).hexdigest()
        place = int(digest, 16) % EVALUATED
        split = SPLITS[place + 1] if place < 2 else SPLITS[0]
        own = path.relative_to(source)
        author = "" if own.parent == Path() else own.parent.name
        begin = sizes[split] + 1
        books[digest] = asdict(Book(str(own), author, split, begin, len(texts[path])))
        parts[split] += [bytes([BOUNDARY]), texts[path]]
        sizes[split] = begin + len(texts[path])
    for split in SPLITS:
        if not parts[split]:
            raise ValueError(
                f"{source} has no book for {split}: {len(books)} books with the suffixes "
                f"{', '.join(SUFFIXES)}, of which one of {EVALUATED} is for {split}"
            )
    left_out = {str(path.relative_to(source)): share for path, share in copies.items()}
    facts = write_splits(folder, {split: b"".join(content) for split, content in parts.items()})
    facts |= {"books": books, "left_out": left_out}
    write_json(folder / FACTS, facts)
    return facts


def write_splits(folder: Path, splits: Mapping[str, bytes]) -> dict:
    """Writes the .bin of each split; returns the bytes and the SHA-256 of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, content in splits.items():
        (folder / f"{split}.bin").write_bytes(content)
    return {
        "bytes": {split: len(content) for split, content in splits.items()},
        "sha256": {s: hashlib.sha256(content).hexdigest() for s, content in splits.items()},
    }


def files_of(source: Path) -> Iterator[Path]:
    """The files of books, in order."""
    for path in sorted(source.rglob("*")):
        if path.suffix in SUFFIXES and path.stem.lower() != "readme" and path.is_file():
            yield path


def text_of(content: bytes) -> bytes:
    """The text of a book's file, without header and BOUNDARY."""
    end = content.find(HEADER, 0, HEADER_BYTES)
    text = content if end < 0 else content[end + len(HEADER) :]
    return text.replace(bytes([BOUNDARY]), b"").strip()


def chosen(paths: list[Path], texts: Mapping[Path, bytes], most_bytes: int | None) -> list[Path]:
    """The paths of whole authors that fit, those with the most books first."""
    if most_bytes is None:
        return paths
    sizes, number = Counter(), Counter(path.parent for path in paths)
    for path in paths:
        sizes[path.parent] += len(texts[path])
    selected, total = set(), 0
    for author in sorted(number, key=lambda author: (-number[author], author)):
        if total + sizes[author] <= most_bytes:
            selected.add(author)
            total += sizes[author]
    return [path for path in paths if path.parent in selected]


def copies_among(texts: Mapping[Path, bytes]) -> dict[Path, float]:
    """The share of each book that is in longer books, for books with more than COPIED."""
    known: set[int] = set()
    copies = {}
    for path in sorted(texts, key=lambda path: (-len(texts[path]), path)):
        own = set(fingerprints(texts[path]).tolist())
        share = len(own & known) / max(len(own), 1)
        if share > COPIED:
            copies[path] = round(share, 3)
        else:
            known |= own
    return copies


def fingerprints(text: bytes) -> np.ndarray:
    """Hashes of some runs of WINDOW letters; equal text gives equal hashes at any position."""
    letters = np.frombuffer(text.lower(), np.uint8)
    hashes = letters[(letters >= ord("a")) & (letters <= ord("z"))].astype(np.uint64)
    factor, width = FACTOR, 1
    while width < WINDOW:
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        factor, width = factor * factor % 2**64, 2 * width
    return np.unique(hashes[hashes >> np.uint64(64 - SAMPLED_BITS) == 0])
