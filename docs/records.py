"""Reads the records of measurements and formats their rows as Markdown tables."""

import json
from collections.abc import Callable
from pathlib import Path

from experiments.markdown import table
from experiments.record import read_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
# The name of each implementation in a table.
NAMES = {
    "sparseflash": "sparseflash",
    "sparseflash:auto": "sparseflash",
    "sparseflash:hopper": "sparseflash, `hopper`",
    "sparseflash:triton": "sparseflash, `triton`",
    "sparseflash:hopper/any-order": "sparseflash, `deterministic=False`",
    "sparseflash:auto/any-order": "sparseflash, `deterministic=False`",
    "flash4": "FlashAttention-4",
    "flash": "FlashAttention-2 (torch)",
    "cudnn": "cuDNN",
    "flex": "FlexAttention",
    "cudnn-bsa": "cuDNN block-sparse attention",
    "cudnn-flex": "cuDNN flex attention",
    "standard": "standard attention",
    "sdpa": "SDPA (torch)",
}
INTERRUPTED = (
    "\n\nThis measurement was interrupted: the last rows are missing, and the first case was not "
    "measured again to check for a drift of the clock."
)
ANY_ORDER = "/any-order"  # suffix of implementations that differ in the backward pass alone
DIRECTIONS = ("forward", "backward")
Rows = list[dict]


def load(name: str) -> dict | None:
    """A record with its rows as dictionaries, or None if it does not exist."""
    path = RESULTS / f"{name}-nvidia-h200.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    if "columns" in record:
        record["rows"] = read_rows(record)
    return record


def size_of(row: dict) -> tuple:
    """The size of the problem of a row: rows of one table have equal sizes."""
    names = ("batch", "heads", "kv_heads", "q_len", "seq_len", "head_dim", "block_size")
    return tuple((name, row.get(name)) for name in names)


def words(size: tuple) -> str:
    """The size of a problem in words."""
    of = dict(size)
    tokens, heads = f"{of['seq_len']:,} tokens", f"{of['heads']} heads"
    if of["q_len"]:
        queries = "1 query" if of["q_len"] == 1 else f"{of['q_len']} queries"
        tokens = f"{queries}, {of['seq_len']:,} keys"
    if of["kv_heads"]:
        heads = f"{of['heads']} query heads, {of['kv_heads']} key heads"
    sides = f"head dim {of['head_dim']}, block size {of['block_size']}"
    return f"{tokens}, batch {of['batch']}, {heads}, {sides}"


def by_size(rows: Rows, cell: Callable[[dict], str]) -> str:
    """A table for each size: a row for each mask, a column for each pass and implementation."""
    parts = []
    for size in dict.fromkeys(map(size_of, rows)):
        of_size = [row for row in rows if size_of(row) == size]
        parts += [f"**{words(size)}**", columns_of(of_size, cell)]
    return "\n\n".join(parts)


def columns_of(rows: Rows, cell: Callable[[dict], str]) -> str:
    """The table of one size."""
    columns = [
        (direction, name)
        for direction in DIRECTIONS
        for name in dict.fromkeys(r["implementation"] for r in rows if r["direction"] == direction)
        if direction == "backward" or not name.endswith(ANY_ORDER)
    ]
    lines = []
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        found = {(r["direction"], r["implementation"]): r for r in rows if r["pattern"] == pattern}
        density = next(iter(found.values()))["density"]
        cells = [cell(found[column]) if column in found else "" for column in columns]
        lines.append([pattern, f"{density:.3g}", *cells])
    head = [f"{direction}: {NAMES[name]}" for direction, name in columns]
    return table(["mask", "density s", *head], lines)


def milliseconds(row: dict) -> str:
    return f"{row['median_ms']:#.3g}".rstrip(".")


def find(rows: Rows, pattern: str, direction: str, name: str) -> dict | None:
    """The row of a mask, a pass and an implementation, or None."""
    wanted = (pattern, direction, name)
    same = (r for r in rows if (r["pattern"], r["direction"], r["implementation"]) == wanted)
    return next(same, None)


def measured(record: dict) -> str:
    """The device, versions, commit, date and command of a record."""
    found = record["environment"]
    versions = found["versions"]
    commit = (found["git"]["commit"] or "unknown")[:7] + " with local changes" * bool(
        found["git"]["dirty"]
    )
    partial = "" if record.get("complete", True) else INTERRUPTED
    return (
        f"*{found['device']}, torch {versions['torch']}, triton {versions['triton']}, commit "
        f"{commit}, {found['date'][:10]}: `{found['command'].split(' --output')[0]}`*{partial}"
    )
