"""Datasets of books as bytes, built from a folder of text files and split by book."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from experiments.files import write_json

SUFFIXES = (".md", ".txt")
SPLITS = ("train", "validation", "test")
BOUNDARY = 0  # the token before each book, and before each sequence that a model reads
EVALUATED = 20  # one book of so many validates, another one tests
FACTS = "books.json"
BYTES = 256  # the vocabulary where a token is a byte
HEADER = b"\n-------\n"  # ends the title, author and year of the known collection
HEADER_BYTES = 600  # at most
WINDOW = 64  # letters, a power of two
SAMPLED_BITS = 8  # one run of 2^8 is compared
FACTOR = 0x9E3779B97F4A7C15  # odd
COPIED = 0.1  # of a book that stands in another one: then it is left out


@dataclass(frozen=True)
class Book:
    """Where a book stands.

    Attributes:
        path: Of its file, below the folder that was read.
        author: The folder that holds the file; empty for a file at the top.
        split: Of SPLITS.
        begin: Its first byte in the split, after BOUNDARY.
        bytes: Of its text.
    """

    path: str
    author: str
    split: str
    begin: int
    bytes: int


@dataclass(frozen=True)
class Books:
    """Built data.

    Attributes:
        splits: The tokens of each split, uint8 bytes or uint16; a book begins with BOUNDARY.
        sha256: Of each split.
        token_bytes: Bytes of each token of the vocabulary.
        bytes_per_token: Mean of the train split.
        books: Of all splits, where tokens are bytes.
    """

    splits: Mapping[str, np.ndarray]
    sha256: Mapping[str, str]
    token_bytes: tuple[int, ...] = (1,) * BYTES
    bytes_per_token: float = 1.0
    books: tuple[Book, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> "Books":
        """Reads what `build` or `tokens.encode` wrote, and checks it.

        Raises:
            ValueError: The folder holds no books, or others than were built; names the file.
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
    """Writes the splits of the books of a folder, and which books they hold.

    A file is a book, without the header that names its author. A book with more than COPIED of
    its text in longer books is left out: no split knows what another one asks. Which split has a
    book follows from its content, so it stays there when others come.

    Args:
        source: Has files of SUFFIXES at any depth; the folder of a file names the author.
        folder: Gets a .bin of each split and books.json.
        most_bytes: Whole authors, those of most books first, while they fit; all if None.

    Returns:
        What books.json holds: bytes and SHA-256 of each split, the books by their SHA-256, and
        the paths that were left out with the share of each that stands elsewhere.

    Raises:
        ValueError: A split would have no book.
    """
    texts = {path: text for path in files_of(source) if (text := text_of(path.read_bytes()))}
    copies = copies_among(texts)
    kept = chosen([path for path in texts if path not in copies], texts, most_bytes)
    books: dict[str, dict] = {}
    parts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for path in kept:
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
    """The paths of whole authors, those of most books first, while they fit."""
    if most_bytes is None:
        return paths
    sizes, number = Counter(), Counter(path.parent for path in paths)
    for path in paths:
        sizes[path.parent] += len(texts[path])
    kept, total = set(), 0
    for author in sorted(number, key=lambda author: (-number[author], author)):
        if total + sizes[author] <= most_bytes:
            kept.add(author)
            total += sizes[author]
    return [path for path in paths if path.parent in kept]


def copies_among(texts: Mapping[Path, bytes]) -> dict[Path, float]:
    """The share of each book that stands in longer ones, of those with more than COPIED."""
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
    """Hashes of some runs of WINDOW letters, the same ones wherever the same letters stand."""
    letters = np.frombuffer(text.lower(), np.uint8)
    hashes = letters[(letters >= ord("a")) & (letters <= ord("z"))].astype(np.uint64)
    factor, width = FACTOR, 1
    while width < WINDOW:
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        factor, width = factor * factor % 2**64, 2 * width
    return np.unique(hashes[hashes >> np.uint64(64 - SAMPLED_BITS) == 0])
