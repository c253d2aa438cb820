"""Trivial predictors of the tasks, whose accuracy is the floor.

ListOps: predictors that read only the outer levels, and guess every deeper list by its operator.
Pathfinder: classifiers that get the coordinates of the discs, or their distance, but no contour.
FilmPairs: a threshold on the words that two reviews share.
"""

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import log, sqrt
from os import cpu_count
from pathlib import Path

import numba
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.lra.tasks import FilmPairs, Pathfinder, Samples
from experiments.lra.tasks.listops import (
    CLOSE,
    DIGIT,
    MAX_ARGUMENTS,
    MAX_DEPTH,
    OPERATOR,
    Expressions,
    apply,
    generate,
)
from experiments.lra.tasks.pathfinder import FreshImages
from experiments.lra.tasks.snakes import DIFFICULTIES

LEVELS = 5
WIDTH, BATCH, STEPS, LEARNING_RATE = 128, 1024, 4000, 3e-3
CHECKED_EVERY = 500
WORD = re.compile(rb"[a-z']+")


def listops_floors(samples: int, seed: int = 1) -> dict[str, float]:
    """The accuracy of predictors that read 0, 1, ... levels below the root operator."""
    arrays = generate(samples, seed)
    expressions, held_out = Expressions(arrays), samples // 5
    roots = arrays["tokens"][arrays["offsets"][:-1]] - OPERATOR
    labels = arrays["labels"].astype(np.int64)
    guesses = np.array(
        [np.bincount(labels[held_out:][roots[held_out:] == op]).argmax() for op in range(4)]
    )
    right = np.zeros(LEVELS)
    for n in range(held_out):
        (ids,), label, _ = expressions[n]
        right += [read(ids, levels, guesses) == label for levels in range(LEVELS)]
    names = ["root operator only", *(f"root and {n} levels" for n in range(1, LEVELS))]
    return dict(zip(names, (right / held_out).round(4).tolist(), strict=True))


@numba.njit(nogil=True)
def read(ids, levels, guesses):
    """The value of an expression if every list `levels` below the root is guessed."""
    operators = np.zeros(MAX_DEPTH, np.int64)
    values = np.zeros((MAX_DEPTH, MAX_ARGUMENTS), np.int64)
    counts = np.zeros(MAX_DEPTH, np.int64)
    depth = 0
    for token in ids:
        if OPERATOR <= token < CLOSE:
            operators[depth], counts[depth] = token - OPERATOR, 0
            depth += 1
            continue
        if token == CLOSE:
            depth -= 1
            if depth == levels:
                value = guesses[operators[depth]]
            else:
                value = apply(operators[depth], values[depth, : counts[depth]])
        else:
            value = token - DIGIT
        if depth > 0:
            values[depth - 1, counts[depth - 1]] = value
            counts[depth - 1] += 1
    return value


def pathfinder_floors(task: Pathfinder, samples: int) -> dict[str, float]:
    """The accuracy of small networks that get the distance of the discs, or their coordinates.

    If contours have a preferred direction, as those of the release in images of 32 and 64 pixels,
    coordinates reveal more than coordinates that are rotated and mirrored at random.
    """
    discs, labels = _discs(task, samples)
    centred = (discs / (task.side - 1) - 0.5).flatten(1)
    # The order of the discs in an image is unknown.
    plain = torch.stack([centred, centred[:, (2, 3, 0, 1)]])
    rotated = torch.stack(symmetries(centred))
    return {
        "distance of the discs": _network_accuracy(_apart(plain), labels),
        "coordinates of the discs, turned and mirrored": _coordinates_accuracy(rotated, labels),
        "coordinates of the discs": _coordinates_accuracy(plain, labels),
    }


def _coordinates_accuracy(forms: Tensor, labels: Tensor) -> float:
    return _network_accuracy(torch.cat([forms, _apart(forms)], -1), labels)


def _apart(forms: Tensor) -> Tensor:
    return (forms[:, :, :2] - forms[:, :, 2:]).norm(dim=-1, keepdim=True)


def _discs(task: Pathfinder, samples: int) -> tuple[Tensor, Tensor]:
    segments, rules = DIFFICULTIES[task.difficulty], replace(task.rules, distractors="none")
    images = FreshImages(task.side, segments, "floors", task.seed, samples, rules=rules)
    with ThreadPoolExecutor(cpu_count()) as pool:
        drawings = list(pool.map(images.draw, range(samples)))
    discs = torch.from_numpy(np.stack([drawing.discs for drawing in drawings])).float()
    return discs, torch.tensor([drawing.label for drawing in drawings])


def symmetries(discs: Tensor) -> list[Tensor]:
    """Pairs of points, (n, 4) relative to the centre of the image, rotated, mirrored, swapped."""
    forms = []
    for order in ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)):
        for sign in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            forms.append(discs[:, order] * torch.tensor(sign * 2))
    return forms


def _network_accuracy(forms: Tensor, labels: Tensor) -> float:
    """The test accuracy of a network on the last fifth of the samples.

    The fifth before it selects the best step. forms: (symmetries, samples, features); a batch has
    each sample in a random form.
    """
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    forms, labels = forms.to(device), labels.to(device)
    fifth = len(labels) // 5
    network = nn.Sequential(
        nn.BatchNorm1d(forms.shape[-1]),
        *(nn.Linear(forms.shape[-1], WIDTH), nn.GELU()),
        *(nn.Linear(WIDTH, WIDTH), nn.GELU()),
        nn.Linear(WIDTH, 2),
    ).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    best = tested = 0.0
    for step in range(1, STEPS + 1):
        sample = torch.randint(len(labels) - 2 * fifth, (BATCH,), device=device)
        form = torch.randint(len(forms), (BATCH,), device=device)
        loss = cross_entropy(network(forms[form, sample]), labels[sample])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % CHECKED_EVERY == 0:
            right = _right(network, forms, labels)
            chosen_on = float(right[-2 * fifth : -fifth].mean())
            if chosen_on > best:
                best, tested = chosen_on, float(right[-fifth:].mean())
    return round(tested, 4)


@torch.no_grad()
def _right(network: nn.Module, forms: Tensor, labels: Tensor) -> Tensor:
    """Whether the mean over its forms classifies each sample correctly."""
    network.eval()
    answers = torch.stack([network(form) for form in forms]).mean(0).argmax(-1)
    network.train()
    return (answers == labels).double()


def film_pairs_floors(data_root: Path) -> dict[str, float]:
    """The accuracy of a threshold on the words that both reviews share, weighted by rarity.

    With and without division by the weights of all words of both reviews (cosine similarity).
    """
    splits = FilmPairs().splits(data_root)
    train, test = (_words(splits[split]) for split in ("train", "test"))
    frequency = Counter(word for documents, _ in train for words in documents for word in words)
    rarity = {word: log((2 * len(train) + 1) / (n + 1)) ** 2 for word, n in frequency.items()}
    never = log(2 * len(train) + 1) ** 2  # weight of words that are not in the training reviews

    def similarities(first: set[bytes], second: set[bytes]) -> tuple[float, float]:
        both, one, other = (
            sum(rarity.get(word, never) for word in words)
            for words in (first & second, first, second)
        )
        return both / sqrt(one * other) if one * other else 0.0, both

    scores = [np.array([similarities(*documents) for documents, _ in p]) for p in (train, test)]
    labels = [np.array([label for _, label in pairs]) for pairs in (train, test)]
    return {
        name: threshold_accuracy(scores[0][:, n], labels[0], scores[1][:, n], labels[1])
        for n, name in enumerate(("shared words", "shared words, not divided by the lengths"))
    }


def threshold_accuracy(
    scores: np.ndarray, labels: np.ndarray, tested: np.ndarray, right: np.ndarray
) -> float:
    """Accuracy on `tested` of the best threshold for `scores`; above it the label is 1."""
    order = np.argsort(scores, kind="stable")
    below, above = np.cumsum(labels[order] == 0), np.cumsum((labels[order] == 1)[::-1])[::-1]
    best = (below[:-1] + above[1:]).argmax()
    level = scores[order][best : best + 2].mean()
    return round(float(((tested > level) == right).mean()), 4)


def _words(pairs: Samples) -> list[tuple[list[set[bytes]], int]]:
    def words(ids: np.ndarray) -> set[bytes]:
        return set(WORD.findall((ids - 1).astype(np.uint8).tobytes().lower()))

    samples = (pairs[i] for i in range(len(pairs)))
    return [([*map(words, sample.documents)], sample.label) for sample in samples]
