"""Sizes of Pathfinder images, and the rules by which they are drawn."""

from dataclasses import dataclass
from math import ceil
from typing import Literal


@dataclass(frozen=True)
class Parameters:
    """Lengths in pixels. margins: one is drawn for each image. distractor_segments: of all
    distractors of an image, as the arena's code describes them. target, distractor: contrasts
    before the image is scaled to 0..255; discs have 1."""

    side: int
    padding: int
    segment: int
    thickness: float
    margins: tuple[int, ...]
    seed_distance: int
    disc_radius: float
    continuity: float
    distractor_segments: int
    target: float
    distractor: float


PARAMETERS = {
    32: Parameters(32, 1, 2, 0.5, (1,), 7, 1.5, 1.0, 20, 1.5, 2.0),
    64: Parameters(64, 1, 5, 1.0, (1,), 12, 2.5, 1.8, 22, 0.8, 0.8),
    128: Parameters(128, 1, 5, 1.5, (2, 3), 20, 3.0, 1.8, 35, 0.9, 0.9),
    256: Parameters(256, 22, 5, 2.0, (3,), 27, 5.0, 1.8, 30, 1.0, 1.0),
}
# Segments of the marked contours.
DIFFICULTIES = {"easy": 6, "intermediate": 9, "hard": 14}
# Segments of a distractor of the baseline, by which the release divided for every difficulty.
BASELINE_DISTRACTOR = 2


@dataclass(frozen=True)
class Rules:
    """Two rules of the generator; the defaults are those by which the arena's images were made.

    Attributes:
        distractors: "release" asks for `distractor_segments / 2` distractors, whatever their
            length: 10, 11, 18 and 15 in images of 32, 64, 128 and 256 pixels. The script of the
            release (`snakes2_wrapper.py`) divides once, by the distractor length 2 of its
            baseline, and its loop over longer contours changes lengths only; the metadata of the
            release names distractors of 4.67 segments beside contours of 14. "described" asks for
            `distractor_segments / length`: 5, 5, 8 and 7 for contours of 14 segments, as the
            docstrings of the arena's loaders have it. "none" draws none: for statistics of the
            discs, of which distractors say nothing.
        directions: "release" gives a first segment only the directions that the border rule of
            the release leaves: 30 of 360 degrees in images of 32 pixels, 95 in images of 64,
            354 to 360 in larger ones. `find_available_coordinates` takes a negative minimum of
            `cv2.dilate`, whose border is the lowest float, for "nothing is free": so it is where
            the stamp, one pixel off its centre, does not reach into all four quadrants. It holds
            for the first marked contour and for all distractors. "any" takes every direction: its
            contours prefer none, and the places of the discs say less of the label.
    """

    distractors: Literal["release", "described", "none"] = "release"
    directions: Literal["release", "any"] = "release"

    def count(self, side: int, segments: int) -> int:
        """Distractors that an image is to have; those that find no free place are left out."""
        if self.distractors == "none":
            return 0
        total = PARAMETERS[side].distractor_segments
        if self.distractors == "release":
            return ceil(total / BASELINE_DISTRACTOR)
        return total // distractor_length(segments)


RELEASE = Rules()


def distractor_length(segments: int) -> int:
    """Segments of a distractor beside marked contours of so many segments."""
    return segments // 3
