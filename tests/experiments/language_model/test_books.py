import json

import numpy as np
import pytest

from experiments.language_model.books import Books, build


def write_books(folder, number=60):
    for i in range(number):
        path = folder / f"author-{i % 3}" / f"{i}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Book {i}. " + "It was a dark and stormy night. " * 20)


def test_a_book_is_in_one_split_and_copies_count_once(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "built"
    write_books(source)
    (source / "copy.txt").write_bytes((source / "author-0" / "0.md").read_bytes())
    (source / "picture.png").write_bytes(b"none")
    facts = build(source, folder)
    books = Books.read(folder)
    assert len(facts["books"]) == 60
    boundaries = {split: int((content == 0).sum()) for split, content in books.splits.items()}
    assert sum(boundaries.values()) == 60
    assert 0 < boundaries["validation"] < 12
    for book in facts["books"].values():
        text = (source / book["path"]).read_bytes()
        other = {"train": "validation", "validation": "train"}[book["split"]]
        assert text in books.splits[book["split"]].tobytes()
        assert text not in books.splits[other].tobytes()
    assert json.loads((folder / "books.json").read_text()) == facts


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
    with pytest.raises(ValueError, match="holds no books that were built"):
        Books.read(tmp_path / "source")


def test_too_few_books(tmp_path):
    (tmp_path / "one.txt").write_text("One.")
    with pytest.raises(ValueError, match=r"has no book for (train|validation): 1 books"):
        build(tmp_path, tmp_path / "built")
