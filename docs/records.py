"""Records of measurements, and their rows as tables of Markdown."""

import json
from collections.abc import Callable
from pathlib import Path

from experiments.markdown import table
from experiments.record import read_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
# Implementations as a reader knows them.
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
    "standard": "materialised",
    "sdpa": "torch's choice",
}
INTERRUPTED = "\n\nInterrupted: the last rows and the check for a drift of the clock are missing."
ANY_ORDER = "/any-order"  # of implementations whose forward pass is that of the one without it
DIRECTIONS = ("forward", "backward")
Rows = list[dict]


def load(name: str) -> dict | None:
    """A record, its rows by the names of their columns; None where there is none."""
    path = RESULTS / f"{name}-nvidia-h200.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    if "columns" in record:
        record["rows"] = read_rows(record)
    return record


def size_of(row: dict) -> tuple:
    """What rows of one table share."""
    names = ("batch", "heads", "kv_heads", "q_len", "seq_len", "head_dim", "block_size")
    return tuple((name, row.get(name)) for name in names)


def words(size: tuple) -> str:
    """The size of a problem in words."""
    of = dict(size)
    heads = f"{of['heads']} heads of {of['head_dim']}"
    if of["kv_heads"]:
        heads += f" on {of['kv_heads']} heads of keys and values"
    queries = f"{of['q_len']} queries, {of['seq_len']:,} keys" if of["q_len"] else ""
    tokens = queries or f"{of['seq_len']:,} tokens"
    return f"{tokens}, batch {of['batch']}, {heads}, blocks of {of['block_size']}"


def by_size(rows: Rows, cell: Callable[[dict], str]) -> str:
    """For every size a table: a line for each mask, a column for each pass and implementation."""
    parts = []
    for size in dict.fromkeys(map(size_of, rows)):
        of_size = [row for row in rows if size_of(row) == size]
        parts += [f"**{words(size)}**", columns_of(of_size, cell)]
    return "\n\n".join(parts)


def columns_of(rows: Rows, cell: Callable[[dict], str]) -> str:
    """One table of by_size."""
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
    """The row of a mask, a pass and an implementation."""
    wanted = (pattern, direction, name)
    same = (r for r in rows if (r["pattern"], r["direction"], r["implementation"]) == wanted)
    return next(same, None)


def measured(record: dict) -> str:
    """Where and how a record was measured."""
    found = record["environment"]
    versions = found["versions"]
    commit = (found["git"]["commit"] or "unknown")[:7] + " with changes" * bool(
        found["git"]["dirty"]
    )
    partial = "" if record.get("complete", True) else INTERRUPTED
    return (
        f"*{found['device']}, torch {versions['torch']}, triton {versions['triton']}, commit "
        f"{commit}, {found['date'][:10]}: `{found['command'].split(' --output')[0]}`*{partial}"
    )
