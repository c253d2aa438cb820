"""What accuracy takes no understanding of a task: the floor under every result.

    python -m experiments.lra.floors --samples 20000

ListOps: readers that see the outer levels only and guess every deeper list by its operator.
Pathfinder: classifiers that see where the discs are, or how far apart, and no contour.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path
from typing import Annotated

import numba
import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.environment import environment
from experiments.files import write_json
from experiments.lra.tasks import ListOps, Pathfinder, Task
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

RESULTS = Path(__file__).parents[1] / "results" / "lra-floors.json"
SIDES = (32, 64, 128, 256)
LEVELS = 5
WIDTH, BATCH, STEPS, LEARNING_RATE = 128, 1024, 4000, 3e-3
CHECKED_EVERY = 500


def floors(task: Task) -> dict[str, float]:
    """The measured floors of a task, none for those that have a class prior only."""
    return json.loads(RESULTS.read_text())["floors"].get(task.name, {})


def main(
    samples: Annotated[
        int, typer.Option(help="of each task, a fifth of them for testing")
    ] = 20_000,
) -> None:
    """Measures the floors of ListOps and Pathfinder and writes results/lra-floors.json."""
    console = Console()
    measured = {ListOps().name: listops_floors(samples)}
    for side in SIDES:
        measured[Pathfinder(side).name] = pathfinder_floors(Pathfinder(side), samples)
        console.print(measured)
    record = environment(torch.device("cpu")) | {"samples": samples, "floors": measured}
    write_json(RESULTS, record)


def listops_floors(samples: int, seed: int = 1) -> dict[str, float]:
    """Accuracy of the readers of 0, 1, ... levels below the root operator."""
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
    """The value of an expression to a reader that guesses every list `levels` below the root."""
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
    """Accuracy of small networks that see the distance of the discs, or their coordinates."""
    discs, labels = _discs(task, samples)
    centred = (discs / (task.side - 1) - 0.5).flatten(1)
    forms = torch.stack(symmetries(centred))
    apart = (forms[:, :, :2] - forms[:, :, 2:]).norm(dim=-1, keepdim=True)
    return {
        "distance of the discs": _network_accuracy(apart, labels),
        "coordinates of the discs": _network_accuracy(torch.cat([forms, apart], -1), labels),
    }


def _discs(task: Pathfinder, samples: int) -> tuple[Tensor, Tensor]:
    images = task.images("floors", samples)
    with ThreadPoolExecutor(cpu_count()) as pool:
        drawings = list(pool.map(images.draw, range(samples)))
    discs = torch.from_numpy(np.stack([drawing.discs for drawing in drawings])).float()
    return discs, torch.tensor([drawing.label for drawing in drawings])


def symmetries(discs: Tensor) -> list[Tensor]:
    """The same pairs of points, (n, 4) from the centre of the image, turned, mirrored, swapped."""
    forms = []
    for order in ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)):
        for sign in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            forms.append(discs[:, order] * torch.tensor(sign * 2))
    return forms


def _network_accuracy(forms: Tensor, labels: Tensor) -> float:
    """Test accuracy, on the last fifth, of a network as it was best on the fifth before.

    forms: (symmetries, samples, features); a batch takes each sample in a random form.
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
    """Whether each sample is answered rightly by the mean over its forms."""
    network.eval()
    answers = torch.stack([network(form) for form in forms]).mean(0).argmax(-1)
    network.train()
    return (answers == labels).double()


if __name__ == "__main__":
    typer.run(main)
