"""Draws images stamp by stamp: two contours, distractors and discs."""

from typing import NamedTuple

import numba
import numpy as np

from experiments.lra.tasks.hashing import below, seed_of, uniform
from experiments.lra.tasks.snakes.rules import RELEASE, Rules, distractor_length
from experiments.lra.tasks.snakes.shapes import OVERLAP, stamps

TRIES = 3  # placements of a segment before its contour is given up
DISTRACTOR_TRIES = 5
FREE = 0.3  # a pixel whose occupancy is at most this is free
CROWDED = 0.01  # no distractor is tried where a smaller part of the image is free
VISIBLE = 0.25  # part of a line's brightness from which a pixel is of its contour
NO_CHOICE = 1e-4  # a contour ends where the weights of its candidates sum to less


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
    """Adds segment n of contour c and moves its pivot; False when no end fits. likely: memory for
    a number a candidate."""
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
