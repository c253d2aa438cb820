"""The lines of the pictures of a record."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.lines import Line2D

from experiments import plots
from tests.helpers.records import BASELINE, EIGHTH, FULL, HALF


def marked(lines: list[Line2D]) -> list[Line2D]:
    """The lines of patterns, without levels and the ideal."""
    return [line for line in lines if line.get_marker() != "None"]


def heights(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


@pytest.mark.parametrize("ours", ["sparseflash", "sparseflash:triton"])
def test_speed_ups_are_those_over_our_full_mask_whichever_backend_was_named(ours):
    rows = [replace(row, implementation=ours) for row in (FULL, HALF, EIGHTH)]
    figure = plots._speedup([*rows, BASELINE])
    (ax,) = figure.axes
    (line,) = marked(ax.lines)
    assert heights(line) == pytest.approx([FULL.median_ms / r.median_ms for r in (EIGHTH, HALF)])
    assert line.get_markerfacecolor() == line.get_color()  # ours are filled
    (level,) = (each for each in ax.lines if len(set(heights(each))) == 1)
    assert heights(level)[0] == pytest.approx(FULL.median_ms / BASELINE.median_ms)
    assert f"full mask of {ours}, N = 1,024" in figure.get_suptitle()


def test_of_two_backends_the_first_is_the_reference_and_the_other_one_is_drawn_hollow():
    second = [
        replace(row, implementation="sparseflash:triton", median_ms=2 * row.median_ms)
        for row in (FULL, HALF)
    ]
    (ax,) = plots._speedup([FULL, HALF, *second]).axes
    first, other = marked(ax.lines)
    assert heights(other) == pytest.approx([height / 2 for height in heights(first)])
    assert other.get_markerfacecolor() == "white"
