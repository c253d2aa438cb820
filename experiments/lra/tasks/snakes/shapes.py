"""Stamps of segments and discs, drawn once for each image size, and the pixels they occupy."""

from functools import lru_cache
from math import ceil, cos, pi, radians, sin
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import grey_dilation

from experiments.lra.tasks.snakes.rules import PARAMETERS, RELEASE, Parameters, Rules

ANTIALIAS = 2
OVERLAP = 1.8  # occupancies of two segments may add up to less than this
CORE = 0.79  # a pixel that is less occupied than this never adds up to OVERLAP: none has over 1


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
        [(centre, centre), (end_column, end_row)], fill=255, width=round(p.thickness * ANTIALIAS)
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
