"""Tokenizes books: a tokenizer that is trained on the train split, and its tokens."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from experiments.files import write_json
from experiments.language_model.books import BOUNDARY, FACTS, SPLITS, Book, Books, write_splits

TOKENIZER = "tokenizer.json"
LEAST, MOST = 258, 2**16  # all bytes, BOUNDARY and a merge; the range of uint16
BATCH = 16  # books at a time


def encode(source: Path, folder: Path, vocabulary: int, progress: bool = True) -> dict:
    """Trains a byte-level BPE tokenizer on the train split, and writes all splits as its tokens.

    Args:
        source: Folder that `books.build` wrote.
        folder: Folder to which a .bin file of each split, books.json and tokenizer.json are
            written.
        vocabulary: Number of tokens, LEAST to MOST.
        progress: Whether training shows a progress bar.

    Returns:
        The contents of books.json.

    Raises:
        ValueError: The vocabulary is out of range, or a book is not UTF-8; the message names it.
    """
    if not LEAST <= vocabulary <= MOST:
        raise ValueError(f"vocabulary must be {LEAST} to {MOST} tokens, got {vocabulary}")
    books = Books.read(source)
    if not books.books:
        raise ValueError(f"{source} must have books as bytes, not as tokens")
    tokenizer = trained(texts_of(books, "train"), vocabulary, progress)
    parts, sizes = {}, {}
    for split in SPLITS:
        encoded = [np.array([], np.uint16)]
        for ids in ids_of(tokenizer, texts_of(books, split)):
            encoded.append(np.array([BOUNDARY, *ids], np.uint16))
        parts[split] = np.concatenate(encoded).tobytes()
        sizes[split] = len(books.splits[split])
    tokens = {split: len(part) // 2 for split, part in parts.items()}
    facts = write_splits(folder, parts) | {"bytes": sizes, "tokens": tokens}
    facts["source"] = dict(books.sha256)
    written = (tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size()))
    facts["token_bytes"] = [len(token) for token in written]  # a letter of these is a byte
    tokenizer.save(str(folder / TOKENIZER))
    write_json(folder / FACTS, facts)
    return facts


def trained(texts: Iterable[str], vocabulary: int, progress: bool) -> Tokenizer:
    """A byte-level BPE tokenizer; no text contains its token BOUNDARY."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[chr(BOUNDARY)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def texts_of(books: Books, split: str) -> Iterator[str]:
    """The texts of a split's books, in order. Raises ValueError for one that is not UTF-8."""
    for book in sorted(books.books, key=lambda book: book.begin):
        if book.split == split:
            yield text_of(books, book)


def text_of(books: Books, book: Book) -> str:
    """The text of a book. Raises ValueError if it is not UTF-8."""
    try:
        return books.text(book).tobytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{book.path} must be UTF-8: {error}") from error


def ids_of(tokenizer: Tokenizer, texts: Iterator[str]) -> Iterator[list[int]]:
    """The tokens of each text."""
    while batch := list(islice(texts, BATCH)):
        for encoding in tokenizer.encode_batch_fast(batch):
            yield encoding.ids


class Reader:
    """Converts between text and tokens, by the tokenizer of a run or byte by byte.

    Args:
        folder: Folder of a run, with tokenizer.json unless it was trained on bytes.
    """

    def __init__(self, folder: Path):
        path = folder / TOKENIZER
        self.tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None
        self.stream = DecodeStream(skip_special_tokens=True)

    def tokens(self, prompt: str) -> list[int]:
        """Of a text."""
        if self.tokenizer is None:
            return list(prompt.encode())
        return self.tokenizer.encode(prompt).ids

    def text(self, token: int) -> bytes:
        """The text that one more token adds."""
        if self.tokenizer is None:
            return bytes([token])
        return (self.stream.step(self.tokenizer, token) or "").encode()
