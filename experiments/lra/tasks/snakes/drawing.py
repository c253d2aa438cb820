"""Draws images from stamps: two contours, distractors and discs."""

from typing import NamedTuple

import numba
import numpy as np

from experiments.lra.tasks.hashing import below, seed_of, uniform
from experiments.lra.tasks.snakes.rules import RELEASE, Rules, distractor_length
from experiments.lra.tasks.snakes.shapes import OVERLAP, stamps

TRIES = 3  # attempts to place a segment
DISTRACTOR_TRIES = 5  # attempts to place a distractor
FREE = 0.3  # a pixel with at most this occupancy is free
CROWDED = 0.01  # no distractor is placed if a smaller share of the pixels is free
VISIBLE = 0.25  # pixels of a line with more brightness belong to its contour
NO_CHOICE = 1e-4  # no segment is placed if the weights of its candidates sum to less


class Drawing(NamedTuple):
    """An image and what is known of it.

    Attributes:
        image: uint8 (side, side).
        label: 1 if the discs are on one contour, else 0.
        discs: int64 (2, 2), row and column of each disc.
        trace: uint8 (side, side), the number of discs on the contour of each pixel; 0 for pixels
            that are on no marked contour.
    """

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
    """Draws an image.

    Args:
        side: Side of the image in pixels.
        segments: Segments of the marked contours.
        stream: Stream of random numbers.
        index: Index of the image in the stream.
        moved: Whether the second disc is on the other contour than it would be, which is the
            least change of the image that changes its label.
        rules: Rules of the generator.
    """
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
    cumulative = np.empty(len(s.circle))
    _two_contours(s, state, mask, contours, cumulative)
    image = np.zeros(s.width * s.width, np.float32)
    for contour in contours:
        _paint(s, image, contour, np.float32(s.target))
    shorter = np.empty((1, distractor_segments, 3), np.int64)
    trial = np.empty_like(mask)
    for _ in range(distractors):
        if _distractor(s, state, mask, trial, shorter, cumulative):
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
    if not s.clipped:  # discs are not scaled: their brightest pixels have more than 1
        image /= _brightest(s, image)
    for row, column in discs:
        _merge(image, s.disc, 0, _index(s, row, column), np.float32(1))
    return _to_bytes(s, image), label, discs, _traced(s, contours, first, second)


@numba.njit(nogil=True, forceinline=True)
def _index(s, row, column):
    """The index of a pixel in the flat array."""
    return s.origin + row * s.width + column


@numba.njit(nogil=True, forceinline=True)
def _traced(s, contours, first, second):
    """The number of discs on the contour of each pixel."""
    trace = np.zeros(s.width * s.width, np.uint8)
    for c in range(2):
        discs = (first == c) + (second == c)
        for row, column, stamp in contours[c]:
            centre = _index(s, row, column)
            for k in range(s.lines.starts[stamp], s.lines.starts[stamp + 1]):
                if s.lines.values[k] > VISIBLE:
                    trace[centre + s.lines.numbers[k]] = discs
    frame = s.origin % s.width
    square = trace.reshape(s.width, s.width)
    return square[frame : frame + s.side, frame : frame + s.side].copy()


@numba.njit(nogil=True, forceinline=True)
def _two_contours(s, state, mask, contours, cumulative):
    """Places the segments of both contours alternately in an empty image.

    Most attempts fail, nearly 1,000 in an image of 64 pixels. A failed attempt clears the pixels
    that it has occupied.
    """
    empty = _empty(s)
    mask[:] = empty
    pivots = np.empty((2, 2), np.int64)
    complete = False
    while not complete:
        complete = _seed_pair(s, state, contours, pivots)
        if not complete:
            continue
        for step in range(2, 2 * contours.shape[1]):
            n, c = step // 2, step % 2
            if not _extend(s, state, mask, pivots, contours, c, n, cumulative):
                complete = False
                for m in range(n - 1):
                    _clear(s, mask, empty, contours, 0, m)
                    _clear(s, mask, empty, contours, 1, m)
                _clear(s, mask, empty, contours, 0, n - 1)
                break
    # The published generator occupies the last segment of the second contour alone.
    _occupy(s, mask, contours, 1, contours.shape[1] - 1)


@numba.njit(nogil=True, forceinline=True)
def _clear(s, mask, empty, contours, c, n):
    """Clears the pixels of segment n of contour c."""
    centre, stamp = _index(s, contours[c, n, 0], contours[c, n, 1]), contours[c, n, 2]
    for k in range(s.occupied.starts[stamp], s.occupied.starts[stamp + 1]):
        pixel = centre + s.occupied.numbers[k]
        mask[pixel] = empty[pixel]


@numba.njit(nogil=True, forceinline=True)
def _empty(s):
    """The occupancy of an image without contours, of which only the padding is occupied."""
    mask = np.zeros((s.width, s.width), np.float32)
    low, p = s.origin % s.width, s.padding
    high = low + s.side
    mask[low:high, low:high] = 1
    mask[low + p : high - p, low + p : high - p] = 0
    return mask.reshape(-1)


@numba.njit(nogil=True, forceinline=True)
def _seed_pair(s, state, contours, pivots):
    """Places the first segments: one away from the edge, the other at a fixed distance from it.

    Returns:
        Whether both could be placed.
    """
    edge = 2 * s.seed_distance
    for _ in range(TRIES):
        degree = below(state, 360)
        if not s.directions[degree]:
            return False
        # The solid pixels of the segment must not be in the edge. They are shifted by one pixel,
        # as in the published generator.
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
    """Places the first segment of contour c at a pixel; whether it is inside the image."""
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
def _extend(s, state, mask, pivots, contours, c, n, cumulative):
    """Places segment n of contour c and moves the pivot of the contour.

    Args:
        cumulative: Memory for the cumulative weights of all candidates.

    Returns:
        Whether it could be placed.
    """
    last = contours[c, n - 1, 2]
    row = int(np.ceil(pivots[c, 0] + s.strides[last, 0]))
    column = int(np.ceil(pivots[c, 1] + s.strides[last, 1]))
    begin = s.turns.starts[last]
    turns = s.turns.starts[last + 1] - begin
    total = _weights(s, mask, begin, turns, row, column, cumulative)
    if total < NO_CHOICE:
        return False
    for _ in range(TRIES):
        drawn = uniform(state) * total
        chosen = 0
        while chosen < turns - 1 and cumulative[chosen] <= drawn:
            chosen += 1
        candidate = s.turns.numbers[begin + chosen]
        end_row, end_column = row + s.circle[candidate, 0], column + s.circle[candidate, 1]
        if _fits(s, mask, 360 + candidate, _index(s, end_row, end_column)):
            _occupy(s, mask, contours, c, n - 1)
            contours[c, n, 0], contours[c, n, 1] = end_row, end_column
            contours[c, n, 2] = 360 + candidate
            pivots[c, 0], pivots[c, 1] = row, column
            return True
    return False


@numba.njit(nogil=True, forceinline=True)
def _weights(s, mask, begin, turns, row, column, cumulative):
    """Writes the cumulative weights of the candidates to `cumulative`, and returns their sum.

    The weight of a candidate is its straightness times 1 - the greatest occupancy near it.
    """
    total = 0.0
    for k in range(turns):
        c = s.turns.numbers[begin + k]
        end_row, end_column = row + s.circle[c, 0], column + s.circle[c, 1]
        if 0 <= end_row < s.side and 0 <= end_column < s.side:
            centre = _index(s, end_row, end_column)
            most = np.float32(0)
            for j in range(len(s.near)):
                occupancy = mask[centre + s.near[j]]
                if occupancy > most:
                    most = occupancy
            total += (1 - most) * s.turns.values[begin + k]
        cumulative[k] = total
    return total


@numba.njit(nogil=True, forceinline=True)
def _fits(s, mask, stamp, centre):
    """Whether no pixel of a stamp would reach the occupancy OVERLAP."""
    for k in range(s.core.starts[stamp], s.core.starts[stamp + 1]):
        if mask[centre + s.core.numbers[k]] + s.core.values[k] >= OVERLAP:
            return False
    return True


@numba.njit(nogil=True, forceinline=True)
def _merge(image, stamps, stamp, centre, contrast):
    """image = max(image, contrast * stamp), with the stamp centred on a pixel."""
    for k in range(stamps.starts[stamp], stamps.starts[stamp + 1]):
        pixel = centre + stamps.numbers[k]
        image[pixel] = max(image[pixel], contrast * stamps.values[k])


@numba.njit(nogil=True, forceinline=True)
def _occupy(s, mask, contours, c, n):
    """Occupies the pixels of segment n of contour c."""
    centre, stamp = _index(s, contours[c, n, 0], contours[c, n, 1]), contours[c, n, 2]
    for k in range(s.occupied.starts[stamp], s.occupied.starts[stamp + 1]):
        pixel = centre + s.occupied.numbers[k]
        if s.inside[pixel] and s.occupied.values[k] > mask[pixel]:
            mask[pixel] = s.occupied.values[k]


@numba.njit(nogil=True, forceinline=True)
def _paint(s, image, contour, contrast):
    for row, column, stamp in contour:
        _merge(image, s.lines, stamp, _index(s, row, column), contrast)


@numba.njit(nogil=True, forceinline=True)
def _distractor(s, state, mask, trial, contours, cumulative):
    """Places a distractor; trial: receives the occupancy with it.

    Returns:
        Whether it could be placed.
    """
    pivots = np.empty((1, 2), np.int64)
    for _ in range(DISTRACTOR_TRIES):
        if _crowded(s, mask):
            return False
        if _place_contour(s, state, mask, trial, contours, pivots, cumulative):
            return True
    return False


@numba.njit(nogil=True, forceinline=True)
def _crowded(s, mask):
    """Whether too few pixels of the image are free for a distractor."""
    missing = CROWDED * s.side * s.side
    for row in range(s.side):
        first = _index(s, row, 0)
        for occupancy in mask[first : first + s.side]:
            if occupancy <= FREE:
                missing -= 1
                if missing <= 0:
                    return False
    return True


@numba.njit(nogil=True, forceinline=True)
def _place_contour(s, state, mask, trial, contours, pivots, cumulative):
    if not _seed_anywhere(s, state, mask, contours, pivots):
        return False
    trial[:] = mask
    segments = contours.shape[1]
    for n in range(1, segments):
        if not _extend(s, state, trial, pivots, contours, 0, n, cumulative):
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
    """A pixel at which a first segment of some direction is free, or (-1, -1) if there is none.

    It is drawn uniformly from these pixels: first by rejection, and if that fails, from a list.
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
    """Whether all pixels are free that a first segment at this pixel would fill."""
    centre = _index(s, row, column)
    for k in range(s.solid.starts[degree], s.solid.starts[degree + 1]):
        if mask[centre + s.solid.numbers[k]] > FREE:
            return False
    return True


@numba.njit(nogil=True, forceinline=True)
def _brightest(s, image):
    """The greatest brightness of the image without its frame."""
    most = np.float32(0)
    for row in range(s.side):
        first = _index(s, row, 0)
        for brightness in image[first : first + s.side]:
            most = max(most, brightness)
    return most


@numba.njit(nogil=True, forceinline=True)
def _to_bytes(s, image):
    """The image without its frame, scaled to 0 to 255."""
    scale = 255 / _brightest(s, image)
    rounding = 0.5 if s.clipped else 0.0
    scaled = np.empty((s.side, s.side), np.uint8)
    for row in range(s.side):
        first = _index(s, row, 0)
        for column in range(s.side):
            scaled[row, column] = np.uint8(image[first + column] * scale + rounding)
    return scaled
