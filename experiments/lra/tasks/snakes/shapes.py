"""Stamps of segments and discs, drawn once for each image size, and the pixels they occupy."""

from functools import lru_cache
from math import ceil, cos, pi, radians, sin
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import grey_dilation

from experiments.lra.tasks.snakes.rules import PARAMETERS, RELEASE, Parameters, Rules

ANTIALIAS = 2  # stamps are drawn so many times as large, and then reduced
OVERLAP = 1.8  # the sum of the occupancies of a pixel by two segments is below this
CORE = 0.79  # a pixel with less occupancy cannot reach OVERLAP, because the other has at most 1


class Lists(NamedTuple):
    """Lists of (number, value), one for each key, in CSR form.

    Attributes:
        starts: int64 (keys + 1,); the list of a key is from starts[key] to starts[key + 1].
        numbers: int64 (n,), of all lists.
        values: float32 (n,), of all lists.
    """

    starts: np.ndarray
    numbers: np.ndarray
    values: np.ndarray


class Stamps(NamedTuple):
    """What is drawn once for an image size and margin.

    An image is a flat array with a frame, which stays free. The frame is as wide as any stamp
    extends, so pixels of stamps are not compared with the border. A stamp is a list of pixels, as
    differences of indices from the pixel on which it is centred. The stamps of segments are those
    of 360 degrees, followed by one for each candidate, which points from the candidate back.

    Attributes:
        side, padding, segment, seed_distance, target, distractor: As in Parameters.
        clipped: Whether brightness was clipped to [0, 1].
        margin: The margin.
        width: Length of a row with its frame.
        origin: Index of the pixel in row 0 and column 0 of the image.
        inside: bool (width^2,), the pixels of the image without the frame.
        lines: Pixels of a segment and their brightness.
        occupied: Pixels that a segment occupies and their occupancy, from 0 to 1.
        core: Those of `occupied` that can reach OVERLAP with another segment.
        solid: Those of `occupied` with occupancy 1, which must be free for a first segment. They
            are shifted by one pixel, as in the published generator.
        box: int64 (360, 2, 2), least and greatest row and column of the solid pixels, not shifted.
        directions: bool (360,), whether a first segment may have a direction; from -180 degrees.
        circle: int64 (candidates, 2), pixels around a pivot where the next segment may end.
        strides: float64 (360 + candidates, 2), from the pivot of a segment to that of the next,
            whose coordinates are rounded up.
        turns: Candidates that may follow a segment, and their weights.
        near: int64 (n,), pixels of a disc whose radius is the margin.
        disc: Pixels of a marker and their brightness.
    """

    side: int
    padding: int
    segment: int
    margin: int
    seed_distance: int
    target: float
    distractor: float
    clipped: bool
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
    """The stamps of an image size, for each of its margins.

    Args:
        side: Side of the image in pixels.
        rules: Rules of the generator.

    Raises:
        ValueError: There are no parameters for this size.
    """
    if side not in PARAMETERS:
        raise ValueError(f"side must be one of {sorted(PARAMETERS)} pixels, got {side}")
    parameters = PARAMETERS[side]
    return tuple(_stamps(parameters, margin, rules) for margin in parameters.margins)


def _stamps(p: Parameters, margin: int, rules: Rules) -> Stamps:
    circle = _circle(p.segment + margin)
    degrees = [radians(degree) for degree in range(-180, 180)]
    towards = np.arctan2(circle[:, 0], circle[:, 1])
    angles = np.concatenate([degrees, towards])
    clipped = rules.resampling == "clipped"
    # Both are opposite directions; their rounding errors move the ends of some segments.
    back = towards + pi if clipped else np.where(towards < 0, towards + pi, towards - pi)
    drawn = [_segment(p, margin, angle, clipped) for angle in [*degrees, *back]]
    lines, masks = (np.stack(part).astype(np.float32) for part in zip(*drawn, strict=True))
    solid = masks[:360].copy()
    if not clipped:  # the published generator cuts the shifted stamp
        end = solid.shape[1] // 2 + p.segment + margin
        solid[:, end:] = solid[:, :, end:] = 0
    disc = _marker(p.disc_radius, clipped)
    frame = max(lines.shape[1], disc.shape[0]) // 2 + 1
    width = p.side + 2 * frame
    inside = np.pad(np.ones((p.side, p.side), bool), frame)
    straightness = _straightness(angles[:, None] - towards, p.continuity)
    strides = [_stride(p.segment + 2 * margin, angle, clipped) for angle in angles]
    return Stamps(
        side=p.side,
        padding=p.padding,
        segment=p.segment,
        margin=margin,
        seed_distance=p.seed_distance,
        target=p.target,
        distractor=p.distractor,
        clipped=clipped,
        width=width,
        origin=frame * width + frame,
        inside=inside.reshape(-1),
        lines=_steps(lines, lines > 0, width),
        occupied=_steps(masks, masks > 0, width),
        core=_steps(masks, masks >= CORE, width),
        solid=_steps(solid, solid == 1, width, shift=1),
        box=np.stack([_solid_box(mask) for mask in solid]),
        directions=np.array(
            [rules.directions == "any" or _reaches_all_quadrants(mask) for mask in solid]
        ),
        circle=circle,
        strides=np.stack(strides).astype(np.float64),  # one type: numba compiles once for both
        turns=_lists(straightness, straightness > 0, np.arange(len(circle))),
        near=(np.argwhere(_disc(margin)) - margin) @ (width, 1),
        disc=_steps(disc[None], disc[None] > 0, width),
    )


def _steps(drawn: np.ndarray, chosen: np.ndarray, width: int, shift: int = 0) -> Lists:
    """Chosen pixels of drawings (n, rows, columns), as differences of indices from the centre.

    Args:
        drawn: Brightness or occupancy of each pixel.
        chosen: bool (n, rows, columns), which pixels are listed.
        width: Length of a row of the image with its frame.
        shift: Rows and columns that are added.
    """
    rows, columns = (np.arange(size) - size // 2 + shift for size in drawn.shape[1:])
    steps = (rows[:, None] * width + columns).reshape(-1)
    return _lists(drawn.reshape(len(drawn), -1), chosen.reshape(len(drawn), -1), steps)


def _lists(values: np.ndarray, chosen: np.ndarray, numbers: np.ndarray) -> Lists:
    """The chosen values (keys, n) of each key, with their numbers (n,)."""
    starts = np.concatenate([[0], np.cumsum(chosen.sum(1))])
    return Lists(starts, numbers[np.nonzero(chosen)[1]], values[chosen].astype(np.float32))


def _stride(distance: int, angle: float, clipped: bool) -> tuple[float, float]:
    """(rows, columns) to the point at a distance in a direction."""
    rows, columns = distance * sin(angle), distance * cos(angle)
    if not clipped:
        return rows, columns
    # Rounded up after the sum with a great coordinate, which removes rounding errors.
    coordinate = 1000
    return ceil(coordinate + rows) - coordinate, ceil(coordinate + columns) - coordinate


def _straightness(turn: np.ndarray, continuity: float) -> np.ndarray:
    """The weights of turns, in radians."""
    turn = np.abs(turn)
    turn = np.minimum(np.minimum(turn, 2 * pi - turn) * continuity, pi / 2)
    weight = np.cos(turn) ** 2
    return np.where(turn < pi / 2, weight, 0).astype(np.float32)


def _circle(radius: int) -> np.ndarray:
    """The distinct pixels (row, column) at steps of one pixel along a circle."""
    theta = np.arange(0, 2 * pi, 1 / radius)
    coordinate = 1000  # coordinates in images are positive, too, so int() rounds down
    rows, columns = coordinate + radius * np.sin(theta), coordinate + radius * np.cos(theta)
    return np.unique(np.stack([rows, columns], axis=1).astype(np.int64), axis=0) - coordinate


def _segment(
    p: Parameters, margin: int, angle: float, clipped: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The brightness and the occupancy of the pixels of a segment."""
    reach = p.segment + ceil(p.thickness) + margin
    centre = reach * ANTIALIAS
    end_row = ceil(centre + p.segment * ANTIALIAS * sin(angle))
    end_column = ceil(centre + p.segment * ANTIALIAS * cos(angle))
    canvas = Image.new("L", (2 * centre + 1, 2 * centre + 1))
    ImageDraw.Draw(canvas).line(
        [(centre, centre), (end_column, end_row)], fill=255, width=round(p.thickness * ANTIALIAS)
    )
    line = np.asarray(canvas)
    occupied = grey_dilation(line, footprint=_disc(margin * ANTIALIAS))
    return _shrunk(line, 2 * reach + 1, clipped), _shrunk(occupied, 2 * reach + 1, True)


def _disc(radius: int) -> np.ndarray:
    row, column = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return row**2 + column**2 <= radius**2


def _shrunk(canvas: np.ndarray, side: int, clipped: bool) -> np.ndarray:
    """A canvas of bytes, reduced; 1 is white. Without clipping, some pixels are outside [0, 1]."""
    pixels = canvas if clipped else canvas.astype(np.float32)
    small = Image.fromarray(pixels).resize((side, side), Image.Resampling.LANCZOS)
    return np.asarray(small) / 255


def _solid_box(mask: np.ndarray) -> np.ndarray:
    pixels = np.argwhere(mask == 1) - mask.shape[0] // 2
    return np.stack([pixels.min(0), pixels.max(0)])


def _reaches_all_quadrants(mask: np.ndarray) -> bool:
    """Whether each closed quadrant has solid pixels, after a shift by one pixel."""
    row, column = (np.argwhere(mask == 1) - mask.shape[0] // 2 + 1).T
    signs = ((1, 1), (1, -1), (-1, 1), (-1, -1))
    return all(((a * row >= 0) & (b * column >= 0)).any() for a, b in signs)


def _marker(radius: float, clipped: bool) -> np.ndarray:
    half = ceil(radius) + 3  # with space for the ringing of the resampling filter
    row, column = np.ogrid[
        -half * ANTIALIAS : (half + 1) * ANTIALIAS, -half * ANTIALIAS : (half + 1) * ANTIALIAS
    ]
    inside = row**2 + column**2 <= (radius * ANTIALIAS) ** 2
    disc = _shrunk(inside.astype(np.uint8) * 255, 2 * half + 1, clipped)
    return disc.astype(np.float32)
