"""Writes the tables of docs/paper.md: figures of the FlashAttention paper and of our records.

    python docs/paper.py

A table is between `<!-- name -->` and `<!-- /name -->`. In place of a table without a record, the
page names the command that makes one. Of the records of several GPUs the latest is shown, of
training steps the record of each GPU. With `--check` nothing is written: the command prints
whether the page is current.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # as a script, and where docs is no package

from records import NAMES, RESULTS, load, load_each, measured, picture  # noqa: E402

from experiments.language_model.results import (  # noqa: E402
    bits_at,
    common_seconds,
    contexts_of,
)
from experiments.long_documents.results import RANDOM, by_device, span, start_of  # noqa: E402
from experiments.markdown import in_percent, table, update, written  # noqa: E402
from experiments.pretraining import (  # noqa: E402
    exact_pairs,
    largest_difference,
    with_baselines,
)
from experiments.record import (  # noqa: E402
    FROM_PYTHON,
    NO_GRAPH,
    Line,
    Measurement,
    crossing_length,
    from_python,
    is_ours,
    lines,
)

PAGE = ROOT / "docs/paper.md"
DEVICES = "nvidia-*"
NOTHING = "–"

LENGTHS = tuple(2**n for n in range(7, 17))
FLASH, SPARSE = "FlashAttention", "block-sparse FlashAttention"
# Milliseconds of both passes at LENGTHS, until memory is exhausted: Tables 20 and 11 of the paper.
PLAIN = {
    "PyTorch": (0.67, 0.70, 1.18, 3.67, 13.22, 50.44),
    "Megatron": (0.74, 0.65, 1.23, 3.80, 13.21),
    FLASH: (0.31, 0.31, 0.73, 2.29, 7.64, 30.09, 118.50, 470.51, 1876.08, 7492.85),
    SPARSE: (0.74, 0.77, 0.82, 0.88, 1.71, 3.21, 6.56, 12.60, 24.93, 50.39),
    "Linformer": (1.31, 1.25, 1.30, 1.29, 3.20, 6.10, 11.93, 23.39, 46.72, 100.52),
    "Reformer": (3.93, 7.01, 13.15, 25.89, 52.09, 105.00, 215.13),
    "SMYRF": (2.98, 4.23, 7.78, 15.12, 29.96, 59.45, 118.60, 237.02),
    "local": (1.09, 1.27, 1.99, 5.38, 18.32, 36.77, 73.67, 147.29, 296.35),
    "LSformer": (3.03, 3.05, 4.26, 10.70, 30.77, 60.15, 118.33, 234.94),
    "block-sparse, OpenAI": (2.39, 2.40, 3.31, 5.02, 12.25, 35.94),
    "Longformer": (2.36, 2.34, 2.38, 2.94, 9.83, 21.35, 58.12),
    "BigBird": (2.35, 2.35, 2.37, 3.25, 10.36, 22.57, 60.63),
}
BOTH = {
    "PyTorch": (0.84, 0.86, 2.35, 8.29, 31.75, 124.19),
    "Megatron": (0.87, 0.89, 1.33, 4.21, 16.50),
    FLASH: (0.43, 0.41, 0.95, 2.55, 9.56, 37.49, 147.75, 586.61, 2339.11, 9341.30),
    SPARSE: (0.44, 0.44, 0.45, 0.89, 1.95, 4.12, 7.64, 16.60, 32.73, 64.11),
    "Linformer": (1.57, 1.49, 1.55, 1.60, 4.19, 8.04, 15.71, 30.92, 61.47),
    "Reformer": (4.30, 7.76, 14.60, 28.74, 57.79, 116.34, 237.57),
    "SMYRF": (3.41, 5.08, 9.35, 18.18, 36.03, 71.68, 143.04, 285.87),
    "local": (1.40, 1.60, 2.06, 6.06, 20.94, 42.01, 84.08, 168.48, 339.45),
    "LSformer": (3.08, 3.10, 4.26, 10.90, 31.59, 61.72, 121.51, 241.18),
    "block-sparse, OpenAI": (2.54, 2.52, 3.71, 5.44, 13.29, 39.19),
    "Longformer": (2.47, 2.49, 2.51, 3.10, 10.39, 22.49, 60.44),
    "BigBird": (2.51, 2.49, 2.52, 3.40, 10.97, 23.89, 63.28),
}
# MB of both passes, without dropout and mask: Table 21.
MEMORY = {
    "PyTorch": (36, 104, 336, 1184, 4416, 17_024),
    FLASH: (22, 44, 104, 209, 418, 836, 1672, 3344, 6688, 13_376),
    SPARSE: (22, 44, 104, 209, 418, 836, 1672, 3344, 6690, 13_384),
    "Linformer": (25, 52, 114, 287, 832, 1652, 3292, 6572, 13_132, 26_252),
    "Reformer": (377, 754, 1508, 3016, 6033, 12_067, 24_134),
    "SMYRF": (217, 434, 868, 1737, 3474, 6947, 13_894, 27_788),
    "local": (53, 110, 232, 592, 1696, 3392, 6784, 13_568, 27_136),
}
KINDS = {  # records of Figure 3: their titles, and the times of the paper
    "bench-landscape": ("Without dropout and padding", PLAIN),
    "bench-landscape-packages": ("Packages, without dropout and padding", PLAIN),
    "bench-landscape-dropout": ("With dropout 0.1", None),
    "bench-landscape-padding": ("With padded keys", None),
    "bench-landscape-dropout-padding": ("With dropout 0.1 and padded keys", BOTH),
    "bench-landscape-packages-dropout-padding": (
        "Packages, with dropout 0.1 and padded keys",
        BOTH,
    ),
}


def row_of_figures(name: str, values: Iterable[float], form: str) -> list[str]:
    """A row of the paper over LENGTHS; NOTHING at lengths that were not measured."""
    written = [form.format(value) for value in values]
    return [name, *written, *[NOTHING] * (len(LENGTHS) - len(written))]


def milliseconds(value: float) -> str:
    """At most three digits, without zeros at the end, or all digits before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def newest(name: str) -> Path | None:
    """The latest record of this name on any GPU, or None."""
    paths = RESULTS.glob(f"{name}-{DEVICES}.json")
    return max(paths, key=lambda path: date_of(json.loads(path.read_text())), default=None)


def date_of(found: object) -> str:
    """The last date in the environments of a record, wherever they are in it."""
    if isinstance(found, list):
        return max(map(date_of, found), default="")
    if not isinstance(found, dict):
        return ""
    own = found.get("environment", {}).get("date", "")
    return max([own, *(date_of(part) for part in found.values())])


def latest(name: str) -> tuple[dict | None, str]:
    """The latest record of this name, with rows as dictionaries, and the name of its file."""
    path = newest(name)
    return (load(name, path.stem.removeprefix(f"{name}-")), path.stem) if path else (None, "")


def paragraphs(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def ratio(value: float, to: float | None, form: str = "{:.2f}") -> str:
    return NOTHING if not to else form.format(value / to)


# Figure 1, right


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


# Figure 3


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


def published_line(times: Iterable[float]) -> Line:
    return {n: (ms, 0) for n, ms in zip(LENGTHS, times, strict=False)}


PAIRED = {
    "standard": "PyTorch",
    "linformer": "Linformer",
    "reformer": "Reformer",
    "smyrf": "SMYRF",
    "local-attention": "local",
    "longformer": "Longformer",
    "bigbird": "BigBird",
}


def crossings(found: dict[tuple[str, str], Line], published: dict | None) -> str:
    """The lengths from which our kernels, and those of the paper, are faster than the others."""
    ours = [label for label in found if is_ours(label[0])]
    dense = next((label for label in ours if label[1] == "full"), None)
    sparse = next((label for label in ours if label[1] != "full"), None)
    rows = []
    for label, line in found.items():
        if label in ours:
            continue
        other = (published or {}).get(PAIRED.get(label[0], ""))
        row = [called(*label)]
        for own, paper in ((dense, FLASH), (sparse, SPARSE)):
            row.append(who(found[own], line) if own else NOTHING)
            if published:
                theirs = published_line(published[paper])
                row.append(who(theirs, published_line(other)) if other else NOTHING)
        rows.append(row)
    head = ["compared with"]
    kernels = (
        (called(*dense) if dense else "", FLASH),
        (called(*sparse) if sparse else "", SPARSE),
    )
    for name, paper in kernels:
        head += [name, *([f"{paper} (paper)"] if published else [])]
    return table(head, rows) if rows else ""


def who(own: Line, other: Line) -> str:
    if not own.keys() & other.keys():
        return NOTHING
    length = crossing_length(own, other)
    if length is not None:
        return f"faster from {length:,.0f}"
    length = crossing_length(other, own)
    return NOTHING if length is None else f"slower from {length:,.0f}"


def published_landscape() -> str:
    """The times and memory that the paper has."""
    head = ["the paper, A100; tokens", *(f"{n:,}" for n in LENGTHS)]
    parts = []
    for title, values, form in (
        (
            "Milliseconds, both passes, without dropout and padding (Table 20)",
            PLAIN,
            "{:,.2f}",
        ),
        ("Milliseconds, both passes, with dropout 0.1 and padding (Table 11)", BOTH, "{:,.2f}"),
        ("MB, both passes, without dropout and padding (Table 21)", MEMORY, "{:,}"),
    ):
        rows = [row_of_figures(name, row, form) for name, row in values.items()]
        parts += [f"**{title}**", table(head, rows)]
    return paragraphs(parts)


# Tables 1 and 2


def pretraining(name: str) -> str:
    """Training steps of each model on each device, and how far exact attentions are apart."""
    records = load_each(name)
    return paragraphs([*map(training_steps, records), losses_apart(records)])


def training_steps(record: dict) -> str:
    """Training steps of each model, compared with the first attention at the same size."""
    lines, of_sdpa = [], {}
    for row in record["rows"]:
        if row["attention"] == "sdpa":
            of_sdpa[size_of(row), row["dropout"]] = row.get("tokens_per_second")
    for row, base in with_baselines(record["rows"]):
        line = [row["model"], f"{row['seq_len']:,}", f"`{row['attention']}`".replace("|", "\\|")]
        line += [f"{row['dropout']:g}", f"{row['padding']:g}"]
        if "reason" in row:
            lines.append([*line, row["reason"], "", "", "", "", ""])
            continue
        lines.append(
            [
                *line,
                f"{row['tokens_per_second']:,.0f}",
                ratio(row["tokens_per_second"], base.get("tokens_per_second")),
                ratio(row["tokens_per_second"], of_sdpa.get((size_of(row), row["dropout"]))),
                ratio(row["peak_bytes"] or 0, 2**30, "{:.1f}"),
                f"{row['loss']:.4f}",
                f"{row['loss'] - base['loss']:+.4f}" if "loss" in base else NOTHING,
            ]
        )
    head = ["model", "tokens", "attention", "dropout", "padding", "tokens/s"]
    head += ["speed-up", "over SDPA", "GiB", "loss", "loss difference"]
    title = f"**{record['rows'][0]['environment']['device']}**"
    shown = picture(record["stem"], "Throughput, and losses step by step")
    sources = dict.fromkeys(map(measured, record["rows"]))  # a command measures one model
    return paragraphs([title, table(head, lines), shown, *sources])


FIRST_STEPS = (5, 10)  # after which the losses of exact attentions are compared


def losses_apart(records: list[dict]) -> str:
    """Differences of exact attentions without dropout, and at the same size with dropout."""
    pairs = [pair for record in records for pair in exact_pairs(record["rows"])]
    sizes = {size_of(one) for one, _ in pairs if not one["dropout"]}
    pairs = [(one, two) for one, two in pairs if size_of(one) in sizes]
    pairs.sort(key=lambda pair: pair[0]["dropout"])
    lines = []
    for one, two in pairs:
        line = [one["environment"]["device"], one["model"], f"{one['seq_len']:,}"]
        line += [f"{one['dropout']:g}", f"`{one['attention']}`, `{two['attention']}`"]
        apart = [largest_difference(one, two, steps) for steps in (*FIRST_STEPS, None)]
        line += [f"{loss:.5f}" for loss in apart]
        lines.append([*line, f"{abs(one['loss'] - two['loss']):.4f}"])
    head = ["device", "model", "tokens", "dropout", "attentions"]
    head += [f"in steps 1 to {steps}" for steps in FIRST_STEPS]
    head += ["in any step", "loss difference"]
    title = "**Exact attentions: the largest difference of their losses in a step**"
    return paragraphs([title, table(head, lines)]) if lines else ""


def size_of(row: dict) -> tuple:
    return row["model"], row["seq_len"], row["padding"]


# Table 4


LANGUAGE_MODELS = (
    "language-model-25m-contexts",
    "language-model-25m-warm-up",
    "language-model-25m-warm-up-tokens",
)


def language_model(name: str) -> str:
    """Bits per byte and throughput of each run, compared with the dense run of its context."""
    path = newest(name)
    if path is None:
        return ""
    record = json.loads(path.read_text())
    runs = record["runs"].values()
    dense = {run["model"]["context"]: run for run in runs if is_dense(run)}
    lines = []
    for label, run in record["runs"].items():
        other = dense.get(run["model"]["context"])
        loss, speed = run["bits_per_byte"], run["bytes_per_second"]
        lines.append(
            [
                label,
                contexts_of(run),
                f"{run['parameters'] / 1e6:.0f}M",
                "; ".join(f"`{text}`" for text in run["model"]["attention"]).replace("|", "\\|"),
                f"{run['trained'] * run['step_bytes'] / 1e6:,.0f}",
                f"{loss:.4f}",
                f"{run['curve'][-1]['by_position'][-1]:.4f}",
                NOTHING
                if other is None
                else f"{100 * (loss / other['bits_per_byte'] - 1):+.2f} %",
                f"{speed:,.0f}",
                NOTHING if other is None else ratio(speed, other["bytes_per_second"]),
            ]
        )
    head = ["run", "context, tokens", "parameters", "attention", "training data, MB"]
    head += ["bits per byte", "bits per byte, last positions", "bits per byte against dense"]
    head += ["bytes/s", "speed-up over dense"]
    first = next(iter(runs))
    shown = picture(path.stem, "Bits per byte over bytes read, over time, and by position")
    source = f"Record `experiments/results/{path.name}`."
    parts = [f"**{record['name']}**", table(head, lines), contexts(record["runs"])]
    parts += [patterns(record["runs"], dense), at_equal_time(record["runs"])]
    parts += [shown, f"{source} {measured(first)}"]
    changed = [name for name, run in record["runs"].items() if run["environment"]["git"]["dirty"]]
    if changed and not first["environment"]["git"]["dirty"]:
        parts.append(f"These runs ended in a checkout with local changes: {', '.join(changed)}.")
    return paragraphs(parts)


def long_step() -> str:
    """Throughput of training steps at 64K tokens, too few to say anything of losses."""
    record, _ = latest("language-model-25m-64k-step")
    if record is None:
        return ""
    runs = list(record["runs"].values())
    dense = next(run for run in runs if is_dense(run))
    found = [
        [
            "; ".join(f"`{text}`" for text in run["model"]["attention"]).replace("|", "\\|"),
            f"{run['model']['context']:,}",
            f"{run['parameters'] / 1e6:.0f}M",
            f"{run['step_bytes']:,.0f}",
            f"{1e3 * run['step_bytes'] / run['bytes_per_second']:,.0f}",
            f"{run['bytes_per_second']:,.0f}",
            ratio(run["bytes_per_second"], dense["bytes_per_second"]),
        ]
        for run in runs
    ]
    head = ["attention", "context, tokens", "parameters", "bytes of a step", "ms of a step"]
    head += ["bytes/s", "speed-up over dense"]
    return paragraphs(
        ["**Training steps with 64K tokens of context**", table(head, found), measured(runs[0])]
    )


def is_dense(run: dict) -> bool:
    return set(run["model"]["attention"]) <= {"flash", "sdpa"}


def contexts(runs: dict[str, dict]) -> str:
    """Bits per byte of longer contexts, and at positions that every run has."""
    (name, first), *others = runs.items()
    size = first["model"]["context"]
    longer = [(n, run) for n, run in others if run["model"]["context"] > size]
    if not longer:
        return ""
    loss = first["bits_per_byte"]
    told = (f"{n} {100 * (run['bits_per_byte'] / loss - 1):+.1f} %" for n, run in longer)
    text = f"Bits per byte against {name}: {', '.join(told)}."
    at = ((n, run, at_position(run, size)) for n, run in ((name, first), *longer))
    found = [f"{n} {bits:.3f}" for n, _, bits in at if bits is not None]
    if all(run["bits_per_byte"] >= loss for _, run in longer):
        text += " None of these longer contexts is better after this much training."
    where = f"at positions {size // 2:,} to {size:,}"
    return f"{text} Bits per byte {where}, which every run has: {', '.join(found)}."


def at_position(run: dict, end: int) -> float | None:
    """Final bits per byte of the octave of positions that ends there, or None."""
    ends = run["positions"][1:]
    return run["curve"][-1]["by_position"][ends.index(end)] if end in ends else None


def patterns(runs: dict[str, dict], dense: dict[int, dict]) -> str:
    """Loss and throughput of patterns, compared with dense attention with the same context."""
    told = []
    for name, run in runs.items():
        other = dense.get(run["model"]["context"])
        if other is None or is_dense(run):
            continue
        change = 100 * (run["bits_per_byte"] / other["bits_per_byte"] - 1)
        times = ratio(run["bytes_per_second"], other["bytes_per_second"])
        told.append(f"{name} {change:+.1f} % bits per byte and {times} times the throughput")
    return f"Against dense attention with the same context: {'; '.join(told)}." if told else ""


TIMES = (1 / 4, 1 / 2, 1)  # of the time after which the first run of a record ended


def at_equal_time(runs: dict[str, dict]) -> str:
    """Bits per byte of runs after the same times of training."""
    last = common_seconds(runs.values())
    if last is None or len(runs) == 1:
        return ""
    times = [last * share for share in TIMES]
    first = bits_at(next(iter(runs.values())), last)
    lines = []
    for name, run in runs.items():
        bits = [bits_at(run, seconds) for seconds in times]
        end = bits[-1]
        change = f"{100 * (end / first - 1):+.1f} %" if end and first else NOTHING
        lines.append([name, *(f"{b:.4f}" if b else NOTHING for b in bits), change])
    title = "**Bits per byte after equal times of training**"
    head = ["run", *(f"{seconds:.3g} s" for seconds in times)]
    return paragraphs([title, table([*head, f"against {next(iter(runs))}"], lines)])


# Table 5


AUTHORS = {  # records of encoders, and the tokens that they read
    "long-documents-authors-words": "words",
    "long-documents-authors-words-chain": "words",
    "long-documents-authors-words-long": "words",
    "long-documents-authors-bytes": "bytes",
}


def authors() -> str:
    """Accuracy of encoders at each length, and of linear models of counts on the same passages."""
    floors = json.loads((RESULTS / "long-documents-floors.json").read_text())["floors"]
    paths = {name: path for name in AUTHORS if (path := newest(name))}
    found = {name: json.loads(path.read_text()) for name, path in paths.items()}
    groups = [
        (length, kind, group)
        for name, record in found.items()
        for kind in [AUTHORS[name]]
        for length, group in record["lengths"].items()
    ]
    trained = {length for length, *_ in groups}
    groups += [(length, "", None) for length in floors if length not in trained]
    lines = [
        [
            f"{int(length):,}",
            *(training_of(kind, group) if group else [NOTHING] * 6),
            accuracy(group),
            *(f"{100 * floors[length][kind]['accuracy']:.1f}" for kind in ("words", "bytes")),
        ]
        for length, kind, group in sorted(groups, key=lambda each: int(each[0]))
    ]
    head = ["bytes of a passage", "encoder of", "starts from", "runs", "steps", "passages read"]
    head += ["validation, %", "test, %", "floor: word counts", "floor: byte counts"]
    parts = [table(head, lines)]
    several = {name: record for name, record in found.items() if len(record["lengths"]) > 1}
    parts += [over_lengths(name, record) for name, record in several.items()]
    parts += [
        picture(paths[name].stem, "Accuracy against the length of a passage") for name in several
    ]
    parts.append("Floors: record `experiments/results/long-documents-floors.json`.")
    for name, record in found.items():
        for _, own in by_device(record["lengths"]):
            run = record["lengths"][own[0]]["runs"][0]
            parts.append(f"{encoders_of(name, record)}, {span(own)}: {measured(run)}")
    return paragraphs([*parts, "" if found else "No encoder has been trained yet."])


def training_of(kind: str, group: dict) -> list[str]:
    """What encoders of one length read, and their best accuracy on validation passages."""
    runs = group["runs"]
    best = [max(accuracy for _, accuracy, *_ in run["curve"]) for run in runs]
    return [
        kind,
        start_of(runs[0]),
        str(len(runs)),
        interval(run["steps"] for run in runs),
        interval(run["steps"] * run["batch_size"] for run in runs),
        f"{100 * fmean(best):.1f}",
    ]


def encoders_of(name: str, record: dict) -> str:
    """What the encoders of a record read, and whether they continue those of shorter lengths."""
    starts = {start_of(group["runs"][0]) for group in record["lengths"].values()}
    continued = " that start from a shorter length" * (starts > {RANDOM})
    return f"Encoders of {AUTHORS[name]}{continued}"


def over_lengths(name: str, record: dict) -> str:
    """How accuracy changes with length, beside the floor of counts, and at the end of training."""
    groups, kind = record["lengths"], AUTHORS[name]
    shares = {length: 100 * group["accuracy"] for length, group in groups.items()}
    first, *_, last = groups
    best = max(shares, key=lambda length: shares[length])
    text = (
        f"{encoders_of(name, record)}: test accuracy is {shares[first]:.1f} % at {span([first])}, "
    )
    text += f"{shares[best]:.1f} % at {span([best])}"
    text += "" if best == last else f" and {shares[last]:.1f} % at {span([last])}"
    floors = {length: floor.get(kind) for length, floor in record["floors"].items()}
    over = {n: shares[n] - 100 * floor["accuracy"] for n, floor in floors.items() if floor}
    above = [f"{int(length):,}" for length, points in over.items() if points > 0]
    lowest = min(over, key=lambda length: over[length])
    text += f". It is above the floor of {kind[:-1]} counts at {', '.join(above) or 'no'} bytes"
    if over[lowest] < 0:
        text += f" and below it by up to {-over[lowest]:.1f} points, at {span([lowest])}"
    rises = {
        length: fmean(100 * (r["curve"][-1][1] - r["curve"][-2][1]) for r in group["runs"])
        for length, group in groups.items()
    }
    most = max(rises, key=lambda length: rises[length])
    change = f"by {rises[most]:.1f} points, at {span([most])}"
    return f"{text}. Between the last two validations their accuracy rose most, {change}."


def interval(values: Iterable[int]) -> str:
    """The least and the greatest of some numbers, or the number that all are."""
    found = list(values)
    return " to ".join(f"{n:,}" for n in dict.fromkeys((min(found), max(found))))


def accuracy(group: dict | None) -> str:
    if group is None or group["accuracy"] is None:
        return NOTHING
    return in_percent(group["accuracy"], group["deviation"], digits=1)


def tuned() -> str:
    """Micro F1 of a fine-tuned encoder at each length, for each data set with a record."""
    parts = []
    for name in TUNED:
        path = newest(name)
        if path is None:
            continue
        record = json.loads(path.read_text())
        rows = [
            [
                f"{int(tokens):,}",
                accuracy(group | {"accuracy": group["micro_f1"]}),
                str(len(group["runs"])),
                f"`{group['runs'][0]['attention']}`".replace("|", "\\|"),
            ]
            for tokens, group in record["lengths"].items()
        ]
        first = next(iter(record["lengths"].values()))["runs"][0]
        parts += [f"**{record['name']}**"]
        parts += [table(["tokens", "micro F1, %", "runs", "attention"], rows), measured(first)]
    return paragraphs(parts)


TUNED = ("long-documents-ecthr", "long-documents-mimic")


# The page


def or_command(ours: str, command: str) -> str:
    """Our tables, or the command that makes the record."""
    return ours or f"*Not measured yet. `{command}` makes the record.*"


def overview() -> str:
    """The subject of each table and figure, and whether there is a record."""
    rows = []
    for name, asks, page, records in (
        ("Figure 1", "time of the parts of standard attention", "below", ("bench-landscape",)),
        ("Figure 2", "memory traffic, block size, density", THEORY, ("io-complexity",)),
        ("Figure 3", "time and memory over lengths", "below", KINDS),
        ("Tables 1, 2", "training BERT-large and GPT-2", "below", ("pretraining",)),
        ("Tables 3, 6", "Long Range Arena, Path-X", ARENA, ("lra-arena", "lra-path-x-labels")),
        ("Table 4", "language models with longer contexts", "below", LANGUAGE_MODELS),
        ("Table 5", "classification of long documents", "below", (*AUTHORS, *TUNED)),
    ):
        found = sum(newest(each) is not None for each in records)
        rows.append([name, asks, page, f"{found} of {len(records)}"])
    return table(["in the paper", "subject", "our results", "records"], rows)


THEORY = "[performance](performance.md#theory-and-measurement)"
ARENA = "[Long Range Arena](../experiments/lra/README.md)"
LANDSCAPE = "python -m experiments.bench landscape"
TABLES: dict[str, Callable[[], str]] = {
    "overview": overview,
    "parts": lambda: or_command(parts_of_standard("bench-landscape"), LANDSCAPE),
    "published": published_landscape,
    "landscape": lambda: or_command(landscapes(), LANDSCAPE),
    "pretraining": lambda: or_command(
        pretraining("pretraining"), "python -m experiments.pretraining measure gpt2"
    ),
    "language-models": lambda: or_command(
        paragraphs([*map(language_model, LANGUAGE_MODELS), long_step()]), "contexts.sh"
    ),
    "authors": authors,
    "tuned": lambda: or_command(tuned(), "python -m experiments.long_documents tune"),
}


def main() -> int:
    return update({PAGE: written(PAGE.read_text(), TABLES)}, check="--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
