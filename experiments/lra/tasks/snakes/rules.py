"""Sizes of Pathfinder images, and the rules by which they are drawn."""

from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args, get_type_hints


@dataclass(frozen=True)
class Parameters:
    """The parameters of an image size. Lengths are in pixels.

    Attributes:
        side: Side of the image.
        padding: Width of the edge that contours leave free.
        segment: Length of a segment.
        thickness: Width of a segment.
        margins: Distances between segments, of which one is drawn for each image.
        seed_distance: Distance between the starts of the two contours.
        disc_radius: Radius of a disc.
        continuity: How strongly a contour prefers to be straight.
        distractor_segments: Segments of all distractors of an image, in the code of the arena.
        target, distractor: Contrasts of contours and distractors; that of discs is 1.
    """

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
DIFFICULTIES = {"easy": 6, "intermediate": 9, "hard": 14}  # segments of the marked contours
BASELINE_DISTRACTOR = 2  # segments by which the release divides at every difficulty; see Rules


@dataclass(frozen=True)
class Rules:
    """Rules of the generator. The defaults are those of the released images.

    Attributes:
        distractors: The number of distractors.
            "release" is `distractor_segments / 2` for every length of distractors: 10, 11, 18 and
            15 in images of 32, 64, 128 and 256 pixels. The script of the release
            (`snakes2_wrapper.py`) divides once, by the distractor length 2 of its baseline, and
            its loop over longer contours changes only lengths. The metadata of the release names
            distractors of 4.67 segments beside contours of 14.
            "described" is `distractor_segments / length`, as in the docstrings of the loaders of
            the arena: 5, 5, 8 and 7 for contours of 14 segments.
            "none" draws no distractors, which is enough for statistics of the discs.
        directions: The directions of a first segment.
            "release" allows 30 of 360 degrees in images of 32 pixels, 95 in images of 64, and 354
            to 360 in larger images. The function `find_available_coordinates` of the release takes
            a negative minimum of `cv2.dilate`, whose border is the lowest float, for "no pixel is
            free". The minimum is negative if the stamp, one pixel off its centre, does not reach
            into all four quadrants. This applies to the first marked contour and to all
            distractors.
            "any" allows every direction. Then the label depends less on the coordinates of
            the discs.
        resampling: How segments and discs, which are drawn at twice their size, are reduced with a
            Lanczos filter.
            "release" does not clip what the filter adds at edges: pixels of lines have up to 1.22,
            pixels of discs up to 1.16 (64 pixels) or 1.12 (128). Lines are scaled to a maximum
            of 1, then discs are drawn, and then the image is scaled to a maximum of 255 and
            rounded down. In the released images of 64 and 128 pixels that
            github.com/tsumansapkota/Solving-LRA-PathX shows, discs have exactly these values and
            segments differ from them by 1 of 255 at most. No image of 32 or 256 pixels could be
            compared. Occupancy is clipped, as in the public code; images do not show whether that
            of the release was.
            "clipped" clips brightness to [0, 1], as the public code does with
            `scipy.misc.imresize`, and does not scale lines. Directions that are multiples of 90
            degrees are rounded in another way.
    """

    distractors: Literal["release", "described", "none"] = "release"
    directions: Literal["release", "any"] = "release"
    resampling: Literal["release", "clipped"] = "release"

    def __post_init__(self) -> None:
        for name, values in get_type_hints(type(self)).items():
            if (given := getattr(self, name)) not in get_args(values):
                raise ValueError(f"{name} must be one of {get_args(values)}, got {given!r}")

    @property
    def suffix(self) -> str:
        """What the name of a task says about these rules.

        The oldest records have names without a suffix, and their images are clipped, with the
        distractors and directions of the release. So these have no suffix for ever.
        """
        named = ""
        if (self.distractors, self.directions) != ("release", "release"):
            named = f"-distractors-{self.distractors}-directions-{self.directions}"
        return named if self.resampling == "clipped" else f"{named}-unclipped"

    def count(self, side: int, segments: int) -> int:
        """The number of distractors of an image; those for which no pixels are free are left out.

        Args:
            side: Side of the image in pixels.
            segments: Segments of the marked contours.
        """
        if self.distractors == "none":
            return 0
        total = PARAMETERS[side].distractor_segments
        if self.distractors == "release":
            return ceil(total / BASELINE_DISTRACTOR)
        return total // distractor_length(segments)


RELEASE = Rules()


def distractor_length(segments: int) -> int:
    """The number of segments of a distractor, from that of the marked contours."""
    return segments // 3
