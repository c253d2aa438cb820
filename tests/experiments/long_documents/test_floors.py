import json

import numpy as np
import pytest
from scipy.sparse import csr_array

from experiments.language_model.books import build
from experiments.long_documents import authors, floors
from experiments.long_documents.floors import fit, measure, scaled, word_buckets
from tests.experiments.long_documents.test_authors import short, write_authors  # noqa: F401


def buckets_of(text):
    return word_buckets(np.frombuffer(text, np.uint8)).tolist()


def test_words_count_whatever_their_case_and_what_stands_between():
    one = buckets_of(b"It was a dark, stormy night")
    assert buckets_of(b"  it WAS -- a\ndark\xe2\x80\x94stormy night!") == one
    assert len(set(one)) == len(one) == 6
    assert buckets_of(b"saw was") != buckets_of(b"was saw")
    assert buckets_of(b"1 2 3") == buckets_of(b"") == []
    assert len(buckets_of(b"a" * 1000)) == 1


def test_rows_are_of_length_1_and_rare_items_count_more():
    counts = csr_array(np.array([[2.0, 1, 0], [0, 1, 1]]))
    found = scaled(counts, np.array([1.0, 1.0, 2.0])).toarray()
    np.testing.assert_allclose((found**2).sum(1), 1, rtol=1e-6)
    assert found[0, 0] / found[0, 1] == pytest.approx(np.log(3) / np.log(2))
    assert found[1, 2] / found[1, 1] == pytest.approx(2)


def test_a_linear_model_separates_what_can_be():
    labels = np.arange(60) % 3
    random = np.random.default_rng(0)
    features = random.normal(size=(60, 5)) + 4 * np.eye(3, 5)[labels]
    weights, bias = fit(csr_array(features.astype(np.float32)), labels)
    assert ((features @ weights + bias).argmax(1) == labels).all()


def test_the_record_says_what_was_measured_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(floors, "PASSAGES", 20)
    monkeypatch.setattr(floors, "ITERATIONS", 20)
    write_authors(tmp_path / "source")
    build(tmp_path / "source", tmp_path / "books")
    path, said = tmp_path / "floors.json", []
    measure(tmp_path / "books", [64], 3, path, said.append)
    record = measure(tmp_path / "books", [64, 128], 3, path, said.append)
    assert record == json.loads(path.read_text())
    assert [line.split()[0] for line in said] == ["64", "128"]
    # Every word ends in a letter of its author, so bytes tell and words, which differ, do not.
    assert record["floors"]["128"]["bytes"]["accuracy"] > 0.9
    assert record["floors"]["128"]["words"]["accuracy"] < 0.7
    assert record["test_passages"] == 3 * authors.TESTED
    measure(tmp_path / "books", [64], 2, path, said.append)
    assert list(json.loads(path.read_text())["floors"]) == ["64"]  # of other authors
