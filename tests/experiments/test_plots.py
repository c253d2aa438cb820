"""The lines of the pictures of a record."""

from dataclasses import replace

import pytest

from experiments import plots
from tests.helpers.records import BASELINE, EIGHTH, FULL, HALF


@pytest.mark.parametrize("ours", ["sparseflash", "sparseflash:triton"])
def test_speed_ups_are_those_over_our_full_mask_whichever_backend_was_named(ours):
    rows = [replace(row, implementation=ours) for row in (FULL, HALF, EIGHTH)]
    figure = plots._speedup([*rows, BASELINE])
    (ax,) = figure.axes
    (line,) = (line for line in ax.lines if line.get_marker() != "None")
    speed_ups = [FULL.median_ms / row.median_ms for row in (EIGHTH, HALF)]
    assert line.get_ydata() == pytest.approx(speed_ups)
    assert line.get_markerfacecolor() == line.get_color()  # ours are filled
    (level,) = (line for line in ax.lines if len(set(line.get_ydata())) == 1)
    assert level.get_ydata()[0] == pytest.approx(FULL.median_ms / BASELINE.median_ms)
    assert f"full mask of {ours}, N = 1,024" in figure.get_suptitle()


def test_of_two_backends_the_first_is_the_reference_and_the_other_one_is_drawn_hollow():
    second = [
        replace(row, implementation="sparseflash:triton", median_ms=2 * row.median_ms)
        for row in (FULL, HALF)
    ]
    (ax,) = plots._speedup([FULL, HALF, *second]).axes
    first, other = (line for line in ax.lines if line.get_marker() != "None")
    assert other.get_ydata() == pytest.approx(first.get_ydata() / 2)
    assert other.get_markerfacecolor() == "white"
