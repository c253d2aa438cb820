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

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, cos, pi, radians, sin
from typing import Literal, NamedTuple

import numba
import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import grey_dilation

from experiments.lra.tasks.hashing import below, seed_of, uniform

ANTIALIAS = 2
TRIES = 3  # placements of a segment before its contour is given up
DISTRACTOR_TRIES = 5
FREE = 0.3  # a pixel whose occupancy is at most this is free
OVERLAP = 1.8  # occupancies of two segments may add up to less than this
CROWDED = 0.01  # no distractor is tried where a smaller part of the image is free
VISIBLE = 0.25  # part of a line's brightness from which a pixel is of its contour
NO_CHOICE = 1e-4  # a contour ends where the weights of its candidates sum to less


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


class Stamps(NamedTuple):
    """Everything drawn beforehand for one size and margin.

    lines, masks: float32 (360 + candidates, 2 reach + 1, 2 reach + 1): a segment and the pixels it
        occupies, centred on its start; first those of whole degrees, then one per candidate, which
        runs from the candidate back
    solid:        int64 (360, 2, 2): lowest and highest row and column of fully occupied pixels
    directions:   bool (360,): degrees, from -180 on, that a first segment may have
    circle:       int64 (candidates, 2): pixels around a pivot where the next segment may end
    strides:      int64 (360 + candidates, 2): from the pivot of a segment to that of the next
    straightness: float32 (360 + candidates, candidates): the weight of the turn from a segment
        to a candidate
    near:         int64 (n, 2): the pixels of a disc as large as the margin
    disc:         float32: a marker, centred
    """

    side: int
    padding: int
    segment: int
    margin: int
    seed_distance: int
    target: float
    distractor: float
    lines: np.ndarray
    masks: np.ndarray
    solid: np.ndarray
    directions: np.ndarray
    circle: np.ndarray
    strides: np.ndarray
    straightness: np.ndarray
    near: np.ndarray
    disc: np.ndarray


@lru_cache
def stamps(side: int, rules: Rules = RELEASE) -> tuple[Stamps, ...]:
    """The stamps of an image size, for each of its margins. Raises ValueError for other sizes."""
    if side not in PARAMETERS:
        raise ValueError(f"side must be one of {sorted(PARAMETERS)} pixels, got {side}")
    parameters = PARAMETERS[side]
    return tuple(_stamps(parameters, margin, rules) for margin in parameters.margins)


def _stamps(p: Parameters, margin: int, rules: Rules) -> Stamps:
    circle = _circle(p.segment + margin)
    degrees = [radians(degree) for degree in range(-180, 180)]
    towards = np.arctan2(circle[:, 0], circle[:, 1])
    angles = np.concatenate([degrees, towards])
    drawn = [_segment(p, margin, angle) for angle in [*degrees, *(towards + pi)]]
    lines, masks = (np.stack(part).astype(np.float32) for part in zip(*drawn, strict=True))
    return Stamps(
        side=p.side,
        padding=p.padding,
        segment=p.segment,
        margin=margin,
        seed_distance=p.seed_distance,
        target=p.target,
        distractor=p.distractor,
        lines=lines,
        masks=masks,
        solid=np.stack([_solid_box(mask) for mask in masks[:360]]),
        directions=np.array(
            [rules.directions == "any" or _reaches_all_quadrants(mask) for mask in masks[:360]]
        ),
        circle=circle,
        strides=np.stack([_moved(p.segment + 2 * margin, angle) for angle in angles]),
        straightness=_straightness(angles[:, None] - towards, p.continuity),
        near=np.argwhere(_disc(margin)) - margin,
        disc=_marker(p.disc_radius),
    )


def _moved(distance: int, angle: float) -> tuple[int, int]:
    """Rows and columns to a point in a direction, rounded up."""
    far = 1000  # rounds as the sum with a coordinate does, which swallows errors of sin and cos
    return ceil(far + distance * sin(angle)) - far, ceil(far + distance * cos(angle)) - far


def _straightness(turn: np.ndarray, continuity: float) -> np.ndarray:
    turn = np.abs(turn)
    turn = np.minimum(np.minimum(turn, 2 * pi - turn) * continuity, pi / 2)
    weight = np.cos(turn) ** 2
    return np.where(turn < pi / 2, weight, 0).astype(np.float32)


def _circle(radius: int) -> np.ndarray:
    """The different pixels (row, column) met in steps of one pixel along a circle."""
    theta = np.arange(0, 2 * pi, 1 / radius)
    far = 1000.0  # rounds as the sum with a coordinate does, which swallows errors of sin and cos
    points = np.stack([far + radius * np.sin(theta), far + radius * np.cos(theta)], axis=1)
    return np.unique(points.astype(np.int64), axis=0) - int(far)


def _segment(p: Parameters, margin: int, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """The line of one segment and the pixels that it occupies, in 0..1."""
    reach = p.segment + ceil(p.thickness) + margin
    centre = reach * ANTIALIAS
    end_row = ceil(centre + p.segment * ANTIALIAS * sin(angle))
    end_column = ceil(centre + p.segment * ANTIALIAS * cos(angle))
    canvas = Image.new("L", (2 * centre + 1, 2 * centre + 1))
    ImageDraw.Draw(canvas).line(
        [(centre, centre), (end_column, end_row)],
        fill=255,
        width=round(p.thickness * ANTIALIAS),
    )
    line = np.asarray(canvas)
    occupied = grey_dilation(line, footprint=_disc(margin * ANTIALIAS))
    return _shrunk(line, 2 * reach + 1), _shrunk(occupied, 2 * reach + 1)


def _disc(radius: int) -> np.ndarray:
    row, column = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return row**2 + column**2 <= radius**2


def _shrunk(canvas: np.ndarray, side: int) -> np.ndarray:
    small = Image.fromarray(canvas).resize((side, side), Image.Resampling.LANCZOS)
    return np.asarray(small) / 255


def _solid_box(mask: np.ndarray) -> np.ndarray:
    pixels = np.argwhere(mask == 1) - mask.shape[0] // 2
    return np.stack([pixels.min(0), pixels.max(0)])


def _reaches_all_quadrants(mask: np.ndarray) -> bool:
    """Whether fully occupied pixels, one pixel off the centre, lie in each closed quadrant."""
    row, column = (np.argwhere(mask == 1) - mask.shape[0] // 2 + 1).T
    signs = ((1, 1), (1, -1), (-1, 1), (-1, -1))
    return all(((a * row >= 0) & (b * column >= 0)).any() for a, b in signs)


def _marker(radius: float) -> np.ndarray:
    half = ceil(radius) + 3  # wide enough for the ringing of the resampling
    row, column = np.ogrid[
        -half * ANTIALIAS : (half + 1) * ANTIALIAS, -half * ANTIALIAS : (half + 1) * ANTIALIAS
    ]
    inside = row**2 + column**2 <= (radius * ANTIALIAS) ** 2
    return _shrunk(inside.astype(np.uint8) * 255, 2 * half + 1).astype(np.float32)


class Drawing(NamedTuple):
    """image: uint8 (side, side); label: whether the discs lie on one contour; discs: int64 (2, 2),
    row and column of the first and of the second; trace: uint8 (side, side), the discs on the
    contour of each pixel, 0 for those of no contour."""

    image: np.ndarray
    label: int
    discs: np.ndarray
    trace: np.ndarray


def draw(
    side: int,
    segments: int,
    stream: np.uint64,
    index: int,
    moved: bool = False,
    rules: Rules = RELEASE,
) -> Drawing:
    """Image `index` of a stream; with `moved`, the same with its second disc on the other contour,
    which is the smallest change that changes the label."""
    seed = np.uint64(seed_of(stream, np.uint64(index)))
    choices = stamps(side, rules)
    chosen = choices[int(seed % np.uint64(len(choices)))]
    lengths = segments, distractor_length(segments), rules.count(side, segments)
    return Drawing(*_draw(chosen, *lengths, seed, moved))


@numba.njit(nogil=True, cache=True)
def _draw(s, segments, distractor_segments, distractors, seed, moved):
    state = np.array([seed], np.uint64)
    mask = np.empty((s.side, s.side), np.float32)
    # The contours, segment by segment: row and column of the start, and stamp.
    contours = np.empty((2, segments, 3), np.int64)
    while not _two_contours(s, state, mask, contours):
        pass
    image = np.zeros((s.side, s.side), np.float32)
    for contour in contours:
        _paint(s, image, contour, s.target)
    shorter = np.empty((distractor_segments, 3), np.int64)
    for _ in range(distractors):
        _distractor(s, state, mask, image, shorter)
    label = below(state, 2)
    first = below(state, 2)
    if moved:
        label = 1 - label
    second = first if label else 1 - first
    discs = np.empty((2, 2), np.int64)
    discs[0] = contours[first, 0, :2]
    discs[1] = contours[second, -1, :2]
    for row, column in discs:
        _merge(image, s.disc, row, column, np.float32(1))
    return _to_bytes(image), label, discs, _traced(s, contours, first, second)


@numba.njit(nogil=True)
def _traced(s, contours, first, second):
    """How many discs the contour of each pixel has."""
    trace = np.zeros((s.side, s.side), np.uint8)
    for c in range(2):
        discs = (first == c) + (second == c)
        for row, column, stamp in contours[c]:
            _mark(trace, s.lines[stamp], row, column, discs)
    return trace


@numba.njit(nogil=True)
def _mark(trace, stamp, row, column, value):
    """trace = value where the stamp, centred on a pixel, is visible."""
    reach, size = stamp.shape[0] // 2, trace.shape[0]
    for r in range(max(0, row - reach), min(size, row + reach + 1)):
        for c in range(max(0, column - reach), min(size, column + reach + 1)):
            if stamp[r - row + reach, c - column + reach] > VISIBLE:
                trace[r, c] = value


@numba.njit(nogil=True)
def _two_contours(s, state, mask, contours):
    """Extends both contours alternately on an empty image; False when one cannot be extended."""
    p, size = s.padding, s.side
    mask[:] = 1
    mask[p : size - p, p : size - p] = 0
    pivots = np.empty((2, 2), np.int64)
    if not _seed_pair(s, state, contours, pivots):
        return False
    for n in range(1, contours.shape[1]):
        for c in range(2):
            if not _extend(s, state, mask, pivots[c], contours[c], n):
                return False
    # Of the last segments only the second contour's was ever merged.
    _occupy(s, mask, contours[1, -1])
    return True


@numba.njit(nogil=True)
def _seed_pair(s, state, contours, pivots):
    """Where the contours begin: the first near the middle, the second at a fixed distance."""
    edge = 2 * s.seed_distance
    for _ in range(TRIES):
        degree = below(state, 360)
        if not s.directions[degree]:
            return False
        # The solid pixels of the segment must stay off the edge. They lie one pixel further than
        # those of the segment that is drawn, as in the published generator.
        low, high = s.solid[degree, 0] + 1, s.solid[degree, 1] + 1
        rows = s.side - 2 * edge - max(high[0], 0) + min(low[0], 0)
        columns = s.side - 2 * edge - max(high[1], 0) + min(low[1], 0)
        if rows <= 0 or columns <= 0:
            return False
        row = edge - min(low[0], 0) + below(state, rows)
        column = edge - min(low[1], 0) + below(state, columns)
        if _start(s, contours[0], pivots[0], row, column, degree):
            break
    else:
        return False
    for _ in range(TRIES):
        degree = below(state, 360)
        towards = _radians(below(state, 360))
        row = round(contours[0, 0, 0] + s.seed_distance * np.sin(towards))
        column = round(contours[0, 0, 1] + s.seed_distance * np.cos(towards))
        if _start(s, contours[1], pivots[1], row, column, degree):
            return True
    return False


@numba.njit(nogil=True)
def _radians(degree):
    return (degree - 180) * np.pi / 180


@numba.njit(nogil=True)
def _start(s, contour, pivot, row, column, degree):
    """Puts the first segment of a contour at a pixel; False when it leaves the image."""
    angle = _radians(degree)
    end_row = int(np.ceil(row + s.segment * np.sin(angle)))
    end_column = int(np.ceil(column + s.segment * np.cos(angle)))
    back = angle + np.pi if angle < 0 else angle - np.pi
    pivot[0] = int(np.ceil(end_row + (s.segment + s.margin) * np.sin(back)))
    pivot[1] = int(np.ceil(end_column + (s.segment + s.margin) * np.cos(back)))
    contour[0, 0], contour[0, 1], contour[0, 2] = row, column, degree
    return (
        min(end_row, end_column, pivot[0], pivot[1]) >= 0
        and max(end_row, end_column, pivot[0], pivot[1]) < s.side
    )


@numba.njit(nogil=True)
def _extend(s, state, mask, pivot, contour, n):
    """Adds segment n of a contour and moves its pivot; False when no end fits."""
    last = contour[n - 1, 2]
    row, column = pivot[0] + s.strides[last, 0], pivot[1] + s.strides[last, 1]
    cumulative = np.empty(len(s.circle))
    total = _weights(mask, s.circle, s.near, s.straightness[last], row, column, cumulative)
    if total < NO_CHOICE:
        return False
    for _ in range(TRIES):
        c = np.searchsorted(cumulative, uniform(state) * total, "right")
        end_row, end_column = row + s.circle[c, 0], column + s.circle[c, 1]
        if _fits(mask, s.masks[360 + c], end_row, end_column):
            _occupy(s, mask, contour[n - 1])
            contour[n, 0], contour[n, 1], contour[n, 2] = end_row, end_column, 360 + c
            pivot[0], pivot[1] = row, column
            return True
    return False


@numba.njit(nogil=True)
def _weights(mask, circle, near, straightness, row, column, cumulative):
    """How likely each candidate is, cumulated: its straightness times how free the pixels near it
    are."""
    size = mask.shape[0]
    total = 0.0
    for c in range(len(circle)):
        end_row, end_column = row + circle[c, 0], column + circle[c, 1]
        if straightness[c] > 0 and 0 <= end_row < size and 0 <= end_column < size:
            most = np.float32(0)
            for k in range(len(near)):
                r, q = end_row + near[k, 0], end_column + near[k, 1]
                if 0 <= r < size and 0 <= q < size:
                    most = max(most, mask[r, q])
            total += (1 - most) * straightness[c]
        cumulative[c] = total
    return total


@numba.njit(nogil=True)
def _fits(mask, stamp, row, column):
    reach, size = stamp.shape[0] // 2, mask.shape[0]
    for r in range(max(0, row - reach), min(size, row + reach + 1)):
        for c in range(max(0, column - reach), min(size, column + reach + 1)):
            if mask[r, c] + stamp[r - row + reach, c - column + reach] >= OVERLAP:
                return False
    return True


@numba.njit(nogil=True)
def _merge(image, stamp, row, column, contrast):
    """image = max(image, contrast * stamp), the stamp centred on a pixel."""
    reach, size = stamp.shape[0] // 2, image.shape[0]
    for r in range(max(0, row - reach), min(size, row + reach + 1)):
        for c in range(max(0, column - reach), min(size, column + reach + 1)):
            value = contrast * stamp[r - row + reach, c - column + reach]
            image[r, c] = max(image[r, c], value)


@numba.njit(nogil=True)
def _occupy(s, mask, segment):
    _merge(mask, s.masks[segment[2]], segment[0], segment[1], np.float32(1))


@numba.njit(nogil=True)
def _paint(s, image, contour, contrast):
    for segment in contour:
        _merge(image, s.lines[segment[2]], segment[0], segment[1], np.float32(contrast))


@numba.njit(nogil=True)
def _distractor(s, state, mask, image, contour):
    """Draws one shorter contour where one fits; leaves the image as it is where none does."""
    pivot = np.empty(2, np.int64)
    trial = np.empty_like(mask)
    for _ in range(DISTRACTOR_TRIES):
        if _crowded(mask):
            return
        trial[:] = mask
        if _place_contour(s, state, trial, contour, pivot):
            mask[:] = trial
            _paint(s, image, contour, s.distractor)
            return


@numba.njit(nogil=True)
def _crowded(mask):
    missing = CROWDED * mask.size
    for occupancy in mask.flat:
        if occupancy <= FREE:
            missing -= 1
            if missing <= 0:
                return False
    return True


@numba.njit(nogil=True)
def _place_contour(s, state, mask, contour, pivot):
    if not _seed_anywhere(s, state, mask, contour, pivot):
        return False
    for n in range(1, len(contour)):
        if not _extend(s, state, mask, pivot, contour, n):
            return False
    _occupy(s, mask, contour[-1])
    return True


@numba.njit(nogil=True)
def _seed_anywhere(s, state, mask, contour, pivot):
    for _ in range(TRIES):
        degree = below(state, 360)
        if not s.directions[degree]:
            return False
        row, column = _free_pixel(s, state, mask, degree)
        if row < 0:
            return False
        if _start(s, contour, pivot, row, column, degree):
            return True
    return False


@numba.njit(nogil=True)
def _free_pixel(s, state, mask, degree):
    """A pixel drawn uniformly from those where the segment meets nothing; -1, -1 without one.

    Draws from all pixels until one is free, which gives the same; after many, looks at all.
    """
    for _ in range(mask.size // 64):
        row, column = below(state, s.side), below(state, s.side)
        if _is_free(s, mask, row, column, degree):
            return row, column
    free = [
        (row, column)
        for row in range(s.side)
        for column in range(s.side)
        if _is_free(s, mask, row, column, degree)
    ]
    if len(free) == 0:
        return -1, -1
    return free[below(state, len(free))]


@numba.njit(nogil=True)
def _is_free(s, mask, row, column, degree):
    stamp = s.masks[degree]
    reach = stamp.shape[0] // 2
    for r in range(stamp.shape[0]):
        for c in range(stamp.shape[1]):
            if stamp[r, c] == 1:
                y, x = row + r - reach + 1, column + c - reach + 1
                if not (0 <= y < s.side and 0 <= x < s.side):
                    continue
                on_edge = y == 0 or x == 0 or y == s.side - 1 or x == s.side - 1
                if on_edge or mask[y, x] > FREE:
                    return False
    return True


@numba.njit(nogil=True)
def _to_bytes(image):
    low = image.min()
    scale = 255 / (image.max() - low)
    scaled = np.empty(image.shape, np.uint8)
    for place, value in np.ndenumerate(image):
        scaled[place] = np.uint8((value - low) * scale + 0.5)
    return scaled
