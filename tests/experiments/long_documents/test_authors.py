from shutil import copytree

import numpy as np
import pytest

from experiments.language_model.books import Books, build
from experiments.long_documents import authors
from experiments.long_documents.authors import (
    Authors,
    books_for_testing,
    books_for_training,
    by_author,
    identity,
)
from experiments.long_documents.words import word_ids
from tests.experiments.language_model.test_books import text_of_book

LONGEST = 256
ENDS = "xyzv"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(authors, "LONGEST", LONGEST)
    monkeypatch.setattr(authors, "LEAST", 2 * LONGEST)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Author n has 30 + n books, whose words end in a letter of the author's own."""
    root = tmp_path_factory.mktemp("authors")
    write_authors(root / "source")
    build(root / "source", root / "books")
    return root


def write_authors(source):
    names = ("0", "1", "2", "Various")
    for number, author in enumerate(names):
        (source / author).mkdir(parents=True)
        for i in range(30 + number):
            text = text_of_book(1000 * number + i).replace(" ", f"{ENDS[number]} ")
            (source / author / f"{i}.md").write_text(text)
    (source / "0" / "short.md").write_text("Too short for a passage.")


def test_books_of_training_and_testing_are_apart_and_of_the_chosen_authors(root):
    books = Books.read(root / "books")
    chosen = by_author(books, 3)
    assert [author for author, _ in chosen] == ["0", "1", "2"]
    assert [len(own) for _, own in chosen] == [30, 31, 32]
    for (author, own), train in zip(chosen, books_for_training(chosen), strict=True):
        assert len(books_for_testing(own)) == 10
        assert not {b.path for b in books_for_testing(own)} & {b.path for b in train}
        assert {b.author for b in own} == {author}
    assert [author for author, _ in by_author(books, 2)] == ["1", "2"]
    with pytest.raises(ValueError, match="at most 3, the number of authors with 3 books"):
        by_author(books, 4)


def test_the_identity_is_that_of_the_chosen_authors_in_any_corpus(root, tmp_path):
    books = Books.read(root / "books")
    found = identity(books, by_author(books, 2))
    for author in ("1", "2"):
        copytree(root / "source" / author, tmp_path / "source" / author)
    build(tmp_path / "source", tmp_path / "books")
    fewer = Books.read(tmp_path / "books")
    assert fewer.sha256 != books.sha256
    assert identity(fewer, by_author(fewer, 2)) == found
    assert identity(books, by_author(books, 3)) != found


def test_lengths_read_the_same_places(root):
    short, long = (Authors(length, 3).splits(root) for length in (64, 256))
    for split in ("train", "validation", "test"):
        for index in range(12):
            one, other = short[split][index], long[split][index]
            assert (len(one.documents[0]), len(other.documents[0])) == (64, 256)
            assert np.array_equal(one.documents[0], other.documents[0][:64])
            assert one.label == other.label
    labels = [short["test"][index].label for index in range(24)]
    assert np.bincount(labels).tolist() == [authors.TESTED] * 3


def test_passages_are_of_their_author_and_of_their_split(root):
    splits = Authors(256, 3).splits(root)
    read = {
        split: [samples[i] for i in range(min(len(samples), 600))]
        for split, samples in splits.items()
    }
    texts = {}
    for split, samples in read.items():
        for sample in samples:
            text = bytes((sample.documents[0] - 1).astype(np.uint8))
            ends = text.split(b" ")[1:-1]
            assert all(word.endswith(ENDS[sample.label].encode()) for word in ends)
            texts.setdefault(split, []).append(text)
    held = b"|".join(texts["validation"] + texts["test"])
    assert not any(text[i : i + 40] in held for text in texts["train"] for i in (0, 100, 216))
    assert len(set(texts["test"])) == len(texts["test"])
    assert [sample.label for sample in read["train"][:6]] == [0, 1, 2, 0, 1, 2]


def test_words_are_read_at_the_places_of_bytes_and_fit_the_shape(root):
    task = Authors(256, 3, tokens="words")
    assert (task.name, task.shape.seq_len) == ("authors-256-words", 64)
    letters, read = (Authors(256, 3).splits(root), task.splits(root))
    for split in ("train", "validation", "test"):
        for index in range(6):
            one, other = letters[split][index], read[split][index]
            text = (one.documents[0] - 1).astype(np.uint8)
            assert other.documents[0].tolist() == word_ids(text).tolist()
            assert one.label == other.label
            assert 0 < other.documents[0].min() <= other.documents[0].max() < task.shape.vocabulary


def test_wrong_input(tmp_path):
    with pytest.raises(ValueError, match="tokens must be bytes or words, got 'letters'"):
        Authors(64, tokens="letters")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="length must be 1 to 256 bytes, got 257"):
        Authors(257)
    with pytest.raises(ValueError, match="authors must be 2 or more, got 1"):
        Authors(64, 1)
    with pytest.raises(FileNotFoundError, match=r"experiments\.language_model data builds it"):
        Authors(64).splits(tmp_path)
