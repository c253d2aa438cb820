"""Floors of authorship: linear models of word counts and of byte counts.

Byte counts show how much the typography of an edition reveals: quotation marks, dashes, accents.
"""

from collections.abc import Callable, Iterable
from math import sqrt
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_array
from scipy.special import log_softmax

from experiments.environment import environment
from experiments.files import read_json, write_json
from experiments.language_model.books import Books
from experiments.long_documents.authors import (
    Drawn,
    Passage,
    books_for_training,
    by_author,
    identity,
    passages_for_testing,
)
from experiments.long_documents.words import BUCKETS, words

PASSAGES = 100  # of each author for training
PENALTY, ITERATIONS = 1e-6, 100  # best on validation passages of 4,096 bytes

Items = Callable[[np.ndarray], np.ndarray]


def measure(
    data: Path,
    lengths: Iterable[int],
    authors: int,
    output: Path,
    show: Callable[[str], None] = print,
) -> dict:
    """Writes the record of floors; lengths in an existing record of the same data are not changed.

    Args:
        data: Folder that `experiments.language_model data` built.
        lengths: Lengths of passages, in bytes.
        authors: Number of authors.
        output: Path of the record.
        show: Called with a line of text for each length.

    Returns:
        The record.

    Raises:
        ValueError: The data have too few authors with enough books.
    """
    books = Books.read(data)
    chosen = by_author(books, authors)
    test = passages_for_testing(chosen)
    facts = {
        "data": identity(books, chosen),
        "authors": {author: [book.path for book in own] for author, own in chosen},
        "training_passages": PASSAGES * authors,
        "test_passages": len(test),
    }
    record = read_json(output, {})
    if {name: record.get(name) for name in facts} != facts:
        record = facts | {"floors": {}, "environment": environment(torch.device("cpu"))}
    for length in lengths:
        if str(length) not in record["floors"]:
            drawn = Drawn(books, books_for_training(chosen), length)
            train = [drawn.place(index) for index in range(PASSAGES * authors)]
            found = {
                "words": accuracy(books, train, test, length, word_buckets, BUCKETS),
                "bytes": accuracy(books, train, test, length, lambda text: text, 256),
            }
            record["floors"][str(length)] = found
            write_json(output, record)
            accuracies = (f"{name} {100 * each['accuracy']:.1f} %" for name, each in found.items())
            show(f"{length:,} bytes: {', '.join(accuracies)}")
    return record


def accuracy(
    books: Books,
    train: list[Passage],
    test: list[Passage],
    length: int,
    items: Items,
    buckets: int,
) -> dict[str, float]:
    """Test accuracy over passages, its mean over authors, and the standard error of this mean.

    The features of a passage are logarithms of counts, weighted by the rarity of the item.
    """
    counts, tested = (counted(books, own, length, items, buckets) for own in (train, test))
    documents = np.bincount(counts.indices, minlength=buckets)
    rarity = np.log((1 + len(train)) / (1 + documents)) + 1
    weights, bias = fit(scaled(counts, rarity), np.array([p.label for p in train]))
    labels = np.array([passage.label for passage in test])
    right = (scaled(tested, rarity) @ weights + bias).argmax(1) == labels
    means = np.array([right[labels == author].mean() for author in np.unique(labels)])
    return {
        "accuracy": round(float(right.mean()), 4),
        "mean_of_authors": round(float(means.mean()), 4),
        "standard_error": round(float(means.std(ddof=1) / sqrt(len(means))), 4),
    }


def counted(
    books: Books, passages: list[Passage], length: int, items: Items, buckets: int
) -> csr_array:
    """The count of each item in each passage: (passages, buckets)."""
    indices, counts, ends = [], [], [0]
    for passage in passages:
        text = books.text(passage.book)[passage.begin : passage.begin + length]
        found, often = np.unique(items(text), return_counts=True)
        indices.append(found)
        counts.append(often.astype(np.float32))
        ends.append(ends[-1] + len(found))
    parts = (np.concatenate(counts), np.concatenate(indices), np.array(ends))
    return csr_array(parts, shape=(len(passages), buckets))


def scaled(counts: csr_array, rarity: np.ndarray) -> csr_array:
    """log(1 + count) times the rarity of the item, with rows of norm 1."""
    values = np.log1p(counts.data) * rarity[counts.indices]
    lengths = np.diff(counts.indptr)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    norms = np.sqrt(np.bincount(rows, values**2, minlength=len(lengths)))
    values = (values / norms[rows]).astype(np.float32)
    return csr_array((values, counts.indices, counts.indptr), shape=counts.shape)


def word_buckets(text: np.ndarray) -> np.ndarray:
    """The bucket of each word of a text, uint8."""
    return words(text)[1]


def fit(features: csr_array, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights (features, classes) and biases of multinomial logistic regression."""
    transposed = features.T.tocsr()
    rows, width = len(labels), len(transposed.indptr) - 1
    classes = int(labels.max()) + 1
    own = (np.arange(rows), labels)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(width + 1, classes).astype(np.float32)
        logs = log_softmax(features @ weights[:-1] + weights[-1], axis=1)
        wrong = np.exp(logs)
        wrong[own] -= 1
        gradient = np.concatenate([transposed @ wrong, wrong.sum(0, keepdims=True)]) / rows
        penalty = PENALTY * flat
        value = -logs[own].mean(dtype=np.float64) + penalty @ flat / 2
        return float(value), gradient.ravel() + penalty

    begin = np.zeros((width + 1) * classes)
    options = {"maxiter": ITERATIONS}
    found = minimize(loss, begin, jac=True, method="L-BFGS-B", options=options).x
    found = found.reshape(width + 1, classes).astype(np.float32)
    return found[:-1], found[-1]
