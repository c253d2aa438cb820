"""The configurations in use are those that were measured to be fast on an H200."""

import json
import math

from experiments.cli import SHIPPED
from experiments.instruments import tuning
from experiments.instruments.tuning import Problem
from sparseflash.backends.triton import configs
from tests.helpers.tuned import H200, configuration_in_use


def test_the_configuration_in_use_is_among_the_fastest(monkeypatch):
    monkeypatch.setattr(configs, "limits", lambda device: H200)
    for measured in json.loads((SHIPPED / "tune-nvidia-h200.json").read_text()):
        times = tuning.times_by_config(measured["rows"])
        in_use = configuration_in_use(measured["pass"], Problem(**measured["problem"]))
        best = min(math.prod(by_density.values()) for by_density in times.values())
        slower = math.sqrt(math.prod(times[in_use].values()) / best)
        assert slower <= 1.03, (measured["pass"], measured["problem"])
