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
CORE = 0.79  # a pixel that is less occupied than this never adds up to OVERLAP: none has over 1
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


class Lists(NamedTuple):
    """A list of numbered things, with a value each, for each of several keys.

    starts: int64 (keys + 1,): where the list of a key starts, and where the last one ends
    numbers: int64 (all,)
    values: float32 (all,)
    """

    starts: np.ndarray
    numbers: np.ndarray
    values: np.ndarray


class Stamps(NamedTuple):
    """Everything drawn beforehand for one size and margin.

    Images are flat arrays with a frame around them, which stays free and is as wide as any stamp
    reaches: no pixel of a stamp need be compared with the border. A stamp is a list of pixels, as
    steps in such an array from the one it is centred on. Stamps of segments are first those of
    whole degrees, then one per candidate, which runs from the candidate back.

    width:        of a row, with its frame
    origin:       number of the pixel in row 0 and column 0 of the image
    inside:       bool (width^2,): pixels of the image, not of the frame
    lines:        pixels of a segment, and how bright they are
    occupied:     pixels that a segment occupies, and how much
    core:         of these, those that can add up to OVERLAP with another segment
    solid:        of these, those occupied fully, which a first segment needs free; they lie one
        pixel further, as in the published generator
    box:          int64 (360, 2, 2): lowest and highest row and column of fully occupied pixels
    directions:   bool (360,): degrees, from -180 on, that a first segment may have
    circle:       int64 (candidates, 2): pixels around a pivot where the next segment may end
    strides:      int64 (360 + candidates, 2): from the pivot of a segment to that of the next
    turns:        candidates that go on from a segment, and the weights of these turns
    near:         int64 (n,): the pixels of a disc as large as the margin
    disc:         pixels of a marker, and how bright they are
    """

    side: int
    padding: int
    segment: int
    margin: int
    seed_distance: int
    target: float
    distractor: float
    width: int
    origin: int
    inside: np.ndarray
    lines: Lists
    occupied: Lists
    core: Lists
    solid: Lists
    box: np.ndarray
    directions: np.ndarray
    circle: np.ndarray
    strides: np.ndarray
    turns: Lists
    near: np.ndarray
    disc: Lists


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
    disc = _marker(p.disc_radius)
    frame = max(lines.shape[1], disc.shape[0]) // 2 + 1
    width = p.side + 2 * frame
    inside = np.pad(np.ones((p.side, p.side), bool), frame)
    straightness = _straightness(angles[:, None] - towards, p.continuity)
    return Stamps(
        side=p.side,
        padding=p.padding,
        segment=p.segment,
        margin=margin,
        seed_distance=p.seed_distance,
        target=p.target,
        distractor=p.distractor,
        width=width,
        origin=frame * width + frame,
        inside=inside.reshape(-1),
        lines=_steps(lines, lines > 0, width),
        occupied=_steps(masks, masks > 0, width),
        core=_steps(masks, masks >= CORE, width),
        solid=_steps(masks[:360], masks[:360] == 1, width, further=1),
        box=np.stack([_solid_box(mask) for mask in masks[:360]]),
        directions=np.array(
            [rules.directions == "any" or _reaches_all_quadrants(mask) for mask in masks[:360]]
        ),
        circle=circle,
        strides=np.stack([_moved(p.segment + 2 * margin, angle) for angle in angles]),
        turns=_lists(straightness, straightness > 0, np.arange(len(circle))),
        near=(np.argwhere(_disc(margin)) - margin) @ (width, 1),
        disc=_steps(disc[None], disc[None] > 0, width),
    )


def _steps(drawn: np.ndarray, chosen: np.ndarray, width: int, further: int = 0) -> Lists:
    """Chosen pixels of drawings (n, rows, columns), as steps from the middle of each."""
    rows, columns = (np.arange(size) - size // 2 + further for size in drawn.shape[1:])
    steps = (rows[:, None] * width + columns).reshape(-1)
    return _lists(drawn.reshape(len(drawn), -1), chosen.reshape(len(drawn), -1), steps)


def _lists(values: np.ndarray, chosen: np.ndarray, numbers: np.ndarray) -> Lists:
    """Of each row of values (keys, n) those that are chosen, and their numbers (n,)."""
    starts = np.concatenate([[0], np.cumsum(chosen.sum(1))])
    return Lists(starts, numbers[np.nonzero(chosen)[1]], values[chosen].astype(np.float32))


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
    mask = np.empty(s.width * s.width, np.float32)
    # The contours, segment by segment: row and column of the start, and stamp.
    contours = np.empty((2, segments, 3), np.int64)
    likely = np.empty(len(s.circle))
    _two_contours(s, state, mask, contours, likely)
    image = np.zeros(s.width * s.width, np.float32)
    for contour in contours:
        _paint(s, image, contour, np.float32(s.target))
    shorter = np.empty((1, distractor_segments, 3), np.int64)
    trial = np.empty_like(mask)
    for _ in range(distractors):
        if _distractor(s, state, mask, trial, shorter, likely):
            mask, trial = trial, mask
            _paint(s, image, shorter[0], np.float32(s.distractor))
    label = below(state, 2)
    first = below(state, 2)
    if moved:
        label = 1 - label
    second = first if label else 1 - first
    discs = np.empty((2, 2), np.int64)
    discs[0] = contours[first, 0, :2]
    discs[1] = contours[second, -1, :2]
    for row, column in discs:
        _merge(image, s.disc, 0, _place(s, row, column), np.float32(1))
    return _to_bytes(s, image), label, discs, _traced(s, contours, first, second)


@numba.njit(nogil=True, forceinline=True)
def _place(s, row, column):
    """The number of a pixel."""
    return s.origin + row * s.width + column


@numba.njit(nogil=True, forceinline=True)
def _traced(s, contours, first, second):
    """How many discs the contour of each pixel has."""
    trace = np.zeros(s.width * s.width, np.uint8)
    for c in range(2):
        discs = (first == c) + (second == c)
        for row, column, stamp in contours[c]:
            place = _place(s, row, column)
            for k in range(s.lines.starts[stamp], s.lines.starts[stamp + 1]):
                if s.lines.values[k] > VISIBLE:
                    trace[place + s.lines.numbers[k]] = discs
    frame = s.origin % s.width
    square = trace.reshape(s.width, s.width)
    return square[frame : frame + s.side, frame : frame + s.side].copy()


@numba.njit(nogil=True, forceinline=True)
def _two_contours(s, state, mask, contours, likely):
    """Extends both contours alternately on an empty image, until both are whole.

    Most attempts fail, nearly 1,000 of them in an image of 64 pixels: each takes back its own.
    """
    empty = _empty(s)
    mask[:] = empty
    pivots = np.empty((2, 2), np.int64)
    whole = False
    while not whole:
        whole = _seed_pair(s, state, contours, pivots)
        if not whole:
            continue
        for step in range(2, 2 * contours.shape[1]):
            n, c = step // 2, step % 2
            if not _extend(s, state, mask, pivots, contours, c, n, likely):
                whole = False
                for m in range(n - 1):
                    _clear(s, mask, empty, contours, 0, m)
                    _clear(s, mask, empty, contours, 1, m)
                _clear(s, mask, empty, contours, 0, n - 1)
                break
    # Of the last segments only the second contour's was ever merged.
    _occupy(s, mask, contours, 1, contours.shape[1] - 1)


@numba.njit(nogil=True, forceinline=True)
def _clear(s, mask, empty, contours, c, n):
    """Takes the pixels of segment n of contour c from what is occupied."""
    place, stamp = _place(s, contours[c, n, 0], contours[c, n, 1]), contours[c, n, 2]
    for k in range(s.occupied.starts[stamp], s.occupied.starts[stamp + 1]):
        pixel = place + s.occupied.numbers[k]
        mask[pixel] = empty[pixel]


@numba.njit(nogil=True, forceinline=True)
def _empty(s):
    """What is occupied at first: the padding of the image."""
    mask = np.zeros((s.width, s.width), np.float32)
    low, p = s.origin % s.width, s.padding
    high = low + s.side
    mask[low:high, low:high] = 1
    mask[low + p : high - p, low + p : high - p] = 0
    return mask.reshape(-1)


@numba.njit(nogil=True, forceinline=True)
def _seed_pair(s, state, contours, pivots):
    """Where the contours begin: the first near the middle, the second at a fixed distance."""
    edge = 2 * s.seed_distance
    for _ in range(TRIES):
        degree = below(state, 360)
        if not s.directions[degree]:
            return False
        # The solid pixels of the segment must stay off the edge. They lie one pixel further than
        # those of the segment that is drawn, as in the published generator.
        up, left = min(s.box[degree, 0, 0] + 1, 0), min(s.box[degree, 0, 1] + 1, 0)
        rows = s.side - 2 * edge - max(s.box[degree, 1, 0] + 1, 0) + up
        columns = s.side - 2 * edge - max(s.box[degree, 1, 1] + 1, 0) + left
        if rows <= 0 or columns <= 0:
            return False
        row = edge - up + below(state, rows)
        column = edge - left + below(state, columns)
        if _start(s, contours, pivots, 0, row, column, degree):
            break
    else:
        return False
    for _ in range(TRIES):
        degree = below(state, 360)
        towards = _radians(below(state, 360))
        row = round(contours[0, 0, 0] + s.seed_distance * np.sin(towards))
        column = round(contours[0, 0, 1] + s.seed_distance * np.cos(towards))
        if _start(s, contours, pivots, 1, row, column, degree):
            return True
    return False


@numba.njit(nogil=True, forceinline=True)
def _radians(degree):
    return (degree - 180) * np.pi / 180


@numba.njit(nogil=True, forceinline=True)
def _start(s, contours, pivots, c, row, column, degree):
    """Puts the first segment of contour c at a pixel; False when it leaves the image."""
    angle = _radians(degree)
    end_row = int(np.ceil(row + s.segment * np.sin(angle)))
    end_column = int(np.ceil(column + s.segment * np.cos(angle)))
    back = angle + np.pi if angle < 0 else angle - np.pi
    pivot_row = int(np.ceil(end_row + (s.segment + s.margin) * np.sin(back)))
    pivot_column = int(np.ceil(end_column + (s.segment + s.margin) * np.cos(back)))
    pivots[c, 0], pivots[c, 1] = pivot_row, pivot_column
    contours[c, 0, 0], contours[c, 0, 1], contours[c, 0, 2] = row, column, degree
    return (
        min(end_row, end_column, pivot_row, pivot_column) >= 0
        and max(end_row, end_column, pivot_row, pivot_column) < s.side
    )


@numba.njit(nogil=True, forceinline=True)
def _extend(s, state, mask, pivots, contours, c, n, likely):
    """Adds segment n of contour c and moves its pivot; False when no end fits. likely: room for a
    number a candidate."""
    last = contours[c, n - 1, 2]
    row, column = pivots[c, 0] + s.strides[last, 0], pivots[c, 1] + s.strides[last, 1]
    begin = s.turns.starts[last]
    turns = s.turns.starts[last + 1] - begin
    total = _weights(s, mask, begin, turns, row, column, likely)
    if total < NO_CHOICE:
        return False
    for _ in range(TRIES):
        drawn = uniform(state) * total
        chosen = 0
        while chosen < turns - 1 and likely[chosen] <= drawn:
            chosen += 1
        candidate = s.turns.numbers[begin + chosen]
        end_row, end_column = row + s.circle[candidate, 0], column + s.circle[candidate, 1]
        if _fits(s, mask, 360 + candidate, _place(s, end_row, end_column)):
            _occupy(s, mask, contours, c, n - 1)
            contours[c, n, 0], contours[c, n, 1] = end_row, end_column
            contours[c, n, 2] = 360 + candidate
            pivots[c, 0], pivots[c, 1] = row, column
            return True
    return False


@numba.njit(nogil=True, forceinline=True)
def _weights(s, mask, begin, turns, row, column, likely):
    """How likely each candidate is, cumulated: its straightness times how free the pixels near it
    are."""
    total = 0.0
    for k in range(turns):
        c = s.turns.numbers[begin + k]
        end_row, end_column = row + s.circle[c, 0], column + s.circle[c, 1]
        if 0 <= end_row < s.side and 0 <= end_column < s.side:
            place = _place(s, end_row, end_column)
            most = np.float32(0)
            for j in range(len(s.near)):
                occupancy = mask[place + s.near[j]]
                if occupancy > most:
                    most = occupancy
            total += (1 - most) * s.turns.values[begin + k]
        likely[k] = total
    return total


@numba.njit(nogil=True, forceinline=True)
def _fits(s, mask, stamp, place):
    for k in range(s.core.starts[stamp], s.core.starts[stamp + 1]):
        if mask[place + s.core.numbers[k]] + s.core.values[k] >= OVERLAP:
            return False
    return True


@numba.njit(nogil=True, forceinline=True)
def _merge(image, stamps, stamp, place, contrast):
    """image = max(image, contrast * stamp), the stamp centred on a pixel."""
    for k in range(stamps.starts[stamp], stamps.starts[stamp + 1]):
        pixel = place + stamps.numbers[k]
        image[pixel] = max(image[pixel], contrast * stamps.values[k])


@numba.njit(nogil=True, forceinline=True)
def _occupy(s, mask, contours, c, n):
    place, stamp = _place(s, contours[c, n, 0], contours[c, n, 1]), contours[c, n, 2]
    for k in range(s.occupied.starts[stamp], s.occupied.starts[stamp + 1]):
        pixel = place + s.occupied.numbers[k]
        if s.inside[pixel] and s.occupied.values[k] > mask[pixel]:
            mask[pixel] = s.occupied.values[k]


@numba.njit(nogil=True, forceinline=True)
def _paint(s, image, contour, contrast):
    for row, column, stamp in contour:
        _merge(image, s.lines, stamp, _place(s, row, column), contrast)


@numba.njit(nogil=True, forceinline=True)
def _distractor(s, state, mask, trial, contours, likely):
    """Finds one shorter contour where one fits, and occupies its pixels in trial; False where none
    does."""
    pivots = np.empty((1, 2), np.int64)
    for _ in range(DISTRACTOR_TRIES):
        if _crowded(s, mask):
            return False
        if _place_contour(s, state, mask, trial, contours, pivots, likely):
            return True
    return False


@numba.njit(nogil=True, forceinline=True)
def _crowded(s, mask):
    missing = CROWDED * s.side * s.side
    for row in range(s.side):
        first = _place(s, row, 0)
        for occupancy in mask[first : first + s.side]:
            if occupancy <= FREE:
                missing -= 1
                if missing <= 0:
                    return False
    return True


@numba.njit(nogil=True, forceinline=True)
def _place_contour(s, state, mask, trial, contours, pivots, likely):
    if not _seed_anywhere(s, state, mask, contours, pivots):
        return False
    trial[:] = mask
    segments = contours.shape[1]
    for n in range(1, segments):
        if not _extend(s, state, trial, pivots, contours, 0, n, likely):
            return False
    _occupy(s, trial, contours, 0, segments - 1)
    return True


@numba.njit(nogil=True, forceinline=True)
def _seed_anywhere(s, state, mask, contours, pivots):
    for _ in range(TRIES):
        degree = below(state, 360)
        if not s.directions[degree]:
            return False
        row, column = _free_pixel(s, state, mask, degree)
        if row < 0:
            return False
        if _start(s, contours, pivots, 0, row, column, degree):
            return True
    return False


@numba.njit(nogil=True, forceinline=True)
def _free_pixel(s, state, mask, degree):
    """A pixel drawn uniformly from those where the segment meets nothing; -1, -1 without one.

    Draws from all pixels until one is free, which gives the same; after many, looks at all.
    """
    for _ in range(s.side * s.side // 64):
        row, column = below(state, s.side), below(state, s.side)
        if _is_free(s, mask, row, column, degree):
            return row, column
    free = np.empty(s.side * s.side, np.int64)
    count = 0
    for row in range(s.side):
        for column in range(s.side):
            free[count] = row * s.side + column
            count += _is_free(s, mask, row, column, degree)
    if count == 0:
        return -1, -1
    chosen = free[below(state, count)]
    return chosen // s.side, chosen % s.side


@numba.njit(nogil=True, forceinline=True)
def _is_free(s, mask, row, column, degree):
    place = _place(s, row, column)
    for k in range(s.solid.starts[degree], s.solid.starts[degree + 1]):
        if mask[place + s.solid.numbers[k]] > FREE:
            return False
    return True


@numba.njit(nogil=True, forceinline=True)
def _to_bytes(s, image):
    frame = s.origin % s.width
    square = image.reshape(s.width, s.width)[frame : frame + s.side, frame : frame + s.side]
    low, high = square[0, 0], square[0, 0]
    for row in range(s.side):
        for column in range(s.side):
            low, high = min(low, square[row, column]), max(high, square[row, column])
    scale = 255 / (high - low)
    scaled = np.empty((s.side, s.side), np.uint8)
    for row in range(s.side):
        for column in range(s.side):
            scaled[row, column] = np.uint8((square[row, column] - low) * scale + 0.5)
    return scaled
