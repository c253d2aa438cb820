import pytest
import torch
from torch import nn

from experiments.lra.causal import moved_discs
from experiments.lra.tasks import Pathfinder


class Oracle(nn.Module):
    """Knows the label of each image of the check."""

    def __init__(self, labels):
        super().__init__()
        self.labels, self.seen = nn.Parameter(torch.tensor(labels).float()), 0

    def forward(self, ids):
        labels = self.labels[self.seen : self.seen + len(ids)]
        self.seen += len(ids)
        return torch.stack([1 - labels, labels], dim=-1)


@pytest.mark.parametrize(("knows", "expected"), [(True, 1.0), (False, 0.0)])
def test_answers_of_a_model_that_follows_contours_turn(knows, expected):
    images = Pathfinder().images("moved discs", 40)
    labels = [images.draw(i, moved).label for i in range(40) for moved in (False, True)]
    model = Oracle(labels if knows else [0] * 80)
    assert moved_discs(model, Pathfinder(), 40) == {"different": expected, "both right": expected}
