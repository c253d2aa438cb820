"""Fits the rates of a machine to measured scaling, and reports the error on left-out patterns.

    python -m experiments.long_context.calibrate results/long-context-*-2-nvidia-h200.json

reads records of `experiments.long_context.scaling`, and finds the rates for which the time model
of `sparseflash.distributed.simulation` is closest to the measured times: least squares of the
logarithms of the times of both passes and of the forward pass. If the records have exchanges of
known sizes, bandwidth and latency are those of the exchanges, because a hidden exchange says
nothing of them. For the error, each pattern is predicted by a fit without it; the error is
predicted over measured time, minus 1. The rates and all errors are written to
long-context-machine-<device>.json, the argument --machine of `scaling` and `simulate`.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli import RESULTS, Output, Overwrite, usage_errors
from experiments.instruments import Log, command
from experiments.long_context.choices import Way

if TYPE_CHECKING:
    import numpy

    from sparseflash.distributed.simulation import Demand, Machine

RATES = ("tflops", "backward_tflops", "bandwidth", "latency_us", "call_us", "memory")
MIN_LATENCY = 1e-3  # milliseconds: the fit of a machine is one of logarithms
Rates = dict[str, float]
MOVED = 0.1  # change of the logarithm of a rate by which it is seen whether a time depends on it
TOLERANCE = 1e-12  # relative change of the loss and of the rates at which a fit ends
OUTLIER = 0.2  # difference of logarithms above which the loss is no longer quadratic


@dataclass(frozen=True)
class Measured:
    """The times of a plan: milliseconds of the slowest rank, of the forward and of both passes."""

    kind: str
    pattern: str
    ranks: int
    seq_len: int
    forward_ms: float
    total_ms: float


MEASURED = tuple(field.name for field in fields(Measured))


@dataclass(frozen=True)
class Point(Measured):
    """A plan that was measured, with the input of the time model."""

    demand: "Demand"

    def modelled(self, machine: "Machine") -> tuple[float, float]:
        """Milliseconds of the forward pass and of both passes."""
        forward, backward = self.demand.times(machine)
        return float(forward.max()), float((forward + backward).max())


@dataclass(frozen=True)
class Row(Measured):
    """A point, predicted with a machine that was fitted to the other patterns.

    An error is predicted over measured time, minus 1.
    """

    predicted_forward_ms: float
    forward_error: float
    predicted_total_ms: float
    total_error: float


def main(
    records: Annotated[
        list[Path], typer.Argument(exists=True, help="Records of the command scaling.")
    ],
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Fit the rates of a machine, and predict each pattern from the other patterns."""
    with usage_errors():
        device, points, known = read(records)
        machine, rows = fitted(points, known), held_out(points, known)
    errors = [abs(row.total_error) for row in rows]
    facts = {
        "machine": asdict(machine),
        "records": [path.name for path in records],
        "median_error": statistics.median(errors),
        "most_error": max(errors),
    }
    log = Log("long-context-machine", "cpu", output, overwrite, device, **facts)
    log.add("end", rows, {}, complete=True)
    figures = {
        "ranks": lambda row: f"{row.ranks}",
        "tokens": lambda row: f"{row.seq_len}",
        "forward ms": lambda row: f"{row.forward_ms:.2f}",
        "predicted forward": lambda row: f"{row.predicted_forward_ms:.2f}",
        "both ms": lambda row: f"{row.total_ms:.2f}",
        "predicted both": lambda row: f"{row.predicted_total_ms:.2f}",
        "error": lambda row: f"{row.total_error:+.1%}",
    }
    log.show("Each pattern predicted from the others", ("kind", "pattern"), figures)
    print(f"error of both passes: median {facts['median_error']:.1%}, most {max(errors):.1%}")
    print(", ".join(f"{name} {getattr(machine, name):.4g}" for name in RATES))


def read(records: Sequence[Path]) -> tuple[str, list[Point], Rates]:
    """The device of all records, the plans that were measured in them, and the known rates.

    Raises:
        ValueError: A file is not a record of scaling, or the records have different devices.
    """
    from sparseflash.distributed.simulation import Demand

    devices, points, exchanges = {}, [], []
    for path in records:
        try:
            found = json.loads(path.read_text())
            devices[found["environment"]["device"]] = path
            demands = {
                (each["pattern"], each["prediction"]["ranks"]): Demand(**each["demand"])
                for each in found["predicted"]
            }
            points += [
                Point(
                    **{name: row[name] for name in MEASURED},
                    demand=demands[row["pattern"], row["ranks"]],
                )
                for row in found["rows"]
                if row["implementation"] == Way.PLAN
            ]
            exchanges += [
                (each["received"], each["milliseconds"]) for each in found.get("exchanges", ())
            ]
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"file {path} must be a record of scaling: {error!r}") from error
    if len(devices) > 1:
        raise ValueError(f"records must be of one device, got {sorted(devices)}")
    return next(iter(devices)), points, of_exchanges(exchanges)


def of_exchanges(measured: Sequence[tuple[int, float]]) -> Rates:
    """Bandwidth and latency of measured exchanges; none if there are fewer than two sizes.

    Least squares of (latency + bytes / bandwidth) / measured time - 1.

    Args:
        measured: (bytes that a rank receives, milliseconds) of each.

    Raises:
        ValueError: Larger exchanges did not take longer.
    """
    import numpy
    from scipy.optimize import nnls

    if len({received for received, _ in measured}) < 2:
        return {}
    received, milliseconds = numpy.array(measured, dtype=float).T
    columns = numpy.stack([1 / milliseconds, received / milliseconds], 1)
    (latency, slope), _ = nnls(columns, numpy.ones(len(measured)))
    if not slope > 0:
        raise ValueError(f"larger exchanges must take longer, got {sorted(measured)}")
    return {"bandwidth": 1 / (slope * 1e6), "latency_us": max(latency, MIN_LATENCY) * 1e3}


def fitted(points: Sequence[Point], known: Rates) -> "Machine":
    """The machine with the known rates whose predicted times are closest to the measured times.

    A rate on which no point depends, such as the bandwidth if all points have one rank, keeps its
    default.
    """
    from sparseflash.distributed.simulation import Machine

    start = replace(Machine(backward_tflops=Machine.tflops, call_us=10.0), **known)
    # Points of one rank give the rates of blocks, from which the fit of all points starts.
    start = _nearest([point for point in points if point.ranks == 1], start, known)
    # An exchange that is hidden at the start says nothing of how much slower it may be.
    slower = (1,) if known else (1, 10, 100)
    starts = [replace(start, bandwidth=start.bandwidth / factor) for factor in slower]
    found = [_nearest(points, each, known) for each in starts]
    return min(found, key=lambda each: _loss(points, each))


def _loss(points: Sequence[Point], machine: "Machine") -> float:
    """What the fit minimises, to four digits, so that equal fits count as equal."""
    import numpy

    measured = numpy.array([(point.forward_ms, point.total_ms) for point in points])
    residuals = numpy.log([point.modelled(machine) for point in points] / measured) / OUTLIER
    return float(f"{(numpy.sqrt(1 + residuals**2) - 1).sum():.3e}")


def held_out(points: Sequence[Point], known: Rates) -> list[Row]:
    """Each point, predicted by the machine that is fitted to the points of other patterns.

    Raises:
        ValueError: There are not two patterns.
    """
    patterns = list(dict.fromkeys(point.pattern for point in points))
    if len(patterns) < 2:
        raise ValueError(f"records must be of two patterns or more, got {patterns}")
    rows = []
    for pattern in patterns:
        machine = fitted([point for point in points if point.pattern != pattern], known)
        rows += [_row(point, machine) for point in points if point.pattern == pattern]
    return rows


def _row(point: Point, machine: "Machine") -> Row:
    forward, total = point.modelled(machine)
    return Row(
        **{name: getattr(point, name) for name in MEASURED},
        predicted_forward_ms=forward,
        forward_error=forward / point.forward_ms - 1,
        predicted_total_ms=total,
        total_error=total / point.total_ms - 1,
    )


def _nearest(points: Sequence[Point], start: "Machine", known: Rates) -> "Machine":
    """The machine closest to the points, fitted from a start with positive and known rates."""
    import numpy
    from scipy.optimize import least_squares

    from sparseflash.distributed.simulation import Machine

    if not points:
        return start
    measured = numpy.log([(point.forward_ms, point.total_ms) for point in points])
    before = numpy.log([getattr(start, name) for name in RATES])

    def times(logarithms: "numpy.ndarray") -> "numpy.ndarray":
        rates = dict(zip(RATES, numpy.exp(logarithms).tolist(), strict=True))
        return numpy.log([point.modelled(Machine(**rates)) for point in points])

    # Only rates on which a time depends; a fit would let the others drift.
    changes = numpy.eye(len(RATES)) * MOVED
    moved = [
        name not in known and bool((times(before + change) != times(before)).any())
        for name, change in zip(RATES, changes, strict=True)
    ]
    free = numpy.flatnonzero(moved)

    def whole(chosen: "numpy.ndarray") -> "numpy.ndarray":
        logarithms = before.copy()
        logarithms[free] = chosen
        return logarithms

    found = least_squares(
        lambda chosen: (times(whole(chosen)) - measured).ravel(),
        before[free],
        bounds=(before[free] - math.log(1e6), before[free] + math.log(1e6)),
        loss="soft_l1",
        f_scale=OUTLIER,
        x_scale="jac",
        ftol=TOLERANCE,
        xtol=TOLERANCE,
    )
    rates = dict(zip(RATES, numpy.exp(whole(found.x)).tolist(), strict=True))
    return Machine(**rates | known)


if __name__ == "__main__":
    command(main)
