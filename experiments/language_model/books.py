"""The bytes of books, built from a folder of text and split by book."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.files import write_json

SUFFIXES = (".md", ".txt")
SPLITS = ("train", "validation")
BOUNDARY = 0  # the byte before each book, and before each sequence that a model reads
VALIDATED = 20  # one book of so many validates
FACTS = "books.json"


@dataclass(frozen=True)
class Books:
    """Built data.

    Attributes:
        splits: The bytes of each split, uint8; every book begins with BOUNDARY.
        sha256: Of each split.
    """

    splits: Mapping[str, np.ndarray]
    sha256: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> "Books":
        """Reads what `build` wrote, and checks it.

        Raises:
            ValueError: The folder holds no books, or others than were built; names the file.
        """
        try:
            hashes = json.loads((folder / FACTS).read_text())["sha256"]
            splits = {s: np.memmap(folder / f"{s}.bin", np.uint8, "r") for s in SPLITS}
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder} holds no books that were built: {error}") from error
        for split, content in splits.items():
            if hashlib.sha256(content.data).hexdigest() != hashes[split]:
                raise ValueError(f"{folder / split}.bin is damaged: its SHA-256 is another")
        return cls(splits, hashes)


def build(source: Path, folder: Path) -> dict:
    """Writes the splits of the books of a folder, and which books they hold.

    A file is a book. Which split has it follows from its content, so two copies of it count once
    and a book keeps its split when others come.

    Args:
        source: Has files of SUFFIXES at any depth.
        folder: Gets train.bin, validation.bin and books.json.

    Returns:
        What books.json holds: bytes and SHA-256 of each split, and of each book.

    Raises:
        ValueError: A split would have no book.
    """
    paths = sorted(p for p in source.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    books, parts = {}, {split: [] for split in SPLITS}
    for path in paths:
        content = path.read_bytes().replace(bytes([BOUNDARY]), b"")
        digest = hashlib.sha256(content).hexdigest()
        if not content or digest in books:
            continue
        split = SPLITS[int(digest, 16) % VALIDATED == 0]
        name = str(path.relative_to(source))
        books[digest] = {"path": name, "split": split, "bytes": len(content)}
        parts[split] += [bytes([BOUNDARY]), content]
    for split in SPLITS:
        if not parts[split]:
            raise ValueError(
                f"{source} has no book for {split}: {len(books)} books with the suffixes "
                f"{', '.join(SUFFIXES)}, of which one of {VALIDATED} validates"
            )
    whole = {split: b"".join(content) for split, content in parts.items()}
    facts = {
        "bytes": {split: len(content) for split, content in whole.items()},
        "sha256": {split: hashlib.sha256(content).hexdigest() for split, content in whole.items()},
        "books": books,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for split, content in whole.items():
        (folder / f"{split}.bin").write_bytes(content)
    write_json(folder / FACTS, facts)
    return facts
