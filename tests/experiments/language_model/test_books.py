import json

import numpy as np
import pytest

from experiments.language_model.books import Books, build

LETTERS = list("abcdefghijklmnopqrstuvwxyz")


def write_books(folder, number=60, begin=0):
    """Books of words that no other one has in this order, of three authors."""
    for i in range(begin, begin + number):
        path = folder / f"author-{i % 3}" / f"{i}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# Title: Book\n\n## Author: Somebody\n\n-------\n\n{text_of_book(i)}\n")


def text_of_book(seed, words=200):
    random = np.random.default_rng(seed)
    words = ["".join(random.choice(LETTERS, 6)) for _ in range(words)]
    return f"Book {seed}. " + " ".join(words)


def test_a_book_is_in_one_split_and_is_found_there(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "built"
    write_books(source)
    (source / "picture.png").write_bytes(b"none")
    (source / "README.md").write_text("No book.")
    facts = build(source, folder)
    books = Books.read(folder)
    assert len(facts["books"]) == len(books.books) == 60
    boundaries = {split: int((content == 0).sum()) for split, content in books.splits.items()}
    assert sum(boundaries.values()) == 60
    assert 0 < boundaries["validation"] < 12
    assert 0 < boundaries["test"] < 12
    for book in books.books:
        number = int(book.path.split("/")[1].removesuffix(".md"))
        assert books.text(book).tobytes().decode() == text_of_book(number)
        assert (book.author, books.splits[book.split][book.begin - 1]) == (
            f"author-{number % 3}",
            0,
        )
    assert not any(b"Somebody" in content.tobytes() for content in books.splits.values())
    assert json.loads((folder / "books.json").read_text()) == facts


def test_books_that_stand_in_longer_ones_are_left_out(tmp_path):
    source = tmp_path / "source"
    write_books(source)
    first, second = text_of_book(0), text_of_book(1)
    (source / "omnibus.txt").write_text(f"{first}\n{second}\n{text_of_book(200)}")
    (source / "part.txt").write_text(text_of_book(2)[:900].upper())
    (source / "quotes.txt").write_text(text_of_book(300, 2000) + first[:100])
    facts = build(source, tmp_path / "built")
    assert set(facts["left_out"]) == {"author-0/0.md", "author-1/1.md", "part.txt"}
    assert min(facts["left_out"].values()) > 0.9
    assert len(facts["books"]) == 60 - 2 + 2


def test_whole_authors_of_most_books_are_chosen(tmp_path):
    source = tmp_path / "source"
    write_books(source, 121)  # one more of author-0
    (source / "author-0" / "121.md").write_text(text_of_book(121))
    size = len(text_of_book(0))
    facts = build(source, tmp_path / "built", most_bytes=50 * size)
    assert {book["author"] for book in facts["books"].values()} == {"author-0"}
    assert len(facts["books"]) == 42


def test_books_keep_their_split_when_others_come(tmp_path):
    for name, number in (("few", 60), ("many", 90)):
        write_books(tmp_path / name, number)
    few, many = (build(tmp_path / n, tmp_path / f"{n}-built")["books"] for n in ("few", "many"))
    assert all(many[digest]["split"] == book["split"] for digest, book in few.items())


def test_damage_is_found(tmp_path):
    write_books(tmp_path / "source")
    build(tmp_path / "source", tmp_path)
    content = np.fromfile(tmp_path / "train.bin", np.uint8)
    content[7] ^= 1
    content.tofile(tmp_path / "train.bin")
    with pytest.raises(ValueError, match=r"train\.bin is damaged"):
        Books.read(tmp_path)
    with pytest.raises(ValueError, match=r"has no books that `python -m .* data` wrote"):
        Books.read(tmp_path / "source")


def test_too_few_books(tmp_path):
    (tmp_path / "one.txt").write_text("One.")
    with pytest.raises(ValueError, match=r"has no book for (train|validation|test): 1 books"):
        build(tmp_path, tmp_path / "built")
