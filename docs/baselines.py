"""Rates of sparseflash over those of the fastest baseline, as tables of Markdown."""

from collections.abc import Iterator
from statistics import median

from records import DIRECTIONS, NAMES, Rows, by_shape, find, paragraphs, size_of

from experiments.markdown import table
from sparseflash.backends.hopper.configs import (
    MAX_DQ_WARPGROUP_DIMS,
    MAX_ORDINALS,
    MIN_PLANNED_BLOCKS,
)

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
    """Sustained rates of the modes: a summary against the fastest baseline, then every mask."""
    over_fastest: dict[bool, list[list[float]]] = {True: [], False: []}
    lines = []
    for of_size, pattern in sizes_and_masks(record["rows"]):
        found = [find(of_size, pattern, "backward", name) for name in (OURS, PLANNED, ANY_ORDER)]
        if not all(found) or found[0]["head_dim"] > MAX_DQ_WARPGROUP_DIMS:
            continue
        rates = [row["sustained_tflops"] for row in found]
        is_planned = has_planned_order(found[0])
        others = of_baselines(of_size, pattern, "backward")
        most = max((row["sustained_tflops"] for row in others), default=None)
        if most:
            over_fastest[is_planned].append([rate / most for rate in rates])
        facts = f"{found[0]['seq_len']:,}", pattern, f"{found[0]['blocks_per_row']:.1f}"
        default, planned, any_order = rates
        line = [f"{default:.0f}", f"{planned:.0f}", f"{any_order:.0f}"]
        line += [f"{planned / default:.2f}", f"{planned / any_order:.2f}"]
        line += [f"{planned / most:.2f}" if most else ""]
        if not is_planned:
            line = [line[0], "", line[2], "", "", ""]
        lines.append([*facts, *line])
    head = ["tokens", "mask", "blocks in a row", "default", "planned", "any order"]
    head += ["planned over default", "over any order", "over the fastest baseline"]
    return paragraphs([_summary_of_order(over_fastest), table(head, lines)])


def has_planned_order(row: dict) -> bool:
    """Whether a call with planned_order=True has a planned order, as select.why_not_planned."""
    rows = row["batch"] * row["heads"] * -(-row["seq_len"] // row["block_size"])
    few = row["blocks_per_row"] < MIN_PLANNED_BLOCKS["H200"]
    return not few and round(row["blocks_per_row"] * rows) <= MAX_ORDINALS


def _summary_of_order(over_fastest: dict[bool, list[list[float]]]) -> str:
    """Rates of the modes over the fastest baseline, of masks with a planned order and of others.

    Args:
        over_fastest: By whether the order is planned, (default, planned, any order) of each mask.
    """
    names = {True: "planned order", False: "default kernels"}
    lines = []
    for is_planned, of_masks in over_fastest.items():
        if not of_masks:
            continue
        cells = [
            f"{min(values):.2f}, {median(values):.2f}, {max(values):.2f}; "
            f"{sum(value < 1 for value in values)} of {len(values)}"
            for values in zip(*of_masks, strict=True)
        ]
        if not is_planned:
            cells[1] = ""
        lines.append([names[is_planned], *cells])
    head = ["with `planned_order=True`", "default", "planned", "any order"]
    if not lines:
        return ""
    what = "The rate over that of the fastest baseline: minimum, median, maximum; masks below 1."
    return f"{what}\n\n{table(head, lines)}"


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
