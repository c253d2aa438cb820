"""Pathfinder images: two contours of dashes among shorter ones, and two discs.

One disc is at an end of a contour. The other is at the other end, or at an end of the other
contour.

The algorithm and its parameters are those of the published generator. Here segments and discs are
drawn once, as stamps, and a pixel is tested for being free only if it is a candidate. `Rules`
documents properties of the released images that the papers do not mention.

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
