"""Pathfinder images: two contours of dashes among shorter ones, and two discs.

One disc is at an end of a contour; the other is at the other end, or at an end of the other
contour.

The algorithm and parameters are those of the published generator. What it draws repeatedly is
drawn once here (stamps), and free pixels are computed only for candidates. `Rules` documents two
properties of the release that its paper does not mention.

Reference:
    Linsley et al. 2018, Learning long-range spatial dependencies with horizontal gated recurrent
    units; Kim, Linsley et al. 2020, Disentangling neural mechanisms for perceptual grouping;
    Tay et al. 2021, Long Range Arena. Code: github.com/drewlinsley/pathfinder, which made the
    release.
"""

from experiments.lra.tasks.snakes.drawing import Drawing, draw
from experiments.lra.tasks.snakes.rules import DIFFICULTIES, RELEASE, Rules
from experiments.lra.tasks.snakes.shapes import stamps

__all__ = ["DIFFICULTIES", "RELEASE", "Drawing", "Rules", "draw", "stamps"]
