"""JSON files that are replaced atomically, and the common properties of several runs."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

RESULT = "result.json"  # in the folder of a run: what it reports at its end


def write_json(path: Path, value: object) -> None:
    """Writes a value and creates the folders above it.

    The text goes to a temporary file of a unique name beside `path`, which then replaces it: a
    reader sees the old value or the new one, and two writers do not mix. The temporary file is
    removed where writing fails.

    Args:
        path: the file, replaced if it exists.
        value: what `json.dumps` takes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        draft.write_text(_lines(value) + "\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def record_path(folder: Path, name: str, device: str) -> Path:
    """NAME-DEVICE.json in a folder, for the full name of a device."""
    machine = re.sub(r"\W+", "-", device.lower())
    return folder / f"{name}-{machine}.json"


def shared(what: str, found: Iterable[str]) -> str:
    """What all runs of a record share. Raises ValueError where they do not."""
    distinct = set(found)
    if len(distinct) != 1:
        raise ValueError(f"runs of a record must have one {what}, got {sorted(distinct)}")
    return distinct.pop()


def read_results(folders: Iterable[Path]) -> list[dict]:
    """What runs wrote to RESULT in their folders. Raises ValueError for a folder without it."""
    paths = [folder / RESULT for folder in folders]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path.parent} holds no {RESULT}: no run of it came to an end")
    return [json.loads(path.read_text()) for path in paths]


def _lines(value: object, depth: int = 1) -> str:
    """JSON with one line for each entry of the outer two levels."""
    indent = "\n" + " " * depth
    if not value or depth > 2 or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, dict):
        entries = [f"{json.dumps(str(k))}: {_lines(v, depth + 1)}" for k, v in value.items()]
    else:
        entries = [_lines(v, depth + 2) for v in value]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}{indent}{f',{indent}'.join(entries)}{indent[:-1]}{closed}"
