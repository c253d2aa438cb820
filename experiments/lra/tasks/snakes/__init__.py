"""Pathfinder images: two contours of dashes among shorter ones, a disc on one end of one contour
and a disc on an end of the same or of the other.

The published generator's algorithm and parameters; everything that it draws again and again is
drawn once here (stamps), and its images of free pixels are asked about candidates only. `Rules`
names the two facts of the release that its paper does not say.

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
