"""Tests whether a model of Pathfinder follows contours.

Its answer must change if a disc moves to the end of the other contour and nothing else changes.
"""

from concurrent.futures import ThreadPoolExecutor
from os import cpu_count

import torch
from rich.progress import track
from torch import Tensor

from experiments.lra.model import Classifier
from experiments.lra.tasks import Pathfinder, Sample, collate

IMAGES = 512
BATCH = 32


@torch.no_grad()
def moved_discs(model: Classifier, task: Pathfinder, count: int = IMAGES) -> dict[str, float]:
    """Tests a model on pairs of images that differ only in the position of the second disc.

    Returns the shares of pairs with different answers, and of pairs with two correct answers. A
    model that guesses at random has 1/2 and 1/4.
    """
    model.eval()
    images = task.images("moved discs", count)
    different = right = 0
    with ThreadPoolExecutor(cpu_count()) as pool:
        pairs = [image for i in range(count) for image in ((i, False), (i, True))]
        drawn_in_order = pool.map(lambda image: images.draw(*image), pairs)
        drawings = list(track(drawn_in_order, "drawing moved discs", len(pairs), transient=True))
    starts = range(0, len(drawings), 2 * BATCH)
    for start in track(starts, "testing moved discs", transient=True):
        drawn = drawings[start : start + 2 * BATCH]
        samples = [Sample([drawing.image.reshape(-1)], drawing.label) for drawing in drawn]
        batch = collate(task.shape, samples)
        answers = _answers(model, batch.ids).view(-1, 2)
        different += int((answers[:, 0] != answers[:, 1]).sum())
        right += int((answers == batch.labels.view(-1, 2)).all(1).sum())
    return {"different": different / count, "both right": right / count}


def _answers(model: Classifier, ids: Tensor) -> Tensor:
    device = next(model.parameters()).device
    # A compiled model would be compiled again for this batch size.
    with torch.compiler.set_stance("force_eager"):
        return model(ids.to(device)).argmax(-1).cpu()
