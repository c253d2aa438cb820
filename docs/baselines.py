"""Rates of sparseflash over those of the fastest baseline, as tables of Markdown."""

from collections.abc import Iterator
from statistics import median

from records import DIRECTIONS, NAMES, Rows, by_shape, find, paragraphs, size_of

from experiments.markdown import table
from sparseflash.backends.hopper.configs import MAX_DQ_WARPGROUP_DIMS

OURS, ANY_ORDER = "sparseflash", "sparseflash:auto/any-order"
PLANNED = "sparseflash:auto/planned"
BASELINES = ("flash4", "flex", "cudnn", "cudnn-bsa", "cudnn-flex", "flash")


def compared(record: dict) -> str:
    """A summary against the fastest baseline, where it is faster, then a table for each size."""
    rows = record["rows"]
    return paragraphs(
        [
            "The first table summarises those below it. A ratio is the rate of sparseflash over "
            "that of the fastest baseline on the same mask and size. Below 1, the baseline is "
            "faster.",
            against_baselines(rows),
            slower_rows(rows),
            by_shape(rows, rested_and_sustained),
        ]
    )


def against_baselines(rows: Rows) -> str:
    """Our rate over that of the fastest baseline, by head dim and pass."""
    lines = []
    for head_dim in sorted({row["head_dim"] for row in rows}, reverse=True):
        same = [row for row in rows if row["head_dim"] == head_dim]
        for direction, ours in ("forward", OURS), ("backward", ANY_ORDER), ("backward", OURS):
            line = [f"{head_dim}", f"{direction}: {NAMES[ours]}"]
            for clock in ("tflops", "sustained_tflops"):
                line += ratios(same, direction, ours, clock)
            lines.append(line)
    head = ["head dim", "pass"]
    for clock in ("rested", "sustained"):
        head += [f"{clock}: minimum, median, maximum", "rows below 1"]
    return table(head, lines)


def ratios(rows: Rows, direction: str, ours: str, clock: str) -> list[str]:
    """The range of our rate over the fastest baseline, and how often ours is slower."""
    found = over_fastest(rows, direction, ours, clock)
    if not found:
        return ["", ""]
    below = sum(value < 1 for value in found)
    values = ", ".join(f"{value:.2f}" for value in (min(found), median(found), max(found)))
    return [values, f"{below} of {len(found)}"]


def over_fastest(rows: Rows, direction: str, ours: str, clock: str) -> list[float]:
    """Our rate over the fastest baseline, for each mask and size that both have."""
    found = []
    for of_size, pattern in sizes_and_masks(rows):
        own = find(of_size, pattern, direction, ours)
        baselines = [row[clock] for row in of_baselines(of_size, pattern, direction)]
        if own and baselines:
            found.append(own[clock] / max(baselines))
    return found


def slower_rows(rows: Rows) -> str:
    """The masks and sizes at which the fastest baseline is faster than the faster of our modes."""
    lines = []
    for of_size, pattern in sizes_and_masks(rows):
        for direction in DIRECTIONS:
            found = [find(of_size, pattern, direction, name) for name in (OURS, ANY_ORDER)]
            own, others = [*filter(None, found)], of_baselines(of_size, pattern, direction)
            if not own or not others:
                continue
            over = [
                max(row[clock] for row in own) / max(row[clock] for row in others)
                for clock in ("tflops", "sustained_tflops")
            ]
            if min(over) < 1:
                row = max(others, key=lambda other: other["sustained_tflops"])
                facts = f"{row['head_dim']}", f"{row['seq_len']:,}", pattern, direction
                shown = (f"{value:.3f}" for value in over)
                lines.append([*facts, *shown, NAMES[row["implementation"]]])
    if not lines:
        return ""
    head = ["head dim", "tokens", "mask", "pass", "rested", "sustained", "fastest, sustained"]
    title = "**Where a baseline is faster than both modes of sparseflash**"
    return f"{title}\n\n{table(head, lines)}"


def planned_order(record: dict) -> str:
    """Sustained rates with dQ in a planned order, over those of other modes and of baselines."""
    lines = []
    for of_size, pattern in sizes_and_masks(record["rows"]):
        row = find(of_size, pattern, "backward", PLANNED)
        default, any_order = (
            find(of_size, pattern, "backward", name) for name in (OURS, ANY_ORDER)
        )
        if not (row and default and any_order) or row["head_dim"] > MAX_DQ_WARPGROUP_DIMS:
            continue
        others = of_baselines(of_size, pattern, "backward")
        before, rate, any_rate = (own["sustained_tflops"] for own in (default, row, any_order))
        facts = f"{row['seq_len']:,}", pattern, f"{row['blocks_per_row']:.1f}"
        rates = (f"{each:.0f}" for each in (before, rate, any_rate))
        over = [f"{rate / each:.2f}" for each in (before, any_rate)]
        most = max((own["sustained_tflops"] for own in others), default=None)
        lines.append([*facts, *rates, *over, f"{rate / most:.2f}" if most else ""])
    head = ["tokens", "mask", "blocks in a row", "default", "planned", "any order"]
    head += ["planned over default", "over any order", "over the fastest baseline"]
    return table(head, lines)


def sizes_and_masks(rows: Rows) -> Iterator[tuple[Rows, str]]:
    """(the rows of a size, a mask of these rows), for each size and mask."""
    for size in dict.fromkeys(map(size_of, rows)):
        of_size = [row for row in rows if size_of(row) == size]
        for pattern in dict.fromkeys(row["pattern"] for row in of_size):
            yield of_size, pattern


def of_baselines(rows: Rows, pattern: str, direction: str) -> Rows:
    """The rows of the other implementations for a mask and a pass."""
    return [row for name in BASELINES if (row := find(rows, pattern, direction, name))]


def rested_and_sustained(row: dict) -> str:
    return f"{row['tflops']:.0f} / {row['sustained_tflops']:.0f}"


def fastest(rows: Rows) -> dict:
    return min(rows, key=lambda row: row["median_ms"])
