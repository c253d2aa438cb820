"""Reads the records of measurements and formats their rows as Markdown tables."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from experiments.markdown import table
from experiments.record import BASELINE_NAMES, read_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
FROM_DOCS = "../experiments/results"  # path of RESULTS from a page in docs/
DEVICE = "nvidia-h200"  # of the figures that the text of a page cites
# The name of each implementation in a table.
NAMES = {
    "sparseflash": "sparseflash",
    "sparseflash:auto": "sparseflash",
    "sparseflash:hopper": "sparseflash, `hopper`",
    "sparseflash:triton": "sparseflash, `triton`",
    "sparseflash:hopper/any-order": "sparseflash, `deterministic=False`",
    "sparseflash:auto/any-order": "sparseflash, `deterministic=False`",
    "sparseflash:auto/planned": "sparseflash, `planned_order=True`",
    **BASELINE_NAMES,
}
INTERRUPTED = (
    "\n\nThis measurement was interrupted: the last rows are missing, and the first case was not "
    "measured again to check for a drift of the clock."
)
# Options that say where files are written and when a command ends, not what is measured.
WRITES = re.compile(r" --(output \S+|overwrite|deadline\.at=\S+|trainer\.logger(\.\w+)?=\S*)")
# Temporary folders of the files that a command read, with that of a copy of the repository.
TEMPORARY = re.compile(r"/tmp/(\w+/(?=experiments/))?")
# Suffixes of implementations that differ in the backward pass alone.
OF_BACKWARD = ("/any-order", "/planned")
DIRECTIONS = ("forward", "backward")
NOTHING = "–"
Rows = list[dict]


def load(name: str, device: str = DEVICE) -> dict | None:
    """A record with its rows as dictionaries and its `stem`, or None if it does not exist.

    The stem is the path of the record in the folder of records, without its suffix. The names of
    its pictures begin with it.
    """
    path = RESULTS / f"{name}-{device}.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    record["stem"] = f"{name}-{device}"
    if "columns" in record:
        record["rows"] = read_rows(record)
    return record


def load_each(name: str) -> list[dict]:
    """The records with this name of all GPUs, that of DEVICE first."""
    paths = RESULTS.glob(f"{name}-nvidia-*.json")
    stem = name.rpartition("/")[2]
    devices = sorted(path.stem.removeprefix(f"{stem}-") for path in paths)
    devices.sort(key=lambda device: device != DEVICE)
    return [record for device in devices if (record := load(name, device)) is not None]


def newest(name: str) -> Path | None:
    """The latest record of this name on any GPU, or None."""
    paths = RESULTS.glob(f"{name}-nvidia-*.json")
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


def read(name: str) -> dict:
    """A record whose name has no device."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def picture(name: str, title: str, folder: str = FROM_DOCS) -> str:
    """A picture of a record in Markdown, or an empty text if it does not exist.

    Args:
        name: Name of the picture, which begins with the stem of its record.
        title: Text in place of the picture.
        folder: Path of the folder of records from the page.
    """
    file = f"{name}.png"
    return f"![{title}]({folder}/{file})" if (RESULTS / file).exists() else ""


def size_of(row: dict) -> tuple:
    """The size of the problem of a row."""
    return (row["batch"], row["seq_len"], row["block_size"], *shape_of(row))


def shape_of(row: dict) -> tuple:
    """The part of the size that rows of one table share."""
    names = ("heads", "kv_heads", "q_len", "head_dim")
    return tuple(row.get(name) for name in names)


def words(rows: Rows) -> str:
    """The shape of rows of one table in words, with the block size if they share it."""
    heads, kv_heads, q_len, head_dim = shape_of(rows[0])
    parts = [f"{q_len} quer{'y' if q_len == 1 else 'ies'}"] if q_len else []
    parts += [f"{heads} query heads, {kv_heads} key heads" if kv_heads else f"{heads} heads"]
    parts += [f"head dim {head_dim}"]
    parts += [f"block size {rows[0]['block_size']}"] * (len(block_sizes(rows)) == 1)
    return ", ".join(parts)


def block_sizes(rows: Rows) -> set[int]:
    return {row["block_size"] for row in rows}


def by_shape(rows: Rows, cell: Callable[[dict], str]) -> str:
    """A table for each shape and pass: rows are lengths and masks, columns implementations."""
    parts = []
    for shape in dict.fromkeys(map(shape_of, rows)):
        for direction in DIRECTIONS:
            own = [r for r in rows if shape_of(r) == shape and r["direction"] == direction]
            if own:
                parts += [f"**{direction.capitalize()}: {words(own)}**", table_of(own, cell)]
    return "\n\n".join(parts)


def table_of(rows: Rows, cell: Callable[[dict], str]) -> str:
    """The table of one shape and pass."""
    names = dict.fromkeys(row["implementation"] for row in rows)
    if rows[0]["direction"] == "forward":
        names = [name for name in names if not name.endswith(OF_BACKWARD)]
    problems: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        problem = row["seq_len"], row["batch"], row["block_size"], row["pattern"]
        problems.setdefault(problem, {})[row["implementation"]] = row
    varied = len(block_sizes(rows)) > 1
    lines = [
        [
            *(f"{tokens:,}", f"{batch}", *[f"{side}"] * varied, pattern),
            f"{next(iter(found.values()))['density']:.3g}",
            *(cell(found[name]) if name in found else "" for name in names),
        ]
        for (tokens, batch, side, pattern), found in problems.items()
    ]
    tokens = "keys" if rows[0].get("q_len") else "tokens"
    head = [
        tokens,
        "batch",
        *["block size"] * varied,
        "mask",
        "density s",
        *(NAMES[name] for name in names),
    ]
    return table(head, lines)


def paragraphs(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def ratio(value: float, to: float | None, form: str = "{:.2f}") -> str:
    return NOTHING if not to else form.format(value / to)


def milliseconds(value: float) -> str:
    """Three digits, with zeros at the end, or all digits before the point."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def time_of(row: dict) -> str:
    """The median milliseconds of a row."""
    return milliseconds(row["median_ms"])


def find(rows: Rows, pattern: str, direction: str, name: str) -> dict | None:
    """The row of a mask, a pass and an implementation, or None."""
    wanted = (pattern, direction, name)
    same = (r for r in rows if (r["pattern"], r["direction"], r["implementation"]) == wanted)
    return next(same, None)


def measured(record: dict) -> str:
    """The device, versions, commit, date and command of a record, and its note.

    The command is shown without WRITES and TEMPORARY.
    A note is a sentence that was added to the environment of a record, about what its fields do
    not say, such as other programs on the host.
    """
    found = record["environment"]
    versions = found["versions"]
    commit = (found["git"]["commit"] or "unknown")[:7] + " with local changes" * bool(
        found["git"]["dirty"]
    )
    partial = "" if record.get("complete", True) else INTERRUPTED
    note = f" {found['note']}" if "note" in found else ""
    command = TEMPORARY.sub("", WRITES.sub("", found["command"]))
    return (
        f"*{found['device']}, torch {versions['torch']}, triton {versions['triton']}, commit "
        f"{commit}, {found['date'][:10]}: `{command}`*{note}{partial}"
    )
