"""Figures 1 (right) and 3 on docs/paper.md: parts of standard attention, time over lengths."""

from published import BOTH, DROPOUT, FLASH, PADDING, PLAIN, SPARSE, published_line
from records import NAMES, NOTHING, latest, measured, milliseconds, paragraphs, picture, ratio

from experiments.markdown import table
from experiments.record import (
    FROM_PYTHON,
    NO_GRAPH,
    Line,
    Measurement,
    crossing_length,
    from_python,
    is_ours,
    lines,
)

KINDS = {  # records of Figure 3: their titles, and the times of the paper
    "bench-landscape": ("Without dropout and padding", PLAIN),
    "bench-landscape-dropout": ("With dropout 0.1", DROPOUT),
    "bench-landscape-padding": ("With padded keys", PADDING),
    "bench-landscape-dropout-padding": ("With dropout 0.1 and padded keys", BOTH),
}
PAIRED = {
    "standard": "PyTorch",
    "linformer": "Linformer",
    "reformer": "Reformer",
    "smyrf": "SMYRF",
    "local-attention": "local",
    "longformer": "Longformer",
    "bigbird": "BigBird",
}


def parts_of_standard(name: str) -> str:
    """Times of the parts of standard attention and of the fused pass, for each problem."""
    record, stem = latest(name)
    rows = [row for row in record["rows"] if row["suite"] == "parts"] if record else []
    if not record or not rows:
        return ""
    parts = []
    for problem in dict.fromkeys((r["batch"], r["heads"], r["seq_len"]) for r in rows):
        of = {
            r["implementation"]: r["median_ms"]
            for r in rows
            if (r["batch"], r["heads"], r["seq_len"]) == problem
        }
        split = {n.partition(":")[2]: ms for n, ms in of.items() if n.startswith("standard:")}
        ours = next((ms for name, ms in of.items() if is_ours(name)), None)
        total = sum(split.values())
        found = [[part, milliseconds(ms), ratio(ms, ours)] for part, ms in split.items()]
        found += [["sum of all parts", milliseconds(total), ratio(total, ours)]]
        found += [["sparseflash, one pass", milliseconds(ours), "1.00"]] if ours else []
        parts.append(f"**Batch {problem[0]}, {problem[1]} heads, {problem[2]:,} tokens**")
        parts.append(table(["part", "ms", "ms / ms of sparseflash"], found))
    parts += [picture(f"{stem}-parts", "Parts of standard attention"), measured(record)]
    return paragraphs(parts)


def landscape(name: str) -> str:
    """Times and memory over lengths, and crossings, of one record and of the paper."""
    title, published = KINDS[name]
    record, stem = latest(name)
    rows = list(map(row_of, record["rows"])) if record else []
    found, marked = lines(rows), from_python(rows)
    if not record or not found:
        return ""
    lengths = sorted({n for line in found.values() for n in line})
    head = ["tokens", *(f"{n:,}" for n in lengths)]
    times, memory = [], []
    for label, line in found.items():
        pairs = [line.get(n) for n in lengths]
        name = called(*label)
        mark = f" ({FROM_PYTHON})" if label[0] in marked else ""
        times.append([name + mark, *(milliseconds(p[0]) if p else NOTHING for p in pairs)])
        memory.append([name, *(f"{round(p[1] / 2**20, 1):,}" if p else NOTHING for p in pairs)])
    parts = [f"**{title}: milliseconds, both passes**", table(head, times)]
    parts += [f'"{FROM_PYTHON}": {NO_GRAPH}.'] if marked else []
    parts += [not_measured(record["skipped"], found)]
    parts += [f"**{title}: peak MiB without the inputs**", table(head, memory)]
    parts += [f"**{title}: crossings**", crossings(found, published)]
    parts += [picture(f"{stem}-landscape", f"{title}: time and memory over lengths")]
    return paragraphs([*parts, measured(record)])


def not_measured(skipped: list[list[str]], found: dict[tuple[str, str], Line]) -> str:
    """Why cells are empty, as a list.

    skipped: [implementation, "PATTERN at N = TOKENS", reason], as records have it.
    """
    reasons: dict[tuple[str, str], list[int]] = {}
    for implementation, where, reason in skipped:
        reason = "out of memory" if "out of memory" in reason else reason.partition(", got")[0]
        tokens = int(where.rpartition(" = ")[2])
        reasons.setdefault((implementation, reason), []).append(tokens)
    rows = []
    shortest = min(n for line in found.values() for n in line)
    for (name, reason), lengths in reasons.items():
        own = [n for label, line in found.items() if label[0] == name for n in line]
        # What fails is not measured at longer lengths; a length that it cannot compute is.
        if len(lengths) > 1 or max(own, default=0) > max(lengths):
            where = f" at {', '.join(f'{n:,}' for n in lengths)} tokens"
        else:
            where = f" from {min(lengths):,} tokens on" * (min(lengths) > shortest)
        for prefix in (f"{name} ", f"{name}: "):
            reason = reason.removeprefix(prefix)
        reason = reason.partition(": pip")[0]  # how to install it
        rows.append(f"- {NAMES.get(name, name)}{where}: {reason}.")
    return "\n".join(["Not measured:", "", *rows]) if rows else ""


def landscapes() -> str:
    """The tables of all kinds of records, and which kinds have none; empty if all have none."""
    shown = {title: landscape(name) for name, (title, _) in KINDS.items()}
    lacking = [title[0].lower() + title[1:] for title, text in shown.items() if not text]
    if len(lacking) == len(shown):
        return ""
    return paragraphs(
        [*shown.values(), f"*Not measured yet: {'; '.join(lacking)}.*" * bool(lacking)]
    )


def row_of(row: dict) -> Measurement:
    """A row of a record, without the figures that are computed from it."""
    names = Measurement.__dataclass_fields__.keys()
    return Measurement(**{name: value for name, value in row.items() if name in names})


def called(implementation: str, family: str) -> str:
    """The name of an implementation and its mask in a table."""
    name = NAMES.get(implementation, implementation)
    return name if family == "full" else f"{name}, `{family}`"


def crossings(found: dict[tuple[str, str], Line], published: dict) -> str:
    """The lengths from which our kernels, and those of the paper, are faster than the others."""
    ours = [label for label in found if is_ours(label[0])]
    papers = {f"{name} (paper)": published_line(published[name]) for name in (FLASH, SPARSE)}
    rows = []
    for label, line in found.items():
        if label not in ours:
            other = published_line(published.get(PAIRED.get(label[0], ""), ()))
            row = [who(found[own], line) for own in ours]
            rows.append([called(*label), *row, *(who(own, other) for own in papers.values())])
    head = ["compared with", *(called(*own) for own in ours), *papers]
    return table(head, rows) if rows else ""


def who(own: Line, other: Line) -> str:
    if not own.keys() & other.keys():
        return NOTHING
    length = crossing_length(own, other)
    if length is not None:
        return f"faster from {length:,.0f}"
    length = crossing_length(other, own)
    return NOTHING if length is None else f"slower from {length:,.0f}"
