"""The record of a run of measurements: its rows, and the JSON file in which they are stored."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from experiments.files import write_json

BACKWARD_FLOPS = 2.5
DIGITS = 6  # significant ones of the floats in rows; the timer has fewer
OURS = "sparseflash"
ANY_ORDER = "/any-order"
# What implementations with a suffix are called with.
OPTIONS_OF_SUFFIX = {
    ANY_ORDER: {"deterministic": False},
    "/planned": {"planned_order": True},
}
# The names of baselines in tables and pictures.
BASELINE_NAMES = {
    "flash4": "FlashAttention-4",
    "flash": "FlashAttention-2 (torch)",
    "cudnn": "cuDNN",
    "flex": "FlexAttention",
    "cudnn-bsa": "cuDNN block-sparse attention",
    "cudnn-flex": "cuDNN flex attention",
    "flashinfer": "FlashInfer block-sparse attention",
    "standard": "standard attention",
    "sdpa": "SDPA (torch)",
    "linear": "Linear",
    "linformer": "Linformer",
    "performer": "Performer",
    "nystromformer": "Nystromformer",
    "reformer": "Reformer",
    "smyrf": "SMYRF",
    "local-attention": "local",
    "longformer": "Longformer",
    "bigbird": "BigBird",
    "routing": "Routing",
    "sinkhorn": "Sinkhorn",
}
# The mark of implementations that were not timed as CUDA graphs, and what it says.
FROM_PYTHON = "called from Python"
NO_GRAPH = (
    "a CUDA graph cannot contain this implementation, so its time includes host time where that "
    "is longer than device time"
)


def is_ours(implementation: str) -> bool:
    return implementation.split(":")[0] == OURS


def useful_flops(
    heads: int, lengths: tuple[int, int], head_dim: int, density: float, direction: str
) -> float:
    """4 head_dim for each pair of a non-zero block, 2.5 times as many backward; for all heads."""
    factor = BACKWARD_FLOPS if direction == "backward" else 1
    return factor * 4 * head_dim * heads * density * lengths[0] * lengths[1]


@dataclass(frozen=True)
class Measurement:
    """One row of a record: a pass of an implementation on a mask.

    Attributes:
        suite: "density" (patterns at one length), "length" (one pattern at many lengths), or the
            name of a suite of fixed problems.
        implementation: OURS, OURS:backend, or the name of a baseline.
        direction: "forward" or "backward".
        median_ms, low_ms, high_ms: Median and quartiles of `runs` runs.
        peak_bytes: Largest amount of memory allocated during the pass, without its inputs. For a
            backward pass this includes the forward pass.
        q_len, kv_heads: Sizes of decoding steps, if they differ from seq_len and heads.
        key_value_bytes: Bytes of keys and values in non-zero blocks, for decoding steps.
        sustained_ms, sustained_low_ms, sustained_high_ms: The same under continuous load.
        clock: The clock that measured it, if it is not that of the settings of the record.
    """

    suite: str
    implementation: str
    family: str
    pattern: str
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    block_size: int
    density: float
    blocks_per_row: float
    direction: str
    median_ms: float
    low_ms: float
    high_ms: float
    runs: int
    peak_bytes: int
    q_len: int | None = None
    kv_heads: int | None = None
    key_value_bytes: int | None = None
    sustained_ms: float | None = None
    sustained_low_ms: float | None = None
    sustained_high_ms: float | None = None
    clock: str | None = None

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s; see `useful_flops`."""
        lengths = (self.q_len or self.seq_len, self.seq_len)
        sizes = (self.batch * self.heads, lengths, self.head_dim, self.density)
        return useful_flops(*sizes, self.direction) / (self.median_ms * 1e9)

    @property
    def useful(self) -> tuple[float, str]:
        """The rate of a case and its unit: TB/s of keys and values in decoding, else TFLOP/s."""
        if self.key_value_bytes is None:
            return self.tflops, "TFLOP/s"
        return self.key_value_bytes / (self.median_ms * 1e9), "TB/s"

    @property
    def useful_sustained(self) -> float | None:
        """`useful` under continuous load, where it was measured."""
        return self.sustained_ms and self.useful[0] * self.median_ms / self.sustained_ms

    @property
    def group(self) -> tuple:
        """The properties that rows must share to be compared."""
        size = (self.batch, self.heads, self.seq_len, self.head_dim, self.block_size)
        return (self.suite, *size, self.q_len, self.kv_heads, self.direction)

    @property
    def size(self) -> str:
        """A description without the length."""
        heads = f"{self.heads} head{'s' * (self.heads != 1)} of {self.head_dim}"
        if self.q_len is None:
            return heads
        return f"{heads}, {self.kv_heads} of keys, {self.q_len} queries"


@dataclass
class Record:
    """A record.

    Attributes:
        settings: The settings of the run.
        roofline: See roofline.py.
        skipped: [implementation, pattern, reason] of baselines that did not run.
        gaps: See runner.measure_gaps.
        drift: Time of the first case at the end of the run over its time at the beginning.
    """

    environment: dict
    settings: dict
    rows: list[Measurement] = field(default_factory=list)
    skipped: list[list[str]] = field(default_factory=list)
    roofline: dict[str, float] = field(default_factory=dict)
    gaps: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    drift: float | None = None
    complete: bool = False

    def save(self, path: Path) -> None:
        """Writes the file atomically, with derived figures in every row.

        Rows are lists of values. "columns" has the names of the values.
        """
        rows = [asdict(row) | _figures(row) | relative(row, self.rows) for row in self.rows]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = [[_short(row.get(name)) for name in columns] for row in rows]
        about = {"environment": self.environment, "settings": self.settings, "columns": columns}
        found = {"rows": table, "crossovers": crossovers(self.rows)}
        write_json(path, about | asdict(self) | found)

    @classmethod
    def load(cls, path: Path) -> "Record":
        """Reads a file that `save` wrote. Raises ValueError for other files."""
        names = Measurement.__dataclass_fields__.keys()
        try:
            data = json.loads(path.read_text())
            rows = read_rows(data)
            known = [Measurement(**{n: row[n] for n in row.keys() & names}) for row in rows]
            other = data.keys() - {"columns", "rows", "crossovers"}
            return cls(rows=known, **{name: data[name] for name in other})
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a record of experiments.speedup or experiments.bench, or one from "
                f"before records named their columns: {error!r}"
            ) from error


def read_rows(data: dict) -> list[dict]:
    """The rows in the JSON of a record, as dicts by column."""
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def _short(value: object) -> object:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _figures(row: Measurement) -> dict[str, float]:
    useful, unit = row.useful
    figures = {"tflops": row.tflops}
    if unit == "TB/s":
        figures["terabytes_per_second"] = useful
    if row.useful_sustained is not None:
        name = "terabytes_per_second" if unit == "TB/s" else "tflops"
        figures[f"sustained_{name}"] = row.useful_sustained
    return figures


def full_row(row: Measurement, rows: Iterable[Measurement]) -> Measurement | None:
    """The full mask of the same implementation in the same group."""
    same = (
        r
        for r in rows
        if (r.implementation, r.family, r.group) == (row.implementation, "full", row.group)
    )
    return next(same, None)


def relative(row: Measurement, rows: Iterable[Measurement]) -> dict[str, float | None]:
    """A row against the full mask of the same kernels: speed-up, its ideal 1/s, and retention."""
    full = full_row(row, rows)
    if full is None:
        return {"speedup": None, "ideal": 1 / row.density, "retention": None}
    return {
        "speedup": full.median_ms / row.median_ms,
        "ideal": 1 / row.density,
        "retention": row.tflops / full.tflops,
    }


def dense_baseline(group: tuple, rows: Iterable[Measurement]) -> Measurement | None:
    """The fastest baseline without a mask in a group."""
    dense = [
        r
        for r in rows
        if r.group == group and r.family == "full" and not is_ours(r.implementation)
    ]
    return min(dense, key=lambda r: r.median_ms, default=None)


def crossovers(rows: list[Measurement]) -> list[dict]:
    """The density below which sparse is faster than dense, for each pattern, length and pass.

    It is compared with our own full mask and with the fastest dense baseline.
    """
    lines = {}
    for row in rows:
        sparse = row.suite == "density" and row.family not in ("full", "causal")
        if sparse and is_ours(row.implementation) and (full := full_row(row, rows)):
            lines.setdefault((full, row.family), []).append(row)
    return [
        _crossovers_of(line, full, dense_baseline(full.group, rows))
        for (full, _), line in lines.items()
    ]


def _crossovers_of(
    line: list[Measurement], full: Measurement, baseline: Measurement | None
) -> dict:
    times = {row.density: row.median_ms for row in line} | {1.0: full.median_ms}
    return {
        "seq_len": full.seq_len,
        "direction": full.direction,
        "implementation": full.implementation,
        "family": line[0].family,
        "against_full": crossover(times, full.median_ms),
        "baseline": baseline and baseline.implementation,
        "against_baseline": baseline and crossover(times, baseline.median_ms),
    }


Line = dict[int, tuple[float, int]]  # by length: milliseconds of all passes, peak bytes


def lines(rows: Iterable[Measurement]) -> dict[tuple[str, str], Line]:
    """The lines of the suite landscape, by implementation and family, ours first.

    A length at which only one of the passes was measured is left out.
    """
    landscape = (row for row in rows if row.suite == "landscape")
    own = sorted(landscape, key=lambda row: not is_ours(row.implementation))
    passes = len({row.direction for row in own})
    found: dict[tuple[str, str], dict[int, list[Measurement]]] = {}
    for row in own:
        line = found.setdefault((row.implementation, row.family), {})
        line.setdefault(row.seq_len, []).append(row)
    return {
        name: {
            n: (sum(r.median_ms for r in of), max(r.peak_bytes for r in of))
            for n, of in line.items()
            if len(of) == passes
        }
        for name, line in found.items()
        if any(len(of) == passes for of in line.values())
    }


def from_python(rows: Iterable[Measurement]) -> set[str]:
    """The implementations that were timed as called from Python, where others were graphs."""
    return {row.implementation for row in rows if row.clock is not None}


def crossing_length(line: Line, other: Line) -> float | None:
    """The length from which on `line` is at most as slow as `other`.

    None if it is slower at the longest length that both have.
    """
    return _crossing([(n, line[n][0] / other[n][0]) for n in sorted(line.keys() & other.keys())])


def crossover(times: dict[float, float], dense_ms: float) -> float | None:
    """The largest density up to which times[density] <= dense_ms.

    None if the lowest density is slower.
    """
    return _crossing([(density, times[density] / dense_ms) for density in sorted(times)[::-1]])


def _crossing(ratios: list[tuple[float, float]]) -> float | None:
    """The point after which all ratios are at most 1, interpolated linearly in log-log."""
    if not ratios or ratios[-1][1] > 1:
        return None
    found = ratios[0][0]
    for (x, before), (following, after) in pairwise(ratios):
        if before > 1 >= after:
            found = x * (following / x) ** (math.log(before) / math.log(before / after))
    return found
